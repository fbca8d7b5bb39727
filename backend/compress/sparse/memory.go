package sparse

import (
	"errors"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// memory is where residuals are, and scratch for one call after the other.
type memory struct {
	device func() backend.Device // nil: the host
	rooms  []backend.Buffer      // scratch; the last one is in use, to be freed
}

func (m *memory) alloc(nbytes int) (backend.Buffer, error) {
	if m.device != nil {
		return m.device().Alloc(nbytes)
	}
	return backend.Of(make([]int64, words(nbytes))).As(backend.U8).Slice(0, nbytes), nil
}

func (m *memory) free(b backend.Buffer) error {
	if m.device != nil {
		return m.device().Free(b)
	}
	return nil
}

// room returns scratch. A call under way may still use scratch that was too small; that is kept
// until the end, and doubling bounds it.
func (m *memory) room(nbytes int) (backend.Buffer, error) {
	have := 0
	if k := len(m.rooms); k > 0 {
		have = m.rooms[k-1].Len()
	}
	if nbytes > have {
		b, err := m.alloc(max(nbytes, 2*have))
		if err != nil {
			return b, err
		}
		m.rooms = append(m.rooms, b)
	}
	return m.rooms[len(m.rooms)-1].Slice(0, nbytes), nil
}

// release gives back the scratch.
func (m *memory) release() (all error) {
	for _, b := range m.rooms {
		all = errors.Join(all, m.free(b))
	}
	m.rooms = nil
	return all
}

// heads is host memory for the heads of messages, which the host reads after a call. Its users hold
// the communicator's mutex.
type heads struct {
	pinned  backend.Buffer
	free    []backend.Buffer // parts of it that no call uses
	pending []*call          // whose heads were not looked at yet, in order
}

// mostPending bounds how many calls the host may be ahead.
const mostPending = 64

// pinner is a device that copies to its own host memory without blocking.
type pinner interface {
	AllocHost(nbytes int) (backend.Buffer, error)
	FreeHost(backend.Buffer) error
}

// takeHeads returns memory of this many words, the same number for every call.
func (h *heads) takeHeads(d backend.Device, words int) (backend.Buffer, error) {
	if h.pinned.Len() == 0 {
		if err := h.pin(d, words); err != nil {
			return backend.Buffer{}, err
		}
	}
	last := len(h.free) - 1
	b := h.free[last]
	h.free = h.free[:last]
	return b, nil
}

// pin makes memory for all calls that may be under way, in one go: it takes the driver a while.
func (h *heads) pin(d backend.Device, words int) (err error) {
	h.pinned = backend.Of(make([]int64, mostPending*words))
	if p, ok := d.(pinner); ok {
		if h.pinned, err = p.AllocHost(h.pinned.NBytes()); err != nil {
			return err
		}
	}
	all := h.pinned.As(backend.I64)
	for i := range mostPending {
		h.free = append(h.free, all.Slice(i*words, (i+1)*words))
	}
	return nil
}

// done takes back the memory of a call whose heads nobody needs any more.
func (h *heads) done(k *call) {
	h.free = append(h.free, k.heads)
	h.pending = slices.DeleteFunc(h.pending, func(other *call) bool { return other == k })
}

// reap looks at the heads of calls that have finished, and waits if too many have not finished.
func (h *heads) reap() {
	for len(h.pending) > 0 && (len(h.pending) >= mostPending || h.pending[0].done.Done()) {
		h.settleFirst()
	}
}

// settleFirst ends the oldest call.
func (h *heads) settleFirst() {
	k := h.pending[0]
	if err := k.settle(); !k.seen { // its caller has the error
		k.endCall(err)
	}
}

// release gives back the memory, when no call is under way.
func (h *heads) release(d backend.Device) (err error) {
	if p, ok := d.(pinner); ok && h.pinned.Len() > 0 {
		err = p.FreeHost(h.pinned)
	}
	h.pinned, h.free = backend.Buffer{}, nil
	return err
}
