package cuda

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/fakedevice"
	"github.com/euryale-ml/euryale/backend/host"
)

var dtypes = []tensor.Dtype{tensor.Float32, tensor.Float64, tensor.Int32, tensor.Int64, tensor.Int, tensor.Byte}

// onDevice moves a tensor to the device.
func onDevice(t testing.TB, e *Engine, x *tensor.Dense) *tensor.Dense {
	t.Helper()
	return must[*tensor.Dense](t)(e.ToDevice(x))
}

// same compares a result with one of the host's.
func same(t testing.TB, e *Engine, what string, got, want tensor.Tensor) {
	t.Helper()
	g := must[*tensor.Dense](t)(e.ToHost(got))
	w := tensor.Materialize(want)
	if !reflect.DeepEqual(g.Data(), w.Data()) || !reflect.DeepEqual([]int(g.Shape()), []int(w.Shape())) {
		t.Errorf("%s: %v %v, on the host %v %v", what, g.Shape(), g.Data(), w.Shape(), w.Data())
	}
}

type binaryFunc func(a, b any, opts ...tensor.FuncOpt) (tensor.Tensor, error)

var binaries = map[string]binaryFunc{
	"Add": tensor.Add, "Sub": tensor.Sub, "Mul": tensor.Mul,
	"MinBetween": tensor.MinBetween, "MaxBetween": tensor.MaxBetween,
	"Lt": tensor.Lt, "Lte": tensor.Lte, "Gt": tensor.Gt, "Gte": tensor.Gte, "ElEq": tensor.ElEq, "ElNe": tensor.ElNe,
}

// isComparison reports whether an operation takes AsSameType.
func isComparison(name string) bool { return name[0] == 'L' || name[0] == 'G' || name[0] == 'E' }

func TestBinaryOperationsAreThoseOfTheHost(t *testing.T) {
	for _, dt := range dtypes {
		for name, f := range binaries {
			t.Run(fmt.Sprintf("%s/%v", name, dt), func(t *testing.T) {
				e := newEngine(t)
				a, b := counting(dt, 3, 5), counting(dt, 5, 3)
				ok(t, b.Reshape(3, 5))
				da, db := onDevice(t, e, a), onDevice(t, e, b)
				var opts []tensor.FuncOpt
				if isComparison(name) {
					opts = append(opts, tensor.AsSameType())
				}
				two := reflect.ValueOf(2).Convert(dt.Type).Interface()
				for what, operands := range map[string][2][2]any{
					"tensors":      {{da, db}, {a, b}},
					"scalar right": {{da, two}, {a, two}},
					"scalar left":  {{two, da}, {two, a}},
				} {
					var got tensor.Tensor
					var err error
					touched(t, e, func() { got, err = f(operands[0][0], operands[0][1], opts...) })
					ok(t, err)
					want, err := f(operands[1][0], operands[1][1], opts...)
					ok(t, err)
					same(t, e, what, got, want)
				}
				same(t, e, "operand", da, a)
			})
		}
	}
}

func TestResultsGoWhereTheOptionsSay(t *testing.T) {
	e := newEngine(t)
	a, b := counting(tensor.Float32, 2, 3), counting(tensor.Float32, 3, 2)
	ok(t, b.Reshape(2, 3))
	sum := must[tensor.Tensor](t)(tensor.Add(a, b))
	da, db := onDevice(t, e, a), onDevice(t, e, b)

	device := onDevice(t, e, a)
	if got := must[tensor.Tensor](t)(tensor.Add(da, db, tensor.WithReuse(device))); got != device {
		t.Error("the tensor to reuse was not returned")
	}
	same(t, e, "reuse", device, sum)

	flat := onDevice(t, e, counting(tensor.Float32, 6))
	must[tensor.Tensor](t)(tensor.Add(da, db, tensor.WithReuse(flat)))
	same(t, e, "reuse of another shape", flat, sum)

	stamped := counting(tensor.Float32, 2, 3) // what the tape machine allocates
	tensor.WithEngine(e)(stamped)
	must[tensor.Tensor](t)(tensor.Add(da, db, tensor.WithReuse(stamped)))
	if !must[backend.Buffer](t)(e.memoryOf(stamped, reading)).Device() {
		t.Error("a result in host memory was not rebound to the device")
	}
	same(t, e, "reuse of host memory", stamped, sum)

	total := onDevice(t, e, a)
	must[tensor.Tensor](t)(tensor.Add(da, db, tensor.WithIncr(total)))
	same(t, e, "increment", total, must[tensor.Tensor](t)(tensor.Add(a, sum)))

	must[tensor.Tensor](t)(tensor.Square(da, tensor.UseUnsafe()))
	same(t, e, "in place", da, must[tensor.Tensor](t)(tensor.Square(a)))

	if _, err := tensor.Add(da, db, tensor.WithReuse(onDevice(t, e, counting(tensor.Float32, 7)))); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("a tensor of another size was reused: %v", err)
	}
}

