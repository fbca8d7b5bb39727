package data_test

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestTheNextReaderNumbersAsTheTraining: a file that lacks a class, or has its columns in another
// order and others besides, is read as the training's; what that does not know is an error.
func TestTheNextReaderNumbersAsTheTraining(t *testing.T) {
	samples, classes, err := data.CSV(file(t, "train.csv",
		[]byte("a,kind,b\n1,owl,2\n3,cat,4\n5,dog,6\n")), "kind")
	require.NoError(t, err)
	_, held := data.Split(samples, 0.5, 1)
	known := data.MappingOf(held)
	test := file(t, "test.csv", []byte("\ufeffname,b,kind, a\nx,8, owl,7\ny,10,elk,9\nz,1,,2\n"))
	s, again, err := data.CSV(test, "kind", known)
	require.That(t, err == nil && slices.Equal(again, classes), "%v %v", again, err)
	if x, class := read(t, s, 0, 2); !slices.Equal(x, []float32{7, 8}) || class != 2 {
		t.Errorf("it is %v of class %d", x, class)
	}
	row := []any{make([]float32, 2), make([]int, 1)}
	refused(t, test, `line 3, column "kind": the label "elk" is none of the classes ["cat" "dog" `+
		`"owl"]`, s.Read(1, row))
	refused(t, test, `line 4, column "kind": there is no label`, s.Read(2, row))
	if err := s.Read(1, row[:1]); err != nil { // a prediction
		t.Error(err)
	}
	_, _, err = data.CSV(file(t, "few.csv", []byte("a,kind\n1,cat\n")), "kind", known)
	refused(t, "few.csv", `no column is named "b", as in the training`, err)
	numbers, _, err := data.CSV(test, "a", data.Mapping{Columns: []string{"b"}}) // to predict a
	require.NoError(t, err)
	y := []float64{0}
	if err := numbers.Read(1, []any{[]float64{0}, y}); err != nil || y[0] != 9 {
		t.Errorf("it is %v, %v", y, err)
	}
	if _, _, err = data.CSV(test, "kind", data.Mapping{}); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("an empty mapping: %v", err)
	}

	text, _, err := data.Text(file(t, "a.txt", []byte("abcä\nabc")), 3)
	require.NoError(t, err)
	s, characters, err := data.Text(file(t, "b.txt", []byte("cäcb")), 3, data.MappingOf(text))
	require.That(t, err == nil && string(characters) == "\nabcä", "%v %v", string(characters), err)
	x, next := make([]int, 3), make([]int, 3)
	if err := s.Read(0, []any{x, next}); err != nil || !slices.Equal(x, []int{3, 4, 3}) ||
		!slices.Equal(next, []int{4, 3, 2}) {
		t.Error(x, next, err)
	}
	_, _, err = data.Text(file(t, "c.txt", []byte("abcd")), 3, data.MappingOf(text))
	refused(t, "c.txt", "'d', is none of the training's 5", err)
}

