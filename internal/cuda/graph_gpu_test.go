//go:build gpu

package cuda

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// A graph runs what was recorded, on two queues, and nothing runs in the capture.
func TestGPUGraphsForkAndJoin(t *testing.T) {
	d := openDevice(t, 0)
	q, side := newQueueOf(t, d), newQueueOf(t, d)
	x := allocate(t, d, 4).As(backend.I32)
	ok(t, q.Fill(x, 5))
	g := must[*backend.Graph](t)(q.Capture(func() error {
		fork, err := q.Record()
		if err != nil {
			return err
		}
		err = errors.Join(side.Wait(fork), side.Reduce(backend.Sum, x, x, x, x))
		if err != nil {
			return err
		}
		join, err := side.Record()
		if err != nil {
			return err
		}
		if err := join.Join(context.Background()); !errors.Is(err, backend.ErrArgument) {
			t.Errorf("join of an event in a graph: %v", err)
		}
		return errors.Join(q.Wait(join), q.Divide(x, x, 2))
	}))
	require.Check(t, q.Recording() == nil && side.Recording() == nil,
		"a queue is recorded after the capture")
	for range 2 {
		must[backend.Work](t)(g.Launch(nil))
	}
	ok(t, side.Wait(must[backend.Event](t)(q.Record())))
	w := must[backend.Work](t)(g.Launch(side))
	ok(t, w.Join(context.Background()))
	var got [1]int32
	ok(t, errors.Join(w.Wait(q), q.Move(backend.Of(got[:]), x), q.drain()))
	if got[0] != 15 { // 5*3/2*3/2*3/2, each time truncated
		t.Errorf("three replays give %v", got[0])
	}
	ok(t, g.Close())
	_, err := g.Launch(nil)
	require.Check(t, errors.Is(err, backend.ErrClosed), "launch of a closed graph: %v", err)
}

// A capture goes on while others take and free memory, which orders all queues. An event of before
// is waited for by the replays.
func TestGPUCapturesStandMemoryOfOthers(t *testing.T) {
	d := openDevice(t, 0)
	q, other := newQueueOf(t, d), newQueueOf(t, d)
	const n = 1 << 16
	x, y := allocate(t, d, 4*n).As(backend.F32), allocate(t, d, 4).As(backend.F32)
	a, b := x.Slice(0, n/2), x.Slice(n/2, n)
	ok(t, other.Fill(x, f32(1)))
	p := &fuse.Program{Shape: []int{n}, Reduced: []bool{true}}
	p.Fold(backend.Sum, p.Load(backend.F32, 1), backend.F32, 0)
	sum := must[fuse.Loop](t)(q.Fuse(p))
	scratch := allocate(t, d, max(sum.Scratch(), 1))
	before := must[backend.Event](t)(other.Record())
	held := must[backend.Buffer](t)(d.Alloc(4 * n))
	g := must[*backend.Graph](t)(q.Capture(func() error {
		done := make(chan error)
		go func() {
			more, err := d.Alloc(3 << 20)
			done <- errors.Join(err, d.Free(more), d.Free(held))
		}()
		if err := errors.Join(<-done, q.Wait(before)); err != nil {
			return err
		}
		return errors.Join(sum.Run([]backend.Buffer{y}, []backend.Buffer{x}, scratch), q.Copy(b, a))
	}))
	for range 3 {
		must[backend.Work](t)(g.Launch(nil))
	}
	var got [1]float32
	ok(t, errors.Join(q.Move(backend.Of(got[:]), y), q.drain()))
	require.Equal(t, "the sum", got[0], n)
	ok(t, g.Close())
}

// What would need the host in each replay is refused, and what was refused leaves the queues
// usable.
func TestGPUCapturesRefuseTheHost(t *testing.T) {
	d := openDevice(t, 0)
	q, side := newQueueOf(t, d), newQueueOf(t, d)
	x := allocate(t, d, 4).As(backend.F32)
	for name, f := range map[string]func() error{
		"to Go":   func() error { return q.Move(backend.Of([]float32{1}), x) },
		"from Go": func() error { return q.Move(x, backend.Of([]float32{1})) },
		"capture": func() error {
			_, err := q.Capture(func() error { return nil })
			return err
		},
		"no join":     func() error { return forkOnly(q, side, x) },
		"own failure": func() error { return backend.ErrArgument },
	} {
		g, err := q.Capture(f)
		if name == "no join" && err != nil || errors.Is(err, backend.ErrArgument) {
			ok(t, errors.Join(q.Zero(x), q.drain(), side.drain()))
			continue
		}
		t.Errorf("%s: %v", name, err)
		if g != nil {
			ok(t, g.Close())
		}
	}
}

func forkOnly(q, side *Queue, x backend.Buffer) error {
	e, err := q.Record()
	if err != nil {
		return err
	}
	return errors.Join(side.Wait(e), side.Zero(x))
}

// Each replay of a graph notes its times anew.
func TestGPUGraphsNoteTimes(t *testing.T) {
	d := openDevice(t, 0)
	q, side := newQueueOf(t, d), newQueueOf(t, d)
	x := allocate(t, d, 32<<20)
	var at [3]backend.TimedEvent
	for i := range at {
		at[i] = must[backend.TimedEvent](t)(q.NewTimedEvent())
		defer func() { ok(t, at[i].Close()) }()
	}
	g := must[*backend.Graph](t)(q.Capture(func() error {
		err := q.RecordTimed(at[1])
		fork, failed := q.Record()
		err = errors.Join(err, failed, side.Wait(fork), side.arithmetic.Zero(x),
			side.RecordTimed(at[2]))
		join, failed := side.Record()
		return errors.Join(err, failed, q.Wait(join))
	}))
	for range 3 {
		ok(t, q.RecordTimed(at[0]))
		w := must[backend.Work](t)(g.Launch(nil))
		ok(t, w.Join(context.Background()))
		var since [3]time.Duration
		for i := 1; i < len(at); i++ {
			var happened bool
			var err error
			since[i], happened, err = at[i].Elapsed(at[0])
			require.Check(t, happened && err == nil, "event %d: %v, %v", i, happened, err)
		}
		if since[1] < 0 || since[2] <= since[1] || since[2] > time.Second {
			t.Errorf("the times are %v", since)
		}
		time.Sleep(10 * time.Millisecond) // by which those of the replay before would be wrong
	}
	ok(t, g.Close())
}
