package exec_test

import (
	"math/rand/v2"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// random makes programs of operations that are exact on integers, from random numbers.
type random struct {
	builder
	next   func(n int) int // 0 up to n
	bounds []float64       // the largest absolute value of each value's elements
	list   ir.ID           // of zeros and ones, as integers
}

// limit keeps all numbers, and sums on the way to them, integers of a float64.
const limit = 1 << 40

func (r *random) add(op ir.Op, shape ir.Dims, bound float64, args ...ir.ID) {
	if bound > limit || shape.Size() > 400 {
		return
	}
	r.op(op, shape, args...)
	r.bounds = append(r.bounds, bound)
}

// grow adds a value, or nothing if the operands that it picks do not fit.
func (r *random) grow() {
	x := ir.ID(r.next(len(r.Values)))
	shape, bound := r.Values[x].Shape, r.bounds[x]
	if r.integer(x) {
		return
	}
	switch axis := r.next(max(shape.Len(), 1)); r.next(19) {
	case 0, 1:
		f := []fuse.Op{fuse.Neg, fuse.Abs, fuse.Sign, fuse.Relu}[r.next(4)]
		r.add(ir.Unary{Op: f}, shape, max(bound, 1), x)
	case 2, 3, 4, 5:
		if y, ok := r.like(shape); ok {
			f := []fuse.Op{fuse.Add, fuse.Sub, fuse.Mul, fuse.Maximum, fuse.Minimum, fuse.Less,
				fuse.GreaterEqual, fuse.Equal}[r.next(8)]
			r.add(ir.Binary{Op: f}, shape, max(bound+r.bounds[y], bound*r.bounds[y], 1), x, y)
			if r.next(4) == 0 {
				r.add(ir.Where{}, shape, max(bound, r.bounds[y]), y, x, y)
			}
		}
	case 6:
		r.reduce(x, axis)
	case 7, 8:
		r.reshape(x)
	case 9:
		r.permute(x)
	case 10:
		if shape.Len() > 0 && shape.At(axis) > 1 {
			start, step := r.next(shape.At(axis)), 1+r.next(2)
			r.add(ir.Slice{Axis: axis, Start: start, Step: step},
				shape.With(axis, (shape.At(axis)-start+step-1)/step), bound, x)
		}
	case 11:
		if shape.Len() > 0 && shape.At(axis) == 1 {
			r.add(ir.Broadcast{}, shape.With(axis, 1+r.next(4)), bound, x)
		}
	case 12:
		if shape.Len() > 0 {
			start, step := r.next(3), 1+r.next(2)
			r.add(ir.Unslice{Axis: axis, Start: start, Step: step},
				shape.With(axis, start+step*(shape.At(axis)-1)+1+r.next(2)), bound, x)
		}
	case 13:
		if y, ok := r.like(shape); ok && shape.Len() > 0 {
			r.add(ir.Concat{Axis: axis}, shape.With(axis, 2*shape.At(axis)),
				max(bound, r.bounds[y]), x, y)
		}
	case 14:
		r.matMul(x)
	case 15:
		r.image(x)
	case 16:
		r.gather(x, axis)
	case 17:
		r.rows(x)
	case 18:
		r.locate(x, axis)
	}
}

// integer reports whether a value has another dtype than most.
func (r *random) integer(x ir.ID) bool { return r.Values[x].DType != r.dtype }

// locate finds places along an axis where x is not 0, in integers, and makes numbers of them.
func (r *random) locate(x ir.ID, axis int) {
	shape := r.Values[x].Shape
	if shape.Len() == 0 {
		return
	}
	bound, dtype := float64(shape.At(axis)), r.dtype
	r.dtype = backend.I64
	r.add(ir.Locate{Axis: axis}, shape, bound, x)
	at := ir.ID(len(r.Values) - 1)
	if r.next(2) == 0 {
		shape = shape.Without(axis)
		r.add(ir.Reduce{Op: backend.Min, Axes: ir.Of(axis)}, shape, bound, at)
		at++
	}
	r.dtype = dtype
	r.add(ir.Cast{}, shape, bound, at)
}

// like returns a value of the shape.
func (r *random) like(shape ir.Dims) (ir.ID, bool) {
	var fit []ir.ID
	for i, v := range r.Values {
		if v.Shape == shape && !r.integer(ir.ID(i)) {
			fit = append(fit, ir.ID(i))
		}
	}
	return fit[r.next(len(fit))], true
}

func (r *random) reduce(x ir.ID, axis int) {
	shape := r.Values[x].Shape
	if shape.Len() == 0 {
		return
	}
	axes := ir.Of(axis)
	if r.next(2) == 0 && shape.Len() > 1 && axis != 0 {
		axes = ir.Of(0, axis)
	}
	r.reduceBy([]backend.ReduceOp{backend.Sum, backend.Max, backend.Min}[r.next(3)], x, axes)
}

func (r *random) reduceBy(f backend.ReduceOp, x ir.ID, axes ir.Dims) {
	shape := r.Values[x].Shape
	result, _ := ir.Reduced(shape, axes)
	r.add(ir.Reduce{Op: f, Axes: axes}, result, r.bounds[x]*float64(shape.Size()), x)
}

// reshape splits or merges an axis, or adds one of length 1.
func (r *random) reshape(x ir.ID) {
	shape := r.Values[x].Shape
	axis := r.next(shape.Len() + 1)
	switch {
	case shape.Len() < 5 && r.next(2) == 0:
		shape = shape.Insert(axis, 1)
	case axis+1 < shape.Len():
		shape = shape.With(axis, shape.At(axis)*shape.At(axis+1)).Without(axis + 1)
	case axis < shape.Len() && shape.At(axis)%2 == 0 && shape.Len() < 5:
		shape = shape.With(axis, shape.At(axis)/2).Insert(axis, 2)
	}
	r.add(ir.Reshape{}, shape, r.bounds[x], x)
}

func (r *random) permute(x ir.ID) {
	shape := r.Values[x].Shape
	axes, result := shape, shape
	for i := range shape.Len() {
		axes = axes.With(i, i)
	}
	for i := range shape.Len() {
		j := i + r.next(shape.Len()-i)
		a := axes.At(i)
		axes = axes.With(i, axes.At(j)).With(j, a)
	}
	for i := range shape.Len() {
		result = result.With(i, shape.At(axes.At(i)))
	}
	r.add(ir.Permute{Axes: axes}, result, r.bounds[x], x)
}

// rows folds the last axis, and adds the result, or what is computed from it, to each element.
func (r *random) rows(x ir.ID) {
	shape, n := r.Values[x].Shape, len(r.Values)
	last := shape.Len() - 1
	if last < 0 || r.bounds[x]*float64(shape.Size())*4 > limit {
		return
	}
	r.reduceBy([]backend.ReduceOp{backend.Sum, backend.Max, backend.Min}[r.next(3)], x, ir.Of(last))
	if r.next(2) == 0 {
		r.add(ir.Unary{Op: fuse.Abs}, shape.Without(last), r.bounds[n], ir.ID(n))
	}
	once := ir.ID(len(r.Values) - 1)
	r.add(ir.Reshape{}, shape.With(last, 1), r.bounds[once], once)
	r.add(ir.Broadcast{}, shape, r.bounds[once], once+1)
	r.add(ir.Binary{Op: []fuse.Op{fuse.Sub, fuse.Maximum, fuse.GreaterEqual}[r.next(3)]}, shape,
		r.bounds[x]+r.bounds[once], x, once+2)
}

// gather takes the first two elements of an axis, several times, and adds as many.
func (r *random) gather(x ir.ID, axis int) {
	shape, n := r.Values[x].Shape, r.Values[r.list].Shape.At(0)
	switch {
	case shape.Len() == 0:
	case shape.At(axis) >= 2 && r.next(2) == 0:
		r.add(ir.Gather{Axis: axis}, shape.With(axis, n), r.bounds[x], x, r.list)
	case shape.At(axis) == n && r.next(2) == 0:
		y, _ := r.like(shape)
		r.add(ir.Put{Axis: axis}, shape, max(r.bounds[x], r.bounds[y]), x, r.list, y)
	case shape.At(axis) == n:
		r.add(ir.GatherGrad{Axis: axis}, shape.With(axis, 2+r.next(3)), r.bounds[x]*float64(n), x,
			r.list)
	}
}

func (r *random) matMul(x ir.ID) {
	y := ir.ID(r.next(len(r.Values)))
	if r.integer(y) {
		return
	}
	for _, op := range []ir.MatMul{{}, {TransA: true}, {TransB: true},
		{TransA: true, TransB: true}} {
		if shape, err := ir.Product(r.Values[x].Shape, r.Values[y].Shape, op); err == nil {
			r.add(op, shape, r.bounds[x]*r.bounds[y]*float64(r.Values[x].Shape.Size()), x, y)
			return
		}
	}
}

func (r *random) image(x ir.ID) {
	s := r.Values[x].Shape
	if s.Len() != 4 || s.At(2) < 2 || s.At(3) < 2 {
		return
	}
	w := ir.Window{H: 2, W: 2, StrideH: 1 + r.next(2), StrideW: 1, DilationH: 1, DilationW: 1}
	oh, ow := (s.At(2)-2)/w.StrideH+1, s.At(3)-1
	if r.next(2) == 0 {
		r.add(ir.Im2Col{Window: w}, ir.Of(s.At(0), oh, ow, s.At(1)*4), r.bounds[x], x)
		r.convolve(ir.ID(len(r.Values)-1), w, s)
		return
	}
	r.add(ir.MaxPool{Window: w}, ir.Of(s.At(0), s.At(1), oh, ow), r.bounds[x], x)
	if y := ir.ID(len(r.Values) - 1); r.bounds[x]*4 < limit {
		r.add(ir.MaxPoolGrad{Window: w}, s, r.bounds[x]*4, x, y)
	}
}

// convolve multiplies patches of images by some of them as filters, as Gorgonia convolves, and adds
// the gradients of that by filters and images.
func (r *random) convolve(patches ir.ID, w ir.Window, images ir.Dims) {
	s, bound := r.Values[patches].Shape, r.bounds[patches]
	if s.Len() != 4 || r.Values[patches].Op != (ir.Im2Col{Window: w}) {
		return
	}
	rows, columns, size := s.At(0)*s.At(1)*s.At(2), s.At(3), float64(s.Size())
	if bound*bound*bound*size*size*4 > limit || rows*columns > 400 {
		return
	}
	filters := 1 + r.next(min(rows, 3))
	p := r.op(ir.Reshape{}, ir.Of(rows, columns), patches)
	f := r.op(ir.Slice{Step: 1}, ir.Of(filters, columns), p)
	y := r.op(ir.MatMul{TransB: true}, ir.Of(rows, filters), p, f)
	r.op(ir.MatMul{TransA: true}, ir.Of(filters, columns), y, p)
	dp := r.op(ir.MatMul{}, ir.Of(rows, columns), y, f)
	r.op(ir.Col2Im{Window: w}, images, r.op(ir.Reshape{}, s, dp))
	sum, all := bound*bound*size, bound*bound*bound*size*size
	r.bounds = append(r.bounds, bound, bound, sum, all, all, all, 4*all)
}

// run makes a program of a number of steps, wants some of its values, and checks it.
func (r *random) run(t *testing.T, steps int) {
	r.make(steps)
	check(t, &r.Program, r.inputs)
}

// make makes a program of a number of steps, and wants some of its values.
func (r *random) make(steps int) {
	r.begin()
	for range steps {
		r.grow()
	}
	r.want4()
}

// begin adds the inputs.
func (r *random) begin() {
	r.dtype = backend.F64
	for i, shape := range [][]int{{}, {6}, {1, 6}, {4, 6}, {6, 4}, {2, 3, 4}, {2, 1, 4, 3}} {
		r.input(i, shape...)
		r.bounds = append(r.bounds, 5)
	}
	r.dtype = backend.I64
	r.list = r.input(0, 6)
	r.dtype, r.bounds = backend.F64, append(r.bounds, 1)
	for i, x := range r.inputs[len(r.inputs)-1] {
		r.inputs[len(r.inputs)-1][i] = float64(int(x) & 1)
	}
}

// want4 wants the last value, and three of any.
func (r *random) want4() {
	r.Results = append(r.Results, ir.ID(len(r.Values)-1))
	for range 3 {
		r.Results = append(r.Results, ir.ID(r.next(len(r.Values))))
	}
}

// TestRandomProgramsAreThePlainLoops runs programs of fixed seeds: shapes, broadcasts, views,
// values that are used several times, and in-place steps, all exact.
func TestRandomProgramsAreThePlainLoops(t *testing.T) {
	for seed := range uint64(150) {
		source := rand.New(rand.NewPCG(seed, 1))
		(&random{next: source.IntN}).run(t, 10+int(seed))
	}
}

// FuzzPrograms lets the fuzzer choose.
func FuzzPrograms(f *testing.F) {
	f.Add([]byte("views, loops and products"))
	f.Fuzz(func(t *testing.T, choices []byte) {
		n := len(choices)
		next := func(n int) int {
			if len(choices) == 0 {
				return 0
			}
			c := int(choices[0])
			choices = choices[1:]
			return c % n
		}
		(&random{next: next}).run(t, min(n/4, 100))
	})
}
