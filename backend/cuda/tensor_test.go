package cuda

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/fakedevice"
	"github.com/euryale-ml/euryale/backend/host"
)

// onDevice moves a tensor to the device.
func onDevice(t testing.TB, e *Engine, x *tensor.Dense) *tensor.Dense {
	t.Helper()
	return must[*tensor.Dense](t)(e.ToDevice(x))
}

// same compares a tensor with one of the host's.
func same(t testing.TB, e *Engine, what string, got, want tensor.Tensor) {
	t.Helper()
	g := must[*tensor.Dense](t)(e.ToHost(got))
	w := tensor.Materialize(want)
	if !reflect.DeepEqual(g.Data(), w.Data()) || !reflect.DeepEqual([]int(g.Shape()), []int(w.Shape())) {
		t.Errorf("%s: %v %v, on the host %v %v", what, g.Shape(), g.Data(), w.Shape(), w.Data())
	}
}

func TestTensorsGoThereAndBack(t *testing.T) {
	e := newEngine(t)
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64, tensor.Int32, tensor.Int64, tensor.Int, tensor.Byte} {
		a := counting(dt, 3, 5)
		touched(t, e, func() { same(t, e, dt.String(), onDevice(t, e, a), a) })
	}
	if s := e.Stats(); s.Uploads != 6 || s.Downloads != 6 {
		t.Errorf("%+v", s)
	}
	one := counting(tensor.Float32, 1, 1)
	same(t, e, "one element", onDevice(t, e, one), one)
	if s := e.Stats(); s.Uploads != 6 {
		t.Errorf("a tensor of one element was moved: %+v", s)
	}
}

func TestHostAccessIsCaught(t *testing.T) {
	e := newEngine(t)
	x := onDevice(t, e, counting(tensor.Float32, 3, 4))
	err := guarded(t, e).Catch(func() { x.Float32s()[5]++ })
	if !errors.Is(err, fakedevice.ErrTouched) || !strings.Contains(err.Error(), "byte 20 of an allocation of 48 bytes") {
		t.Error(err)
	}
}

func TestViewsAreReadInTheirOrder(t *testing.T) {
	e := newEngine(t)
	a, b := counting(tensor.Float64, 4, 3), counting(tensor.Float64, 3, 4)
	da, db := onDevice(t, e, a), onDevice(t, e, b)
	ok(t, errors.Join(a.T(), da.T()))
	touched(t, e, func() {
		same(t, e, "transposed to host", da, a)
		same(t, e, "transposed kept", onDevice(t, e, da), a)
	})
	columns := gorgonia.S(1, 3)
	slice := must[tensor.View](t)(db.Slice(nil, columns)).(*tensor.Dense)
	same(t, e, "sliced", slice, must[tensor.View](t)(b.Slice(nil, columns)))
	if err := e.Copy(slice, counting(tensor.Float64, 3, 2)); !errors.Is(err, backend.ErrUnsupported) {
		t.Errorf("a view was written to: %v", err)
	}
	whole := onDevice(t, e, counting(tensor.Float64, 3, 2))
	ok(t, e.Copy(whole, slice))
	same(t, e, "copied from a view", whole, must[tensor.View](t)(b.Slice(nil, columns)))
}

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

func TestPackageTensorMovesElements(t *testing.T) {
	e := newEngine(t)
	a := counting(tensor.Float32, 2, 3, 4)
	d := onDevice(t, e, a)
	touched(t, e, func() {
		same(t, e, "clone", d.Clone().(*tensor.Dense), a)
		other := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(2, 3, 4), tensor.WithEngine(e))
		ok(t, tensor.Copy(other, d))
		same(t, e, "copy", other, a)
		back := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(2, 3, 4))
		ok(t, e.Memcpy(back, other))
		same(t, e, "copy to the host", back, a)
		ok(t, e.Memset(other, float32(3)))
		want := tensor.New(tensor.WithShape(2, 3, 4), tensor.WithBacking(slices.Repeat([]float32{3}, 24)))
		same(t, e, "set", other, want)
		e.Memclr(other)
		same(t, e, "clear", other, tensor.New(tensor.WithShape(2, 3, 4), tensor.Of(tensor.Float32)))
		small := must[tensor.Memory](t)(e.Alloc(8))
		ok(t, e.Memcpy(small, tensor.New(tensor.WithBacking([]float64{7}))))
		if got := small.(block).host; !slices.Equal(backend.View[float64](backend.Of(got).As(backend.F64)), []float64{7}) {
			t.Errorf("one element is %v", got)
		}
	})
}

