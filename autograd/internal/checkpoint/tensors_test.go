package checkpoint

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Tensors that share bytes would take more memory than the file has.
func TestFoundTensorsThatShareBytesAreRefused(t *testing.T) {
	const one = `{"dtype":"U8","shape":[8],"data_offsets":[0,8]}`
	header := fmt.Sprintf(`{"a":%s,"b":%s}`, one, one)
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	file = append(file, make([]byte, 8)...)
	_, err := decodeTensors(bytes.NewReader(file), int64(len(file)))
	require.Fails(t, "the header", err, "a tensor begins at byte 0, and the one before ends at 8")
}

// Whatever bit of a file is another one, that is an error or makes no difference.
func TestEveryDamagedBitIsNoticed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.safetensors")
	want := map[string]stored{
		"a": {Shape: []int{2, 3}, Data: backend.Of([]float32{1, 2, 3, 4, 5, 6})},
		"b": {Shape: []int{1}, Data: backend.Of([]int64{7})},
	}
	require.NoError(t, require.Err(WriteTensors(files.Disk(path), ".", listed(want), Remarks{})))
	file := require.Value(os.ReadFile(path))(t)
	same := func(got map[string]stored) bool {
		return maps.EqualFunc(got, want, func(x, y stored) bool {
			return slices.Equal(x.Shape, y.Shape) && x.Data.DType() == y.Data.DType() &&
				bytes.Equal(x.Data.Bytes(), y.Data.Bytes())
		})
	}
	noticed := 0
	for bit := range 8 * len(file) {
		file[bit/8] ^= 1 << (bit % 8)
		got, err := decodeTensors(bytes.NewReader(file), int64(len(file)))
		if err != nil {
			noticed++
		} else if !same(got) {
			t.Errorf("bit %d of byte %d (%q): %+v", bit%8, bit/8, file[bit/8], got)
		}
		file[bit/8] ^= 1 << (bit % 8)
	}
	got, err := decodeTensors(bytes.NewReader(file), int64(len(file)))
	require.Check(t, err == nil && same(got) && noticed >= 7*len(file),
		"%d of %d bits were noticed; unharmed: %+v, %v", noticed, 8*len(file), got, err)
}

func TestTensorsComeBackAsTheyWere(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.safetensors")
	want := map[string]stored{
		"a":      {Shape: []int{2, 3}, Data: backend.Of([]float32{1, 2, 3, 4, 5, 6})},
		"byte":   {Shape: []int{3}, Data: backend.Of([]byte{1, 2, 3})},
		"scalar": {Shape: []int{}, Data: backend.Of([]float64{7})},
		"empty":  {Shape: []int{0, 4}, Data: backend.Of([]backend.BFloat16{})},
		"counts": {Shape: []int{2}, Data: backend.Of([]int64{-1, 1 << 40})},
	}
	require.NoError(t, require.Err(WriteTensors(files.Disk(path), ".", listed(want), Remarks{})))
	got, err := ReadTensors(files.Disk(path), ".")
	require.That(t, err == nil && len(got) == len(want), "%d tensors: %v", len(got), err)
	for name, w := range want {
		if g := got[name]; !slices.Equal(g.Shape, w.Shape) || g.Data.DType() != w.Data.DType() ||
			!bytes.Equal(g.Data.Bytes(), w.Data.Bytes()) {
			t.Errorf("%s came back as %v %v", name, g.Shape, g.Data.DType())
		}
	}
}

// listed returns tensors that a rank has of its own.
func listed(all map[string]stored) (list []Tensor) {
	for name, t := range all {
		list = append(list, Whole(name, t.Shape, t.Data, Own))
	}
	return list
}
