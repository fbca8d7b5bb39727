package fakedevice

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/fusetest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// join waits for a queue.
func join(t *testing.T, q backend.Queue) {
	t.Helper()
	e, err := q.Record()
	if err == nil {
		err = e.Join(context.Background())
	}
	require.NoError(t, err)
}

// upload returns memory of the device with the elements of host memory. Memory that was
// uploaded before is the same again.
func upload(t *testing.T, d *Device, q backend.Queue, list []backend.Buffer,
	known map[uintptr]backend.Buffer) (on []backend.Buffer) {
	t.Helper()
	for _, b := range list {
		if _, ok := known[b.Addr()]; !ok {
			known[b.Addr()] = alloc(t, d, b.NBytes()).As(b.DType())
			require.NoError(t, q.Move(known[b.Addr()], b))
		}
		on = append(on, known[b.Addr()].As(b.DType()))
	}
	return on
}

func TestFusedProgramsRunBehindTheGuard(t *testing.T) {
	d := newDevice(t)
	q := require.Value(d.NewQueue())(t)
	defer q.Close()
	for seed := range uint64(40) {
		c := fusetest.Random(rand.New(rand.NewPCG(seed, 21)), 2000)
		l := require.Value(q.(fuse.Queue).Fuse(c.Program))(t)
		known := map[uintptr]backend.Buffer{}
		dst, src := upload(t, d, q, c.Dst, known), upload(t, d, q, c.Src, known)
		require.NoError(t, l.Run(dst, src, alloc(t, d, max(l.Scratch(), 1))))
		for k := range dst {
			require.NoError(t, q.Move(c.Dst[k], dst[k]))
		}
		join(t, q)
		require.NoError(t, require.Err(c.Check(c.Dst)))
	}
}

// A graph runs a program again, on what its memory then holds.
func TestFusedProgramsAreRecorded(t *testing.T) {
	d := newDevice(t)
	q := require.Value(d.NewQueue())(t)
	defer q.Close()
	p := &fuse.Program{Shape: []int{4}}
	x := p.Load(backend.F32, 1)
	p.Store(p.Do(fuse.Add, x, x), backend.F32, 1)
	l := require.Value(q.(fuse.Queue).Fuse(p))(t)
	memory := []backend.Buffer{alloc(t, d, 16).As(backend.F32)}
	require.NoError(t, q.Move(memory[0], backend.Of([]float32{1, 2, 3, 4})))
	graph := require.Value(q.(backend.GraphQueue).Capture(func() error {
		return l.Run(memory, memory, backend.Buffer{})
	}))(t)
	defer graph.Close()
	for range 3 {
		require.NoError(t, require.Err(graph.Launch(q)))
	}
	got := make([]float32, 4)
	require.NoError(t, q.Move(backend.Of(got), memory[0]))
	join(t, q)
	for i, x := range got {
		require.Check(t, x == float32(8*(i+1)), "element %d is %v after three replays, want %v", i,
			x, 8*(i+1))
	}
}

func TestFusedProgramsNeedTheScratchOfADevice(t *testing.T) {
	d := newDevice(t)
	p := &fuse.Program{Shape: []int{1 << 16}, Reduced: []bool{true}}
	p.Fold(backend.Sum, p.Load(backend.F32, 1), backend.F32, 0)
	l := require.Value(d.Default().(fuse.Queue).Fuse(p))(t)
	x, y := alloc(t, d, 4<<16).As(backend.F32), alloc(t, d, 4).As(backend.F32)
	require.Fails(t, "without scratch",
		l.Run([]backend.Buffer{y}, []backend.Buffer{x}, backend.Buffer{}), backend.ErrArgument)
	err := l.Run([]backend.Buffer{y}, []backend.Buffer{backend.Of(make([]float32, 1<<16))},
		backend.Buffer{})
	require.Check(t, errors.Is(err, backend.ErrArgument), "with host memory: %v", err)
	require.NoError(t, l.Run([]backend.Buffer{y}, []backend.Buffer{x},
		alloc(t, d, l.Scratch())))
}
