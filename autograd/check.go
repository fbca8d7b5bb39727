package autograd

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// Check returns an error on every rank unless the parameters have the same bits on all
// ranks. It is collective. Call it now and then, and after training: it finds ranks whose
// solvers or seeds differ.
//
// Cost: a hash of the parameters, for which those on a device are copied to the host, and an
// all-gather of 8 bytes for each.
//
// Errors: [backend.ErrMismatch], naming the first rank and parameter that
// differ from rank 0; those of the communicator.
func (d *DataParallel) Check() error {
	if err := residence.Bound(d.comm.Device(), d.check); err != nil {
		return fmt.Errorf("autograd: rank %d of %s: check: %w", d.comm.Rank(), d.comm.Name(), err)
	}
	return nil
}

func (d *DataParallel) check() error {
	if err := alikeOn(d.comm, d.params); err != nil {
		return err
	}
	return d.checkParts()
}

// alikeOn returns an error unless parameters have the same bits on all ranks of a communicator.
func alikeOn(comm backend.Communicator, params []*param) error {
	n := len(params)
	if comm.Size() == 1 || n == 0 {
		return nil
	}
	mine, all := make([]int64, n), make([]int64, n*comm.Size())
	for i, p := range params {
		value, err := p.bytes()
		if err != nil {
			return err
		}
		sum := sha256.Sum256(value)
		mine[i] = int64(binary.LittleEndian.Uint64(sum[:]))
	}
	if err := exchange(backend.Label(comm, backend.ForCheck), backend.Collective{Kind: backend.AllGather}, backend.Of(all), backend.Of(mine)); err != nil {
		return err
	}
	for i, hash := range all {
		if hash != all[i%n] {
			return fmt.Errorf("%w: parameter %v is not the same on rank %d as on rank 0", backend.ErrMismatch, params[i%n], i/n)
		}
	}
	return nil
}

// Hash returns the SHA-256 of all parameters of this rank, in the order of New, in
// hexadecimal: of their elements in row-major order, little endian, one after the other.
// Trainings that end with the same hash end with the same bits, on any number of ranks and
// on the host or on devices. It is not collective: [DataParallel.Check] compares ranks.
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
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("autograd: rank %d of %s: hash: %w", d.comm.Rank(), d.comm.Name(), err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
