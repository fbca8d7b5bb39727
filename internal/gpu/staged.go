package gpu

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
)

// onHost reports whether the call reads or writes host memory.
func (k *call) onHost() bool {
	if k.src.Device() && k.dst.Device() {
		return false
	}
	return k.reads() && onHost(k.src) || k.writes() && onHost(k.dst)
}

func onHost(b backend.Buffer) bool { return b.Len() > 0 && !b.Device() }

// reads reports whether this rank's src is used.
func (k *call) reads() bool {
	return k.rank == k.what.Root || k.what.Kind != backend.Broadcast &&
		k.what.Kind != backend.Scatter
}

// writes reports whether this rank's dst is used.
func (k *call) writes() bool {
	return k.rank == k.what.Root || k.what.Kind != backend.Reduce && k.what.Kind != backend.Gather
}

// staged runs a call on host buffers: it copies src to the device, runs the call there, and copies
// dst back.
func (c *Communicator) staged(q stream, k *call) (backend.Work, error) {
	c.noticeHost(k.what)
	copies := *k // and not k, which would take memory in every call
	var dst, src backend.Buffer
	if k.writes() {
		dst = k.dst
	}
	if k.reads() {
		src = k.src
	}
	return group.Staged(c, q, dst, src, func(dst, src backend.Buffer) (backend.Work, error) {
		if copies.writes() {
			copies.dst = dst
		}
		if copies.reads() {
			copies.src = src
		}
		w, err := c.start(q, &copies)
		if err != nil {
			return nil, c.ended(err, copies.what.String())
		}
		return w, nil
	})
}

// noticeHost says, once, that a call was given host memory, which costs two copies.
func (c *Communicator) noticeHost(what backend.Collective) {
	c.notice(fmt.Sprintf("%s: %v was given host memory: backend nccl copies it to the GPU and "+
		"back, and waits for that. Pass buffers on the communicator's device, or set "+
		"EURYALE_BACKEND=host. This notice appears once.", backend.RankOf(c), what))
}