// TestAColumnOfTextsHasAColumnForEach: the next reader has them in the training's order, and
// refuses a text that the training had not; Columns selects those of a training.
func TestAColumnOfTextsHasAColumnForEach(t *testing.T) {
	train := []byte("id,a,city,y\nu,1, Rome,no\nv,2,Bonn,yes\nw,3,Rome,no\n")
	for _, c := range []struct {
		mappings []data.Mapping
		columns  []string
		x        [][]float32
	}{
		{nil, []string{"id=u", "id=v", "id=w", "a", "city=Bonn", "city=Rome"},
			[][]float32{{1, 0, 0, 1, 0, 1}, {0, 1, 0, 2, 1, 0}, {0, 0, 1, 3, 0, 1}}},
		{[]data.Mapping{data.Columns("city", "a")}, []string{"city=Bonn", "city=Rome", "a"},
			[][]float32{{0, 1, 1}, {1, 0, 2}, {0, 1, 3}}},
	} {
		s, classes, err := data.CSV(file(t, "a.csv", train), "y", c.mappings...)
		known := data.MappingOf(s)
		require.That(t, err == nil && slices.Equal(known.Columns, c.columns) &&
			slices.Equal(classes, []string{"no", "yes"}), "%q %q %v", known.Columns, classes, err)
		for i, want := range c.x {
			x, class := read(t, s, i, len(want))
			require.Check(t, slices.Equal(x, want) && class == i%2, "%d: %v of %d", i, x, class)
		}
		again, _, err := data.CSV(file(t, "b.csv", []byte("city,a,id\nBonn,7,w\n")), "", known)
		require.NoError(t, err)
		want := []float32{0, 0, 1, 7, 1, 0}
		if len(c.columns) == 3 {
			want = []float32{1, 0, 7}
		}
		x := make([]float32, len(want))
		require.Check(t, again.Read(0, []any{x}) == nil && slices.Equal(x, want), "%v", x)
		known.Classes = nil // as of a training that predicts a number
		for text, says := range map[string]string{"": "a value is missing",
			"Oslo": `"Oslo" is none of the training's texts, ["Bonn" "Rome"]`} {
			_, _, err = data.CSV(file(t, "c.csv", []byte("city,a,id\n"+text+",7,w\n")), "", known)
			refused(t, "c.csv", `line 2, column "city": `+says, err)
		}
	}
	names := []byte("name,y\n")
	for i := range 101 {
		names = fmt.Appendf(names, "n%d,1\n", i)
	}
	_, _, err := data.CSV(file(t, "d.csv", names), "y")
	refused(t, "d.csv", `"name" has more than 100 different texts, such as "n0" and "n1":`, err)
}

// TestATableIsReadAgainAsItWas: whatever its columns and texts are, in another order of columns, of
// the file and of the mapping; or it is refused, as two columns of one name are.
func TestATableIsReadAgainAsItWas(t *testing.T) {
	names := []string{"a", "a=b", "b", "a b", "c=", "=d", "\"q\"", "x,y", "b=a"}
	texts := []string{"Rome", "b", "a=b", "=", "\"", "x,", "two\nlines", "é", "-", "b=", "e5"}
	refusals := map[string]int{"has texts, and = in its name": 0, "would be named": 0}
	for seed := range uint64(1000) {
		r := rand.New(rand.NewPCG(seed, 1))
		n, rows := 1+r.IntN(4), 1+r.IntN(5)
		lines := make([][]string, 1+rows) // the header, and others
		want := make([]map[string]float64, 1+rows)
		for _, k := range r.Perm(len(names))[:n] {
			lines[0] = append(lines[0], names[k])
			numbers := r.IntN(2) == 0
			for i := 1; i <= rows; i++ {
				x, text := r.IntN(9), texts[r.IntN(len(texts))]
				if want[i] == nil {
					want[i] = map[string]float64{}
				}
				if numbers {
					text, want[i][names[k]] = fmt.Sprint(x), float64(x)
				} else {
					want[i][names[k]+"="+text] = 1
				}
				lines[i] = append(lines[i], text)
			}
		}
		write := func(name string) string {
			var b bytes.Buffer
			w, order := csv.NewWriter(&b), r.Perm(n)
			for _, line := range lines {
				var all []string
				for _, c := range order {
					all = append(all, line[c])
				}
				require.NoError(t, w.Write(append(all, "y")))
			}
			w.Flush()
			return file(t, name, b.Bytes())
		}
		var selects []data.Mapping
		if seed%2 == 0 {
			selects = []data.Mapping{data.Columns(lines[0]...)}
		}
		s, _, err := data.CSV(write("a.csv"), "y", selects...)
		if err != nil {
			known := false
			for says := range refusals {
				if strings.Contains(err.Error(), says) {
					refusals[says], known = refusals[says]+1, true
				}
			}
			require.That(t, known, "seed %d: %v", seed, err)
			continue
		}
		known := data.MappingOf(s)
		mixed := slices.Clone(known.Columns)
		r.Shuffle(len(mixed), func(i, j int) { mixed[i], mixed[j] = mixed[j], mixed[i] })
		again, _, err := data.CSV(write("b.csv"), "", data.Mapping{Columns: mixed})
		require.That(t, err == nil, "seed %d: %v", seed, err)
		for i := range rows {
			x, y := make([]float64, len(known.Columns)), make([]float64, len(known.Columns))
			require.NoError(t, errors.Join(s.Read(i, []any{x}), again.Read(i, []any{y})))
			for k, name := range known.Columns {
				require.Check(t, x[k] == want[i+1][name] && y[k] == want[i+1][mixed[k]],
					"seed %d: %q is %v, %q is %v", seed, name, x[k], mixed[k], y[k])
			}
		}
	}
	for says, n := range refusals {
		require.Check(t, n > 0, "no table %s", says)
	}
	for _, c := range []string{"a=3", "y", ""} {
		_, _, err := data.CSV(file(t, "a.csv", []byte("a,y\n3,1\n")), "y", data.Columns(c))
		refused(t, "a.csv", fmt.Sprintf("no column is named %q, as in", c), err)
	}
}

