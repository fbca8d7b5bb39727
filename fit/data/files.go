package data

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/csv"
	"errors"
	"fmt"
	"image"
	"image/color"
	_ "image/jpeg" // formats that Images reads
	_ "image/png"
	"io"
	"io/fs"
	"maps"
	"math"
	"math/big"
	"os"
	"path"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/image/draw"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/files"
)

// CSV reads a table with a header. A sample is the numbers of all columns except the one named
// label, in their order, and the label: its class if the input is Int, otherwise its number.
// classes are the different values of the label's column, in the order of numbers if all are, else
// of text. A column in which nothing begins with a digit has a number for each of its texts, in
// their order, named "city=Rome": 1 in the lines that have it, else 0. Spaces around names, numbers
// and texts do not count, nor does a byte order mark.
//
// known is the [Mapping] of a training: columns are then found by name, whatever others there are,
// and scaled, and labels numbered, as there. A label of "" is then none, as in what is predicted.
// [Columns] selects those of a training.
//
// Errors: a file that is not CSV, or not UTF-8; columns without a name, or two of one name; no
// column of the name; a value that is missing or, among numbers, not a finite one, an integer that
// a float64 does not hold, or a text that the training had not, with its line and column; a column
// of more than 100 texts; in Read, a label that is missing or not among the classes, one that is
// not a finite number if the input has floats, and an integer that the input does not hold, with
// its line.
func CSV(path, label string, known ...Mapping) (samples Set, classes []string, err error) {
	return Source(nil).CSV(path, label, known...)
}

// CSV is the function CSV for files of the store.
func (s Source) CSV(path, label string, known ...Mapping) (samples Set, classes []string,
	err error) {
	as, err := given(known)
	if err != nil {
		return nil, nil, err
	}
	t := &sheet{from: s, path: path, texts: map[int]map[string]bool{}}
	if err := t.read(label, as); err != nil {
		return nil, nil, err
	}
	kinds := learn(t.labels)
	if as != nil && !as.selects {
		kinds = of(as)
	}
	n := len(t.labels)
	class := make([]int, n)
	for i, l := range t.labels {
		class[i] = kinds.of(l)
	}
	named, numbered := table(n, t.values, class), table(n, t.values, t.targets)
	all := set{n, func(i int, row []any) error {
		from, err := named, error(nil)
		if len(row) > 1 {
			_, ints := row[1].([]int)
			switch {
			case ints && class[i] < 0:
				err = kinds.wrong(t.labels[i])
			case !ints && math.IsNaN(t.targets[i]):
				err = fmt.Errorf("the label %q is no finite number: give it to an input of Int, "+
					"for its class", t.labels[i])
			case !ints:
				from = numbered
			}
		}
		if err != nil {
			return wrong(path, "line %d, column %q: %w", t.lines[i], label, err)
		}
		if err = from.Read(i, row); err != nil {
			return wrong(path, "line %d: %w", t.lines[i], err)
		}
		return nil
	}, Mapping{Columns: t.columns, Classes: kinds.classes}}
	if as != nil && len(as.Means) > 0 {
		return scaled(all, *as), kinds.classes, nil
	}
	return all, kinds.classes, nil
}

// sheet is what a table has.
type sheet struct {
	from    Source
	path    string
	columns []string
	at      []int                   // of the columns, in the file
	when    []string                // the text for which a column is 1, "" for one of numbers
	texts   map[int]map[string]bool // those of a column of the file, nil for numbers
	values  []float64
	labels  []string
	targets []float64 // the numbers of labels, NaN for none
	lines   []int     // of the file, from 1
}

// read reads the columns that a mapping names, or all but the label.
func (t *sheet) read(label string, as *Mapping) error {
	text, err := t.from.letters(t.path)
	if err != nil {
		return err
	}
	in := csv.NewReader(bytes.NewReader(text))
	header, err := in.Read()
	if err != nil {
		return wrong(t.path, "no header: %w", err)
	}
	target, err := t.find(header, label, as)
	if err == nil && (as == nil || as.selects) {
		err = t.spread(text)
	}
	if err != nil {
		return err
	}
	for {
		record, err := in.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil && !errors.Is(err, csv.ErrFieldCount) {
			return wrong(t.path, "%w", err)
		}
		line, _ := in.FieldPos(0)
		if err != nil {
			return wrong(t.path, "line %d has %d values, and the header %d names: write a "+
				"value that has a comma in quotes", line, len(record), len(header))
		}
		if c, err := t.add(record); err != nil {
			return wrong(t.path, "line %d, column %q: %w", line, header[c], err)
		}
		l := ""
		if target >= 0 {
			l = strings.TrimSpace(record[target])
		}
		x, err := number(l)
		if err != nil {
			x = math.NaN()
		}
		t.labels, t.targets = append(t.labels, l), append(t.targets, x)
		t.lines = append(t.lines, line)
	}
	if len(t.labels) == 0 {
		return wrong(t.path, "there is no line behind the header")
	}
	return nil
}