func TestResetRecyclesResults(t *testing.T) {
	e := newEngine(t)
	ok(t, e.Reserve(1<<20))
	d := onDevice(t, e, counting(tensor.Float32, 1000))
	before := e.Stats().ArenaBytes
	device := guarded(t, e)
	blocks, nbytes := device.Live()
	for range 5000 { // more than the arena has room for
		b := must[backend.Buffer](t)(e.Workspace(backend.F32, 1000))
		y := must[*tensor.Dense](t)(e.Tensor(b, tensor.Float32, 1000))
		ok(t, e.Copy(y, d))
		e.Reset()
	}
	if n, size := device.Live(); n != blocks || size != nbytes || e.Stats().ArenaBytes != before {
		t.Errorf("%d blocks of %d bytes, before %d of %d; %+v", n, size, blocks, nbytes, e.Stats())
	}
	same(t, e, "kept", d, counting(tensor.Float32, 1000))
	for range 5000 { // until it grows
		must[backend.Buffer](t)(e.Workspace(backend.F32, 1000))
	}
	if after := e.Stats().ArenaBytes; after < 5000*4000 {
		t.Errorf("%d bytes for 5000 results of 4000", after)
	}
}

func TestFreeGivesMemoryBack(t *testing.T) {
	e := newEngine(t)
	device := guarded(t, e)
	d := onDevice(t, e, counting(tensor.Float32, 4))
	if n, nbytes := device.Live(); n != 1 || nbytes != 16 {
		t.Errorf("%d blocks of %d bytes", n, nbytes)
	}
	y := d.Clone().(*tensor.Dense)
	ok(t, e.Free(y, 0)) // of the arena: nothing to do
	same(t, e, "result", y, counting(tensor.Float32, 4))
	ok(t, e.Free(d, 0))
	if _, err := e.ToHost(d); err == nil {
		t.Error("freed memory was read")
	}
	if n, _ := device.Live(); n != 1 {
		t.Errorf("%d blocks are live, want the arena", n)
	}
}

func TestAdoptedMemoryBelongsToItsOwner(t *testing.T) {
	e := newEngine(t)
	wide := must[backend.Buffer](t)(e.Device().Alloc(48))
	b := wide.Slice(24, 48)
	x := must[*tensor.Dense](t)(e.Adopt(b, tensor.Float32, 2, 3))
	ok(t, e.Copy(x, counting(tensor.Float32, 2, 3)))
	same(t, e, "adopted", x, counting(tensor.Float32, 2, 3))
	if _, err := e.Adopt(b, tensor.Float32, 2, 4); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("too small: %v", err)
	}
	ok(t, e.Free(x, 0))
	same(t, e, "after Free", x, counting(tensor.Float32, 2, 3))
	ok(t, e.Device().Free(wide))
}

func TestWorkspaceBecomesTensors(t *testing.T) {
	e := newEngine(t)
	w := must[backend.Buffer](t)(e.Workspace(backend.F32, 6))
	ok(t, e.Queue().Fill(w, 3))
	y := must[*tensor.Dense](t)(e.Tensor(w, tensor.Float32, 2, 3))
	same(t, e, "tensor", y, tensor.New(tensor.WithShape(2, 3), tensor.WithBacking([]float32{3, 3, 3, 3, 3, 3})))
	if got := must[backend.Buffer](t)(e.Buffer(y)); got != w {
		t.Error("the buffer of a tensor is not its memory")
	}
	if got := must[backend.Buffer](t)(e.Buffer(counting(tensor.Float32, 3))); !got.Device() {
		t.Error("the buffer of a host tensor is not on the device")
	}
	one := must[*tensor.Dense](t)(e.Tensor(w.Slice(1, 2), tensor.Float32, 1, 1))
	if one.Float32s()[0] != 3 { // read by the host
		t.Errorf("the one element is %v", one)
	}
	if got := must[backend.Buffer](t)(e.Buffer(one)); !got.Device() || got.Len() != 1 {
		t.Error("the buffer of one element is not on the device")
	}
	if _, err := e.Tensor(w, tensor.Float32, 7); !errors.Is(err, backend.ErrArgument) {
		t.Error(err)
	}
}