// TestClassesAreInTheOrderOfNumbers if all are, and one number is one class, however it is written.
func TestClassesAreInTheOrderOfNumbers(t *testing.T) {
	for labels, want := range map[[4]string][]string{
		{"10", "2", "0", "-1"}:      {"-1", "0", "2", "10"},
		{"1.0", " 1", "01", "+1"}:   {"1.0"},
		{"0", "-0", "0.5", "1e1"}:   {"0", "0.5", "1e1"},
		{"10", "2", "x", "x "}:      {"10", "2", "x"},
		{"1_0", "2", "10", "0x1p3"}: {"0x1p3", "10", "1_0", "2"}, // as text
		{"2", "10", "", "nan"}:      {"2", "10"},
		{"nan", "b", "inf", "b"}:    {"b", "inf", "nan"},
		{"9007199254740993", "2", "2", "9007199254740992"}: {"2", "9007199254740992",
			"9007199254740993"},
		{"99999999999999999998", "2", "10", "99999999999999999999"}: {"10", "2",
			"99999999999999999998", "99999999999999999999"}, // as text
	} {
		content := "a,y\n"
		for _, l := range labels {
			content += "1," + l + "\n"
		}
		s, classes, err := data.CSV(file(t, "a.csv", []byte(content)), "y")
		if err != nil || !slices.Equal(classes, want) {
			t.Errorf("%q: %q, %v, want %q", labels, classes, err, want)
			continue
		}
		again, _, err := data.CSV(file(t, "b.csv", []byte(content)), "y", data.MappingOf(s))
		if err != nil {
			t.Errorf("%q: %v", labels, err)
			continue
		}
		for i := range labels {
			x, y := []any{[]float32{0}, []int{0}}, []any{[]float32{0}, []int{0}}
			one, other := s.Read(i, x), again.Read(i, y)
			require.Check(t, (one == nil) == (other == nil) && fmt.Sprint(x) == fmt.Sprint(y),
				"%q: label %d is %v, %v at first, and then %v, %v", labels, i, x, one, y, other)
		}
	}
}

// TestUnclearTablesAreErrors.
func TestUnclearTablesAreErrors(t *testing.T) {
	for content, says := range map[string]string{
		"y,a,y\n1,2,3\n":            `column 3 is named "y"`,
		"a,a ,y\n1,2,3\n":           `column 2 is named "a"`,
		",a,y\n0,1,x\n":             `column 1 is named ""`,
		"a,y\n":                     "no line behind the header",
		"a,y\n1,caf\xe9\n":          "not UTF-8",
		"a,y\n9007199254740993,x\n": "more digits than a float64",
	} {
		_, _, err := data.CSV(file(t, "a.csv", []byte(content)), "y")
		refused(t, "a.csv", says, err)
	}
	const pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:1\n"
	_, _, err := data.CSV(file(t, "a.csv.gz", []byte(pointer)), "y")
	refused(t, "a.csv.gz", "git lfs pull", err)
}

