package cuda

import (
	"errors"
	"slices"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

func TestWatchCallsBeforeMemoryChanges(t *testing.T) {
	changes := map[string]func(e *Engine, x *tensor.Dense) error{
		"overwritten":  func(_ *Engine, x *tensor.Dense) error { return second(tensor.Neg(x, tensor.UseUnsafe())) },
		"reused":       func(_ *Engine, x *tensor.Dense) error { return second(tensor.Neg(x, tensor.WithReuse(x))) },
		"incremented":  func(_ *Engine, x *tensor.Dense) error { return second(tensor.Mul(x, x, tensor.WithIncr(x))) },
		"copied into":  func(e *Engine, x *tensor.Dense) error { return e.Copy(x, counting(tensor.Float32, 3, 2)) },
		"filled":       func(e *Engine, x *tensor.Dense) error { return e.Memset(x, float32(1)) },
		"cleared":      func(e *Engine, x *tensor.Dense) error { e.Memclr(x); return nil },
		"moved within": func(_ *Engine, x *tensor.Dense) error { return errors.Join(x.T(), x.Transpose()) },
		"recycled":     func(e *Engine, _ *tensor.Dense) error { e.Reset(); return nil },
	}
	e := newEngine(t)
	for name, change := range changes {
		for _, stopped := range []bool{false, true} {
			x := must[tensor.Tensor](t)(tensor.Add(onDevice(t, e, counting(tensor.Float32, 3, 2)), float32(1))).(*tensor.Dense)
			before := floats(t, e, x)
			b := must[backend.Buffer](t)(e.Buffer(x))
			saved := must[backend.Buffer](t)(e.Workspace(backend.F32, 6))
			calls := 0
			stop := e.Watch(b, func() { calls++; ok(t, e.dev.Copy(saved, b)) })
			must[tensor.Tensor](t)(tensor.Add(x, x)) // a use is no change
			if calls != 0 {
				t.Errorf("%s: called at a use", name)
			}
			if stopped {
				stop()
			}
			ok(t, change(e, x))
			if calls > 1 || stopped == (calls == 1) {
				t.Errorf("%s, stopped %v: called %d times", name, stopped, calls)
			}
			if stopped || name == "recycled" {
				continue
			}
			kept := must[*tensor.Dense](t)(e.Tensor(saved, tensor.Float32, 3, 2))
			if now := floats(t, e, kept); !slices.Equal(now, before) {
				t.Errorf("%s: called too late: %v, before %v", name, now, before)
			}
		}
	}
	x := onDevice(t, e, counting(tensor.Float32, 3, 2))
	calls := 0
	e.Watch(must[backend.Buffer](t)(e.Buffer(x)), func() { calls++ })
	other := onDevice(t, e, counting(tensor.Float32, 3, 2))
	ok(t, e.Memset(other, float32(1)))
	ok(t, e.Free(x, int64(x.MemSize())))
	if calls != 1 {
		t.Errorf("freed: called %d times", calls)
	}
}

func second(_ tensor.Tensor, err error) error { return err }

// TestViewsOfManyAxes has more axes than a kernel takes.
func TestViewsOfManyAxes(t *testing.T) {
	e := newEngine(t)
	shape := slices.Repeat([]int{2}, backend.MaxAxes+2)
	axes := make([]int, len(shape))
	for i := range axes {
		axes[i] = len(axes) - 1 - i
	}
	x := counting(tensor.Float32, shape...)
	d := onDevice(t, e, x)
	ok(t, errors.Join(x.T(axes...), d.T(axes...)))
	same(t, e, "transposed", d, x)
}
