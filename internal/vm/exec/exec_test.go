package exec_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/interpret"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/internal/vm/proof"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// buffer returns elements as memory of a dtype.
func buffer(d backend.DType, data []float64) backend.Buffer {
	switch d {
	case backend.F32:
		return backend.Of(converted[float32](data))
	case backend.I64:
		return backend.Of(converted[int64](data))
	case backend.U8:
		return backend.Of(converted[byte](data))
	}
	return backend.Of(converted[float64](data))
}

func converted[T float32 | float64 | int64 | byte](data []float64) []T {
	to := make([]T, len(data))
	for i, x := range data {
		to[i] = T(x)
	}
	return to
}

// numbers returns memory as elements.
func numbers(b backend.Buffer) []float64 {
	switch b.DType() {
	case backend.F32:
		return widened(backend.View[float32](b))
	case backend.I64:
		return widened(backend.View[int64](b))
	case backend.U8:
		return widened(backend.View[byte](b))
	}
	return widened(backend.View[float64](b))
}

func widened[T float32 | float64 | int64 | byte](data []T) []float64 {
	to := make([]float64, len(data))
	for i, x := range data {
		to[i] = float64(x)
	}
	return to
}

// check plans a program, and compares its results with the reference, on the host, also by the
// plain plan, and on a device whose memory the host cannot touch.
func check(t *testing.T, p *ir.Program, inputs [][]float64) {
	t.Helper()
	require.NoError(t, p.Check())
	want := reference(t, p, inputs)
	checkOn(t, exec.Host{}, plain, p, inputs, want)
	checkOn(t, exec.Host{}, within(plan.Standard()), p, inputs, want)
	checkOn(t, exec.Host{}, within(small), p, inputs, want)
	for _, planner := range []planner{within(plan.Standard()), within(small)} {
		device, closed := fake(t)
		checkOn(t, device, planner, p, inputs, want)
		closed()
	}
}

// reference evaluates a program value by value.
func reference(t *testing.T, p *ir.Program, inputs [][]float64) []interpret.Array {
	t.Helper()
	var outside interpret.Outside
	for _, x := range inputs {
		outside.Inputs = append(outside.Inputs, interpret.Of(ir.Of(len(x)), x))
	}
	return require.Value(interpret.Program(p, outside))(t)
}

// fake returns a device whose memory the host cannot touch, and what closes it.
func fake(t *testing.T) (device exec.Device, closed func()) {
	t.Helper()
	d, err := fakedevice.New(host.Device{})
	require.NoError(t, err)
	if device, err = exec.On(d); err != nil {
		t.Fatal(err)
	}
	return device, func() {
		if err := d.Close(); err != nil { // which finds memory that was not freed
			t.Error(err)
		}
	}
}

// small are limits that programs of a few elements reach.
var small = plan.Limits{
	SmallLoop: 4, LargeLoop: 16, LoopValues: 8, LoopOperands: 8, ShortRow: 2, LongRow: 64,
	ManyRows:           2,
	RematerializeBytes: 16, RematerializeOps: 24, Besides: 2, Search: 64,
}

// planner makes a plan of a program.
type planner = func(*ir.Program, ...lower.Update) (*plan.Plan, error)

// within plans within limits.
func within(l plan.Limits) planner {
	return func(p *ir.Program, updates ...lower.Update) (*plan.Plan, error) {
		return l.New(proof.Verify, p, lower.Solver{Updates: updates})
	}
}

// plain makes plain plans.
func plain(p *ir.Program, updates ...lower.Update) (*plan.Plan, error) {
	refused := errors.New("the first plan")
	planned, err := plan.Standard().New(func(p *plan.Plan) (err error) {
		if err, refused = refused, nil; err == nil {
			err = proof.Verify(p)
		}
		return err
	}, p, lower.Solver{Updates: updates})
	if err == nil {
		planned.Doubt = nil
	}
	return planned, err
}