// TestNumbersStayAsTheyAre in a []float64; what a []float32 would make another integer is an error.
func TestNumbersStayAsTheyAre(t *testing.T) {
	path := file(t, "a.csv", []byte("a,y\n16777217,0.1\n0.1,16777217\n1e99,16777216\n"))
	s, _, err := data.CSV(path, "y")
	require.NoError(t, err)
	for i, want := range [][2]float64{{16777217, 0.1}, {0.1, 16777217}, {1e99, 16777216}} {
		x, y := []float64{0}, []float64{0}
		if err := s.Read(i, []any{x, y}); err != nil || x[0] != want[0] || y[0] != want[1] {
			t.Errorf("sample %d is %v, %v, %v; want %v", i, x, y, err, want)
		}
		err := s.Read(i, []any{[]float32{0}, []float32{0}})
		refused(t, path, "a float32 does not hold", err)
	}
	ints, err := data.Tensors(tensor.New(tensor.WithBacking([]int{1 << 24, 1<<24 + 1, 1<<53 + 1})))
	require.NoError(t, err)
	for i, fits := range [][2]bool{{true, true}, {false, true}, {false, false}} {
		narrow, wide := ints.Read(i, []any{[]float32{0}}), ints.Read(i, []any{[]float64{0}})
		require.Check(t, (narrow == nil) == fits[0] && (wide == nil) == fits[1],
			"integer %d: %v, %v", i, narrow, wide)
	}
}

// TestFoldersAreClasses: hidden ones are not, images that would be left out are errors, and the
// next folder has the training's classes.
func TestFoldersAreClasses(t *testing.T) {
	var dot bytes.Buffer
	require.NoError(t, png.Encode(&dot, image.NewGray(image.Rect(0, 0, 1, 1))))
	folder := func(names ...string) string {
		dir := t.TempDir()
		for _, name := range names {
			path := filepath.Join(dir, name)
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
			if filepath.Base(name) == "none" {
				continue
			}
			require.NoError(t, os.WriteFile(path, dot.Bytes(), 0o600))
		}
		return dir
	}
	train := folder("10/a.png", "9/a.JPEG", "9/._a.png", "9/notes.txt", "0/a.png", "README.md",
		".ipynb_checkpoints/a.png", "__MACOSX/b.png", ".DS_Store", "10/b.jfif", "10/c.jpe", "10/d")
	licence := filepath.Join(train, "10", "LICENSE")
	require.NoError(t, os.WriteFile(licence, []byte("MIT"), 0o600))
	s, classes, err := data.Images(train, 1, 1)
	require.That(t, err == nil && slices.Equal(classes, []string{"0", "9", "10"}) && s.Len() == 6,
		"%v %v", classes, err)
	known := data.MappingOf(s)
	s, _, err = data.Images(folder("10/a.png", "9/none"), 1, 1, known)
	require.NoError(t, err)
	_, class := read(t, s, 0, 3)
	require.Check(t, class == 2, "10 is class %d", class)
	_, _, err = data.Images(folder("8/a.png"), 1, 1, known)
	refused(t, "a.png", `"8" is none of the classes`, err)
	for says, names := range map[string][]string{
		"a class without images": {"a/1.png", "b/none"},
		"are the same number":    {"1/1.png", "01/1.png"},
		"convert it":             {"a/1.png", "a/2.jp2"},
		"no class":               {"a/1.png", "2.png"},
		"it has no class":        {"a/1.png", "a/b/2.png"},
	} {
		_, _, err := data.Images(folder(names...), 1, 1)
		refused(t, "data: ", says, err)
	}
}

// TestTransparencyShowsTheColour below it, as Pillow's convert("RGB").
func TestTransparencyShowsTheColour(t *testing.T) {
	box := image.Rect(0, 0, 2, 1)
	half, none := color.NRGBA{200, 100, 50, 128}, color.NRGBA{20, 40, 60, 0}
	deep := image.NewNRGBA64(box)
	deep.SetNRGBA64(0, 0, color.NRGBA64{200 << 8, 100 << 8, 50 << 8, 1 << 15})
	deep.SetNRGBA64(1, 0, color.NRGBA64{20 << 8, 40 << 8, 60 << 8, 0})
	plain, few := image.NewNRGBA(box), image.NewPaletted(box, color.Palette{half, none})
	plain.SetNRGBA(0, 0, half)
	plain.SetNRGBA(1, 0, none)
	few.SetColorIndex(1, 0, 1)
	for i, m := range []image.Image{plain, deep, few} {
		dir := t.TempDir()
		var b bytes.Buffer
		require.NoError(t, errors.Join(png.Encode(&b, m), os.Mkdir(filepath.Join(dir, "c"), 0o700),
			os.WriteFile(filepath.Join(dir, "c", "a.png"), b.Bytes(), 0o600)))
		s, _, err := data.Images(dir, 1, 2)
		require.NoError(t, err)
		x, _ := read(t, s, 0, 6)
		for k, want := range []float32{200, 20, 100, 40, 50, 60} {
			require.Check(t, x[k] == want/255, "image %d: element %d is %v, want %v", i, k,
				x[k]*255, want)
		}
	}
}

