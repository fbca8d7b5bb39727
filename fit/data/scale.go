package data

import (
	"fmt"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// Standardize returns the samples of a table with columns of the mean 0 and the standard deviation
// 1: it subtracts from each number the mean of its column over all samples, and divides by their
// deviation, or by 1 in a column of one value. Both are in the [Mapping] of the samples, and so in
// the checkpoints of a training: [CSV] scales a file that it reads with this mapping in the same
// way. Other samples that are read already, such as those that [Split] holds out, are given known,
// the mapping of the training:
//
//	train, err := data.Standardize(train)
//	held, err = data.Standardize(held, data.MappingOf(train))
//
// Cost: it reads all samples twice, without known.
//
// Errors: [backend.ErrArgument] for samples that are of no table, or scaled already, and for a
// known of other columns or of none that were scaled; a deviation that a float64 does not hold;
// those of Read.
func Standardize(s Set, known ...Mapping) (Set, error) {
	if err := backend.Given("data.Standardize", "s", s); err != nil {
		return nil, err
	}
	as, err := given(known)
	if err != nil {
		return nil, err
	}
	m := MappingOf(s)
	if len(m.Columns) == 0 || len(m.Means) > 0 {
		return nil, fmt.Errorf("%w: data.Standardize: the samples have %d columns, of which %d "+
			"are scaled: give those that data.CSV has read", backend.ErrArgument, len(m.Columns),
			len(m.Means))
	}
	if as == nil {
		as = &m
		if err := as.standardize(s); err != nil {
			return nil, err
		}
	}
	if !slices.Equal(as.Columns, m.Columns) || len(as.Means) == 0 {
		return nil, fmt.Errorf("%w: data.Standardize: the Mapping has columns %s, of which %d are "+
			"scaled, and the samples have %s: give the Mapping of the training's samples, as "+
			"Standardize returned them", backend.ErrArgument, few(as.Columns), len(as.Means),
			few(m.Columns))
	}
	return scaled(s, *as), nil
}

// standardize learns means and deviations from samples.
func (m *Mapping) standardize(s Set) error {
	n, columns := s.Len(), len(m.Columns)
	x, sums, squares := make([]float64, columns), make([]float64, columns), make([]float64, columns)
	for _, add := range []func(c int){
		func(c int) { sums[c] += x[c] / float64(n) },
		func(c int) { squares[c] += (x[c] - sums[c]) * (x[c] - sums[c]) / float64(n) },
	} {
		for i := range n {
			if err := s.Read(i, []any{x}); err != nil {
				return err
			}
			for c := range columns {
				add(c)
			}
		}
	}
	for c, of := range squares {
		if squares[c] = math.Sqrt(of); of == 0 {
			squares[c] = 1
		}
		if math.IsInf(squares[c], 0) || math.IsNaN(squares[c]) {
			return fmt.Errorf("data.Standardize: the numbers of column %q are too large for a "+
				"deviation", m.Columns[c])
		}
	}
	m.Means, m.Deviations = sums, squares
	return nil
}

// scaled returns samples whose columns are scaled as a mapping says.
func scaled(s Set, as Mapping) Set {
	m := MappingOf(s)
	m.Means, m.Deviations = as.Means, as.Deviations
	return set{s.Len(), func(i int, row []any) error {
		if len(row) == 0 {
			return s.Read(i, row)
		}
		wide := slices.Clone(row)
		wide[0] = make([]float64, len(m.Columns))
		if err := s.Read(i, wide); err != nil {
			return err
		}
		x := wide[0].([]float64)
		for c := range x {
			x[c] = (x[c] - m.Means[c]) / m.Deviations[c]
		}
		copy(row[1:], wide[1:])
		if err := put(row[0], x, 1); err != nil {
			return fmt.Errorf("%w: data: input 0, of the scaled columns: %w", backend.ErrArgument,
				err)
		}
		return nil
	}, m}
}