// checkOn runs a program on a device.
func checkOn(t *testing.T, device exec.Device, planner planner, p *ir.Program, inputs [][]float64,
	want []interpret.Array) {
	t.Helper()
	planned := require.Value(planner(p))(t)
	require.That(t, planned.Doubt == nil, "%v in\n%v", planned.Doubt, planned)
	e := require.Value(exec.New(planned, device, nil, nil))(t)
	defer func() {
		require.Report(t, e.Close())
	}()
	for range 3 { // later runs find values in the arena, and devices record the second one
		run(t, e, planned, inputs)
	}
	for i, r := range p.Results {
		v := p.Values[r]
		dst := buffer(v.DType, make([]float64, v.Shape.Size()))
		require.NoError(t, e.Result(i, dst))
		for j, got := range numbers(dst) {
			if w := want[r].Data[j]; !w.Allows(got) {
				t.Fatalf("result %d, %v: element %d is %v, want %v, in\n%v", i, v.Op, j, got, w,
					planned)
			}
		}
	}
}

func run(t *testing.T, e *exec.Executor, p *plan.Plan, inputs [][]float64) {
	t.Helper()
	bind(e, p, inputs)
	require.NoError(t, errors.Join(e.Run(0), e.Fetch()))
}

// bind binds the inputs of a plan.
func bind(e *exec.Executor, p *plan.Plan, inputs [][]float64) {
	for i, b := range p.Buffers {
		if b.Kind == plan.Input {
			e.Bind(i, buffer(b.DType, inputs[b.Index]))
		}
	}
}

// builder makes programs.
type builder struct {
	ir.Program
	dtype  backend.DType
	inputs [][]float64
}

// input adds an input of small integers.
func (b *builder) input(seed int, shape ...int) ir.ID {
	d := ir.Of(shape...)
	a := make([]float64, d.Size())
	for i := range a {
		a[i] = float64((i*7+seed*3)%11 - 5)
	}
	b.inputs = append(b.inputs, a)
	return b.Add(ir.Value{Op: ir.Input{Index: len(b.inputs) - 1}, Shape: d, DType: b.dtype,
		Name: "input"})
}

func (b *builder) op(op ir.Op, shape ir.Dims, args ...ir.ID) ir.ID {
	return b.Add(ir.Value{Op: op, Args: args, Shape: shape, DType: b.dtype, Name: "test"})
}

var floats = []backend.DType{backend.F64, backend.F32}

