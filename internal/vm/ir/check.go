package ir

import (
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// check checks operands, shape and dtype of one value.
func (p *Program) check(v Value) error {
	if n := arity(v.Op); n >= 0 && n != len(v.Args) {
		return fmt.Errorf("%d operands, want %d", len(v.Args), n)
	}
	if Leaf(v.Op) {
		return nil
	}
	switch v.Op.(type) {
	case Opaque, AllGather:
		return nil
	}
	if len(v.Args) == 0 {
		return errors.New("no operands")
	}
	for i, a := range v.Args {
		d := p.Values[a].DType
		if integer := d == backend.I32 || d == backend.I64; integer && counts(v.Op, i) {
			continue
		}
		if v.Op == (Where{}) && i == 0 { // is 0 or not in any dtype
			continue
		}
		if Exact(v.Op, i) {
			if d != Statistics(v.DType) {
				return fmt.Errorf("lse or mask is %v, the result %v", d, v.DType)
			}
			continue
		}
		if d == backend.BF16 && v.DType == backend.F32 && widens(v.Op) {
			continue
		}
		if d != v.DType && !converts(v) {
			return fmt.Errorf("an operand is %v, the result %v", d, v.DType)
		}
	}
	want, err := p.shape(v)
	if err == nil && want != v.Shape {
		err = fmt.Errorf("shape %v, want %v", v.Shape, want)
	}
	return err
}

// arity returns the number of operands, -1 for any.
func arity(op Op) int {
	if Leaf(op) {
		return 0
	}
	switch op := op.(type) {
	case Concat, Opaque, AllReduce, AllGather:
		return -1
	case Binary, MatMul, Convolution, MaxPoolGrad, Gather, GatherGrad:
		return 2
	case Select, Where, Dropout, Put:
		return 3
	case Attention:
		return 3 + op.hiding()
	case AttentionGrad:
		return 6 + Attention(op).hiding()
	case LSTM:
		if op.Grad {
			return 5
		}
		return 4
	}
	return 1
}

// hiding returns how many operands hide keys.
func (o Attention) hiding() int {
	n := 0
	for _, is := range []bool{o.Mask, o.Lengths || o.Starts} {
		if is {
			n++
		}
	}
	return n
}

// Exact reports whether operand i of attention or its gradient is lse or the mask, which have the
// dtype of the statistics.
func Exact(op Op, i int) bool {
	_, grad := op.(AttentionGrad)
	_, mask, _ := Hiding(op)
	return grad && i == 4 || i == mask
}

// counts reports whether operand i is one of integers, whatever the others are.
func counts(op Op, i int) bool {
	switch op.(type) {
	case Select:
		return i == 0
	case Gather, GatherGrad, Put:
		return i == 1
	case Dropout:
		return i > 0
	case Attention, AttentionGrad:
		_, _, counts := Hiding(op)
		return i == counts
	}
	return false
}

// widens reports whether an operation on F32 reads BF16, too: loops widen what they load.
func widens(op Op) bool {
	switch op.(type) {
	case Reduce, MatMul:
		return true
	}
	return Elementwise(op)
}

// converts reports whether the dtype of the result may differ from that of the operands.
func converts(v Value) bool {
	if b, ok := v.Op.(Binary); ok {
		return Compares(b.Op) && v.DType == backend.U8
	}
	switch v.Op.(type) {
	case Cast, Locate, Result:
		return true
	}
	return false
}

// Statistics returns the dtype in which attention of a dtype keeps its statistics.
func Statistics(d backend.DType) backend.DType {
	if d == backend.F64 {
		return d
	}
	return backend.F32
}

// shape returns the shape that a result has, or v's own where the operation leaves a choice.
func (p *Program) shape(v Value) (Dims, error) {
	x := p.Values[v.Args[0]].Shape
	switch op := v.Op.(type) {
	case Reshape:
		if x.Size() != v.Shape.Size() {
			return x, fmt.Errorf("%v has %d elements, %v %d", x, x.Size(), v.Shape, v.Shape.Size())
		}
		return v.Shape, nil
	case Permute:
		return Permuted(x, op.Axes)
	case Slice:
		return sliced(x, v.Shape, op.Axis, op.Start, op.Step)
	case Unslice:
		_, err := sliced(v.Shape, x, op.Axis, op.Start, op.Step)
		return v.Shape, err
	case Broadcast:
		return broadcast(x, v.Shape)
	case Unary, Binary, Copy, Cast, Locate, Select, Where, Dropout, AllReduce:
		for _, a := range v.Args {
			if s := p.Values[a].Shape; s != x {
				return x, fmt.Errorf("operands of shape %v and %v", x, s)
			}
		}
		return x, nil
	case Reduce:
		return Reduced(x, op.Axes)
	case Concat:
		return p.joined(v, op.Axis)
	case Gather:
		return p.gathered(x, v.Args[1], op.Axis)
	case GatherGrad:
		s, err := p.gathered(v.Shape, v.Args[1], op.Axis)
		if err == nil && s != x {
			err = fmt.Errorf("%v is taken from %v, not %v", s, v.Shape, x)
		}
		return v.Shape, err
	case Put:
		s, err := p.gathered(x, v.Args[1], op.Axis)
		if rows := p.Values[v.Args[2]].Shape; err == nil && s != rows {
			err = fmt.Errorf("%v are put into %v, want %v", rows, x, s)
		}
		return x, err
	case MatMul:
		return Product(x, p.Values[v.Args[1]].Shape, op)
	case Im2Col:
		return op.Window.patches(x)
	case Col2Im:
		s, err := op.Window.patches(v.Shape)
		if err == nil && s != x {
			err = fmt.Errorf("patches %v for an image %v, want %v", x, v.Shape, s)
		}
		return v.Shape, err
	case Convolution:
		return v.Shape, p.convolution(v, op)
	case Attention, AttentionGrad:
		return p.attention(v)
	case LSTM:
		return p.recurrent(v, op.Grad)
	case Result:
		of := p.Values[v.Args[0]]
		all := Besides(of, func(i int) Value { return p.Values[of.Args[i]] })
		if op.Index < 1 || op.Index > len(all) || all[op.Index-1].DType != v.DType {
			return v.Shape, fmt.Errorf("%v of %v, as %v", op, of.Op, v.DType)
		}
		return all[op.Index-1].Shape, nil
	case MaxPool, MaxPoolGrad: // explicit padding may leave the last rows out
		return v.Shape, nil
	}
	return x, fmt.Errorf("unknown operation %T", v.Op)
}

// Besides returns shapes and dtypes of what the operation of v gives besides its first result, room
// that it needs among them; operand returns those of operand i.
func Besides(v Value, operand func(i int) Value) []Value {
	switch op := v.Op.(type) {
	case Attention:
		return []Value{{Shape: v.Shape.Without(v.Shape.Len() - 1), DType: Statistics(v.DType)}}
	case AttentionGrad:
		k, values, lse := operand(1), operand(2), operand(4)
		return []Value{{Shape: k.Shape, DType: v.DType}, {Shape: values.Shape, DType: v.DType},
			{Shape: lse.Shape, DType: lse.DType}}
	case LSTM:
		all, besides := v.Shape, []Value{}
		if !op.Grad {
			kept := Of(all.At(0)-2, 5, all.At(1), all.At(2))
			besides = append(besides, Value{Shape: kept, DType: v.DType})
		}
		if op.Precision == BF16 {
			besides = append(besides, Value{Shape: all, DType: backend.BF16})
		}
		return besides
	}
	return nil
}

// recurrent returns the shape of the first result of an LSTM or its gradient.
func (p *Program) recurrent(v Value, grad bool) (Dims, error) {
	all := v.Shape
	if grad {
		all = p.Values[v.Args[0]].Shape
	}
	if all.Len() != 3 || all.At(0) < 3 {
		return all, fmt.Errorf("%v of all of shape %v", v.Op, all)
	}
	steps, batch, size := all.At(0)-2, all.At(1), all.At(2)
	state, weights := Of(batch, size), Of(4*size, size)
	result, want := all, []Dims{Of(steps*batch, 4*size), state, state, weights}
	if grad {
		result = Of((steps+1)*batch, 4*size)
		want = []Dims{all, Of(steps, 5, batch, size), Of(steps, batch, size), state, weights}
	}
	for i, a := range v.Args {
		if s := p.Values[a].Shape; s != want[i] {
			return all, fmt.Errorf("operand %d has shape %v, want %v", i, s, want[i])
		}
	}
	return result, nil
}

// attention returns the shape of the first result of attention or its gradient.
func (p *Program) attention(v Value) (Dims, error) {
	shape := func(i int) Dims { return p.Values[v.Args[i]].Shape }
	q, k, values := shape(0), shape(1), shape(2)
	if q.Len() != 4 || k.Len() != 4 || values.Len() != 4 || values.With(3, k.At(3)) != k ||
		k.At(1) < 1 || q.At(1)%k.At(1) != 0 || k.With(1, q.At(1)).With(2, q.At(2)) != q {
		return q, fmt.Errorf("operands of shape %v, %v and %v", q, k, values)
	}
	scores, y := q.With(3, k.At(2)), q.With(3, values.At(3))
	result, others := y, []Dims{}
	if _, grad := v.Op.(AttentionGrad); grad {
		result, others = q, []Dims{y, q.Without(3), y}
	}
	o, mask, counts := Hiding(v.Op)
	if o.Lengths && o.Starts || o.Window < 0 || o.Window > 0 && !o.Causal {
		return q, fmt.Errorf("lengths and starts, or a window of %d", o.Window)
	}
	if mask >= 0 {
		m := shape(mask)
		if m.Len() == 4 {
			for axis := range 4 {
				if m.At(axis) == 1 {
					scores = scores.With(axis, 1)
				}
			}
		}
		others = append(others, scores)
	}
	if counts >= 0 {
		of := Of(q.At(0))
		if o.Starts {
			of = Of(q.At(0), q.At(2))
		}
		others = append(others, of)
	}
	for i, want := range others {
		if s := shape(3 + i); s != want {
			return q, fmt.Errorf("operands of shape %v, %v, %v and %v, want %v", q, k, values, s,
				want)
		}
	}
	return result, nil
}

// Permuted returns the shape of a permutation of x.
func Permuted(x, axes Dims) (Dims, error) {
	y := x
	if axes.Len() != x.Len() {
		return x, fmt.Errorf("permutation %v of shape %v", axes, x)
	}
	for i := range axes.Len() {
		if !axes.Has(i) {
			return x, fmt.Errorf("%v is no permutation", axes)
		}
		y = y.With(i, x.At(axes.At(i)))
	}
	return y, nil
}

func sliced(x, y Dims, axis, start, step int) (Dims, error) {
	if axis < 0 || axis >= x.Len() || y.Len() != x.Len() || step < 1 || start < 0 {
		return x, fmt.Errorf("slice of axis %d of %v to %v from %d, step %d", axis, x, y, start,
			step)
	}
	n := y.At(axis)
	if n > 0 && start+(n-1)*step >= x.At(axis) {
		return x, fmt.Errorf("%d elements of axis %d of %v from %d, step %d", n, axis, x, start,
			step)
	}
	return x.With(axis, n), nil
}

func broadcast(x, y Dims) (Dims, error) {
	if x.Len() != y.Len() {
		return y, fmt.Errorf("broadcast of %v to %v", x, y)
	}
	for i := range x.Len() {
		if x.At(i) != y.At(i) && x.At(i) != 1 {
			return y, fmt.Errorf("broadcast of %v to %v", x, y)
		}
	}
	return y, nil
}

// Reduced returns the shape of x without the axes.
func Reduced(x, axes Dims) (Dims, error) {
	y := Dims{}
	for i := range x.Len() {
		if !axes.Has(i) {
			y = y.Insert(y.Len(), x.At(i))
		}
	}
	if y.Len()+axes.Len() != x.Len() {
		return y, fmt.Errorf("axes %v of shape %v", axes, x)
	}
	return y, nil
}

// gathered returns the shape of what a list takes from an axis of x.
func (p *Program) gathered(x Dims, list ID, axis int) (Dims, error) {
	n := p.Values[list]
	if n.DType.Float() || n.Shape.Len() != 1 || axis < 0 || axis >= x.Len() {
		return x, fmt.Errorf("axis %d of %v by %v %v", axis, x, n.DType, n.Shape)
	}
	return x.With(axis, n.Shape.At(0)), nil
}

func (p *Program) joined(v Value, axis int) (Dims, error) {
	y, n := p.Values[v.Args[0]].Shape, 0
	if axis < 0 || axis >= y.Len() {
		return y, fmt.Errorf("axis %d of shape %v", axis, y)
	}
	for _, a := range v.Args {
		s := p.Values[a].Shape
		if s.Len() != y.Len() || s.With(axis, 0) != y.With(axis, 0) {
			return y, fmt.Errorf("operands of shape %v and %v", y, s)
		}
		n += s.At(axis)
	}
	return y.With(axis, n), nil
}

// Product returns the shape of a product of operands of shape a and b.
func Product(a, b Dims, op MatMul) (Dims, error) {
	n := a.Len()
	if n < 2 || b.Len() != n {
		return a, fmt.Errorf("operands of shape %v and %v", a, b)
	}
	rows, inner := a.At(n-2), a.At(n-1)
	if op.TransA {
		rows, inner = inner, rows
	}
	innerB, columns := b.At(n-2), b.At(n-1)
	if op.TransB {
		innerB, columns = columns, innerB
	}
	c := a.With(n-2, rows).With(n-1, columns)
	if inner != innerB || c.With(n-2, 0).With(n-1, 0) != b.With(n-2, 0).With(n-1, 0) {
		return a, fmt.Errorf("operands of shape %v and %v", a, b)
	}
	return c, nil
}

// Images returns what images, filters and results a convolution has, of its operands and its
// result: with channels as the second axis.
func (c Convolution) Images(a, b, dst Dims) (x, w, y Dims) {
	if c.ChannelsLast {
		a, b, dst = channelsSecond(a), channelsSecond(b), channelsSecond(dst)
	}
	switch c.Pass {
	case kernels.Forward:
		return a, b, dst
	case kernels.InputGradient:
		return dst, b, a
	default:
		return a, dst, b
	}
}

// channelsSecond returns a shape with its last axis as the second one.
func channelsSecond(d Dims) Dims {
	if d.Len() != 4 {
		return d
	}
	return Of(d.At(0), d.At(3), d.At(1), d.At(2))
}

// convolution checks the shapes of images, filters and results.
func (p *Program) convolution(v Value, op Convolution) error {
	x, w, y := op.Images(p.Values[v.Args[0]].Shape, p.Values[v.Args[1]].Shape, v.Shape)
	patches, err := op.Window.patches(x)
	if err != nil {
		return err
	}
	groups := max(op.Groups, 1)
	if w.Len() != 4 || op.Groups < 0 || w.At(0)%groups != 0 ||
		w.Without(0) != Of(x.At(1)/groups, op.Window.H, op.Window.W) || x.At(1)%groups != 0 ||
		y != Of(x.At(0), w.At(0), patches.At(1), patches.At(2)) {
		return fmt.Errorf("%v of images %v and filters %v to %v", op, x, w, y)
	}
	return nil
}

// patches returns the shape of the patches of images x.
func (w Window) patches(x Dims) (Dims, error) {
	if x.Len() != 4 {
		return x, fmt.Errorf("images %v, want 4 axes", x)
	}
	h := (x.At(2)+2*w.PadH+w.MoreH-(w.DilationH*(w.H-1)+1))/w.StrideH + 1
	wd := (x.At(3)+2*w.PadW+w.MoreW-(w.DilationW*(w.W-1)+1))/w.StrideW + 1
	return Of(x.At(0), h, wd, x.At(1)*w.H*w.W), nil
}
