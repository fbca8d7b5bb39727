package exec

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

// snapshots are where an executor copies variables, from the first Snapshot to Close.
type snapshots struct {
	room backend.Buffer
	side backend.Queue // brings the copies to the host while the main queue goes on
}

// Snapshot starts copies, behind what was started, of what the device has newer than host memory
// that was bound, or than a part of it, and copies other memory at once. fetch brings the copies to
// the host, in the same order. Another goroutine may call it, once; the next Snapshot and Close
// must wait for it. The device needs memory for the copies. Where there is too little, Snapshot
// waits for copies on the host.
func (e *Executor) Snapshot(
	memory []backend.Buffer,
) (fetch func() ([]backend.Buffer, error), err error) {
	newer, nbytes := e.newer(), 0
	all, from := make([]backend.Buffer, len(memory)), make([]backend.Buffer, len(memory))
	for i, m := range memory {
		if c, at := around(newer, m); c != nil {
			from[i] = c.Device.Slice(at, at+m.NBytes())
			nbytes += aligned(m.NBytes())
			continue
		}
		all[i] = like(m)
		copy(all[i].Bytes(), m.Bytes())
	}
	s := &e.snapshots
	if nbytes == 0 || s.prepare(e.device, nbytes) != nil {
		err := download(e.device, all, from, memory)
		return func() ([]backend.Buffer, error) {
			return all, nil
		}, errors.Join(err, e.device.Join())
	}
	at := 0
	for i, b := range from {
		if b.Len() == 0 {
			continue
		}
		from[i] = s.room.Slice(at, at+b.Len())
		at += aligned(b.Len())
		if err := e.device.Move(from[i], b); err != nil {
			return nil, errors.Join(err, e.device.Join())
		}
	}
	copied, err := e.device.Main().Record()
	if err == nil {
		err = s.side.Wait(copied)
	}
	side := s.side
	return func() ([]backend.Buffer, error) {
		err := download(side, all, from, memory)
		return all, errors.Join(err, drain(side))
	}, err
}

// newer returns the copies whose elements are newer than those of the host, in the order of their
// addresses there.
func (e *Executor) newer() (all []*residence.Copy) {
	for _, c := range e.resident {
		if c != nil && c.Fresh && e.device.Copies().Written(c) {
			all = append(all, c)
		}
	}
	slices.SortFunc(all, func(a, b *residence.Copy) int {
		return cmp.Compare(a.Host.Addr(), b.Host.Addr())
	})
	return all
}

// around returns which copy has memory of the host, and from which byte on; nil if none has.
func around(all []*residence.Copy, m backend.Buffer) (of *residence.Copy, at int) {
	i, _ := slices.BinarySearchFunc(all, m.Addr()+1, func(c *residence.Copy, after uintptr) int {
		return cmp.Compare(c.Host.Addr(), after)
	})
	if m.Len() == 0 || i == 0 {
		return nil, 0
	}
	of, at = all[i-1], int(m.Addr()-all[i-1].Host.Addr())
	if at+m.NBytes() > of.Host.NBytes() {
		return nil, 0
	}
	return of, at
}

// prepare makes room on the device, and the queue.
func (s *snapshots) prepare(d Device, nbytes int) (err error) {
	if s.side == nil {
		if s.side, err = d.NewQueue(); err != nil {
			return err
		}
	}
	if s.room.Len() >= nbytes {
		return nil
	}
	if s.room.Len() > 0 {
		err = d.Free(s.room)
		s.room = backend.Buffer{}
	}
	if err == nil {
		s.room, err = d.Alloc(nbytes)
	}
	return err
}

// free gives back what prepare has made.
func (s *snapshots) free(d Device) (err error) {
	if s.side != nil {
		err = s.side.Close()
	}
	if s.room.Len() > 0 {
		err = errors.Join(err, d.Free(s.room))
	}
	*s = snapshots{}
	return err
}

// download brings memory of a device to new host memory, which is like memory. Where from is empty
// it is there already.
func download(by interface {
	Move(dst, src backend.Buffer) error
}, to, from, memory []backend.Buffer) error {
	for i, b := range from {
		if b.Len() == 0 {
			continue
		}
		to[i] = like(memory[i])
		if err := by.Move(to[i].As(backend.U8), b); err != nil {
			return err
		}
	}
	return nil
}

// drain waits for everything that was started on a queue.
func drain(q backend.Queue) error {
	e, err := q.Record()
	if err != nil {
		return err
	}
	return e.Join(context.Background())
}

// like returns host memory of the same length and dtype.
func like(b backend.Buffer) backend.Buffer {
	return backend.Of(make([]float64, (b.NBytes()+7)/8)).As(b.DType()).Slice(0, b.Len())
}

// aligned returns the bytes that a copy takes among others.
func aligned(nbytes int) int { return (nbytes + alignment - 1) / alignment * alignment }