func TestOperationsAreThePlainLoop(t *testing.T) {
	window := ir.Window{H: 3, W: 2, PadH: 1, PadW: 1, StrideH: 2, StrideW: 1, DilationH: 1,
		DilationW: 2}
	pool := ir.Window{H: 3, W: 2, PadH: 1, PadW: 0, StrideH: 2, StrideW: 2, DilationH: 1,
		DilationW: 1}
	uneven := ir.Window{H: 2, W: 3, PadH: 1, MoreH: 1, StrideH: 2, StrideW: 2, DilationH: 2,
		DilationW: 1}
	tests := []struct {
		op     ir.Op
		result []int
		args   [][]int
	}{
		{ir.Reduce{Op: backend.Sum, Axes: ir.Of(0, 2)}, []int{3}, [][]int{{2, 3, 4}}},
		{ir.Reduce{Op: backend.Max, Axes: ir.Of(1)}, []int{2, 4}, [][]int{{2, 3, 4}}},
		{ir.Reduce{Op: backend.Min, Axes: ir.Of(0)}, nil, [][]int{{5}}},
		{ir.Where{}, []int{3, 4}, [][]int{{3, 4}, {3, 4}, {3, 4}}},
		{ir.Unslice{Axis: 1, Start: 1, Step: 2}, []int{2, 6}, [][]int{{2, 3}}},
		{ir.Concat{Axis: 1}, []int{2, 6, 2}, [][]int{{2, 3, 2}, {2, 1, 2}, {2, 2, 2}}},
		{ir.MatMul{}, []int{3, 5}, [][]int{{3, 4}, {4, 5}}},
		{ir.MatMul{TransA: true}, []int{3, 5}, [][]int{{4, 3}, {4, 5}}},
		{ir.MatMul{TransB: true}, []int{3, 5}, [][]int{{3, 4}, {5, 4}}},
		{ir.MatMul{TransA: true, TransB: true}, []int{2, 2, 3, 5},
			[][]int{{2, 2, 4, 3}, {2, 2, 5, 4}}},
		{ir.MatMul{}, []int{1, 1}, [][]int{{1, 6}, {6, 1}}},
		{ir.Im2Col{Window: window}, []int{2, 3, 5, 18}, [][]int{{2, 3, 5, 5}}},
		{ir.Col2Im{Window: window}, []int{2, 3, 5, 5}, [][]int{{2, 3, 5, 18}}},
		{ir.Convolution{Pass: kernels.Forward, Window: window}, []int{2, 4, 3, 5},
			[][]int{{2, 3, 5, 5}, {4, 3, 3, 2}}},
		{ir.Convolution{Pass: kernels.InputGradient, Window: window}, []int{2, 3, 5, 5},
			[][]int{{2, 4, 3, 5}, {4, 3, 3, 2}}},
		{ir.Convolution{Pass: kernels.FilterGradient, Window: window}, []int{4, 3, 3, 2},
			[][]int{{2, 3, 5, 5}, {2, 4, 3, 5}}},
		{ir.Convolution{Pass: kernels.Forward, Window: window, Groups: 2}, []int{2, 6, 3, 5},
			[][]int{{2, 4, 5, 5}, {6, 2, 3, 2}}},
		{ir.Convolution{Pass: kernels.InputGradient, Window: window, Groups: 2},
			[]int{2, 4, 5, 5}, [][]int{{2, 6, 3, 5}, {6, 2, 3, 2}}},
		{ir.Convolution{Pass: kernels.FilterGradient, Window: window, Groups: 2},
			[]int{6, 2, 3, 2}, [][]int{{2, 4, 5, 5}, {2, 6, 3, 5}}},
		{ir.MaxPool{Window: uneven}, []int{2, 2, 3, 2}, [][]int{{2, 2, 4, 6}}},
		{ir.MaxPoolGrad{Window: uneven}, []int{2, 2, 4, 6}, [][]int{{2, 2, 4, 6}, {2, 2, 3, 2}}},
		{ir.MaxPool{Window: pool}, []int{2, 2, 3, 2}, [][]int{{2, 2, 5, 4}}},
		{ir.MaxPool{Window: pool, Rectified: true}, []int{2, 2, 3, 2}, [][]int{{2, 2, 5, 4}}},
		{ir.MaxPoolGrad{Window: pool, Rectified: true}, []int{2, 2, 5, 4},
			[][]int{{2, 2, 5, 4}, {2, 2, 3, 2}}},
		{ir.MaxPoolGrad{Window: pool}, []int{2, 2, 5, 4}, [][]int{{2, 2, 5, 4}, {2, 2, 3, 2}}},
	}
	for _, dtype := range floats {
		for _, test := range tests {
			t.Run(fmt.Sprint(dtype, " ", test.op), func(t *testing.T) {
				b := &builder{dtype: dtype}
				var args []ir.ID
				for i, shape := range test.args {
					args = append(args, b.input(i, shape...))
				}
				b.Results = []ir.ID{b.op(test.op, ir.Of(test.result...), args...)}
				check(t, &b.Program, b.inputs)
			})
		}
	}
}

// TestAttentionIsThePlainLoop: operands are views of one input, as they lie in it, results are
// several, and not all of them are used.
func TestAttentionIsThePlainLoop(t *testing.T) {
	for _, dtype := range floats {
		for _, causal := range []bool{false, true} {
			t.Run(fmt.Sprint(dtype, " causal ", causal), func(t *testing.T) {
				b := &builder{dtype: dtype}
				const batch, heads, queries, keys, size = 2, 3, 4, 6, 5
				both, dy := b.input(1, batch, keys, 3*heads, size),
					b.input(2, batch, heads, queries, size)
				both = b.op(ir.Binary{Op: fuse.Div}, ir.Of(batch, keys, 3*heads, size), both,
					b.op(ir.Broadcast{}, ir.Of(batch, keys, 3*heads, size),
						b.op(ir.Reshape{}, ir.Of(1, 1, 1, 1), b.op(ir.ScalarOf(5), ir.Dims{}))))
				part := func(i, n int) ir.ID {
					x := b.op(ir.Slice{Axis: 2, Start: i * heads, Step: 1},
						ir.Of(batch, keys, heads, size), both)
					x = b.op(ir.Slice{Axis: 1, Start: keys - n, Step: 1},
						ir.Of(batch, n, heads, size), x)
					return b.op(ir.Permute{Axes: ir.Of(0, 2, 1, 3)},
						ir.Of(batch, heads, n, size), x)
				}
				q, k, v := part(0, queries), part(1, keys), part(2, keys)
				shape, others := ir.Of(batch, heads, queries, size), ir.Of(batch, heads, keys, size)
				y := b.op(ir.Attention{Causal: causal, Scale: 0.5}, shape, q, k, v)
				lse := b.op(ir.Result{Index: 1}, shape.Without(3), y)
				dq := b.op(ir.AttentionGrad{Causal: causal, Scale: 0.5}, shape, q, k, v, y, lse, dy)
				dk, dv := b.op(ir.Result{Index: 1}, others, dq),
					b.op(ir.Result{Index: 2}, others, dq)
				for _, results := range [][]ir.ID{{y}, {lse}, {dv}, {y, dq, dk, dv, lse}} {
					b.Results = results
					check(t, &b.Program, b.inputs)
				}
				planned := require.Value(within(plan.Standard())(&b.Program))(t)
				if n := len(planned.Steps); n != 3 { // the division, and no copies
					t.Errorf("%d steps, want 3, in\n%v", n, planned)
				}
			})
		}
	}
}

