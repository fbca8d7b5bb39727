package safetensors_test

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// file returns a file of a header and zeros.
func file(header string, data int) []byte {
	return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...),
		make([]byte, data)...)
}

func TestTensorsComeBack(t *testing.T) {
	want := map[string]safetensors.Tensor{
		"b":       {Shape: []int{2, 3}, Data: backend.Of([]float32{1, 2, 3, 4, 5, 6})},
		"a.odd":   {Shape: []int{3}, Data: backend.Of([]uint8{7, 8, 9})},
		"nothing": {Shape: []int{0, 4}, Data: backend.Of([]float64{})},
		"none":    {Shape: []int{4, 0, 2}, Data: backend.Of([]float64{})},
		"number":  {Shape: nil, Data: backend.Of([]int64{-1})},
	}
	var b bytes.Buffer
	require.NoError(t, safetensors.Write(&b, want, map[string]string{"format": "pt"}))
	path := filepath.Join(t.TempDir(), "model.safetensors")
	require.NoError(t, os.WriteFile(path, b.Bytes(), 0o600))
	f := require.Value(safetensors.Open(files.Disk(path), "."))(t)
	defer f.Close()
	if f.Metadata["format"] != "pt" || len(f.Names()) != len(want) {
		t.Errorf("%v, %v", f.Metadata, f.Names())
	}
	for name, w := range want {
		got, err := f.Read(name)
		require.Check(t, err == nil && slices.Equal(got.Shape, w.Shape) &&
			got.Data.DType() == w.Data.DType() && bytes.Equal(got.Data.Bytes(),
			w.Data.Bytes()), "%s came back as %v %v, %v", name, got.Shape, got.Data, err)
	}
	require.Fails(t, "Read", require.Err(f.Read("c")), `no tensor "c"`)
}

// TestBooleansAreBytes: masks of models have this dtype.
func TestBooleansAreBytes(t *testing.T) {
	b := file(`{"mask":{"dtype":"BOOL","shape":[2,3],"data_offsets":[0,6]}}`, 6)
	h := require.Value(safetensors.ReadHeader(bytes.NewReader(b), int64(len(b))))(t)
	if d, shape, ok := h.Of("mask"); d != backend.U8 || !slices.Equal(shape, []int{2, 3}) || !ok {
		t.Errorf("the mask is %v %v", d, shape)
	}
}

// TestTensorsOfOtherDTypesAreLeftAlone: those that the format has and package backend lacks. The
// others of a file can be read, and these are errors.
func TestTensorsOfOtherDTypesAreLeftAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	b := file(`{"a":{"dtype":"F4","shape":[3,2],"data_offsets":[0,3]},"b":{"dtype":"C64",`+
		`"shape":[1],"data_offsets":[3,11]},"c":{"dtype":"U8","shape":[2],"data_offsets":[11,13]}}`,
		13)
	b[len(b)-1] = 7
	require.NoError(t, os.WriteFile(path, b, 0o600))
	f, err := safetensors.Open(files.Disk(path), ".")
	require.NoError(t, err)
	defer f.Close()
	require.Equal(t, "the other tensor", require.Value(f.Read("c"))(t).Data.Bytes()[1], 7)
	for _, name := range []string{"a", "b"} {
		require.Fails(t, name, require.Err(f.Read(name)), backend.ErrUnsupported)
	}
	others := map[string]string{}
	err = f.Each(bytes.NewReader(b[int64(len(b))-f.DataBytes():]), func(name string,
		s safetensors.Tensor) {
		others[name] = s.Other
	})
	require.Check(t, err == nil && others["a"] == "F4" && others["b"] == "C64" && others["c"] == "",
		"they are %v, %v", others, err)
	b = file(`{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,3]}}`, 3)
	require.Fails(t, "3 elements of 4 bits have 3 bytes",
		require.Err(safetensors.ReadHeader(bytes.NewReader(b), int64(len(b)))))
}

func TestHostileFilesAreRefusedBeforeTheirDataAreRead(t *testing.T) {
	for what, b := range map[string][]byte{
		"no length":        {1, 2, 3},
		"a header of 2 GB": binary.LittleEndian.AppendUint64(nil, 2<<30),
		"a header beyond":  binary.LittleEndian.AppendUint64(nil, 1),
		"no JSON":          file(`{"a":`, 0),
		"a list":           file(`[]`, 0),
		"a dtype":          file(`{"a":{"dtype":"Q3","shape":[1],"data_offsets":[0,8]}}`, 8),
		"too large a shape": file(
			`{"a":{"dtype":"F64","shape":[4611686018427387904,4],"data_offsets":[0,8]}}`, 8),
		"negative": file(`{"a":{"dtype":"F64","shape":[-1,-1],"data_offsets":[0,8]}}`, 8),
		"backwards": file(
			`{"a":{"dtype":"F64","shape":[1],"data_offsets":[8,0]}}`, 8),
		"beyond the file": file(`{"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}`, 8),
		"bytes of nobody": file(`{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}`, 16),
		"overlap and gap": file(`{"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]},`+
			`"b":{"dtype":"F64","shape":[2],"data_offsets":[8,24]}}`, 32),
	} {
		_, err := safetensors.ReadHeader(bytes.NewReader(b), int64(len(b)))
		require.Check(t, err != nil, "%s: no error", what)
	}
}

func FuzzReadHeader(f *testing.F) {
	f.Add(file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"x":"y"}}`,
		8))
	f.Add(file(`{"a":{"dtype":"F64","shape":[4611686018427387904,4],"data_offsets":[0,8]}}`, 8))
	f.Add(file(`{"a":{"dtype":"F64","shape":[-1,-1],"data_offsets":[8,0]}}`, 8))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		h, err := safetensors.ReadHeader(r, int64(len(b)))
		if err != nil {
			return
		}
		require.NoError(t, h.Each(r, func(name string, s safetensors.Tensor) {
			n := 1
			for _, d := range s.Shape {
				n *= d
			}
			if s.Other == "" && n != s.Data.Len() {
				t.Errorf("%q has %d elements and the shape %v", name, s.Data.Len(), s.Shape)
			}
		}))
	})
}