func TestViewsAreReadInTheirOrder(t *testing.T) {
	e := newEngine(t)
	a, b := counting(tensor.Float64, 4, 3), counting(tensor.Float64, 3, 4)
	da, db := onDevice(t, e, a), onDevice(t, e, b)
	ok(t, a.T())
	ok(t, da.T())
	var got tensor.Tensor
	var err error
	touched(t, e, func() { got, err = tensor.Add(da, db) })
	ok(t, err)
	same(t, e, "transposed", got, must[tensor.Tensor](t)(tensor.Add(a, b)))
	same(t, e, "transposed to host", da, a)
	same(t, e, "transposed kept", onDevice(t, e, da), a)

	slice := must[tensor.View](t)(db.Slice(nil, gorgonia.S(1, 3)))
	square := must[tensor.Tensor](t)(e.Square(slice))
	same(t, e, "sliced", square, must[tensor.Tensor](t)(tensor.Square(must[tensor.View](t)(b.Slice(nil, gorgonia.S(1, 3))).Materialize())))
	if _, err := e.Square(slice, tensor.UseUnsafe()); !errors.Is(err, backend.ErrUnsupported) {
		t.Errorf("a view was written to: %v", err)
	}
	same(t, e, "summed", must[tensor.Tensor](t)(e.Sum(da, 0)), must[*tensor.Dense](t)(a.Materialize().(*tensor.Dense).Sum(0)))
}

func TestCopiesOfViewsByPackageTensorAreRefused(t *testing.T) {
	e := newEngine(t)
	d := onDevice(t, e, counting(tensor.Float32, 4, 3))
	slice := must[tensor.View](t)(d.Slice(nil, gorgonia.S(1, 3)))
	copied := slice.Materialize() // which fails without an error
	_, err := e.Square(copied)
	if !errors.Is(err, backend.ErrUnsupported) || !strings.Contains(err.Error(), "view") {
		t.Error(err)
	}
}

func TestFoldsAreThoseOfTheHost(t *testing.T) {
	e := newEngine(t)
	a := counting(tensor.Float32, 2, 3, 4)
	d := onDevice(t, e, a)
	for _, along := range [][]int{nil, {0}, {1}, {2}, {0, 1}, {2, 0}, {1, 2}, {0, 1, 2}} {
		want := must[*tensor.Dense](t)(a.Sum(append([]int(nil), along...)...))
		same(t, e, fmt.Sprint("sum along ", along), must[*tensor.Dense](t)(d.Sum(along...)), want)
	}
	for axis := range 3 {
		same(t, e, "max", must[*tensor.Dense](t)(d.Max(axis)), must[*tensor.Dense](t)(a.Max(axis)))
		same(t, e, "min", must[*tensor.Dense](t)(d.Min(axis)), must[*tensor.Dense](t)(a.Min(axis)))
	}
	scalar := must[*tensor.Dense](t)(d.Sum())
	if got := scalar.ScalarValue(); got != must[*tensor.Dense](t)(a.Sum()).ScalarValue() { // read by the host
		t.Errorf("the sum is %v", got)
	}
	if _, err := e.Sum(d, 3); !errors.Is(err, backend.ErrArgument) {
		t.Error(err)
	}
}

func TestRepeatIsThatOfTheHost(t *testing.T) {
	e := newEngine(t)
	for _, c := range []struct {
		shape       []int
		axis, times int
	}{
		{[]int{3}, 0, 2}, {[]int{3}, 1, 2}, {[]int{2, 3}, 0, 3}, {[]int{2, 3}, 1, 2}, {[]int{2, 1, 3}, 1, 4}, {[]int{2, 3}, tensor.AllAxes, 2}, {[]int{2, 3}, 0, 1},
	} {
		a := counting(tensor.Int32, c.shape...)
		want := must[tensor.Tensor](t)(tensor.Repeat(a, c.axis, c.times))
		d := onDevice(t, e, a)
		same(t, e, fmt.Sprint(c), must[tensor.Tensor](t)(tensor.Repeat(d, c.axis, c.times)), want)
		reuse := tensor.New(tensor.Of(tensor.Int32), tensor.WithShape(want.Shape()...))
		tensor.WithEngine(e)(reuse)
		must[tensor.Tensor](t)(tensor.RepeatReuse(d, reuse, c.axis, c.times))
		same(t, e, fmt.Sprint("reuse ", c), reuse, want)
	}
	d := onDevice(t, e, counting(tensor.Int32, 2, 3))
	if _, err := e.Repeat(d, 0, 1, 2); !errors.Is(err, backend.ErrUnsupported) {
		t.Error(err)
	}
	one := must[tensor.Tensor](t)(e.Repeat(onDevice(t, e, counting(tensor.Int32, 1, 1)), 0, 5))
	same(t, e, "one element", one, must[tensor.Tensor](t)(tensor.Repeat(counting(tensor.Int32, 1, 1), 0, 5)))
}

