package autograd

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"slices"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// Check returns an error on every rank unless the model has the same bits on all ranks:
// parameters, variables of [WithFrozen], moving averages of batch norms, the seed and step of
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
	if err := residence.Bound(d.comm.Device(), d.check); err != nil {
		return wrapped("rank %d of %s: check: %w", d.comm.Rank(), d.comm.Name(), err)
	}
	return nil
}

func (d *DataParallel) check() error {
	problem := errors.Join(d.model.find(), d.pull(true))
	comm := backend.Label(d.comm, backend.ForCheck)
	all := slices.Concat(items(d.params), d.model.rest())
	if d.solver != nil && !d.elastic { // whose newcomers set their rate later
		all = append(all, item{"a setting of the solver, such as its rate,", d.settings})
	}
	err := alikeOn(comm, all, problem)
	if err != nil {
		return err
	}
	return d.checkParts()
}

// settings returns the settings of the machine's solver.
func (d *DataParallel) settings() ([]byte, error) {
	all := []solver.Solver{d.solver}
	if groups, ok := d.solver.(*solver.Groups); ok {
		all = nil
		for _, g := range groups.List() {
			all = append(all, g.Solver)
		}
	}
	return json.Marshal(all)
}

// alikeOn returns an error unless items have the same bits on all ranks of a communicator. A rank
// with a problem, or whose items cannot be read, takes part.
func alikeOn(comm backend.Communicator, items []item, problem error) error {
	const size = 8 // of a hash
	var mine []byte
	for _, p := range items {
		value, err := p.bytes()
		problem = cmp.Or(problem, err)
		sum := sha256.Sum256(value)
		mine = append(mine, sum[:size]...)
	}
	all, err := agreeAndGather(comm, "", mine, problem)
	if err != nil {
		return err
	}
	for r, theirs := range all {
		for i, p := range items {
			at := size * i
			if !bytes.Equal(theirs[at:at+size], all[0][at:at+size]) {
				return fmt.Errorf("%w: %s is not the same on rank %d as on rank 0",
					backend.ErrMismatch, p.name, r)
			}
		}
	}
	return nil
}

// Hash returns the SHA-256 of the model on this rank, in hexadecimal. It covers the elements of all
// parameters in the order of New, in row-major order, little endian, one after the other; then the
// variables of [WithFrozen], the moving averages of batch norms, and the step and seed of random
// numbers, if there are any. Trainings that end with the same hash end with the same bits, on any
// number of ranks and on the host or on devices. It is collective only where ranks divide
// parameters ([WithParts], vm.WithShards): [DataParallel.Check] compares ranks.
//
// Cost: a hash of the parameters, after copying those that a machine has on a device to
// the host.
//
// Errors: a parameter that was bound to another kind of value; those of the device.
func (d *DataParallel) Hash() (string, error) {
	h := sha256.New()
	err := residence.Bound(d.comm.Device(), func() error {
		if err := d.pull(true); err != nil {
			return err
		}
		for _, p := range d.params {
			value, err := p.bytes()
			if err != nil {
				return err
			}
			if d.parts.divided(p.index) {
				whole, err := d.parts.join(p, backend.Of(value).As(p.dtype))
				if err != nil {
					return err
				}
				value = whole.Data.Bytes()
			}
			h.Write(value)
		}
		return d.hashRest(h)
	})
	if err != nil {
		return "", wrapped("rank %d of %s: hash: %w", d.comm.Rank(),
			d.comm.Name(), err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// hashRest adds the model without its parameters to a hash.
func (d *DataParallel) hashRest(h hash.Hash) error {
	if err := d.model.find(); err != nil {
		return err
	}
	for _, p := range d.model.rest() {
		value, err := p.bytes()
		if err != nil {
			return err
		}
		h.Write(value)
	}
	return nil
}
