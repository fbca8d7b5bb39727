package interpret

import (
	"fmt"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Array is a value: its elements in row-major order.
type Array struct {
	Shape ir.Dims
	Data  []Number
	// sums has the terms of the elements of a product: a machine may add those of several
	// elements in one sum, as a convolution's gradient by its images does.
	sums []*sum
}

// Of returns an array of elements without errors.
func Of(shape ir.Dims, data []float64) Array {
	a := Array{Shape: shape, Data: make([]Number, len(data))}
	for i, x := range data {
		a.Data[i].Value = x
	}
	return a
}

// Outside has the values that come from outside of a program.
type Outside struct {
	Inputs, Constants []Array         // by their indices
	Kept              map[ir.Op]Array // of states, sums of runs and settings
	// Opaque evaluates an operation that only the graph knows.
	Opaque func(v ir.Value, args []Array) (Array, error)
}

// Program returns all values of a program.
func Program(p *ir.Program, outside Outside) ([]Array, error) {
	values := make([]Array, len(p.Values))
	for i, v := range p.Values {
		args := make([]Array, len(v.Args))
		for j, a := range v.Args {
			args[j] = values[a]
		}
		if r, ok := v.Op.(ir.Result); ok { // evaluates the operation again
			of := p.Values[v.Args[0]]
			for _, a := range of.Args {
				args = append(args, values[a])
			}
			values[i] = besides(in(of.DType), of, r.Index, args[1:])
			continue
		}
		var err error
		if values[i], err = evaluate(v, args, outside); err != nil {
			return nil, fmt.Errorf("interpret: value %d, %v of %s: %w", i, v.Op, v.Name, err)
		}
	}
	return values, nil
}

// besides returns result number index of attention or its gradient.
func besides(a arithmetic, v ir.Value, index int, args []Array) Array {
	if op, ok := v.Op.(ir.AttentionGrad); ok {
		return a.attentionGrad(op, args)[index]
	}
	return a.attention(v.Op.(ir.Attention), args)[index]
}

// evaluate returns the value of an operation.
func evaluate(v ir.Value, args []Array, outside Outside) (Array, error) {
	a := in(v.DType)
	switch op := v.Op.(type) {
	case ir.Input:
		return Array{Shape: v.Shape, Data: outside.Inputs[op.Index].Data}, nil
	case ir.Constant:
		return Array{Shape: v.Shape, Data: outside.Constants[op.Index].Data}, nil
	case ir.Scalar:
		x := a.rounded(op.Float(), 0, true)
		return Array{Shape: v.Shape, Data: slices.Repeat([]Number{x}, v.Shape.Size())}, nil
	case ir.State, ir.Setting, ir.PartialSum:
		return outside.kept(v)
	case ir.Opaque:
		return outside.Opaque(v, args)
	case ir.Reshape, ir.Copy:
		return Array{v.Shape, args[0].Data, args[0].sums}, nil
	case ir.Cast, ir.Unary, ir.Binary, ir.Locate, ir.Select, ir.Where, ir.Dropout:
		return a.elements(v, args)
	case ir.Permute, ir.Slice, ir.Broadcast, ir.Unslice, ir.Concat, ir.Im2Col:
		return moved(v, args), nil
	case ir.MatMul:
		return a.multiplied(v, op, args[0], args[1]), nil
	case ir.Reduce:
		return a.reduced(v, op, args[0]), nil
	case ir.GatherGrad:
		y := a.scattered(v, args[0], func(i []int) {
			i[op.Axis] = int(args[1].Data[i[op.Axis]].Value)
		})
		return blurred(poisoned(y, args[1], v.Shape.At(op.Axis)), args[1]), nil
	case ir.Gather:
		return blurred(moved(v, args), args[1]), nil
	case ir.Put:
		y := poisoned(put(v, op.Axis, args), args[1], v.Shape.At(op.Axis))
		return blurred(y, args[1]), nil
	case ir.Col2Im:
		return a.scattered(v, args[0], func(i []int) {
			c, h, w, ok := pixel(op.Window, v.Shape, i)
			if i[1], i[2], i[3] = c, h, w; !ok {
				i[0] = -1
			}
		}), nil
	case ir.Attention:
		return a.attention(op, args)[0], nil
	case ir.AttentionGrad:
		return a.attentionGrad(op, args)[0], nil
	}
	return a.layer(v, args)
}

// elements evaluates what is computed element by element.
func (a arithmetic) elements(v ir.Value, args []Array) (Array, error) {
	y := Array{Shape: v.Shape, Data: make([]Number, v.Shape.Size())}
	index := make([]int, v.Shape.Len())
	for i := range y.Data {
		var err error
		x := args[0].Data[i]
		switch op := v.Op.(type) {
		case ir.Cast:
			if y.Data[i] = a.rounded(x.Value, x.Err, true); a.whole {
				y.Data[i] = Number{math.Trunc(x.Value), math.Ceil(x.Err)}
			}
		case ir.Unary:
			y.Data[i], err = a.unary(op.Op, x)
		case ir.Binary:
			y.Data[i], err = a.binary(op.Op, x, args[1].Data[i])
		case ir.Locate:
			n := float64(v.Shape.At(op.Axis))
			y.Data[i] = chosen(x, Number{Value: float64(index[op.Axis])}, Number{Value: n})
		case ir.Select:
			off := math.Abs(x.Value - float64(index[op.Axis]))
			here := Number{Err: x.Err}
			if off > x.Err {
				here.Err = 0
			}
			if off == 0 {
				here.Value = 1
			}
			y.Data[i] = chosen(here, args[1].Data[i], args[2].Data[i])
		case ir.Where:
			y.Data[i] = chosen(x, args[1].Data[i], args[2].Data[i])
		case ir.Dropout:
			y.Data[i] = a.dropout(op, v.Shape, i, x, args[1].Data[i].Value, args[2].Data[i].Value)
		}
		if err != nil {
			return y, err
		}
		next(index, v.Shape)
	}
	return y, nil
}

// chosen is x where a condition is not 0, else y. The bound of a condition leaves it open.
func chosen(condition, x, y Number) Number {
	z := y
	if condition.Value != 0 {
		z = x
	}
	if condition.Err > 0 {
		z.Err = x.Err + y.Err
		if x.Value != y.Value { // two infinities differ by NaN
			z.Err += math.Abs(x.Value - y.Value)
		}
		if math.IsNaN(z.Err) {
			z.Err = math.Inf(1)
		}
	}
	return z
}

// blurred is y, without a bound if an index of a list is not exact.
func blurred(y, list Array) Array {
	if slices.ContainsFunc(list.Data, func(i Number) bool { return i.Err > 0 }) {
		for i := range y.Data {
			y.Data[i].Err = math.Inf(1)
		}
	}
	return y
}

// poisoned is y, NaN if an index of a list is out of range: it could have named any row.
func poisoned(y, list Array, count int) Array {
	if slices.ContainsFunc(list.Data, func(i Number) bool {
		return i.Value < 0 || i.Value >= float64(count)
	}) {
		for i := range y.Data {
			y.Data[i] = Number{Value: math.NaN()}
		}
	}
	return y
}

// next goes to the index of the next element.
func next(index []int, shape ir.Dims) {
	for axis := len(index) - 1; axis >= 0; axis-- {
		if index[axis]++; index[axis] < shape.At(axis) {
			return
		}
		index[axis] = 0
	}
}

// each calls f with every index of a shape, which f may change, and the place of the element.
func each(shape ir.Dims, f func(place int, index []int)) {
	index, given := make([]int, shape.Len()), make([]int, shape.Len())
	for i := range shape.Size() {
		copy(given, index)
		f(i, given)
		next(index, shape)
	}
}

// offsetOf returns where an element is.
func offsetOf(shape ir.Dims, index []int) int {
	at := 0
	for i, x := range index {
		at = at*shape.At(i) + x
	}
	return at
}

// moved evaluates operations that only move elements.
func moved(v ir.Value, args []Array) Array {
	y := Array{Shape: v.Shape, Data: make([]Number, v.Shape.Size())}
	each(v.Shape, func(at int, i []int) {
		x := args[0]
		from, ok := slices.Clone(i), true
		switch op := v.Op.(type) {
		case ir.Permute:
			for to := range i {
				from[op.Axes.At(to)] = i[to]
			}
		case ir.Slice:
			from[op.Axis] = op.Start + op.Step*i[op.Axis]
		case ir.Broadcast:
			for axis := range from {
				from[axis] %= x.Shape.At(axis)
			}
		case ir.Unslice:
			k := i[op.Axis] - op.Start
			from[op.Axis] = k / op.Step
			ok = k >= 0 && k%op.Step == 0 && k/op.Step < x.Shape.At(op.Axis)
		case ir.Concat:
			for k := 0; from[op.Axis] >= args[k].Shape.At(op.Axis); x = args[k] {
				from[op.Axis] -= args[k].Shape.At(op.Axis)
				k++
			}
		case ir.Gather:
			from[op.Axis] = int(args[1].Data[i[op.Axis]].Value)
			if k := from[op.Axis]; k < 0 || k >= x.Shape.At(op.Axis) {
				y.Data[at].Value, ok = math.NaN(), false
			}
		case ir.Im2Col:
			from[1], from[2], from[3], ok = pixel(op.Window, x.Shape, i)
		}
		if ok {
			y.Data[at] = x.Data[offsetOf(x.Shape, from)]
		}
	})
	return y
}

// put returns x with other elements of an axis.
func put(v ir.Value, axis int, args []Array) Array {
	y := Array{Shape: v.Shape, Data: slices.Clone(args[0].Data)}
	each(args[2].Shape, func(at int, i []int) {
		to := slices.Clone(i)
		to[axis] = int(args[1].Data[i[axis]].Value)
		if to[axis] >= 0 && to[axis] < v.Shape.At(axis) {
			y.Data[offsetOf(v.Shape, to)] = args[2].Data[at]
		}
	})
	return y
}

// scattered adds up the elements of x where to says. Where to makes an index negative or too
// large, the element is lost.
func (a arithmetic) scattered(v ir.Value, x Array, to func(index []int)) Array {
	sums := a.sums(v.Shape)
	each(x.Shape, func(at int, i []int) {
		to(i)
		for axis, k := range i {
			if k < 0 || k >= v.Shape.At(axis) {
				return
			}
		}
		if to := sums[offsetOf(v.Shape, i)]; x.sums != nil {
			to.join(x.sums[at])
		} else {
			to.add(x.Data[at])
		}
	})
	return results(v.Shape, sums)
}

func (a arithmetic) sums(shape ir.Dims) []*sum {
	sums := make([]*sum, shape.Size())
	for i := range sums {
		sums[i] = a.sum()
	}
	return sums
}

func results(shape ir.Dims, sums []*sum) Array {
	y := Array{Shape: shape, Data: make([]Number, len(sums))}
	for i, s := range sums {
		y.Data[i] = s.result()
	}
	return y
}

func (a arithmetic) multiplied(v ir.Value, op ir.MatMul, x, y Array) Array {
	n := v.Shape.Len()
	inner := x.Shape.At(n - 1)
	if op.TransA {
		inner = x.Shape.At(n - 2)
	}
	element := func(x Array, batch []int, row, column int, transposed bool) Number {
		if transposed {
			row, column = column, row
		}
		return x.Data[offsetOf(x.Shape, append(slices.Clone(batch), row, column))]
	}
	sums := a.sums(v.Shape)
	each(v.Shape, func(at int, i []int) {
		for k := range inner {
			left := element(x, i[:n-2], i[n-2], k, op.TransA)
			sums[at].product(left, element(y, i[:n-2], k, i[n-1], op.TransB))
		}
	})
	z := results(v.Shape, sums)
	z.sums = sums
	return z
}

func (a arithmetic) reduced(v ir.Value, op ir.Reduce, x Array) Array {
	members := make([][]Number, v.Shape.Size())
	each(x.Shape, func(place int, i []int) {
		at := 0
		for axis := range i {
			if !op.Axes.Has(axis) {
				at = at*x.Shape.At(axis) + i[axis]
			}
		}
		e := x.Data[place]
		if op.Op == backend.Min {
			e.Value = -e.Value
		}
		members[at] = append(members[at], e)
	})
	y := Array{Shape: v.Shape, Data: make([]Number, len(members))}
	for i, of := range members {
		switch op.Op {
		case backend.Sum:
			s := a.sum()
			for _, e := range of {
				s.add(e)
			}
			y.Data[i] = s.result()
		default:
			if y.Data[i] = largest(of); op.Op == backend.Min {
				y.Data[i].Value = -y.Data[i].Value
			}
		}
	}
	return y
}

// dropout is x divided by the share that stays, or 0: by word element mod 4 of the counter of
// its sample and quad.
func (a arithmetic) dropout(
	op ir.Dropout, shape ir.Dims, place int, x Number, step, first float64,
) Number {
	size := shape.Size() / shape.At(0)
	element := place % size
	sample, at := uint32(int(first)+place/size), uint64(step)
	counter := [4]uint32{uint32(element / 4), sample, uint32(at), uint32(at >> 32)}
	words := philox(counter, [2]uint32{op.Seed, op.Op})
	u := float64(words[element%4]) / (1 << 32)
	if a.single {
		u = float64(words[element%4]>>8) / (1 << 24)
	}
	if u < op.P {
		return Number{}
	}
	share := Number{Value: 1 / (1 - op.P)}
	return a.mul(x, a.rounded(share.Value, 0, false))
}

// philox is Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011).
//
// Origin: Philox
func philox(c [4]uint32, key [2]uint32) [4]uint32 {
	for range 10 {
		p, q := uint64(c[0])*0xD2511F53, uint64(c[2])*0xCD9E8D57
		c[0], c[2] = uint32(q>>32)^c[1]^key[0], uint32(p>>32)^c[3]^key[1]
		c[1], c[3] = uint32(q), uint32(p)
		key[0], key[1] = key[0]+0x9E3779B9, key[1]+0xBB67AE85
	}
	return c
}

// do evaluates functions of two numbers in reductions of layers.
func (a arithmetic) do(f fuse.Op, x Number) Number {
	y, err := a.unary(f, x)
	if err != nil {
		return Number{math.NaN(), math.Inf(1)}
	}
	return y
}
