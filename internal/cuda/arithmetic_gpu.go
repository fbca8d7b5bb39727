//go:build gpu

package cuda

import (
	"fmt"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	gpukernels "github.com/euryale-ml/euryale/internal/kernels/cuda"
)

// arithmetic computes on a queue.
type arithmetic struct {
	gpukernels.Kernels
	queue *Queue
}

var _ backend.Arithmetic = (*arithmetic)(nil)

func newArithmetic(q *Queue) *arithmetic {
	return &arithmetic{gpukernels.New(launcher{q, q.launcher}), q}
}

// launcher launches as long as the queue is open.
type launcher struct {
	queue *Queue
	*gpukernels.Stream
}

func (l launcher) Launch(c gpukernels.Launch) error {
	if err := l.queue.usable(); err != nil {
		return err
	}
	return l.Stream.Launch(c)
}

// ampere is the compute capability from which on tensor cores multiply bf16.
const ampere = 80

// allocWorkspace gives the queue the workspace that kernels for few rows and few queries need,
// where the device has them.
func (q *Queue) allocWorkspace() error {
	if q.device.arch < ampere || q.workspace.Len() > 0 {
		return nil
	}
	workspace, err := q.Alloc(gpukernels.FewRowsWorkspace)
	if err == nil {
		err = q.Zero(workspace)
	}
	q.workspace = workspace
	return err
}

// PrepareAttention loads what attention needs, so that it can be captured.
func (q *Queue) PrepareAttention() error {
	if err := q.device.Prepare(gpukernels.AttentionFamilies()...); err != nil {
		return err
	}
	return q.allocWorkspace()
}

// Attention computes what [gpukernels.Kernels.Attention] does: for few queries by kernels for
// these, where they are faster, once there is room for them.
func (a *arithmetic) Attention(x kernels.Attention) error {
	if a.queue.workspace.Len() > 0 && gpukernels.FitsFewQueries(x) &&
		gpukernels.PrefersFewQueries(x) {
		return a.FewQueries(x, a.queue.workspace)
	}
	return a.Kernels.Attention(x)
}

// Move implements [backend.Arithmetic]. Host memory that is not from AllocHost is
// copied through pinned memory first, so that it may be used again when Move
// returns; it then waits for the queue where dst is of the host.
func (a *arithmetic) Move(dst, src backend.Buffer) error {
	if err := (kernels.Check{Device: true}).Move(dst, src); err != nil {
		return err
	}
	if dst.Len() == 0 {
		return nil
	}
	q := a.queue
	if err := q.usable(); err != nil {
		return err
	}
	to, from := dst.As(backend.U8), src.As(backend.U8)
	return q.device.on("move", func() error {
		switch {
		case dst.Device() && src.Device():
			return a.Copy(dst, src)
		case dst.Device():
			return q.upload(to, from)
		case src.Device():
			return q.download(to, from)
		}
		if err := q.drain(); err != nil {
			return err
		}
		return kernels.Host{}.Copy(dst, src)
	})
}

// CopyFrom copies memory of another device of this process to memory of this
// one, in the order of this queue; the queue must be ordered after what wrote
// it. Kernels reach the memory of another device after EnablePeerAccess; this works
// without, through the host where it must.
func (q *Queue) CopyFrom(dst backend.Buffer, from *Device, src backend.Buffer) error {
	if err := (kernels.Check{Device: true}).Copy(dst, src); err != nil {
		return err
	}
	if dst.Len() == 0 {
		return nil
	}
	if err := q.usable(); err != nil {
		return err
	}
	return q.device.on(fmt.Sprintf("copy from %s", from.Name()), func() error {
		return cu.MemcpyPeerAsync(cu.DevicePtr(dst.Addr()), q.device.context,
			cu.DevicePtr(src.Addr()), from.context, int64(dst.NBytes()), q.stream)
	})
}

// Push copies to memory of this device, or of one whose memory kernels reach, by a copy engine: no
// multiprocessor takes part.
func (q *Queue) Push(dst, src backend.Buffer) error {
	if err := (kernels.Check{Device: true}).Copy(dst, src); err != nil {
		return err
	}
	if dst.Len() == 0 {
		return nil
	}
	if err := q.usable(); err != nil {
		return err
	}
	defer q.launcher.Separate()
	return q.device.on("push", func() error {
		return cu.MemcpyDtoDAsync(cu.DevicePtr(dst.Addr()), cu.DevicePtr(src.Addr()),
			int64(dst.NBytes()), q.stream)
	})
}
