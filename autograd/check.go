package autograd

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// Check returns an error on every rank unless the model is bitwise identical on all ranks:
// parameters, variables of [WithFrozen], running statistics of batch norms, the seed and step of
// random numbers, and the settings of a machine's solver, such as its rate. It is collective. Call
// it now and then between steps, and after training: it finds ranks whose solvers or seeds differ.
//
// Cost: a hash of the model, after copying what is on a device to the host, and an all-gather of 32
// bytes plus 8 for each part of the model.
//
// Errors: [backend.ErrMismatch], naming the first rank that differs from rank 0 and what differs
// there; a part that a rank cannot read, such as a frozen parameter that is a view; those of the
// communicator.
func (d *DataParallel) Check() error {
	return onRank(d.comm, "check", residence.Bound(d.comm.Device(), d.check))
}

func (d *DataParallel) check() error {
	problem := errors.Join(d.model.find(), d.planned.bring(true))
	comm := backend.Label(d.comm, backend.ForCheck)
	all := slices.Concat(items(d.params), d.model.rest())
	if d.solver != nil && !d.elastic { // whose replacements set their rate later
		all = append(all, item{"a setting of the solver, such as its rate,",
			func() ([]byte, error) { return settings(d.solver) }})
	}
	if err := alikeOn(comm, all, problem); err != nil {
		return err
	}
	return d.parts.check(d.params, d.model.rest())
}

// settings returns the settings of a machine's solver.
func settings(by solver.Solver) ([]byte, error) {
	all := []solver.Solver{by}
	if groups, ok := by.(*solver.Groups); ok {
		all = nil
		for _, g := range groups.List() {
			all = append(all, g.Solver)
		}
	}
	return json.Marshal(all)
}

// Hash returns the SHA-256 of the model on this rank, in hexadecimal. It covers the elements of all
// parameters in the order of New, in row-major order, little endian, one after the other; then the
// variables of [WithFrozen], the running statistics of batch norms, and the step and seed of random
// numbers, if there are any. Trainings that end with the same hash are bitwise identical, on any
// number of ranks and on the host or on devices. It is collective only where ranks shard
// parameters ([WithParts], vm.WithShards): [DataParallel.Check] compares ranks.
//
// Cost: a hash of the parameters, after copying those that a machine has on a device to
// the host.
//
// Errors: a parameter that was bound to another kind of value; those of the device.
func (d *DataParallel) Hash() (string, error) {
	h := sha256.New()
	err := residence.Bound(d.comm.Device(), func() error {
		if err := d.planned.bring(true); err != nil {
			return err
		}
		for _, p := range d.params {
			value, err := p.bytes()
			if err != nil {
				return err
			}
			if d.parts.isPart(p.index) {
				whole, err := d.parts.join(p, backend.Of(value).As(p.dtype))
				if err != nil {
					return err
				}
				value = whole.Data.Bytes()
			}
			h.Write(value)
		}
		return d.model.hash(h)
	})
	if err != nil {
		return "", onRank(d.comm, "hash", err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// hash adds the model without its learnables to a hash.
func (v *inventory) hash(h hash.Hash) error {
	if err := v.find(); err != nil {
		return err
	}
	for _, p := range v.rest() {
		value, err := p.bytes()
		if err != nil {
			return err
		}
		h.Write(value)
	}
	return nil
}

// CheckFinite returns an error on every rank if the model has a NaN or an infinity on one of them:
// in parameters, running statistics of batch norms, the residuals of a compression, and what a
// solver keeps, which nil leaves out. The error names the tensor, the element and the step.
// Variables of [WithFrozen] may be infinite, as masks are, but not NaN. It is collective. Call it
// before a model is called good: the loss of a step may be finite while its gradient is not.
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
		return d.saver.Agree("", errors.Join(d.planned.bring(!d.sharded),
			d.checkFinite(solver, d.saver.Steps)))
	})
}

func (d *contents) checkFinite(by gorgonia.Solver, steps uint64) error {
	if by == nil {
		by = &gorgonia.VanillaSolver{} // which keeps nothing
	}
	own, err := d.own(true)
	if err != nil {
		return err
	}
	state, err := d.modelState(by)
	if d.sharded {
		err = errors.Join(err, d.checkShards(by))
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
			return checkpoint.Remarks{Step: fmt.Sprint(steps)}.Diverged(err)
		}
	}
	return nil
}
