package fakedevice

import (
	"fmt"
	"slices"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

var _ fuse.Queue = (*queue)(nil)

// Fuse implements [fuse.Queue]: the host's loop, which asks for the scratch that a GPU needs.
func (q *queue) Fuse(p *fuse.Program) (fuse.Loop, error) {
	l := &loop{queue: q, program: p, on: map[backend.Queue]fuse.Loop{}}
	for _, vectors := range []bool{false, true} {
		kernel, err := fuse.PTX(p, vectors, fuse.Ampere)
		if err != nil {
			return nil, err
		}
		l.scratch = max(l.scratch, kernel.Scratch)
	}
	_, err := l.of(q.Queue)
	return l, err
}

// loop is a program on a queue of the device.
type loop struct {
	queue   *queue
	program *fuse.Program
	scratch int

	mu sync.Mutex
	on map[backend.Queue]fuse.Loop // on queues of the host: graphs are launched on others, too
}

// of returns the loop on a queue of the host.
func (l *loop) of(host backend.Queue) (fuse.Loop, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if known := l.on[host]; known != nil {
		return known, nil
	}
	fuses, ok := host.(fuse.Queue)
	if !ok {
		return nil, fmt.Errorf("fakedevice: %w: a %T runs no fused programs",
			backend.ErrUnsupported, host)
	}
	known, err := fuses.Fuse(l.program)
	if err == nil {
		l.on[host] = known
	}
	return known, err
}

// Scratch implements [fuse.Loop].
func (l *loop) Scratch() int { return l.scratch }

// Run implements [fuse.Loop].
func (l *loop) Run(dst, src []backend.Buffer, scratch backend.Buffer) error {
	wrong := l.program.CheckBuffers(dst, src, true)
	all := slices.Concat(dst, src)
	if l.scratch > 0 {
		if wrong == nil && (scratch.NBytes() < l.scratch || scratch.Addr()%fuse.Alignment != 0) {
			wrong = fmt.Errorf("fakedevice: %w: scratch of %d bytes at %#x, want %d bytes at a "+
				"multiple of %d",
				backend.ErrArgument, scratch.NBytes(), scratch.Addr(), l.scratch, fuse.Alignment)
		}
		all = append(all, scratch)
	}
	outputs, operands := len(dst), len(dst)+len(src)
	return l.queue.on(wrong, func(on backend.Queue, b []backend.Buffer) error {
		host, err := l.of(on)
		if err != nil {
			return err
		}
		return host.Run(b[:outputs], b[outputs:operands], backend.Buffer{})
	}, all...)
}
