package fit

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/fit/data"
)

// ReadMapping returns what the numbers of a training's samples stand for, as [Checkpoint] has saved
// it: give it to the reader of the samples of a prediction. path is a checkpoint, or a directory,
// whose newest one is read. The mapping is empty if package data has not read the samples.
//
// Errors: those of autograd.ReadProgress.
func ReadMapping(path string, store ...func(url string) (fs.FS, error)) (data.Mapping, error) {
	var kept past
	err := autograd.ReadProgress(path, &kept, store...)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: give the directory that fit.Checkpoint had", err)
	}
	if err != nil {
		return data.Mapping{}, fmt.Errorf("fit: %w", err)
	}
	return kept.mapping(), nil
}

// mapping returns the mapping of the samples, as far as a graph reads it: classes are integers.
func (d Data) mapping() data.Mapping {
	m := data.MappingOf(d.Set)
	if !slices.ContainsFunc(d.Inputs, func(n *gorgonia.Node) bool {
		return n.Dtype() == tensor.Int
	}) {
		m.Classes = nil
	}
	return m
}

// mapping returns the mapping that a checkpoint has, empty if it is older.
func (p *past) mapping() data.Mapping {
	if p.Mapping == nil {
		return data.Mapping{}
	}
	return *p.Mapping
}

// checkMapping returns an error if both of two mappings have something, and not the same.
func checkMapping(m, other data.Mapping) error {
	if len(m.Columns) == 0 || len(other.Columns) == 0 {
		m = data.Mapping{Classes: m.Classes}
		other = data.Mapping{Classes: other.Classes}
	}
	if len(m.Classes) == 0 || len(other.Classes) == 0 {
		m.Classes, other.Classes = nil, nil
	}
	return m.Check(other)
}
