//go:build gpu

package cuda

/*
#include <cuda.h>

// In relaxed mode, neither this thread's look for other events and its need of memory is an error,
// nor what other threads do to the device meanwhile.
static CUresult euryale_capture_begin(uintptr_t stream)
{
	return cuStreamBeginCapture((CUstream)stream, CU_STREAM_CAPTURE_MODE_RELAXED);
}

// Ends the capture and, unless it has failed, makes what can be launched of it, and has it on the
// device: the first launch takes memory otherwise, which a driver does not give while kernels of
// other ranks wait for this one.
static CUresult euryale_capture_end(uintptr_t stream, int make, CUgraphExec *exec)
{
	CUgraph graph = NULL;
	CUresult code = cuStreamEndCapture((CUstream)stream, &graph);

	if (code == CUDA_SUCCESS && make)
		code = cuGraphInstantiateWithFlags(exec, graph, 0);
	if (code == CUDA_SUCCESS && make)
		code = cuGraphUpload(*exec, (CUstream)stream);
	if (code == CUDA_SUCCESS && make)
		code = cuStreamSynchronize((CUstream)stream);
	if (graph)
		cuGraphDestroy(graph);
	return code;
}

static CUresult euryale_graph_launch(CUgraphExec exec, uintptr_t stream)
{
	return cuGraphLaunch(exec, (CUstream)stream);
}
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
)

var _ backend.GraphQueue = (*Queue)(nil)

// recording is a capture of one queue or several.
type recording struct {
	backend.Recording

	mu     sync.Mutex
	queues []*Queue
	events []cu.Event      // recorded meanwhile
	behind map[*Queue]seen // what the next work of a queue comes after
}

// seen is how many events of each queue of a recording come before a point. It does not change.
type seen map[*Queue]int

// captured is an event of a recording.
type captured struct {
	in     *recording
	event  cu.Event
	before seen // it and those before it
}

// Recording implements [backend.GraphQueue].
func (q *Queue) Recording() *backend.Recording {
	if r := q.recording.Load(); r != nil {
		return &r.Recording
	}
	return nil
}

// Capture implements [backend.GraphQueue]. Other goroutines may use the device and its memory
// meanwhile, but not the queues that are recorded. Move takes memory of the host
// from AllocHost only.
func (q *Queue) Capture(f func() error) (*backend.Graph, error) {
	r := &recording{behind: map[*Queue]seen{}}
	x := &graphExec{device: q.device}
	err := q.device.on("capture", func() error {
		if err := r.add(q); err != nil {
			return err
		}
		defer r.endCapture()
		if err := result(C.euryale_capture_begin(C.uintptr_t(q.Stream()))); err != nil {
			return err
		}
		err := f()
		if err == nil {
			err = r.Complete(q)
		}
		make := C.int(0)
		if err == nil {
			make = 1
		}
		return errors.Join(err, result(C.euryale_capture_end(C.uintptr_t(q.Stream()), make,
			&x.exec)))
	})
	if err != nil {
		return nil, errors.Join(err, x.Close())
	}
	return backend.NewGraph(q, &r.Recording, x), nil
}

// add records a queue, too, from now on.
func (r *recording) add(q *Queue) error {
	began, err := q.Mark()
	if err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.recording.Load() != nil {
		return fmt.Errorf("%w: the queue is being recorded already", backend.ErrArgument)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	q.began = began
	q.recording.Store(r)
	q.launcher.Separate()
	r.queues = append(r.queues, q)
	r.behind[q] = seen{}
	return nil
}

// endCapture ends the capture for its queues.
func (r *recording) endCapture() {
	r.End()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, q := range r.queues {
		q.recording.Store(nil)
		q.launcher.Forget()
	}
	for i := range r.events {
		cu.DestroyEvent(&r.events[i]) // nothing asks for them any more
	}
	r.events = nil
}

// mark is [Queue.Mark] of a queue that is recorded.
func (r *recording) mark(q *Queue) (e Event, err error) {
	err = q.device.on("record an event", func() error {
		event, err := cu.MakeEvent(cu.DisableTiming)
		if err != nil {
			return err
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.events = append(r.events, event)
		before := maps.Clone(r.behind[q])
		before[q]++
		r.behind[q] = before
		e = Event{queue: q, captured: &captured{r, event, before}}
		return event.Record(q.stream)
	})
	return e, err
}

// join orders q after an event of a recording, which q becomes part of.
func (q *Queue) join(e Event) error {
	in := e.captured.in
	if in.Ended() {
		return backend.RecordedEvent().Join(context.Background())
	}
	if e.queue == q {
		return nil
	}
	if err := q.usable(); err != nil {
		return err
	}
	switch q.recording.Load() {
	case in:
	case nil:
		if err := in.add(q); err != nil {
			return err
		}
	default:
		return fmt.Errorf("%w: the queue is being recorded into another graph", backend.ErrArgument)
	}
	q.launcher.Separate()
	in.follow(q, e.captured.before)
	return q.device.on("wait for an event", func() error {
		return q.stream.Wait(e.captured.event, 0)
	})
}

// follow notes that what is recorded on q from now on comes after an event, and those before it.
func (r *recording) follow(q *Queue, before seen) {
	r.mu.Lock()
	defer r.mu.Unlock()
	behind := maps.Clone(r.behind[q])
	for of, n := range before {
		behind[of] = max(behind[of], n)
	}
	r.behind[q] = behind
}

// Joined reports whether what is recorded on the queue from now on comes after an event of the
// same recording.
func (q *Queue) Joined(e backend.Event) bool {
	own, ok := e.(Event)
	r := q.recording.Load()
	if !ok || own.captured == nil || own.captured.in != r {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.behind[q][own.queue] >= own.captured.before[own.queue]
}

// graphExec is a graph of the driver that can be launched.
type graphExec struct {
	device *Device
	exec   C.CUgraphExec
}

// Launch implements [backend.Replayer].
func (g *graphExec) Launch(on backend.Queue) error {
	q, ok := on.(*Queue)
	if !ok || q.device != g.device {
		return fmt.Errorf("%w: a graph of %s on a queue of another device", backend.ErrArgument,
			g.device.Name())
	}
	if err := q.usable(); err != nil {
		return err
	}
	defer q.launcher.Forget()
	return g.device.on("launch a graph", func() error {
		return result(C.euryale_graph_launch(g.exec, C.uintptr_t(q.Stream())))
	})
}

// Close implements [backend.Replayer].
func (g *graphExec) Close() error {
	if g.exec == nil {
		return nil
	}
	exec := g.exec
	g.exec = nil
	return g.device.on("close a graph", func() error { return result(C.cuGraphExecDestroy(exec)) })
}

func result(code C.CUresult) error {
	if code == C.CUDA_SUCCESS {
		return nil
	}
	return failure(int(code))
}
