package backend_test

import (
	"context"
	"errors"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestBufferNamesTheSlice(t *testing.T) {
	x := []float32{1, 2, 3, 4}
	b := backend.Of(x)
	require.That(t, b.Len() == 4 && b.NBytes() == 16 && b.DType() == backend.F32 && !b.Device(),
		"%+v is not 4 f32 of the host", b)
	backend.View[float32](b.Slice(1, 3))[1] = 9
	require.Check(t, x[2] == 9, "x is %v, want element 2 to be 9", x)
	if half := b.Slice(1, 4).As(backend.F64); half.Len() != 1 || half.NBytes() != 8 {
		t.Errorf("12 bytes are %d f64, want 1", half.Len())
	}
	p := (*float32)(b.Slice(1, 3).Pointer())
	require.Check(t, *p == 2, "the pointer is to %v, want the second element", *p)
	n := len(b.As(backend.U8).Bytes())
	require.Check(t, n == 16, "%d bytes, want 16", n)
}

func TestEmptyBuffersHoldNothing(t *testing.T) {
	for name, b := range map[string]backend.Buffer{
		"zero": {}, "nil": backend.Of[int32](nil), "empty": backend.Of([]int32{}),
		"end": backend.Of([]int32{1}).Slice(1, 1),
	} {
		require.Check(t, b.Len() == 0 && b.Bytes() == nil && backend.View[int32](b) == nil &&
			!b.Device(), "%s: %+v is not empty", name, b)
	}
}

func TestDeviceBufferIsNotTouched(t *testing.T) {
	b := backend.OnDevice(backend.F32, 4096, 8)
	require.Check(t, b.Device() && b.Bytes() == nil && b.Pointer() == nil &&
		backend.View[float32](b) == nil, "%+v gives its memory to the host", b)
	if s := b.Slice(2, 5); s.Addr() != 4096+8 || s.Len() != 3 {
		t.Errorf("elements 2 to 5 are %d at %d", s.Len(), s.Addr())
	}
}

func TestEveryElementHasItsDType(t *testing.T) {
	got := []backend.DType{
		backend.DTypeOf[backend.Float16](), backend.DTypeOf[backend.BFloat16](),
		backend.DTypeOf[float32](),
		backend.DTypeOf[float64](), backend.DTypeOf[int32](), backend.DTypeOf[int64](),
		backend.DTypeOf[byte](),
	}
	for i, d := range backend.DTypes() {
		if got[i] != d || d.Size() == 0 || !d.Valid() {
			t.Errorf("element %d is %v, want %v", i, got[i], d)
		}
	}
}

func TestMisuseOfBuffersPanics(t *testing.T) {
	b := backend.Of([]float32{1, 2})
	for name, misuse := range map[string]func(){
		"past the end": func() { b.Slice(0, 3) },
		"backwards":    func() { b.Slice(2, 1) },
		"negative":     func() { b.Slice(-1, 1) },
		"wrong view":   func() { backend.View[float64](b) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() { require.Check(t, recover() != nil, "no panic") }()
			misuse()
		})
	}
}

func TestErrorNamesEverything(t *testing.T) {
	cause := &backend.MismatchError{Rank: 1, Peer: 3,
		Mine:   backend.Collective{Kind: backend.AllReduce}.Header(4, 8, backend.F32),
		Theirs: backend.Collective{Kind: backend.Broadcast, Root: 2}.Header(4, 8, backend.F32)}
	err := error(&backend.Error{Comm: "job/1", Rank: 1, Peer: 3, Call: "allreduce(sum)",
		Cause: cause})
	for _, part := range []string{"rank 1 of job/1", "allreduce(sum) of 8 f32", "rank 3",
		"broadcast(root 2)", "call 4"} {
		require.Fails(t, "backend.Error", err, part)
	}
	if !errors.Is(err, backend.ErrMismatch) || errors.Is(err, backend.ErrTimeout) {
		t.Errorf("%v is ErrMismatch: %v, ErrTimeout: %v", err, errors.Is(err, backend.ErrMismatch),
			errors.Is(err, backend.ErrTimeout))
	}
	own := &backend.Error{Comm: "job", Rank: 1, Peer: -1, Cause: backend.ErrClosed}
	got, want := own.Error(), "rank 1 of job: closed"
	require.Check(t, got == want, "got %q, want %q", got, want)
}

// lossy is what the leaf is, and no layer.
type lossy interface {
	backend.Communicator
	Lose(rank int, cause error)
}

// layer wraps a communicator.
type layer struct {
	backend.Base
	name string
}

func TestAsFindsTheOutermost(t *testing.T) {
	leaf := group()[0]
	comm := layer{backend.Wrap(layer{backend.Wrap(leaf), "inner"}), "outer"}
	l, ok := backend.As[layer](comm)
	require.Check(t, ok && l.name == "outer", "found %q, want outer", l.name)
	if v, ok := backend.As[lossy](comm); !ok || v != leaf {
		t.Errorf("found %v, want the leaf", v)
	}
	if _, ok := backend.As[interface{ Fly() }](comm); ok {
		t.Error("found what is not there")
	}
}

func TestDoneIsOver(t *testing.T) {
	for _, want := range []error{nil, errors.New("an error")} {
		w := backend.Finished(want)
		require.Equal(t, "Join", w.Join(context.Background()), want)
		require.Equal(t, "Wait", w.Wait(nil), want)
	}
}