func TestPackageTensorMovesElements(t *testing.T) {
	e := newEngine(t)
	a := counting(tensor.Float32, 2, 3, 4)
	d := onDevice(t, e, a)
	touched(t, e, func() {
		same(t, e, "clone", d.Clone().(*tensor.Dense), a)
		same(t, e, "transpose", must[tensor.Tensor](t)(tensor.Transpose(d, 2, 0, 1)), must[tensor.Tensor](t)(tensor.Transpose(a, 2, 0, 1)))
		other := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(2, 3, 4), tensor.WithEngine(e))
		ok(t, tensor.Copy(other, d))
		same(t, e, "copy", other, a)
		back := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(2, 3, 4))
		ok(t, e.Memcpy(back, other))
		same(t, e, "copy to the host", back, a)
		ok(t, e.Memset(other, float32(3)))
		want := must[tensor.Tensor](t)(tensor.Add(must[tensor.Tensor](t)(tensor.Mul(a, float32(0))), float32(3)))
		same(t, e, "set", other, want)
		e.Memclr(other)
		same(t, e, "clear", other, must[tensor.Tensor](t)(tensor.Mul(want, float32(0))))
		_ = fmt.Sprintf("%v", d.Shape())
	})
	if _, err := e.Accessible(d); !errors.Is(err, backend.ErrUnsupported) {
		t.Error(err)
	}
}

func TestValuesOfEarlierRunsAreRefused(t *testing.T) {
	e := newEngine(t)
	d := onDevice(t, e, counting(tensor.Float32, 4))
	y := must[tensor.Tensor](t)(e.Square(d))
	kept := must[*tensor.Dense](t)(e.ToDevice(y))
	onHost := must[*tensor.Dense](t)(e.ToHost(y))
	e.Reset()
	for name, err := range map[string]error{
		"read":    func() error { _, err := e.Square(y); return err }(),
		"written": e.Copy(y, d),
		"fetched": func() error { _, err := e.ToHost(y); return err }(),
	} {
		if !errors.Is(err, errStale) {
			t.Errorf("%s: %v", name, err)
		}
	}
	same(t, e, "kept", kept, onHost)
}

func TestMemoryIsReadOnlyOnceWritten(t *testing.T) {
	e := newEngine(t)
	y := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(4), tensor.WithEngine(e))
	if _, err := e.Square(y); !errors.Is(err, errUnwritten) {
		t.Error(err)
	}
	ok(t, e.Copy(y, counting(tensor.Float32, 4)))
	same(t, e, "written", y, counting(tensor.Float32, 4))
}

func TestFreeGivesMemoryBack(t *testing.T) {
	e := newEngine(t)
	device := guarded(t, e)
	d := onDevice(t, e, counting(tensor.Float32, 4))
	if n, nbytes := device.Live(); n != 1 || nbytes != 16 {
		t.Errorf("%d blocks of %d bytes", n, nbytes)
	}
	y := must[tensor.Tensor](t)(e.Square(d))
	ok(t, e.Free(y, 0)) // of the arena: nothing to do
	same(t, e, "result", y, must[tensor.Tensor](t)(tensor.Square(counting(tensor.Float32, 4))))
	ok(t, e.Free(d, 0))
	if _, err := e.Square(d); err == nil {
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
	if _, err := e.Square(e.over(b.As(backend.F32), tensor.Float32, tensor.Shape{2, 3})); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("memory that the engine does not know: %v", err)
	}
	x := must[*tensor.Dense](t)(e.Adopt(b, tensor.Float32, 2, 3))
	ok(t, e.Copy(x, counting(tensor.Float32, 2, 3)))
	same(t, e, "adopted", x, counting(tensor.Float32, 2, 3))
	if _, err := e.Adopt(b, tensor.Float32, 2, 3); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("adopted twice: %v", err)
	}
	if _, err := e.Adopt(b, tensor.Float32, 2, 4); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("too small: %v", err)
	}
	if _, err := e.Adopt(wide, tensor.Float32, 4, 3); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("adopted with memory before it: %v", err)
	}
	ok(t, e.Free(x, 0))
	y := must[*tensor.Dense](t)(e.Adopt(wide.Slice(0, 24), tensor.Float32, 2, 3))
	z := must[*tensor.Dense](t)(e.Adopt(b, tensor.Float32, 2, 3)) // side by side
	ok(t, errors.Join(e.Free(y, 0), e.Free(z, 0)))
	ok(t, e.Device().Free(wide))
}

