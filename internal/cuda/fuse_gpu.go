//go:build gpu

package cuda

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

var _ fuse.Joiner = (*Queue)(nil)

// Fuse implements [fuse.Queue]. The kernel is compiled when it returns; operands that are
// not aligned to [fuse.Alignment] compile another at their first Run, which a capture cannot
// record.
func (q *Queue) Fuse(p *fuse.Program) (fuse.Loop, error) { return q.FuseAll([]*fuse.Program{p}) }

// FuseAll implements [fuse.Joiner].
func (q *Queue) FuseAll(all []*fuse.Program) (fuse.Loop, error) {
	if err := q.usable(); err != nil {
		return nil, err
	}
	l, err := q.launcher.FuseAll(all)
	if err != nil {
		return nil, q.device.named("fuse", err)
	}
	return loop{l, q}, nil
}

// loop is a program that runs as long as its queue is open.
type loop struct {
	fuse.Loop
	queue *Queue
}

// Run implements [fuse.Loop].
func (l loop) Run(dst, src []backend.Buffer, scratch backend.Buffer) error {
	if err := l.queue.usable(); err != nil {
		return err
	}
	return l.Loop.Run(dst, src, scratch)
}
