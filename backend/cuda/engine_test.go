package cuda

import (
	"errors"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend/fakedevice"
	"github.com/euryale-ml/euryale/backend/host"
)

// must fails the test on an error, and returns the value otherwise.
func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newEngine returns an engine on memory that faults when the host touches it, or
// on a GPU where the tests are told so.
func newEngine(t testing.TB) *Engine {
	t.Helper()
	if d := theGPU(t); d != nil {
		e, err := NewEngine(d, nil)
		ok(t, err)
		t.Cleanup(func() { ok(t, e.Close()) })
		return e
	}
	d, err := fakedevice.New(host.Device{})
	ok(t, err)
	e, err := NewEngine(d, nil)
	ok(t, err)
	t.Cleanup(func() {
		if err := errors.Join(e.Close(), d.Close()); err != nil {
			t.Error(err)
		}
	})
	return e
}

// guarded returns the device of an engine that has guarded memory; tests of it
// are skipped on a GPU.
func guarded(t testing.TB, e *Engine) *fakedevice.Device {
	t.Helper()
	d, ok := e.device.(*fakedevice.Device)
	if !ok {
		t.Skip("it is about guarded memory")
	}
	return d
}

// touched runs f and fails if the host touches device memory.
func touched(t testing.TB, e *Engine, f func()) {
	t.Helper()
	if d, guarded := e.device.(*fakedevice.Device); guarded {
		ok(t, d.Catch(f))
		return
	}
	f()
}

// counting returns a tensor of small integers, of both signs.
func counting(dt tensor.Dtype, shape ...int) *tensor.Dense {
	x := tensor.New(tensor.Of(dt), tensor.WithShape(shape...))
	for i := range elements(shape) {
		v := (i*7+3)%11 - 5
		switch dt {
		case tensor.Float32:
			x.Float32s()[i] = float32(v)
		case tensor.Float64:
			x.Float64s()[i] = float64(v)
		case tensor.Int32:
			x.Int32s()[i] = int32(v)
		case tensor.Int64:
			x.Int64s()[i] = int64(v)
		case tensor.Int:
			x.Ints()[i] = v
		case tensor.Byte:
			x.Uint8s()[i] = byte(v + 5)
		}
	}
	return x
}

// Gorgonia's machines do not run on an engine: the error says what does.
func TestMachinesOfGorgoniaAreRefused(t *testing.T) {
	e := newEngine(t)
	for name, build := range map[string]func(x *gorgonia.Node) (*gorgonia.Node, error){
		"sum":        func(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Sum(x) },
		"product":    func(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Mul(x, x) },
		"difference": func(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Sub(x, x) },
		"multiple": func(x *gorgonia.Node) (*gorgonia.Node, error) {
			return gorgonia.Mul(x, gorgonia.NewConstant(float32(3)))
		},
		"exp":     gorgonia.Exp,
		"sigmoid": gorgonia.Sigmoid,
		"broadcast": func(x *gorgonia.Node) (*gorgonia.Node, error) {
			row, err := gorgonia.Slice(x, gorgonia.S(0))
			if err == nil {
				row, err = gorgonia.Reshape(row, tensor.Shape{1, 3})
			}
			if err != nil {
				return nil, err
			}
			return gorgonia.BroadcastAdd(x, row, nil, []byte{0})
		},
	} {
		g := gorgonia.NewGraph()
		x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(3, 3), gorgonia.WithName("x"), gorgonia.WithValue(onDevice(t, e, counting(tensor.Float32, 3, 3))))
		if _, err := build(x); err != nil {
			t.Fatal(err)
		}
		m := gorgonia.NewTapeMachine(g, gorgonia.WithEngine(e))
		var err error
		touched(t, e, func() { err = m.RunAll() })
		if err == nil || !strings.Contains(err.Error(), "run the graph by vm.New") {
			t.Errorf("%s: %v", name, err)
		}
		ok(t, m.Close())
	}
}