// TestAttentionThatHidesKeysIsThePlainLoop: heads share keys, values have a width of their own,
// scores a cap, a mask lies with its axes exchanged, and lengths hide keys.
func TestAttentionThatHidesKeysIsThePlainLoop(t *testing.T) {
	for _, dtype := range floats {
		for n, masked := range [][]int{nil, {1, 1, 4, 6}, {2, 4, 1, 6}} {
			const batch, heads, shared, queries, keys, size, width = 2, 4, 2, 4, 6, 5, 3
			b := &builder{dtype: dtype}
			op := ir.Attention{Causal: n == 1, Scale: 0.1, SoftCap: float64(n % 2),
				Mask: masked != nil, Lengths: n != 1}
			x := []ir.ID{b.input(1, batch, heads, queries, size),
				b.input(2, batch, shared, keys, size), b.input(3, batch, shared, keys, width)}
			dy := b.input(4, batch, heads, queries, width)
			var hides []ir.ID
			if op.Mask {
				m := ir.Of(masked...)
				raw := ir.Of(m.At(0), m.At(1), m.At(3), m.At(2))
				hides = append(hides, b.op(ir.Permute{Axes: ir.Of(0, 1, 3, 2)}, m,
					b.input(5, raw.Slice()...)))
			}
			if op.Lengths {
				b.inputs = append(b.inputs, []float64{6, 2})
				hides = append(hides, b.Add(ir.Value{Op: ir.Input{Index: len(b.inputs) - 1},
					Shape: ir.Of(batch), DType: backend.I64, Name: "lengths"}))
			}
			result := ir.Of(batch, heads, queries, width)
			y := b.op(op, result, append(slices.Clone(x), hides...)...)
			lse := b.op(ir.Result{Index: 1}, result.Without(3), y)
			dq := b.op(ir.AttentionGrad(op), ir.Of(batch, heads, queries, size),
				append(append(slices.Clone(x), y, lse, dy), hides...)...)
			dk := b.op(ir.Result{Index: 1}, ir.Of(batch, shared, keys, size), dq)
			dv := b.op(ir.Result{Index: 2}, ir.Of(batch, shared, keys, width), dq)
			b.Results = []ir.ID{y, dq, dk, dv, lse}
			check(t, &b.Program, b.inputs)
		}
	}
}

// TestAttentionWritesRowsOfAllHeads: where results are read with their heads exchanged, they lie
// that way.
func TestAttentionWritesRowsOfAllHeads(t *testing.T) {
	const batch, heads, n, size = 2, 3, 4, 5
	b := &builder{dtype: backend.F64}
	shape, rows := ir.Of(batch, heads, n, size), ir.Of(batch*n, heads*size)
	exchanged := func(x ir.ID, from ir.Dims) ir.ID {
		return b.op(ir.Permute{Axes: ir.Of(0, 2, 1, 3)}, ir.Of(from.At(0), from.At(2), from.At(1),
			from.At(3)), x)
	}
	in := func(seed int) ir.ID {
		return exchanged(b.input(seed, batch, n, heads, size), ir.Of(batch, n, heads, size))
	}
	q, k, v, dy, w := in(1), in(2), in(3), in(4), b.input(5, heads*size, 2)
	y := b.op(ir.Attention{Scale: 0.01}, shape, q, k, v)
	lse := b.op(ir.Result{Index: 1}, shape.Without(3), y)
	dq := b.op(ir.AttentionGrad{Scale: 0.01}, shape, q, k, v, y, lse, dy)
	for _, x := range []ir.ID{y, dq, b.op(ir.Result{Index: 1}, shape, dq),
		b.op(ir.Result{Index: 2}, shape, dq)} {
		x = b.op(ir.Reshape{}, rows, exchanged(x, shape))
		b.Results = append(b.Results, b.op(ir.MatMul{}, ir.Of(batch*n, 2), x, w))
	}
	check(t, &b.Program, b.inputs)
	planned := require.Value(within(plan.Standard())(&b.Program))(t)
	if len(planned.Steps) != 6 { // attention, its gradient and four products
		t.Errorf("there are copies in\n%v", planned)
	}
}