// add adds the values of a line, or returns the column of a value that is wrong, and why.
func (t *sheet) add(record []string) (wrong int, err error) {
	for i, c := range t.at {
		value, x := strings.TrimSpace(record[c]), 0.0
		switch {
		case value == "":
			err = errors.New("a value is missing: fill it in, or leave out the line, or the " +
				"column by data.Columns")
		case t.when[i] == "":
			x, err = number(value)
		case value == t.when[i]:
			x = 1
		case !t.texts[c][value]:
			err = fmt.Errorf("%q is none of the training's texts, %s", value,
				few(slices.Sorted(maps.Keys(t.texts[c]))))
		}
		if err != nil {
			return c, err
		}
		t.values = append(t.values, x)
	}
	return 0, nil
}

// spread gives each column without numbers one column for each of its texts.
func (t *sheet) spread(table []byte) error {
	in := csv.NewReader(bytes.NewReader(table))
	in.ReuseRecord = true
	for _, c := range t.at {
		t.texts[c] = map[string]bool{}
	}
	for line := 1; ; line++ {
		record, err := in.Read()
		if err != nil {
			break // which read returns, unless it is the end
		}
		for _, c := range t.at {
			text := strings.TrimSpace(record[c])
			if line == 1 || text == "" || t.texts[c] == nil {
				continue
			}
			if numeric(text) {
				t.texts[c] = nil
			} else if len(t.texts[c]) <= mostTexts {
				t.texts[c][strings.Clone(text)] = true
			}
		}
	}
	columns, at := t.columns, t.at
	t.columns, t.at, t.when = nil, nil, nil
	for i, name := range columns {
		all := slices.Sorted(maps.Keys(t.texts[at[i]]))
		switch {
		case len(all) > mostTexts:
			return wrong(t.path, "column %q has more than %d different texts, such as %q and %q: "+
				"leave it out, by data.Columns", name, mostTexts, all[0], all[1])
		case len(all) > 0 && strings.Contains(name, "="):
			return wrong(t.path, "column %q has texts, and = in its name: give it another name",
				name)
		case len(all) == 0:
			all = []string{""}
		}
		for _, text := range all {
			column := name
			if text != "" {
				column += "=" + text
			}
			if slices.Contains(t.columns, column) {
				return wrong(t.path, "two columns would be named %q: rename one, or leave it out, "+
					"by data.Columns", column)
			}
			t.columns, t.at, t.when = append(t.columns, column), append(t.at, at[i]),
				append(t.when, text)
		}
	}
	return nil
}

// numeric reports whether a text is a number, or begins as one that is written wrong, as 3,5 is.
func numeric(text string) bool {
	_, err := parse(text)
	r, _ := utf8.DecodeRuneInString(strings.TrimLeft(text, "+-.,$€£¥ "))
	return err == nil || unicode.IsDigit(r)
}

// mostTexts is how many texts a column may have: one of more has names, as of customers.
const mostTexts = 100

// find finds the columns of a header, and returns the label's.
func (t *sheet) find(header []string, label string, as *Mapping) (target int, err error) {
	for c, name := range header {
		name = strings.TrimSpace(name)
		if name == "" || slices.Contains(header[:c], name) {
			return 0, wrong(t.path, "column %d is named %q, like another or not at all: give it "+
				"a name, or leave it out if it numbers the lines%s", c+1, name, hint(header))
		}
		if header[c] = name; name != label && as == nil {
			t.columns, t.at = append(t.columns, name), append(t.at, c)
		}
	}
	predicts := as != nil && label == ""
	if target = slices.Index(header, label); !predicts && target < 0 {
		return 0, wrong(t.path, "no column is named %q: there are %q%s", label, header,
			hint(header))
	} else if !predicts && len(header) == 1 {
		return 0, wrong(t.path, "there is no column but the label's, %q", label)
	}
	if as == nil {
		return target, nil
	}
	t.columns = as.Columns
	for _, column := range as.Columns {
		name, text, _ := strings.Cut(column, "=")
		c := slices.Index(header, column)
		if c >= 0 || as.selects {
			text = ""
		} else if text != "" {
			c = slices.Index(header, name)
		}
		if c < 0 || c == target {
			return 0, wrong(t.path, "no column is named %q, as in the training or data.Columns, "+
				"or it is the label: there are %q%s", column, header, hint(header))
		}
		if t.at, t.when = append(t.at, c), append(t.when, text); text != "" {
			if t.texts[c] == nil {
				t.texts[c] = map[string]bool{}
			}
			t.texts[c][text] = true
		}
	}
	if len(t.at) == 0 {
		return 0, wrong(t.path, "%w: the Mapping is of no table", backend.ErrArgument)
	}
	return target, nil
}

