package autograd

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
)

// CheckFinite returns an error on every rank if the model has a NaN or an infinity on one of them:
// in parameters, moving averages of batch norms, the residuals of a compression, and what a solver
// keeps, which nil leaves out. The error names the tensor, the element and the step. Variables of
// [WithFrozen] may be infinite, as masks are, but not NaN. It is collective. Call it before a model
// is called good: the loss of a step may be finite while its gradient is not.
//
// Save, SaveAsync and [SaveWeights] refuse such a model by the same rule.
//
// Cost: a pass over the model, after copying what is on a device to the host, and an all-gather of
// 32 bytes.
//
// Errors, on all ranks: an element that is not finite; those of Save that occur before files are
// written.
func (d *DataParallel) CheckFinite(solver gorgonia.Solver) error {
	return d.collectively(backend.ForCheck, "check for NaN", func() error {
		return d.agree("", errors.Join(d.pull(!d.sharded), d.checkFinite(solver)))
	})
}

func (d *DataParallel) checkFinite(by gorgonia.Solver) error {
	if by == nil {
		by = &gorgonia.VanillaSolver{} // which keeps nothing
	}
	own, err := d.own(true)
	if err != nil {
		return err
	}
	state, err := d.modelState(by)
	if d.sharded {
		err = errors.Join(err, d.divides(by))
	}
	if err != nil {
		return err
	}
	all := append(own, d.listed(state, by)...)
	slices.SortFunc(all, func(a, b checkpoint.Tensor) int {
		return strings.Compare(a.Name, b.Name)
	})
	for _, t := range all {
		if err := t.CheckFinite(); err != nil {
			return checkpoint.Remarks{Step: fmt.Sprint(d.saves.steps)}.Diverged(err)
		}
	}
	return nil
}

// own returns what this rank alone has: the state of a compression, and rows of tables.
func (d *DataParallel) own(tables bool) (all []checkpoint.Tensor, err error) {
	if c, ok := d.compression(); ok {
		state, err := c.State()
		if err != nil {
			return nil, err
		}
		for name, b := range state {
			all = append(all, checkpoint.Whole(name, []int{b.Len()}, b, checkpoint.Own))
		}
	}
	if tables {
		all = append(all, d.rows()...)
	}
	return all, nil
}

// constant reports whether nothing trains a tensor of a file.
func (v *inventory) constant(name string) bool {
	return slices.ContainsFunc(v.frozen, func(p piece) bool { return p.file == name })
}