func TestFunctionsAreThePlainLoop(t *testing.T) {
	for _, dtype := range floats {
		for _, f := range fuse.Ops() {
			if n := f.Operands(); n > 2 || f == fuse.Cast {
				continue // programs have no such values
			}
			t.Run(fmt.Sprint(dtype, " ", f), func(t *testing.T) {
				b := &builder{dtype: dtype}
				x, y := b.input(1, 4, 6), b.input(2, 4, 6)
				if f == fuse.Log || f == fuse.Log2 || f == fuse.Sqrt || f == fuse.InvSqrt ||
					f == fuse.Log1p {
					x = b.op(ir.Unary{Op: fuse.Abs}, ir.Of(4, 6), x)
				}
				half := b.op(ir.Broadcast{}, ir.Of(4, 6), b.op(ir.Reshape{}, ir.Of(1, 1),
					b.op(ir.ScalarOf(0.25), ir.Dims{})))
				x = b.op(ir.Binary{Op: fuse.Mul}, ir.Of(4, 6), x, half)
				if f.Operands() == 2 {
					b.Results = []ir.ID{b.op(ir.Binary{Op: f}, ir.Of(4, 6), x, y)}
				} else {
					b.Results = []ir.ID{b.op(ir.Unary{Op: f}, ir.Of(4, 6), x)}
				}
				check(t, &b.Program, b.inputs)
			})
		}
	}
}

func TestCasts(t *testing.T) {
	b := &builder{dtype: backend.F32}
	x, y := b.input(1, 3, 4), b.input(4, 3, 4)
	less := b.Add(ir.Value{Op: ir.Binary{Op: fuse.Less}, Args: []ir.ID{x, y}, Shape: ir.Of(3, 4),
		DType: backend.U8})
	whole := b.Add(ir.Value{Op: ir.Cast{}, Args: []ir.ID{x}, Shape: ir.Of(3, 4),
		DType: backend.I64})
	wide := b.Add(ir.Value{Op: ir.Cast{}, Args: []ir.ID{whole}, Shape: ir.Of(3, 4),
		DType: backend.F64})
	bits := b.Add(ir.Value{Op: ir.Slice{Axis: 1, Start: 1, Step: 2}, Args: []ir.ID{less},
		Shape: ir.Of(3, 2), DType: backend.U8})
	b.Results = []ir.ID{less, whole, wide, bits}
	check(t, &b.Program, b.inputs)
}

// TestGather: elements of each axis, by integers in range or not, sums of them, and others in their
// place.
func TestGather(t *testing.T) {
	for _, dtype := range floats {
		for axis := range 3 {
			b := &builder{dtype: dtype}
			shape := ir.Of(3, 4, 2)
			x, list := b.input(1, shape.Slice()...), b.input(2, 6)
			dy := b.input(3, shape.With(axis, 6).Slice()...)
			inside := b.op(ir.Binary{Op: fuse.Less}, ir.Of(6), list, b.input(4, 6)) // 0 or 1
			for _, list := range []ir.ID{list, inside} {
				whole := b.Add(ir.Value{Op: ir.Cast{}, Args: []ir.ID{list}, Shape: ir.Of(6),
					DType: backend.I64})
				y := b.op(ir.Gather{Axis: axis}, shape.With(axis, 6), x, whole)
				b.Results = append(b.Results, y, b.op(ir.GatherGrad{Axis: axis}, shape, dy, whole),
					b.op(ir.Put{Axis: axis}, shape, x, whole, dy))
			}
			check(t, &b.Program, b.inputs)
		}
	}
}

