package data_test

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"image"
	"image/color"
	"image/jpeg"
	"image/png"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func file(t *testing.T, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, content, 0o600))
	return path
}

// packed is content as gzip.
func packed(t *testing.T, content []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	require.NoError(t, require.Err(z.Write(content)))
	require.NoError(t, z.Close())
	return b.Bytes()
}

// read returns a sample of n floats and a class.
func read(t *testing.T, s data.Set, i, n int) ([]float32, int) {
	t.Helper()
	x, y := make([]float32, n), make([]int, 1)
	require.NoError(t, s.Read(i, []any{x, y}))
	wide := make([]float64, n)
	require.NoError(t, s.Read(i, []any{wide, y}))
	for k := range x {
		if float32(wide[k]) != x[k] {
			t.Errorf("sample %d: %v as float32, and %v as float64", i, x, wide)
		}
	}
	return x, y[0]
}

// refused checks that reading is an error that names the file and says why.
func refused(t *testing.T, path, says string, err error) {
	t.Helper()
	require.Fails(t, path, err, filepath.Base(path), says)
}

func TestCSVReadsColumnsAndClasses(t *testing.T) {
	path := file(t, "a.csv", []byte("a,kind,b\n1,red,-2.5\n3,\"bl,ue\",4\n 5 ,red,6e1\n"))
	s, classes, err := data.CSV(path, "kind")
	require.That(t, err == nil && s.Len() == 3 && slices.Equal(classes, []string{"bl,ue", "red"}),
		"%v %v %v", s, classes, err)
	for i, want := range [][]float32{{1, -2.5, 1}, {3, 4, 0}, {5, 60, 1}} {
		if x, class := read(t, s, i, 2); !slices.Equal(x, want[:2]) || class != int(want[2]) {
			t.Errorf("sample %d is %v of class %d, want %v", i, x, class, want)
		}
	}
	s, _, err = data.CSV(file(t, "b.csv", []byte("a,b\n1,2\n3,4\n")), "b")
	y := make([]float64, 1)
	require.Check(t, err == nil && s.Read(1, []any{make([]float32, 1), y}) == nil && y[0] == 4,
		"the target is %v, %v", y, err)
	for _, label := range []string{"red", "", "NaN", "1e999"} { // none is the number 0
		path := file(t, "c.csv.gz", packed(t, []byte("a,b\n1,2\n3,"+label+"\n")))
		s, _, err := data.CSV(path, "b")
		if err != nil || s.Read(0, []any{make([]float32, 1), y}) != nil || y[0] != 2 {
			t.Errorf("the target is %v, %v", y, err)
			continue
		}
		refused(t, path, "no finite number", s.Read(1, []any{make([]float32, 1), y}))
	}
	for content, says := range map[string]string{
		"":                   "no header",
		"a,b\n1,2\n":         "kind",
		"kind\nx\n":          "no column but the label",
		"a;kind\n1;x\n":      `separated by ";"`,
		"a\tkind\n1\tx\n":    `separated by "\t"`,
		"5.1,3.5,x\n4,3,y\n": "the first line must have the names",
		"a,kind\n1\n":        "line 2 has 1 values, and the header 2 names",
		"a,kind\n1,x\nz,x\n": "line 3",
		"a,b,kind\n1,,x\n":   `line 2, column "b"`,
		"a,kind\nNaN,x\n":    "no finite number",
		"a,kind\n1e999,x\n":  "no finite number",
		"a,kind\n\"1,x\n":    "line 2",
		"a,kind\n3 %,x\n":    `"3 %" is no finite number`,
		"a,b=,kind\n1,x,x\n": "= in its name",
	} {
		path := file(t, "wrong.csv", []byte(content))
		_, _, err := data.CSV(path, "kind")
		refused(t, path, says, err)
	}
}

// idx is a file of shape and bytes.
func idx(magic uint32, shape []uint32, content []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, magic)
	for _, n := range shape {
		b = binary.BigEndian.AppendUint32(b, n)
	}
	return append(b, content...)
}

func TestIDXReadsImagesAndLabels(t *testing.T) {
	pictures := idx(0x803, []uint32{2, 1, 3}, []byte{0, 51, 255, 102, 0, 0})
	kinds := idx(0x801, []uint32{2}, []byte{7, 3})
	images, labels := file(t, "images", pictures), file(t, "labels.gz", packed(t, kinds))
	s, err := data.IDX(images, labels)
	require.That(t, err == nil && s.Len() == 2, "%v %v", s, err)
	if x, class := read(t, s, 0, 3); !slices.Equal(x, []float32{0, 0.2, 1}) || class != 7 {
		t.Errorf("it is %v of class %d", x, class)
	}
	require.Fails(t, "there is a third sample",
		s.Read(2, []any{make([]float32, 3), make([]int, 1)}))
	require.Fails(t, "an input of another size takes an image",
		s.Read(0, []any{make([]float32, 4), make([]int, 1)}))
	for name, content := range map[string][]byte{
		"short":    pictures[:len(pictures)-1],
		"long":     append(slices.Clone(pictures), 0),
		"header":   pictures[:9],
		"empty":    nil,
		"labels":   kinds,
		"huge":     idx(0x803, []uint32{1 << 31, 1 << 31, 1 << 31}, []byte{1}),
		"overflow": idx(0x803, []uint32{1 << 31, 1 << 31, 4}, nil),
	} {
		path := file(t, name, content)
		_, err := data.IDX(path, labels)
		refused(t, path, "", err)
	}
	for name, content := range map[string][]byte{
		"cut.gz":   packed(t, kinds)[:20],
		"plain.gz": kinds,
		"fewer":    idx(0x801, []uint32{1}, []byte{7}),
	} {
		path := file(t, name, content)
		_, err := data.IDX(images, path)
		refused(t, path, "", err)
	}
}