// hint says what is wrong with a header that has not the names that it should have.
func hint(header []string) string {
	for _, mark := range []string{";", "\t", "|"} {
		if len(header) == 1 && strings.Contains(header[0], mark) {
			return fmt.Sprintf(": the columns are separated by %q: write commas", mark)
		}
	}
	for _, name := range header {
		if _, err := parse(strings.TrimSpace(name)); err == nil {
			return ": the first line must have the names of the columns, and has numbers"
		}
	}
	return ""
}

// number returns a finite number. Integers are exact.
func number(text string) (float64, error) {
	x, err := parse(text)
	if err != nil || math.IsNaN(x) || math.IsInf(x, 0) {
		return 0, fmt.Errorf("%q is no finite number: correct it, or leave out the line, or "+
			"the column by data.Columns", text)
	}
	if integer(text) && math.Abs(x) >= 1<<53 {
		exact, ok := new(big.Int).SetString(text, 10)
		if back, _ := big.NewFloat(x).Int(nil); !ok || exact.Cmp(back) != 0 {
			return 0, fmt.Errorf("%q has more digits than a float64: is it a name?", text)
		}
	}
	return x, nil
}

// IDX reads the files of MNIST: images, and their labels.
//
// Errors: files of another format or length, or with different numbers of samples.
func IDX(images, labels string) (Set, error) { return Source(nil).IDX(images, labels) }

// IDX is the function IDX for files of the store.
func (s Source) IDX(images, labels string) (Set, error) {
	n, pixels, err := s.idx(images, 3)
	if err != nil {
		return nil, err
	}
	count, kinds, err := s.idx(labels, 1)
	if err == nil && n != count {
		err = wrong(labels, "%d labels, and %d images in %s", count, n, images)
	}
	return table(n, pixels, ints(kinds)), err
}

// idx returns the first axis and the bytes of an IDX file.
func (s Source) idx(path string, axes int) (n int, elements []byte, err error) {
	all, err := s.contents(path)
	if err != nil {
		return 0, nil, err
	}
	head := 4 * (1 + axes)
	if len(all) < head || binary.BigEndian.Uint32(all) != 0x800+uint32(axes) {
		return 0, nil, wrong(path, "no IDX file of bytes with %d axes", axes)
	}
	want := 1.0 // which does not overflow
	for at := 4; at < head; at += 4 {
		want *= float64(binary.BigEndian.Uint32(all[at:]))
	}
	if elements = all[head:]; want != float64(len(elements)) {
		return 0, nil, wrong(path, "%d bytes of data, its header says %.0f", len(elements), want)
	}
	return int(binary.BigEndian.Uint32(all[4:])), elements, nil
}

func ints(bytes []byte) []int {
	all := make([]int, len(bytes))
	for i, b := range bytes {
		all[i] = int(b)
	}
	return all
}

// CIFAR reads the binary files of CIFAR-10, or of CIFAR-100 with its fine labels.
//
// Errors: another number of classes; a file whose length does not fit its records; a label that is
// out of range, with its record.
func CIFAR(classes int, files ...string) (Set, error) {
	return Source(nil).CIFAR(classes, files...)
}

// CIFAR is the function CIFAR for files of the store.
func (s Source) CIFAR(classes int, files ...string) (Set, error) {
	const size = 3 * 32 * 32
	labels := map[int]int{10: 1, 100: 2}[classes]
	if labels == 0 {
		return nil, wrong("CIFAR", "%d classes: there are 10 or 100", classes)
	}
	var pixels, kinds []byte
	if len(files) == 0 {
		return nil, wrong("CIFAR", "no files")
	}
	for _, file := range files {
		all, err := s.contents(file)
		if err != nil {
			return nil, err
		}
		if len(all) == 0 || len(all)%(labels+size) != 0 {
			return nil, wrong(file, "%d bytes are not records of %d", len(all), labels+size)
		}
		for i, record := range slices.Collect(slices.Chunk(all, labels+size)) {
			kind := record[labels-1]
			if int(kind) >= classes {
				return nil, wrong(file, "record %d has the label %d, of %d", i, kind, classes)
			}
			pixels, kinds = append(pixels, record[labels:]...), append(kinds, kind)
		}
	}
	return table(len(kinds), pixels, ints(kinds)), nil
}