// TestScalesTravelWithTheMapping: what is learned from the samples of a training scales its parts,
// and other files, in the same way.
func TestScalesTravelWithTheMapping(t *testing.T) {
	table := file(t, "train.csv", []byte("a,kind,b\n1,owl,5\n3,cat,5\n5,owl,5\n7,cat,5\n"))
	samples := require.Value(first(data.CSV(table, "kind")))(t)
	s := require.Value(data.Standardize(samples))(t)
	known := data.MappingOf(s)
	require.Equal(t, "the mapping", fmt.Sprint(known),
		"{[a b] [cat owl] [4 5] [2.23606797749979 1] false}")
	for i, want := range []float64{-3, -1, 1, 3} {
		x, class := read(t, s, i, 2)
		require.Slices(t, "a sample", x, []float32{float32(want / math.Sqrt(5)), 0})
		require.Equal(t, "its class", class, 1-i%2)
	}
	mean, deviation := 0.0, 0.0
	for i := range s.Len() {
		x := make([]float64, 2)
		require.NoError(t, s.Read(i, []any{x}))
		mean, deviation = mean+x[0], deviation+x[0]*x[0]/4
	}
	require.Check(t, math.Abs(mean) < 1e-15 && math.Abs(deviation-1) < 1e-15, "%v, %v", mean,
		deviation)

	rest, held := data.Split(samples, 0.5, 1)
	for _, part := range []data.Set{rest, held} {
		part = require.Value(data.Standardize(part, known))(t)
		require.NoError(t, known.Check(data.MappingOf(part)))
	}
	other := file(t, "new.csv", []byte("b,a\n6,9\n"))
	again := require.Value(first(data.CSV(other, "", known)))(t)
	x := make([]float64, 2)
	require.NoError(t, again.Read(0, []any{x}))
	require.Slices(t, "a prediction", x, []float64{math.Sqrt(5), 1})
	require.Fails(t, "its label", again.Read(0, []any{x, make([]int, 1)}), "there is no label")

	wide := []any{make([]int, 2), make([]int, 1)}
	require.Fails(t, "integers", s.Read(0, wide), backend.ErrArgument, "[]int takes another type")
	unscaled := data.MappingOf(samples)
	_, none := data.Split(samples, 0, 1)
	require.Fails(t, "another scale", known.Check(unscaled), "Standardize has scaled the columns")
	for says, wrong := range map[string]error{
		"no samples to learn from":         require.Err(data.Standardize(none)),
		"2 columns, of which 2 are scaled": require.Err(data.Standardize(s)),
		"of which 0 are scaled, and the":   require.Err(data.Standardize(samples, unscaled)),
		"0 columns":                        require.Err(data.Standardize(data.Of(1, nil))),
		"1 means and 0 deviations": require.Err(first(data.CSV(table, "kind",
			data.Mapping{Columns: []string{"a"}, Means: []float64{1}}))),
		"the mean 1 and the deviation 0": require.Err(first(data.CSV(table, "kind", data.Mapping{
			Columns: []string{"a"}, Means: []float64{1}, Deviations: []float64{0}}))),
		"the mean NaN": require.Err(data.Standardize(samples, data.Mapping{Deviations: []float64{1,
			1}, Columns: known.Columns, Means: []float64{math.NaN(), 1}})),
		`"a" are too large`: require.Err(data.Standardize(require.Value(first(data.CSV(file(t,
			"huge.csv", []byte("a,b\n1e300,1\n-1e300,1\n")), "b")))(t))),
	} {
		require.Fails(t, says, wrong, says)
	}
}

// first leaves out the classes of a table.
func first(s data.Set, _ []string, err error) (data.Set, error) { return s, err }
