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
// Cost: it reads all samples, without known.
//
// Errors: [backend.ErrArgument] for samples that are of no table, or scaled already, or none to
// learn from, and for a known of other columns or of none that were scaled; a deviation that a
// float64 does not hold; those of Read.
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
		err = as.standardize(s)
	} else if !slices.Equal(as.Columns, m.Columns) || len(as.Means) == 0 {
		err = fmt.Errorf("%w: data.Standardize: the Mapping has the columns %s, of which %d are "+
			"scaled, and the samples have %s: give the Mapping of the training",
			backend.ErrArgument, few(as.Columns), len(as.Means), few(m.Columns))
	}
	if err != nil {
		return nil, err
	}
	return scaled(s, *as), nil
}

// standardize learns means and deviations from samples, by Welford's method.
func (m *Mapping) standardize(s Set) error {
	n := len(m.Columns)
	if s.Len() == 0 {
		return fmt.Errorf("%w: data.Standardize: there are no samples to learn from: give those "+
			"of the training, or a Mapping", backend.ErrArgument)
	}
	m.Means, m.Deviations = make([]float64, n), make([]float64, n)
	x := make([]float64, n)
	for i := range s.Len() {
		if err := s.Read(i, []any{x}); err != nil {
			return err
		}
		for c := range x {
			off := x[c] - m.Means[c]
			m.Means[c] += off / float64(i+1)
			m.Deviations[c] += off * (x[c] - m.Means[c])
		}
	}
	for c, squares := range m.Deviations {
		if m.Deviations[c] = math.Sqrt(squares / float64(s.Len())); squares == 0 {
			m.Deviations[c] = 1
		}
		if !(m.Deviations[c] <= math.MaxFloat64) {
			return fmt.Errorf("data.Standardize: the numbers of column %q are too large for a "+
				"deviation", m.Columns[c])
		}
	}
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