// largest is the most pixels that an image may have.
const largest = 1 << 26

// Images reads a folder that has a folder of JPEG and PNG files for each class, by name: in the
// order of numbers if all are, else of text. Each image is decoded and scaled in Read. As in
// Pillow's convert("RGB"), transparency is left out, which shows the colour below it, and so is the
// orientation that a camera notes. Of 16 bits the upper 8 count. Hidden folders and files, whose
// names begin with a dot, and __MACOSX are no classes.
//
// known is the [Mapping] of a training, whose classes have the same numbers here.
//
// Errors: a folder without images; a class without any, unless known has it, and a class that known
// lacks; images that lie elsewhere, or of other formats, which would be left out; in Read, a file
// that is not an image, or has more than 2^26 pixels.
func Images(dir string, h, w int, known ...Mapping) (samples Set, classes []string, err error) {
	return Source(nil).Images(dir, h, w, known...)
}

// Images is the function Images for a folder of the store.
func (s Source) Images(dir string, h, w int, known ...Mapping) (samples Set, classes []string,
	err error) {
	as, err := given(known)
	if err != nil {
		return nil, nil, err
	}
	in, err := s.at(dir)
	if err != nil {
		return nil, nil, err
	}
	files, folders, err := pictures(in)
	if err != nil || len(files) == 0 || h < 1 || w < 1 {
		return nil, nil, wrong(dir, "%d images in folders of it, to be of %d x %d pixels: %w",
			len(files), h, w, cmp.Or(err, os.ErrNotExist))
	}
	kinds := learn(folders)
	if as != nil {
		kinds = of(as)
	} else if len(kinds.classes) < len(folders) {
		return nil, nil, wrong(dir, "some names of its folders are the same number, as 1 and 01 "+
			"are, and each class needs its own: %s", few(folders))
	}
	class, full := make([]int, len(files)), map[string]bool{}
	for i, file := range files {
		name := path.Dir(file)
		if class[i] = kinds.of(name); class[i] < 0 {
			return nil, nil, wrong(in.Path(file), "%w", kinds.wrong(name))
		}
		full[name] = true
	}
	for _, name := range folders {
		if as == nil && !full[name] {
			return nil, nil, wrong(in.Path(name), "a class without images")
		}
	}
	return set{len(files), func(i int, row []any) error {
		planes, err := decode(in, files[i], h, w)
		if err != nil {
			return wrong(in.Path(files[i]), "%w", err)
		}
		return table(1, planes, class[i:i+1]).Read(0, row)
	}, Mapping{Classes: kinds.classes}}, kinds.classes, nil
}

// pictures returns the images in the folders of a folder, and these folders, sorted by name.
func pictures(in files.Dir) (files, folders []string, err error) {
	err = each(in, ".", func(name string, folder bool) error {
		if !folder {
			return misplaced(name)
		}
		folders = append(folders, name)
		return each(in, name, func(file string, folder bool) error {
			if file = path.Join(name, file); folder {
				return none(in, file)
			}
			is, err := picture(file)
			if !is && err == nil && path.Ext(file) == "" {
				is = decodes(in, file)
			}
			if is {
				files = append(files, file)
			}
			return err
		})
	})
	return files, folders, err
}

// none refuses images anywhere below a folder.
func none(in files.Dir, at string) error {
	return each(in, at, func(name string, folder bool) error {
		if name = path.Join(at, name); folder {
			return none(in, name)
		}
		return misplaced(name)
	})
}

