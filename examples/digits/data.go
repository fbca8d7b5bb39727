package main

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
	side   = 8 // pixels
	pixels = side * side
	labels = 10
	levels = 16 // the largest grey level
)

//go:embed digits.csv
var digitsCSV string

// samples are images and what they show.
type samples struct {
	images  *tensor.Dense // [n, d...], 0 to 1, where d is the input of a model
	labels  *tensor.Dense // [n, 10], one-hot
	classes []int
}

func (s samples) count() int { return len(s.classes) }

// load returns the images to train on, and those that are held out, which are a
// fifth of a shuffle by seed. shape is that of an image.
func load(seed uint64, shape []int) (train, heldOut samples, err error) {
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

func parse(records [][]string, shape []int) (s samples, err error) {
	n := len(records)
	images, hot := make([]float32, n*pixels), make([]float32, n*labels)
	s.classes = make([]int, n)
	for i, record := range records {
		if s.classes[i], err = parseImage(record, images[i*pixels:(i+1)*pixels]); err != nil {
			return s, err
		}
		hot[i*labels+s.classes[i]] = 1
	}
	s.images = tensor.New(tensor.WithShape(append([]int{n}, shape...)...), tensor.WithBacking(images))
	s.labels = tensor.New(tensor.WithShape(n, labels), tensor.WithBacking(hot))
	return s, nil
}

// parseImage reads the pixels of one image, and returns which digit it is.
func parseImage(record []string, image []float32) (class int, err error) {
	if len(record) != pixels+1 {
		return 0, fmt.Errorf("an image has %d columns, want %d", len(record), pixels+1)
	}
	for i := range image {
		level, err := strconv.Atoi(record[i])
		if err != nil {
			return 0, err
		}
		image[i] = float32(level) / levels
	}
	class, err = strconv.Atoi(record[pixels])
	if err == nil && (class < 0 || class >= labels) {
		err = fmt.Errorf("label %d", class)
	}
	return class, err
}
