package data

import (
	"cmp"
	"encoding/binary"
	"encoding/csv"
	"errors"
	"image"
	_ "image/jpeg" // formats that Images reads
	_ "image/png"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/image/draw"
)

// CSV reads a table with a header. A sample is the numbers of all columns but the one named label,
// in their order, and what that has: its class if the input is Int, and else its number. classes
// are the sorted values of the column.
//
//	row: [columns] of floats, [] of Int or floats
//
// Errors: a file that is no CSV; no column of that name; a value that is no finite number, with
// its line.
func CSV(path, label string) (samples Set, classes []string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	in := csv.NewReader(f)
	in.ReuseRecord = true
	header, err := in.Read()
	if err != nil {
		return nil, nil, wrong(path, "no header: %w", err)
	}
	at, width := slices.Index(header, label), len(header)
	if at < 0 || width == 1 {
		return nil, nil, wrong(path, "no column is named %q, or no other: there are %q", label,
			header)
	}
	width--
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
			if c == at {
				labels = append(labels, strings.Clone(text))
			}
			x, err := strconv.ParseFloat(strings.TrimSpace(text), 32)
			if c == at {
				targets = append(targets, float32(x))
				continue
			}
			if err != nil || x-x != 0 {
				line, _ := in.FieldPos(c)
				return nil, nil, wrong(path, "line %d: %q is no finite number", line, text)
			}
			values = append(values, float32(x))
		}
	}
	classes = slices.Compact(slices.Sorted(slices.Values(labels)))
	class := make([]int, len(labels))
	for i, l := range labels {
		class[i], _ = slices.BinarySearch(classes, l)
	}
	return Of(len(values)/width, func(i int, row []any) error {
		err := put(row, 0, values[i*width:(i+1)*width], 1)
		if len(row) < 2 || err != nil {
			return err
		}
		if _, ok := row[1].([]int); !ok {
			return put(row, 1, targets[i:i+1], 1)
		}
		return put(row, 1, class[i:i+1], 1)
	}), classes, nil
}

// IDX reads the files of MNIST: images, and their labels.
//
//	row: [h w] of floats, [] of Int
//
// Errors: files of another format or length, or with different numbers of samples.
func IDX(images, labels string) (Set, error) {
	shape, bytes, err := idx(images, 3)
	if err != nil {
		return nil, err
	}
	count, classes, err := idx(labels, 1)
	if err != nil {
		return nil, err
	}
	if shape[0] != count[0] {
		return nil, wrong(labels, "%d labels, and %d images in %s", count[0], shape[0], images)
	}
	size := shape[1] * shape[2]
	return Of(shape[0], func(i int, row []any) error {
		return image8(row, bytes[i*size:(i+1)*size], int(classes[i]))
	}), nil
}

// image8 writes pixels as numbers from 0 to 1, and their class.
func image8(row []any, pixels []byte, class int) error {
	return cmp.Or(put(row, 0, pixels, 255), put(row, 1, []int{class}, 1))
}

// idx returns the shape and the bytes of an IDX file.
func idx(path string, axes int) (shape []int, data []byte, err error) {
	all, err := contents(path)
	if err != nil {
		return nil, nil, err
	}
	head := 4 * (1 + axes)
	if len(all) < head || binary.BigEndian.Uint32(all) != 0x800+uint32(axes) {
		return nil, nil, wrong(path, "no IDX file of bytes with %d axes", axes)
	}
	want := uint64(1)
	for a := range axes {
		n := binary.BigEndian.Uint32(all[4+4*a:])
		shape = append(shape, int(n))
		if want *= uint64(n); want > uint64(len(all)) {
			break
		}
	}
	if data = all[head:]; want != uint64(len(data)) {
		return nil, nil, wrong(path, "it has %d bytes of data, and a header for the shape %v",
			len(data), shape)
	}
	return shape, data, nil
}

