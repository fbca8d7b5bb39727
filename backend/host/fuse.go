package host

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

var (
	_ fuse.Queue = inline{}
	_ fuse.Queue = (*Queue)(nil)
)

// Fuse implements [fuse.Queue].
func (inline) Fuse(p *fuse.Program) (fuse.Loop, error) { return fuse.Host(p, nil) }

// Fuse implements [fuse.Queue].
func (q *Queue) Fuse(p *fuse.Program) (fuse.Loop, error) {
	l, err := fuse.Host(p, nil)
	return loop{l, q, p}, err
}

// loop is a program that runs on a queue.
type loop struct {
	fuse.Loop
	queue   *Queue
	program *fuse.Program
}

// Run implements [fuse.Loop]. Arguments are checked when it starts, so that the program cannot
// fail when it runs.
func (l loop) Run(dst, src []backend.Buffer, scratch backend.Buffer) error {
	if err := l.program.CheckBuffers(dst, src, false); err != nil {
		return err
	}
	dst, src = slices.Clone(dst), slices.Clone(src)
	return l.queue.submit(func() { l.Loop.Run(dst, src, scratch) })
}
