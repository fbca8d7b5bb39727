package main

import (
	_ "embed"
	"encoding/csv"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
)

const (
	side   = 8 // pixels
	pixels = side * side
	labels = 10
	levels = 16 // the largest grey level
)

//go:embed digits.csv
var digitsCSV string

// image is one handwritten digit.
type image struct {
	pixels [pixels]float32 // 0 to 1, row by row
	label  int
}

// load returns the images to train on, and those that are held out, which are a
// fifth of a shuffle by seed.
func load(seed uint64) (train, heldOut []image, err error) {
	records, err := csv.NewReader(strings.NewReader(digitsCSV)).ReadAll()
	if err != nil {
		return nil, nil, fmt.Errorf("digits.csv: %w", err)
	}
	records = records[1:] // the header
	images := make([]image, len(records))
	for i, j := range rand.New(rand.NewPCG(seed, 0)).Perm(len(records)) {
		if images[i], err = parse(records[j]); err != nil {
			return nil, nil, fmt.Errorf("digits.csv: image %d: %w", j, err)
		}
	}
	n := len(images) / 5
	return images[n:], images[:n], nil
}

func parse(record []string) (im image, err error) {
	if len(record) != pixels+1 {
		return im, fmt.Errorf("it has %d columns, want %d", len(record), pixels+1)
	}
	for i := range im.pixels {
		level, err := strconv.Atoi(record[i])
		if err != nil {
			return im, err
		}
		im.pixels[i] = float32(level) / levels
	}
	im.label, err = strconv.Atoi(record[pixels])
	if err == nil && (im.label < 0 || im.label >= labels) {
		err = fmt.Errorf("label %d", im.label)
	}
	return im, err
}
