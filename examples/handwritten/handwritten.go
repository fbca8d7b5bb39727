// Package handwritten has images of handwritten digits for examples to train on, embedded in the
// program: 1797 images of 8x8 pixels. ATTRIBUTION.md says where they are from.
package handwritten

import (
	_ "embed"
	"encoding/csv"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"

	"gorgonia.org/tensor"
)

const (
	Side   = 8           // of an image, in pixels
	Pixels = Side * Side // of an image
	Labels = 10          // digits

	levels = 16 // the largest grey level
)

//go:embed digits.csv
var digitsCSV string

// Samples are images and what they show.
type Samples struct {
	Images  *tensor.Dense // [n, d...], 0 to 1, where d is the input of a model
	Labels  *tensor.Dense // [n, 10], one-hot
	Classes []int
}

// Count returns the number of images.
func (s Samples) Count() int { return len(s.Classes) }

// Load returns the images to train on, and those that are held out, which are a
// fifth of a shuffle by seed. shape is the shape of an image.
func Load(seed uint64, shape []int) (train, heldOut Samples, err error) {
	records, err := csv.NewReader(strings.NewReader(digitsCSV)).ReadAll()
	if err != nil {
		return train, heldOut, fmt.Errorf("digits.csv: %w", err)
	}
	records = records[1:] // the header
	shuffled := make([][]string, len(records))
	for i, j := range rand.New(rand.NewPCG(seed, 0)).Perm(len(records)) {
		shuffled[i] = records[j]
	}
	n := len(records) / 5
	if heldOut, err = parse(shuffled[:n], shape); err == nil {
		train, err = parse(shuffled[n:], shape)
	}
	if err != nil {
		return train, heldOut, fmt.Errorf("digits.csv: %w", err)
	}
	return train, heldOut, nil
}

func parse(records [][]string, shape []int) (s Samples, err error) {
	n := len(records)
	images, hot := make([]float32, n*Pixels), make([]float32, n*Labels)
	s.Classes = make([]int, n)
	for i, record := range records {
		if s.Classes[i], err = parseImage(record, images[i*Pixels:(i+1)*Pixels]); err != nil {
			return s, err
		}
		hot[i*Labels+s.Classes[i]] = 1
	}
	s.Images = tensor.New(tensor.WithShape(append([]int{n}, shape...)...),
		tensor.WithBacking(images))
	s.Labels = tensor.New(tensor.WithShape(n, Labels), tensor.WithBacking(hot))
	return s, nil
}

// parseImage reads the pixels of one image, and returns which digit it is.
func parseImage(record []string, image []float32) (class int, err error) {
	if len(record) != Pixels+1 {
		return 0, fmt.Errorf("an image has %d columns, want %d", len(record), Pixels+1)
	}
	for i := range image {
		level, err := strconv.Atoi(record[i])
		if err != nil {
			return 0, err
		}
		image[i] = float32(level) / levels
	}
	class, err = strconv.Atoi(record[Pixels])
	if err == nil && (class < 0 || class >= Labels) {
		err = fmt.Errorf("label %d", class)
	}
	return class, err
}