// TestWrongIndicesOfInputs: what is out of range is an error if the host knows it before the run.
func TestWrongIndicesOfInputs(t *testing.T) {
	onFake, closed := fake(t)
	defer closed()
	for _, device := range []exec.Device{exec.Host{}, onFake} {
		b := &builder{dtype: backend.I64}
		list := b.input(1, 2)
		b.dtype = backend.F32
		x := b.input(2, 4, 3)
		b.Results = []ir.ID{b.op(ir.Gather{Axis: 0}, ir.Of(2, 3), x, list)}
		planned := require.Value(within(plan.Standard())(&b.Program))(t)
		e := require.Value(exec.New(planned, device, nil, nil))(t)
		for _, test := range []struct {
			indices []float64
			wrong   bool
		}{{[]float64{0, 4}, true}, {[]float64{-1, 0}, true}, {[]float64{0, 3}, false}} {
			b.inputs[0] = test.indices
			bind(e, planned, b.inputs)
			if err := errors.Join(e.Run(0), e.Fetch()); errors.Is(
				err, backend.ErrArgument) != test.wrong || !test.wrong && err != nil {
				t.Errorf("indices %v: %v", test.indices, err)
			}
		}
		require.Report(t, e.Close())
	}
}

// TestPartsSideBySide: a sum of parts with zeros, of any order, is what its plan makes of it.
func TestPartsSideBySide(t *testing.T) {
	for axis := range 3 {
		b := &builder{dtype: backend.F32}
		whole := ir.Of(3, 4, 2)
		sum := ir.ID(-1)
		for k := whole.At(axis) - 1; k >= 0; k-- {
			x := b.op(ir.Unslice{Axis: axis, Start: k, Step: 1}, whole,
				b.input(k, whole.With(axis, 1).Slice()...))
			if sum >= 0 {
				x = b.op(ir.Binary{Op: fuse.Add}, whole, x, sum)
			}
			sum = x
		}
		turned := b.op(ir.Permute{Axes: ir.Of(1, 2, 0)}, ir.Of(4, 2, 3), sum)
		b.Results = []ir.ID{turned, b.op(ir.Reshape{}, ir.Of(8, 3), turned)}
		check(t, &b.Program, b.inputs)
	}
}

// TestRematerialized: a large layer norm whose normalised rows a later loop needs, too.
func TestRematerialized(t *testing.T) {
	b := &builder{dtype: backend.F32}
	shape := ir.Of(1025, 1024)
	x := b.op(ir.Unary{Op: fuse.Abs}, shape, b.input(1, shape.Slice()...))
	sum := b.op(ir.Reduce{Op: backend.Sum, Axes: ir.Of(1)}, ir.Of(1025), x)
	wide := b.op(ir.Broadcast{}, shape, b.op(ir.Reshape{}, ir.Of(1025, 1), sum))
	z := b.op(ir.Binary{Op: fuse.Sub}, shape, x, wide)
	slice := b.op(ir.Slice{Axis: 0, Start: 1024, Step: 1}, ir.Of(1, 1024),
		b.op(ir.Unary{Op: fuse.Neg}, shape, z))
	y := b.op(ir.MatMul{TransB: true}, ir.Of(1, 1), slice, slice)
	later := b.op(ir.Binary{Op: fuse.Mul}, shape, z, b.op(ir.Broadcast{}, shape, y))
	b.Results = []ir.ID{x, b.op(ir.Reduce{Op: backend.Max, Axes: ir.Of(0)}, ir.Of(1024), later)}
	check(t, &b.Program, b.inputs)
}

// TestSelect: labels of one axis, repeated along it, choose between two values, of which one is
// written over.
func TestSelect(t *testing.T) {
	for axis, shape := range []ir.Dims{ir.Of(4, 3), ir.Of(4, 3)} {
		b := &builder{dtype: backend.F64}
		x, y := b.input(0, shape.Slice()...), b.input(1, shape.Slice()...)
		labels := b.input(2, shape.With(axis, 1).Slice()...)
		whole := b.Add(ir.Value{Op: ir.Cast{}, Args: []ir.ID{labels}, Shape: shape.With(axis, 1),
			DType: backend.I64})
		wide := b.Add(ir.Value{Op: ir.Broadcast{}, Args: []ir.ID{whole}, Shape: shape,
			DType: backend.I64})
		sum := b.op(ir.Binary{Op: fuse.Add}, shape, x, y)
		b.Results = []ir.ID{b.op(ir.Select{Axis: axis}, shape, wide, sum, y)}
		check(t, &b.Program, b.inputs)
	}
}
