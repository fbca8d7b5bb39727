package autograd

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// Check returns an error on every rank unless the model has the same bits on all ranks:
// parameters, variables of [WithFrozen], moving averages of batch norms, and the seed and step of
// random numbers. It is collective. Call it now and then between steps, and after training: it
// finds ranks whose solvers or seeds differ.
//
// Cost: a hash of the model, for which those on a device are copied to the host, and an
// all-gather of 8 bytes for each.
//
// Errors: [backend.ErrMismatch], naming the first rank and what differs there from rank 0; those
// of the communicator.
func (d *DataParallel) Check() error {
	if err := residence.Bound(d.comm.Device(), d.check); err != nil {
		return fmt.Errorf("autograd: rank %d of %s: check: %w", d.comm.Rank(), d.comm.Name(), err)
	}
	return nil
}

func (d *DataParallel) check() error {
	if err := d.model.find(); err != nil {
		return err
	}
	comm := backend.Label(d.comm, backend.ForCheck)
	if err := alikeOn(comm, slices.Concat(items(d.params), d.model.rest())); err != nil {
		return err
	}
	return d.checkParts()
}

// alikeOn returns an error unless items have the same bits on all ranks of a communicator.
func alikeOn(comm backend.Communicator, items []item) error {
	n := len(items)
	if comm.Size() == 1 || n == 0 {
		return nil
	}
	mine, all := make([]int64, n), make([]int64, n*comm.Size())
	for i, p := range items {
		value, err := p.bytes()
		if err != nil {
			return err
		}
		sum := sha256.Sum256(value)
		mine[i] = int64(binary.LittleEndian.Uint64(sum[:]))
	}
	gather := backend.Collective{Kind: backend.AllGather}
	if err := exchange(comm, gather, backend.Of(all), backend.Of(mine)); err != nil {
		return err
	}
	for i, hash := range all {
		if hash != all[i%n] {
			return fmt.Errorf("%w: %s is not the same on rank %d as on rank 0",
				backend.ErrMismatch, items[i%n].name, i/n)
		}
	}
	return nil
}

// Hash returns the SHA-256 of the model on this rank, in hexadecimal: of the elements of all
// parameters in the order of New, in row-major order, little endian, one after the other; then of
// variables of [WithFrozen], of moving averages of batch norms, and of step and seed of random
// numbers, if there are any. Trainings that end with the same hash end with the same bits, on any
// number of ranks and on the host or on devices. It is not collective: [DataParallel.Check]
// compares ranks.
//
// Cost: a hash of the parameters, for which those on a device are copied to the host.
//
// Errors: a parameter that was bound to another kind of value; those of a device.
func (d *DataParallel) Hash() (string, error) {
	h := sha256.New()
	err := residence.Bound(d.comm.Device(), func() error {
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
				value = whole.data.Bytes()
			}
			h.Write(value)
		}
		return d.hashRest(h)
	})
	if err != nil {
		return "", fmt.Errorf("autograd: rank %d of %s: hash: %w", d.comm.Rank(), d.comm.Name(), err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// hashRest adds all of the model but the parameters to a hash.
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
