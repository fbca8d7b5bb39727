package data

import (
	"bytes"
	"encoding/binary"
	"encoding/csv"
	"errors"
	"image"
	_ "image/jpeg" // formats that Images reads
	_ "image/png"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/image/draw"
)

// CSV reads a table with a header. A sample is the numbers of all columns except the one named
// label, in their order, and the label: its class if the input is Int, otherwise its number.
// classes are the sorted values of the label's column.
//
// Errors: a file that is not CSV; no column of that name; a value that is not a finite number, with
// its line; in Read, a label that is not a finite number if the input has floats.
func CSV(path, label string) (samples Set, classes []string, err error) {
	text, err := contents(path)
	if err != nil {
		return nil, nil, err
	}
	in := csv.NewReader(bytes.NewReader(text))
	header, err := in.Read()
	if err != nil {
		return nil, nil, wrong(path, "no header: %w", err)
	}
	at := slices.Index(header, label)
	if at < 0 || len(header) == 1 {
		return nil, nil, wrong(path, "no column is named %q, or no other: there are %q", label,
			header)
	}
	var values, targets []float32
	var labels []string
	for {
		record, err := in.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, nil, wrong(path, "%w", err)
		}
		for c, text := range record {
			x, err := strconv.ParseFloat(strings.TrimSpace(text), 32)
			switch {
			case c == at:
				if err != nil || math.IsInf(x, 0) {
					x = math.NaN()
				}
				labels, targets = append(labels, text), append(targets, float32(x))
			case err != nil || math.IsNaN(x) || math.IsInf(x, 0):
				line, _ := in.FieldPos(c)
				return nil, nil, wrong(path, "line %d: %q is no finite number", line, text)
			default:
				values = append(values, float32(x))
			}
		}
	}
	n, class := len(labels), make([]int, len(labels))
	classes = slices.Compact(slices.Sorted(slices.Values(labels)))
	for i, l := range labels {
		class[i], _ = slices.BinarySearch(classes, l)
	}
	named, numbered := table(n, values, class), table(n, values, targets)
	return Of(n, func(i int, row []any) error {
		if len(row) > 1 {
			if _, ok := row[1].([]int); !ok && targets[i] != targets[i] {
				return wrong(path, "sample %d: the label %q is no finite number: give it to an "+
					"input of Int, for its class", i, labels[i])
			} else if !ok {
				return numbered.Read(i, row)
			}
		}
		return named.Read(i, row)
	}), classes, nil
}

// IDX reads the files of MNIST: images, and their labels.
//
// Errors: files of another format or length, or with different numbers of samples.
func IDX(images, labels string) (Set, error) {
	n, pixels, err := idx(images, 3)
	if err != nil {
		return nil, err
	}
	count, kinds, err := idx(labels, 1)
	if err == nil && n != count {
		err = wrong(labels, "%d labels, and %d images in %s", count, n, images)
	}
	return table(n, pixels, ints(kinds)), err
}

// idx returns the first axis and the bytes of an IDX file.
func idx(path string, axes int) (n int, elements []byte, err error) {
	all, err := contents(path)
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
	const size = 3 * 32 * 32
	labels := map[int]int{10: 1, 100: 2}[classes]
	if labels == 0 {
		return nil, wrong("CIFAR", "%d classes: there are 10 or 100", classes)
	}
	var pixels, kinds []byte
	for _, file := range files {
		all, err := contents(file)
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

// Images reads a folder that has a folder of JPEG and PNG files for each class, sorted by name.
// Each image is decoded and scaled in Read.
//
// Errors: a folder without images; in Read, a file that is not an image, or has more than 2^26
// pixels.
func Images(dir string, h, w int) (samples Set, classes []string, err error) {
	files, err := fs.Glob(os.DirFS(dir), "*/*.[jJpP]*[gG]")
	if err != nil || len(files) == 0 || h < 1 || w < 1 {
		return nil, nil, wrong(dir, "%d images in folders of it, to be of %d x %d pixels: %w",
			len(files), w, h, errors.Join(err, os.ErrNotExist))
	}
	var class []int
	for i, file := range files { // Glob has sorted them
		name := path.Dir(file)
		files[i] = filepath.Join(dir, file)
		if len(classes) == 0 || classes[len(classes)-1] != name {
			classes = append(classes, name)
		}
		class = append(class, len(classes)-1)
	}
	return Of(len(files), func(i int, row []any) error {
		planes, err := decode(files[i], h, w)
		if err != nil {
			return wrong(files[i], "%w", err)
		}
		return table(1, planes, class[i:i+1]).Read(0, row)
	}), classes, nil
}

// decode returns the red, green and blue planes of an image.
func decode(path string, h, w int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size, _, err := image.DecodeConfig(f)
	if n := int64(size.Width) * int64(size.Height); err == nil && (n < 1 || n > largest) {
		err = errors.New("too many pixels")
	}
	if _, back := f.Seek(0, io.SeekStart); err != nil || back != nil {
		return nil, errors.Join(err, back)
	}
	from, _, err := image.Decode(f)
	if err != nil {
		return nil, err
	}
	scaled, planes := image.NewRGBA(image.Rect(0, 0, w, h)), make([]byte, 3*h*w)
	draw.BiLinear.Scale(scaled, scaled.Bounds(), from, from.Bounds(), draw.Src, nil)
	for i := range planes {
		planes[i] = scaled.Pix[i%(h*w)*4+i/(h*w)]
	}
	return planes, nil
}

// Text reads a text for a model that predicts the next character. A sample is n characters, as
// indices into the sorted characters of the text, and for each of them the character that follows
// it. Sample i begins at character i*n.
//
// Errors: a text of fewer than n+1 characters.
func Text(path string, n int) (samples Set, characters []rune, err error) {
	all, err := contents(path)
	if err != nil {
		return nil, nil, err
	}
	text := []rune(string(all))
	if n < 1 || len(text) <= n {
		return nil, nil, wrong(path, "%d characters: %d are needed", len(text), n+1)
	}
	characters = slices.Compact(slices.Sorted(slices.Values(text)))
	tokens := make([]int, len(text))
	for i, c := range text {
		tokens[i], _ = slices.BinarySearch(characters, c)
	}
	m := (len(tokens) - 1) / n
	return table(m, tokens[:m*n], tokens[1:m*n+1]), characters, nil
}
