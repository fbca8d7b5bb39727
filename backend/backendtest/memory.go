package backendtest

import (
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

const (
	guardBytes = 64   // on each side of an operand
	guardByte  = 0xc5 // what is there
	staleByte  = 0xa5 // what a destination holds before the call
	lineBytes  = 64
)

// memory is where a rank's operands live: a piece from the device's Alloc and a
// piece from the communicator's. Operands are cut from them one after the other.
type memory struct {
	move   func(dst, src backend.Buffer) error
	pieces [2]backend.Buffer
	used   [2]int
	comm   backend.Communicator
}

const (
	plain  = 0
	shared = 1
)

// newMemory is collective. Shared memory is small on many machines, so that an
// operand which does not fit there is put into the plain piece.
func (s *suite) newMemory(c backend.Communicator, nbytes, sharedBytes int) (*memory, error) {
	m := &memory{move: s.Copy, comm: c}
	if m.move == nil {
		m.move = func(dst, src backend.Buffer) error { copy(dst.Bytes(), src.Bytes()); return nil }
	}
	var err error
	if m.pieces[plain], err = c.Device().Alloc(nbytes); err != nil {
		return nil, err
	}
	m.pieces[shared], err = c.Alloc(sharedBytes)
	return m, err
}

// free gives the pieces back.
func (m *memory) free() error {
	return errors.Join(m.comm.Device().Free(m.pieces[plain]), m.comm.Free(m.pieces[shared]))
}

func (m *memory) reset() { m.used = [2]int{} }

func (m *memory) takeBuffer(nbytes, where int) (backend.Buffer, error) {
	nbytes = (nbytes + lineBytes - 1) / lineBytes * lineBytes
	if m.used[where]+nbytes > m.pieces[where].Len() {
		where = plain
	}
	lo := m.used[where]
	if lo+nbytes > m.pieces[where].Len() {
		return backend.Buffer{}, fmt.Errorf("backendtest: %d bytes do not fit the test's memory "+
			"of %d", lo+nbytes, m.pieces[where].Len())
	}
	m.used[where] += nbytes
	return m.pieces[where].Slice(lo, lo+nbytes), nil
}

// operand is elements with guards around them.
type operand struct {
	m      *memory
	place  backend.Buffer // bytes: guard, offset, elements, guard
	image  []byte         // what place holds before the call
	lo, hi int            // where the elements are, in bytes
	dtype  backend.DType
}

// operand makes one of n elements, offset elements off alignment, which hold
// content, or stale bytes if that is nil.
func (m *memory) operand(d backend.DType, n, offset, where int, content []byte) (*operand, error) {
	o := &operand{m: m, dtype: d, lo: guardBytes + offset*d.Size()}
	o.hi = o.lo + n*d.Size()
	o.image = make([]byte, o.hi+guardBytes)
	o.draw(content)
	place, err := m.takeBuffer(len(o.image), where)
	if err != nil {
		return nil, err
	}
	o.place = place.Slice(0, len(o.image))
	return o, m.move(o.place, backend.Of(o.image))
}

// draw fills the image.
//
//go:norace
func (o *operand) draw(content []byte) {
	for i := range o.image {
		o.image[i] = guardByte
	}
	for i := o.lo; i < o.hi; i++ {
		o.image[i] = staleByte
	}
	copy(o.image[o.lo:o.hi], content)
}

// buffer returns elements from to to.
func (o *operand) buffer(from, to int) backend.Buffer {
	size := o.dtype.Size()
	return o.place.Slice(o.lo+from*size, o.lo+to*size).As(o.dtype)
}

func (o *operand) len() int { return (o.hi - o.lo) / o.dtype.Size() }

// fetch returns what place holds now.
func (o *operand) fetch() ([]byte, error) {
	now := make([]byte, len(o.image))
	return now, o.m.move(backend.Of(now), o.place)
}

// untouched checks that nothing but bytes lo to hi has changed.
//
//go:norace
func (o *operand) untouched(now []byte, lo, hi int) error {
	for i, b := range now {
		if b == o.image[i] || i >= lo && i < hi {
			continue
		}
		switch {
		case i < o.lo:
			return fmt.Errorf("wrote %d bytes before the operand", o.lo-i)
		case i >= o.hi:
			return fmt.Errorf("wrote %d bytes past the end of the operand", i-o.hi+1)
		default:
			return fmt.Errorf("changed element %d, which it must not touch",
				(i-o.lo)/o.dtype.Size())
		}
	}
	return nil
}