func TestUnsupportedIsAClearError(t *testing.T) {
	e := newEngine(t)
	d := onDevice(t, e, counting(tensor.Float32, 3, 3))
	i := onDevice(t, e, counting(tensor.Int64, 4))
	fail := func(_ any, err error) error { return err }
	for want, err := range map[string]error{
		"use one up to 2^53":           e.Memset(i, int64(1)<<60+1),
		"use Float32, Float64":         fail(e.ToDevice(tensor.New(tensor.Of(tensor.Complex64), tensor.WithShape(2)))),
		"use a *tensor.Dense":          fail(e.ToHost(nil)),
		"dtype and number of elements": e.Copy(d, i),
		"bytes":                        fail(e.Alloc(-1)),
		"copy the tensor with ToHost":  fail(e.Accessible(d)),
		"a masked tensor":              fail(e.Buffer(tensor.New(tensor.WithBacking([]float32{1, 2}, []bool{true, false})))),
		"no room for":                  e.Reserve(1 << 45),
		"which has no separate memory": fail(NewEngine(host.Device{}, nil)),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// A tensor of another device is refused: its address means nothing here.
func TestTensorsOfOtherDevicesAreRefused(t *testing.T) {
	m := must[*fakedevice.Machine](t)(fakedevice.NewMachine(host.Device{}))
	var engines [2]*Engine
	for i := range engines {
		d := must[*fakedevice.GPU](t)(m.GPU(i, fakedevice.Properties{Product: "NVIDIA H200", Capability: 90}))
		engines[i] = must[*Engine](t)(NewEngine(d, nil))
	}
	x := onDevice(t, engines[0], counting(tensor.Float32, 4))
	if _, err := engines[1].ToHost(x); !errors.Is(err, backend.ErrArgument) || !strings.Contains(err.Error(), "is on the device fake:0") {
		t.Error(err)
	}
	ok(t, errors.Join(engines[0].Close(), engines[1].Close()))
}

// bound counts how often a device is bound to the calling thread.
type bound struct {
	*fakedevice.Device
	depth, calls int
	refuse       error
}

func (b *bound) Bind() (func(), error) {
	if b.refuse != nil {
		return nil, b.refuse
	}
	b.depth++
	b.calls++
	return func() { b.depth-- }, nil
}

func TestDeviceIsBoundAroundEveryOperation(t *testing.T) {
	inner := must[*fakedevice.Device](t)(fakedevice.New(host.Device{}))
	d := &bound{Device: inner}
	e, err := NewEngine(d, nil)
	ok(t, err)
	x := onDevice(t, e, counting(tensor.Float32, 3))
	for name, f := range map[string]func() error{
		"device": func() error { _, err := e.ToDevice(x); return err },
		"host":   func() error { _, err := e.ToHost(x); return err },
		"copy":   func() error { return e.Copy(x, x) },
		"buffer": func() error { _, err := e.Buffer(x); return err },
		"set":    func() error { return e.Memset(x, float32(1)) },
		"alloc":  func() error { _, err := e.Alloc(100); return err },
	} {
		before := d.calls
		ok(t, f())
		if d.calls == before || d.depth != 0 {
			t.Errorf("%s: bound %d times, %d of them still", name, d.calls-before, d.depth)
		}
		d.refuse = errors.New("no context")
		if err := f(); !errors.Is(err, d.refuse) {
			t.Errorf("%s: %v", name, err)
		}
		d.refuse = nil
	}
	ok(t, errors.Join(e.Close(), inner.Close()))
}