// each calls a function for the entries of a folder, sorted by name, that are not hidden.
func each(in files.Dir, dir string, f func(name string, folder bool) error) error {
	entries, err := in.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := e.Name()
		if strings.HasPrefix(name, ".") || name == "__MACOSX" {
			continue
		}
		folder := e.IsDir()
		if e.Type() == fs.ModeSymlink {
			var info fs.FileInfo
			if info, err = in.Stat(path.Join(dir, name)); err == nil {
				folder = info.IsDir()
			}
		}
		if err == nil {
			err = f(name, folder)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// picture reports whether a file is an image by its name.
func picture(file string) (bool, error) {
	switch kind := strings.ToLower(path.Ext(file)); {
	case slices.Contains(unread, kind):
		return false, wrong(file, "of images only JPEG and PNG are read: convert it")
	default:
		return slices.Contains([]string{".jpg", ".jpeg", ".jpe", ".jfif", ".png"}, kind), nil
	}
}

// decodes reports whether a file without an extension begins as an image does.
func decodes(in files.Dir, name string) bool {
	f, err := in.Open(name)
	if err != nil {
		return false
	}
	defer f.Close()
	_, _, err = image.DecodeConfig(f)
	return err == nil
}

// misplaced refuses an image that is not in a folder of its class.
func misplaced(file string) error {
	if image, err := picture(file); image || err != nil {
		return wrong(file, "an image that no folder of the given one has, so it has no class")
	}
	return nil
}

// unread are formats that Images does not read.
var unread = []string{".apng", ".avif", ".bmp", ".exr", ".gif", ".heic", ".heif", ".ico", ".jp2",
	".jxl", ".npy", ".pgm", ".ppm", ".psd", ".svg", ".tga", ".tif", ".tiff", ".webp"}

// decode returns the red, green and blue planes of an image.
func decode(in files.Dir, name string, h, w int) ([]byte, error) {
	f, err := in.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var head bytes.Buffer
	size, _, err := image.DecodeConfig(io.TeeReader(f, &head))
	if n := int64(size.Width) * int64(size.Height); err == nil && (n < 1 || n > largest) {
		err = errors.New("too many pixels")
	}
	if err != nil {
		return nil, err
	}
	from, _, err := image.Decode(io.MultiReader(&head, f))
	if err != nil {
		return nil, err
	}
	show(from)
	scaled, planes := image.NewRGBA(image.Rect(0, 0, w, h)), make([]byte, 3*h*w)
	draw.BiLinear.Scale(scaled, scaled.Bounds(), from, from.Bounds(), draw.Src, nil)
	for i := range planes {
		planes[i] = scaled.Pix[i%(h*w)*4+i/(h*w)]
	}
	return planes, nil
}

// show makes an image opaque, with its colours as they are.
func show(m image.Image) {
	switch m := m.(type) {
	case *image.NRGBA:
		for i := 3; i < len(m.Pix); i += 4 {
			m.Pix[i] = 255
		}
	case *image.NRGBA64:
		for i := 6; i < len(m.Pix); i += 8 {
			m.Pix[i], m.Pix[i+1] = 255, 255
		}
	case *image.Paletted:
		for i, c := range m.Palette {
			if c, ok := c.(color.NRGBA); ok {
				c.A = 255
				m.Palette[i] = c
			}
		}
	}
}

// Text reads a text for a model that predicts the next character. A sample is n characters, as
// indices into the sorted characters of the text, and for each of them the character that follows
// it. Sample i begins at character i*n.
//
// known is the [Mapping] of a training, whose characters have the same numbers here.
//
// Errors: a text of fewer than n+1 characters, or that is not UTF-8; a character that known lacks.
func Text(path string, n int, known ...Mapping) (samples Set, characters []rune, err error) {
	return Source(nil).Text(path, n, known...)
}

// Text is the function Text for a file of the store.
func (s Source) Text(path string, n int, known ...Mapping) (samples Set, characters []rune,
	err error) {
	as, err := given(known)
	if err != nil {
		return nil, nil, err
	}
	all, err := s.letters(path)
	if err != nil {
		return nil, nil, err
	}
	text := []rune(string(all))
	if n < 1 || len(text) <= n {
		return nil, nil, wrong(path, "%d characters: %d are needed", len(text), n+1)
	}
	characters = slices.Compact(slices.Sorted(slices.Values(text)))
	if as != nil {
		characters = []rune(strings.Join(as.Classes, ""))
	}
	class, names := map[rune]int{}, make([]string, len(characters))
	for i, c := range characters {
		class[c], names[i] = i, string(c)
	}
	if as != nil && !slices.Equal(names, as.Classes) {
		return nil, nil, wrong(path, "%w: the Mapping is of no text", backend.ErrArgument)
	}
	tokens := make([]int, len(text))
	for i, c := range text {
		var ok bool
		if tokens[i], ok = class[c]; !ok {
			return nil, nil, wrong(path, "character %d, %q, is none of the training's %d", i, c,
				len(characters))
		}
	}
	m := (len(tokens) - 1) / n
	read := table(m, tokens[:m*n], tokens[1:m*n+1]).Read
	return set{m, read, Mapping{Classes: names}}, characters, nil
}

// letters returns a file of text, without the mark with which UTF-8 may begin.
func (s Source) letters(path string) ([]byte, error) {
	text, err := s.contents(path)
	if err != nil {
		return nil, err
	}
	if text, err = files.UTF8(text); err != nil {
		err = wrong(path, "%w", err)
	}
	return text, err
}
