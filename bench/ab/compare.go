package main

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/internal/bench"
)

// group is what one run of the benchmark measures.
type group struct {
	where      string // "host" or "gpu"
	ranks      int
	collective string
}

// times are microseconds per call, by bytes.
type times map[int]float64

// cell is one size of a group, and how the versions compare.
type cell struct {
	group
	bytes    int
	old, new float64   // medians of the first rounds, in microseconds
	ratios   []float64 // the median of each repeat's rounds
}

// ratio compares the first rounds. Later ones are made for cells that looked slow, so an
// average of them would favor the new version.
func (c cell) ratio() float64 { return c.ratios[0] }

// lowest is the ratio that no repeat was below.
func (c cell) lowest() float64 { return slices.Min(c.ratios) }

func (c cell) String() string {
	text := fmt.Sprintf("%-4s %d ranks  %-13s %9d bytes  %10.2f us  %10.2f us  %.3f", c.where,
		c.ranks, c.collective, c.bytes, c.old, c.new, c.ratio())
	if len(c.ratios) > 1 {
		text += fmt.Sprintf("  again: %.3f", c.ratios[1:])
	}
	return text
}

// compare measures a group with both versions in turn, 0 being the old one, and again while a
// cell has always been above its limit.
func (g group) compare(rounds int, measure measurement) ([]cell, error) {
	var cells []cell
	for range repeats {
		found, err := g.once(rounds, measure)
		if err != nil {
			return nil, err
		}
		if cells == nil {
			cells = found
		} else {
			for i := range cells {
				cells[i].ratios = append(cells[i].ratios, found[i].ratio())
			}
		}
		if !slices.ContainsFunc(cells, func(c cell) bool { return c.lowest() > cellLimit }) {
			break
		}
	}
	return cells, nil
}

// once runs each version once a round, the old one first in every other round.
func (g group) once(rounds int, measure measurement) ([]cell, error) {
	pairs, err := bench.Turns(rounds, func(version int) (map[int]float64, error) {
		return measure(version, g)
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", g.collective, err)
	}
	var cells []cell
	for _, p := range pairs {
		cells = append(cells, cell{g, p.Bytes, p.Micros[0], p.Micros[1], []float64{p.Ratio}})
	}
	return cells, nil
}

func geomean(cells []cell) float64 {
	sum := 0.0
	for _, c := range cells {
		sum += math.Log(c.ratio())
	}
	return math.Exp(sum / float64(len(cells)))
}

func worst(cells []cell) cell {
	return slices.MaxFunc(cells, func(a, b cell) int {
		if a.lowest() > b.lowest() {
			return 1
		}
		return -1
	})
}

func summary(cells []cell) string {
	w := worst(cells)
	return fmt.Sprintf("cells=%d geomean=%.3f worst=%.3f (%s, %d ranks, %s of %d bytes)",
		len(cells), geomean(cells), w.lowest(), w.where, w.ranks, w.collective, w.bytes)
}

// judge returns an error if the new version is slower than it may be.
func judge(cells []cell) error {
	var errs []error
	if g := geomean(cells); g > geomeanLimit {
		errs = append(errs, fmt.Errorf("the geometric mean is %.3f, above %.2f", g, geomeanLimit))
	}
	for _, c := range cells {
		if c.lowest() > cellLimit {
			errs = append(errs, fmt.Errorf("above %.2f in %d repeats: %v", cellLimit,
				len(c.ratios), c))
		}
	}
	return errors.Join(errs...)
}