// TestTruncatedFilesTakeNoMoreMemoryThanTheyHave: a header may say what it wants.
func TestTruncatedFilesTakeNoMoreMemoryThanTheyHave(t *testing.T) {
	huge := file(t, "huge", idx(0x803, []uint32{60000, 4096, 4096}, make([]byte, 1000)))
	labels := file(t, "labels", idx(0x801, []uint32{60000}, nil))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := data.IDX(huge, labels)
	runtime.ReadMemStats(&after)
	refused(t, huge, "1000 bytes of data", err)
	got := after.TotalAlloc - before.TotalAlloc
	require.Check(t, got <= 1<<20, "%d bytes were allocated for a file of 1 kB", got)
}

func TestCIFARReadsBothFormats(t *testing.T) {
	record := func(labels ...byte) []byte {
		r := append(labels, make([]byte, 3072)...)
		r[len(labels)+3071] = 255
		return r
	}
	ten := file(t, "ten.bin", slices.Concat(record(4), record(9)))
	more := file(t, "more.bin", record(1))
	s, err := data.CIFAR(10, ten, more)
	require.That(t, err == nil && s.Len() == 3, "%v %v", s, err)
	for i, want := range []int{4, 9, 1} {
		if x, class := read(t, s, i, 3072); class != want || x[0] != 0 || x[3071] != 1 {
			t.Errorf("record %d has class %d, want %d", i, class, want)
		}
	}
	s = require.Value(data.CIFAR(100, file(t, "hundred.bin", record(3, 77))))(t)
	_, class := read(t, s, 0, 3072)
	require.Check(t, class == 77, "the fine label is %d", class)
	for name, content := range map[string][]byte{
		"cut.bin": record(4)[:3000], "empty.bin": nil, "label.bin": record(10),
	} {
		path := file(t, name, content)
		_, err := data.CIFAR(10, path)
		refused(t, path, "", err)
	}
	require.Fails(t, "there are 11 classes", require.Err(data.CIFAR(11, ten)))
}

func TestImagesAreScaled(t *testing.T) {
	dir := t.TempDir()
	save := func(name string, w, h int, at func(x, y int) color.Color) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		m := image.NewRGBA(image.Rect(0, 0, w, h))
		for y := range h {
			for x := range w {
				m.Set(x, y, at(x, y))
			}
		}
		var b bytes.Buffer
		err := png.Encode(&b, m)
		if strings.HasSuffix(name, "g") && !strings.HasSuffix(name, ".png") {
			b.Reset()
			err = jpeg.Encode(&b, m, nil)
		}
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, b.Bytes(), 0o600))
		return path
	}
	red, blue := color.RGBA{255, 0, 0, 255}, color.RGBA{0, 0, 255, 255}
	save("dog/1.png", 16, 4, func(x, _ int) color.Color { // the left half is red
		if x < 8 {
			return red
		}
		return blue
	})
	save("cat/2.jpg", 4, 4, func(_, _ int) color.Color { return blue })
	require.NoError(t, os.WriteFile(filepath.Join(dir, "cat", "notes.txt"), nil, 0o600))
	s, classes, err := data.Images(dir, 2, 2)
	require.That(t, err == nil && s.Len() == 2 && slices.Equal(classes, []string{"cat", "dog"}),
		"%v %v %v", s, classes, err)
	if x, class := read(t, s, 1, 12); class != 1 ||
		x[0] < 0.8 || x[1] > 0.2 || x[0] != x[2] || x[4] != 0 || x[8] > 0.2 || x[9] < 0.8 {
		t.Errorf("the dog is %v of class %d", x, class)
	}
	if x, class := read(t, s, 0, 12); class != 0 || x[0] > 0.02 || x[8] < 0.98 {
		t.Errorf("the cat is %v of class %d", x, class)
	}
	whole := require.Value(os.ReadFile(filepath.Join(dir, "dog", "1.png")))(t)
	large := slices.Clone(whole)
	binary.BigEndian.PutUint32(large[16:], 1<<20) // of the header, whose checksum is wrong then
	for name, content := range map[string][]byte{
		"3.png": whole[:len(whole)/2], "4.jpeg": whole[:0], "5.png": large,
	} {
		path := filepath.Join(dir, "dog", name)
		require.NoError(t, os.WriteFile(path, content, 0o600))
		s, _, err := data.Images(dir, 2, 2)
		require.NoError(t, err)
		refused(t, path, "", s.Read(2, []any{make([]float32, 12), make([]int, 1)}))
		require.NoError(t, os.Remove(path))
	}
	_, _, err = data.Images(t.TempDir(), 2, 2)
	require.Check(t, err != nil, "an empty folder has images")
}