func TestWorkspaceBecomesTensorsOfTheRun(t *testing.T) {
	e := newEngine(t)
	ok(t, e.Reserve(1<<16))
	before := e.Stats().ArenaBytes
	w := must[backend.Buffer](t)(e.Workspace(backend.F32, 6))
	k := e.Queue()
	ok(t, k.Fill(w, 3))
	y := must[*tensor.Dense](t)(e.Tensor(w, tensor.Float32, 2, 3))
	same(t, e, "tensor", must[tensor.Tensor](t)(e.Add(y, y)), must[tensor.Tensor](t)(tensor.Add(tensor.Ones(tensor.Float32, 2, 3), float32(5))))
	if got := must[backend.Buffer](t)(e.Buffer(y)); got != w {
		t.Error("the buffer of a tensor is not its memory")
	}
	if got := must[backend.Buffer](t)(e.Buffer(counting(tensor.Float32, 3))); !got.Device() {
		t.Error("the buffer of a host tensor is not on the device")
	}
	if after := e.Stats().ArenaBytes; after != before {
		t.Errorf("reserved %d bytes, holds %d", before, after)
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
		"matrix product":               fail(tensor.MatMul(d, d)),
		"softmax":                      fail(tensor.SoftMax(d, 1)),
		"AsSameType":                   fail(tensor.Gt(d, d)),
		"the Go function":              fail(d.Apply(func(x float32) float32 { return x })),
		"function of floats":           fail(e.Exp(i)),
		"use floats or integers up to": fail(e.AddScalar(i, int64(1)<<60, true)),
		"types must be the same":       fail(e.AddScalar(d, float64(1), true)),
		"shape and dtype must be":      fail(e.Add(d, i)),
		"use Float32, Float64":         fail(e.ToDevice(tensor.New(tensor.Of(tensor.Complex64), tensor.WithShape(2)))),
		"use a *tensor.Dense":          fail(e.ToHost(nil)),
		"dtype and number of elements": e.Copy(d, i),
		"bytes":                        fail(e.Alloc(-1)),
		"is no scalar":                 fail(e.AddScalar(d, i, true)),
		"copy the tensor with ToHost":  fail(e.Accessible(d)),
		"a masked tensor":              fail(e.Square(tensor.New(tensor.WithBacking([]float32{1, 2}, []bool{true, false})))),
		"matrix-vector":                e.MatVecMul(d, d, d),
		"outer":                        e.Outer(d, d, d),
		"no room for":                  e.Reserve(1 << 45),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
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
		"square": func() error { _, err := e.Square(x); return err },
		"add":    func() error { _, err := e.AddScalar(x, float32(1), true); return err },
		"sum":    func() error { _, err := e.Sum(x); return err },
		"repeat": func() error { _, err := e.Repeat(x, 0, 2); return err },
		"host":   func() error { _, err := e.ToHost(x); return err },
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

func TestMappedFunctionsExist(t *testing.T) {
	e := newEngine(t)
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		for name, f := range map[string]func(*gorgonia.Node) (*gorgonia.Node, error){
			"sigmoid": gorgonia.Sigmoid, "softplus": gorgonia.Softplus, "log1p": gorgonia.Log1p, "expm1": gorgonia.Expm1,
			"ceil": gorgonia.Ceil, "floor": gorgonia.Floor, "log2": gorgonia.Log2, "sign": gorgonia.Sign, "invsqrt": gorgonia.InverseSqrt,
		} {
			g := gorgonia.NewGraph()
			x := gorgonia.NewVector(g, dt, gorgonia.WithShape(4), gorgonia.WithName("x"), gorgonia.WithValue(onDevice(t, e, counting(dt, 4))))
			y := node(f(x))
			m := must[*Machine](t)(e.NewMachine(g))
			if err := m.RunAll(); err != nil {
				t.Errorf("%s of %v: %v", name, dt, err)
				continue
			}
			must[*tensor.Dense](t)(e.ToHost(y.Value().(tensor.Tensor)))
			ok(t, m.Close())
		}
	}
}

func BenchmarkAddOfSmallTensors(b *testing.B) {
	e := newEngine(b)
	x := onDevice(b, e, counting(tensor.Float32, 16))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := e.Add(x, x); err != nil {
			b.Fatal(err)
		}
		e.Reset()
	}
}
