package gpu

import (
	"context"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// onHost reports whether the call reads or writes host memory.
func (k *call) onHost() bool { return k.reads() && onHost(k.src) || k.writes() && onHost(k.dst) }

func onHost(b backend.Buffer) bool { return b.Len() > 0 && !b.Device() }

// reads reports whether this rank's src is used.
func (k *call) reads() bool {
	return k.rank == k.what.Root || k.what.Kind != backend.Broadcast && k.what.Kind != backend.Scatter
}

// writes reports whether this rank's dst is used.
func (k *call) writes() bool {
	return k.rank == k.what.Root || k.what.Kind != backend.Reduce && k.what.Kind != backend.Gather
}

// staged runs a call that was given host memory on copies of it on the device. It
// returns when the call is done: somebody must copy the result to dst.
func (c *Communicator) staged(q Stream, k *call) (backend.Work, error) {
	c.noticeHost(k.what)
	copies, free, err := c.copies(k)
	defer free()
	if err == nil && k.reads() && onHost(k.src) {
		err = q.Move(copies.src, k.src)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %v of host memory: %w", backend.RankOf(c), k.what, err)
	}
	w, err := c.start(q, &copies)
	if err != nil {
		return nil, c.ended(err, k.what.String())
	}
	if err := w.Join(context.Background()); err != nil {
		return nil, err
	}
	if k.writes() && onHost(k.dst) {
		err := q.Move(k.dst, copies.dst)
		if err == nil {
			err = drain(context.Background(), q)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %v to host memory: %w", backend.RankOf(c), k.what, err)
		}
	}
	return w, nil
}

// noticeHost says, once, that a call was given host memory, which costs two copies.
func (c *Communicator) noticeHost(what backend.Collective) {
	c.notice(fmt.Sprintf("%s: %v was given host memory: backend nccl copies it to the GPU and back, and waits for it. Keep tensors on the device (ToDevice of its engine), or set EURYALE_BACKEND=host. This is said once.", backend.RankOf(c), what))
}

// copies returns the call with memory of the device in place of the host's, which
// free gives back.
func (c *Communicator) copies(k *call) (onDevice call, free func(), err error) {
	var taken []backend.Buffer
	toDevice := func(b backend.Buffer, used bool) backend.Buffer {
		if !used || !onHost(b) || err != nil {
			return b
		}
		var t backend.Buffer
		if t, err = c.dev.Alloc(b.NBytes()); err == nil {
			taken = append(taken, t)
		}
		return t.As(b.DType())
	}
	onDevice = *k
	onDevice.src, onDevice.dst = toDevice(k.src, k.reads()), toDevice(k.dst, k.writes())
	return onDevice, func() {
		for _, t := range taken {
			c.dev.Free(t) // it is memory of dev, so there is no error
		}
	}, err
}