func TestTextPredictsTheNextCharacter(t *testing.T) {
	path := file(t, "a.txt", []byte("abcäabc"))
	s, characters, err := data.Text(path, 3)
	require.That(t, err == nil && s.Len() == 2 && string(characters) == "abcä", "%v %v %v", s,
		string(characters), err)
	x, y := make([]int, 3), make([]int, 3)
	if err := s.Read(1, []any{x, y}); err != nil || fmt.Sprint(x, y) != "[3 0 1] [0 1 2]" {
		t.Errorf("%v predict %v, %v", x, y, err)
	}
	_, _, err = data.Text(path, 7)
	refused(t, path, "8 are needed", err)
}

func TestSplitHasEachSampleOnce(t *testing.T) {
	all := data.Of(10, func(i int, row []any) error { row[0].([]int)[0] = i; return nil })
	rest, held := data.Split(all, 0.3, 5)
	var seen []int
	for _, s := range []data.Set{rest, held} {
		for i := range s.Len() {
			x := make([]int, 1)
			require.NoError(t, s.Read(i, []any{x}))
			seen = append(seen, x[0])
		}
	}
	slices.Sort(seen)
	if held.Len() != 3 || !slices.Equal(seen, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}) {
		t.Errorf("%d are held out, and all are %v", held.Len(), seen)
	}
	for _, part := range []float64{20, -0.1, math.NaN()} {
		rest, held = data.Split(all, part, 5)
		for _, s := range []data.Set{rest, held} {
			refused(t, "data.Split", "not from 0 to 1", s.Read(0, []any{make([]int, 1)}))
		}
	}
}

func TestTensorsAreRead(t *testing.T) {
	x := tensor.New(tensor.WithShape(2, 2), tensor.WithBacking([]float64{1, 2, 3, 4}))
	y := tensor.New(tensor.WithShape(2), tensor.WithBacking([]int{5, 6}))
	s, err := data.Tensors(x, y)
	require.NoError(t, err)
	if x, class := read(t, s, 1, 2); !slices.Equal(x, []float32{3, 4}) || class != 6 {
		t.Errorf("sample 1 is %v, %d", x, class)
	}
	short := tensor.New(tensor.WithShape(1), tensor.WithBacking([]int{5}))
	require.Fails(t, "columns of different lengths are taken", require.Err(data.Tensors(x, short)))
	require.Fails(t, "an input of Int takes floats", s.Read(0, []any{make([]int, 2)}))
	err = s.Read(0, []any{make([]float64, 2), make([]int, 1), make([]int, 1)})
	refused(t, "data: ", "there are 3 inputs, and a sample has values for 2", err)
	for says, x := range map[string]*tensor.Dense{
		"is of int32": tensor.New(tensor.WithBacking([]int32{1, 2})),
		"is of bool":  tensor.New(tensor.WithBacking([]bool{true, false})),
		"is of uint8": tensor.New(tensor.WithBacking([]byte{1, 2})),
		"row-major order": tensor.New(tensor.WithShape(2, 2),
			tensor.AsFortran([]float64{1, 2, 3, 4})),
	} {
		_, err := data.Tensors(x)
		refused(t, "data.Tensors", says, err)
	}
}

// table is one of numbers.
func table(t *testing.T) data.Set {
	s, _, err := data.CSV(file(t, "a.csv", []byte("a,b\n1,2\n")), "b")
	require.NoError(t, err)
	return s
}

func TestNilArgumentsAreErrors(t *testing.T) {
	x := tensor.New(tensor.WithBacking([]int{5}))
	nilargs.Check(t, map[string]nilargs.Use{
		"Tensors": {F: data.Tensors, Args: []any{x}},
		"Of": {F: func(n int, read func(int, []any) error) error {
			return data.Of(n, read).Read(0, nil)
		}, Args: []any{1, func(int, []any) error { return nil }}},
		"Split": {F: func(s data.Set, part float64, seed uint64) error {
			rest, _ := data.Split(s, part, seed)
			return rest.Read(0, nil)
		}, Args: []any{data.Of(1, func(int, []any) error { return nil }), 0.0, uint64(1)}},
		"Standardize": {F: func(s data.Set) error { return require.Err(data.Standardize(s)) },
			Args: []any{table(t)}},
	}, map[string]string{"CSV": "a mapping is no pointer", "Images": "likewise", "Text": "likewise",
		"MappingOf": "nil is a set without one"})
}