// CIFAR reads the binary files of CIFAR-10, or of CIFAR-100, whose fine labels it takes.
//
//	row: [3 32 32] of floats, [] of Int
//
// Errors: another number of classes; a file whose length is no multiple of a record's; a label that
// is out of range, with its record.
func CIFAR(classes int, files ...string) (Set, error) {
	const image = 3 * 32 * 32
	labels := map[int]int{10: 1, 100: 2}[classes]
	if labels == 0 {
		return nil, wrong("CIFAR", "%d classes: there are 10 or 100", classes)
	}
	var all []byte
	record := labels + image
	for _, file := range files {
		more, err := contents(file)
		if err != nil {
			return nil, err
		}
		if len(more) == 0 || len(more)%record != 0 {
			return nil, wrong(file, "%d bytes are not records of %d", len(more), record)
		}
		for i := labels - 1; i < len(more); i += record {
			if int(more[i]) >= classes {
				return nil, wrong(file, "record %d has the label %d, of %d", i/record, more[i], classes)
			}
		}
		all = append(all, more...)
	}
	return Of(len(all)/record, func(i int, row []any) error {
		r := all[i*record : (i+1)*record]
		return image8(row, r[labels:], int(r[labels-1]))
	}), nil
}

// largest is how many pixels an image may have.
const largest = 1 << 26

// Images reads a folder with a folder for each class, sorted by name, that holds JPEG and PNG
// files. Each is decoded when it is read, cropped to the sides' proportion, and scaled.
//
//	row: [3 h w] of floats, [] of Int
//
// Errors: a folder without images; when read, a file that is no image, or has more than 2^26
// pixels.
func Images(dir string, h, w int) (samples Set, classes []string, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "*", "*"))
	if err != nil {
		return nil, nil, err
	}
	files = slices.DeleteFunc(files, func(file string) bool {
		return !slices.Contains([]string{".jpg", ".jpeg", ".png"},
			strings.ToLower(filepath.Ext(file)))
	})
	if len(files) == 0 || h < 1 || w < 1 {
		return nil, nil, wrong(dir, "no JPEG or PNG files in folders of it, or a size below 1")
	}
	var class []int
	for _, file := range files { // Glob has sorted them
		name := filepath.Base(filepath.Dir(file))
		if len(classes) == 0 || classes[len(classes)-1] != name {
			classes = append(classes, name)
		}
		class = append(class, len(classes)-1)
	}
	return Of(len(files), func(i int, row []any) error {
		planes, err := decode(files[i], h, w)
		if err != nil {
			return err
		}
		return image8(row, planes, class[i])
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
	if err != nil {
		return nil, wrong(path, "%w", err)
	}
	if n := int64(size.Width) * int64(size.Height); n < 1 || n > largest {
		return nil, wrong(path, "an image of %d x %d pixels", size.Width, size.Height)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	from, _, err := image.Decode(f)
	if err != nil {
		return nil, wrong(path, "%w", err)
	}
	part := from.Bounds() // in the middle, with the sides' proportion
	cropX, cropY := part.Dx()-part.Dy()*w/h, part.Dy()-part.Dx()*h/w
	part.Min.X += max(0, cropX) / 2
	part.Max.X -= max(0, cropX) - max(0, cropX)/2
	part.Min.Y += max(0, cropY) / 2
	part.Max.Y -= max(0, cropY) - max(0, cropY)/2
	scaled := image.NewRGBA(image.Rect(0, 0, w, h))
	draw.BiLinear.Scale(scaled, scaled.Bounds(), from, part, draw.Src, nil)
	planes := make([]byte, 3*h*w)
	for i := range h * w {
		for c := range 3 {
			planes[c*h*w+i] = scaled.Pix[4*i+c]
		}
	}
	return planes, nil
}

// Text reads a text for a model that predicts the next character. A sample is n characters, as
// numbers into the sorted characters of the text, and the n that follow each of them. Sample i
// begins at character i*n.
//
//	row: [n] of Int, [n] of Int
//
// Errors: a text of less than n+1 characters.
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
	return Of((len(tokens)-1)/n, func(i int, row []any) error {
		return cmp.Or(put(row, 0, tokens[i*n:][:n], 1), put(row, 1, tokens[i*n+1:][:n], 1))
	}), characters, nil
}
