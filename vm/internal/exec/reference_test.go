package exec_test

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// array is a value of the reference: its elements in row-major order, as float64 whatever the
// dtype.
type array struct {
	shape ir.Dims
	data  []float64
}

func (a array) at(index ...int) float64 { return a.data[a.place(index...)] }

// place returns where an element is.
func (a array) place(index ...int) int {
	at := 0
	for i, x := range index {
		at = at*a.shape.At(i) + x
	}
	return at
}

// fill returns an array whose elements are f of their index.
func fill(shape ir.Dims, f func(index []int) float64) array {
	a := array{shape, make([]float64, shape.Size())}
	index := make([]int, shape.Len())
	for i := range a.data {
		a.data[i] = f(index)
		for axis := len(index) - 1; axis >= 0; axis-- {
			if index[axis]++; index[axis] < shape.At(axis) {
				break
			}
			index[axis] = 0
		}
	}
	return a
}

// reference computes a program value by value, by index and in float64, and rounds each value
// to its dtype. It shares no code with what it tests.
func reference(p *ir.Program, inputs []array) []array {
	values := make([]array, len(p.Values))
	for i, v := range p.Values {
		of, number := v, 0
		if r, ok := v.Op.(ir.Result); ok {
			of, number = p.Values[v.Args[0]], r.Index
		}
		args := make([]array, len(of.Args))
		for j, a := range of.Args {
			args[j] = values[a]
		}
		values[i] = evaluate(of, number, args, inputs)
		for j, x := range values[i].data {
			if v.DType == backend.F32 {
				values[i].data[j] = float64(float32(x))
			}
		}
	}
	return values
}

// evaluate returns one of the results of a value's operation.
func evaluate(v ir.Value, number int, args, inputs []array) array {
	switch op := v.Op.(type) {
	case ir.Input:
		return array{v.Shape, append([]float64{}, inputs[op.Index].data...)}
	case ir.Scalar:
		return array{v.Shape, []float64{op.Float()}}
	case ir.Reshape, ir.Copy:
		return array{v.Shape, append([]float64{}, args[0].data...)}
	case ir.Cast:
		return fill(v.Shape, func(i []int) float64 {
			if v.DType.Float() {
				return args[0].at(i...)
			}
			return math.Trunc(args[0].at(i...))
		})
	case ir.Unary:
		return fill(v.Shape, func(i []int) float64 { return function(op.Op, args[0].at(i...), 0) })
	case ir.Binary:
		return fill(v.Shape, func(i []int) float64 { return function(op.Op, args[0].at(i...), args[1].at(i...)) })
	case ir.Select:
		return fill(v.Shape, func(i []int) float64 {
			if args[0].at(i...) == float64(i[op.Axis]) {
				return args[1].at(i...)
			}
			return args[2].at(i...)
		})
	case ir.Where:
		return fill(v.Shape, func(i []int) float64 {
			if args[0].at(i...) != 0 {
				return args[1].at(i...)
			}
			return args[2].at(i...)
		})
	case ir.Permute, ir.Slice, ir.Broadcast, ir.Unslice, ir.Concat:
		return moved(v, args)
	case ir.MatMul:
		return multiplied(v, op, args[0], args[1])
	case ir.Reduce:
		return reduced(v, op, args[0])
	case ir.Gather:
		return fill(v.Shape, func(i []int) float64 {
			from := append([]int{}, i...)
			if from[op.Axis] = int(args[1].at(i[op.Axis])); from[op.Axis] < 0 || from[op.Axis] >= args[0].shape.At(op.Axis) {
				return math.NaN()
			}
			return args[0].at(from...)
		})
	case ir.GatherGrad:
		return fill(v.Shape, func(i []int) float64 {
			sum := 0.0
			for k, named := range args[1].data {
				if int(named) == i[op.Axis] {
					from := append([]int{}, i...)
					from[op.Axis] = k
					sum += args[0].at(from...)
				}
			}
			return sum
		})
	case ir.Attention:
		return attention(op, args)[number]
	case ir.AttentionGrad:
		return attentionGrad(op, args)[number]
	case ir.SoftMax:
		return softmax(v, op.Axis, op.Log, args[0])
	case ir.SoftMaxGrad:
		return softmaxGrad(v, op, args[0], args[1])
	}
	return image(v, args)
}

func function(f fuse.Op, x, y float64) float64 {
	truth := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	switch f {
	case fuse.Abs:
		return math.Abs(x)
	case fuse.Relu:
		return max(x, 0)
	case fuse.Sign:
		return truth(x > 0) - truth(x < 0)
	case fuse.Ceil:
		return math.Ceil(x)
	case fuse.Floor:
		return math.Floor(x)
	case fuse.Sin:
		return math.Sin(x)
	case fuse.Cos:
		return math.Cos(x)
	case fuse.Exp:
		return math.Exp(x)
	case fuse.Log:
		return math.Log(x)
	case fuse.Log2:
		return math.Log2(x)
	case fuse.Neg:
		return -x
	case fuse.Square:
		return x * x
	case fuse.Sqrt:
		return math.Sqrt(x)
	case fuse.Inv:
		return 1 / x
	case fuse.InvSqrt:
		return 1 / math.Sqrt(x)
	case fuse.Cube:
		return x * x * x
	case fuse.Tanh:
		return math.Tanh(x)
	case fuse.Sigmoid:
		return 1 / (1 + math.Exp(-x))
	case fuse.Log1p:
		return math.Log1p(x)
	case fuse.Expm1:
		return math.Expm1(x)
	case fuse.Softplus:
		return math.Log1p(math.Exp(x))
	case fuse.Erf:
		return math.Erf(x)
	case fuse.Add:
		return x + y
	case fuse.Sub:
		return x - y
	case fuse.Mul:
		return x * y
	case fuse.Div:
		return x / y
	case fuse.Pow:
		return math.Pow(x, y)
	case fuse.Less:
		return truth(x < y)
	case fuse.Greater:
		return truth(x > y)
	case fuse.LessEqual:
		return truth(x <= y)
	case fuse.GreaterEqual:
		return truth(x >= y)
	case fuse.Equal:
		return truth(x == y)
	case fuse.NotEqual:
		return truth(x != y)
	case fuse.Minimum:
		return min(x, y)
	case fuse.Maximum:
		return max(x, y)
	}
	panic("a function without a reference")
}

// moved evaluates operations that only move elements.
func moved(v ir.Value, args []array) array {
	return fill(v.Shape, func(i []int) float64 {
		x := args[0]
		from := append([]int{}, i...)
		switch op := v.Op.(type) {
		case ir.Permute:
			for to := range i {
				from[op.Axes.At(to)] = i[to]
			}
		case ir.Slice:
			from[op.Axis] = op.Start + op.Step*i[op.Axis]
		case ir.Broadcast:
			for axis := range from {
				from[axis] %= x.shape.At(axis)
			}
		case ir.Unslice:
			at := i[op.Axis] - op.Start
			if from[op.Axis] = at / op.Step; at < 0 || at%op.Step != 0 || at/op.Step >= x.shape.At(op.Axis) {
				return 0
			}
		case ir.Concat:
			for k := 0; from[op.Axis] >= args[k].shape.At(op.Axis); x = args[k] {
				from[op.Axis] -= args[k].shape.At(op.Axis)
				k++
			}
		}
		return x.at(from...)
	})
}

func multiplied(v ir.Value, op ir.MatMul, a, b array) array {
	n := v.Shape.Len()
	inner := a.shape.At(n - 1)
	if op.TransA {
		inner = a.shape.At(n - 2)
	}
	element := func(x array, batch []int, row, column int, transposed bool) float64 {
		if transposed {
			row, column = column, row
		}
		return x.at(append(append([]int{}, batch...), row, column)...)
	}
	return fill(v.Shape, func(i []int) float64 {
		sum := 0.0
		for k := range inner {
			sum += element(a, i[:n-2], i[n-2], k, op.TransA) * element(b, i[:n-2], k, i[n-1], op.TransB)
		}
		return sum
	})
}

// each calls f with every index of a shape.
func each(shape ir.Dims, f func(index []int)) {
	fill(shape, func(index []int) float64 {
		f(index)
		return 0
	})
}

// folds are the functions that reductions fold with.
var folds = map[backend.ReduceOp]fuse.Op{backend.Sum: fuse.Add, backend.Max: fuse.Maximum, backend.Min: fuse.Minimum}

func reduced(v ir.Value, op ir.Reduce, x array) array {
	y := fill(v.Shape, func([]int) float64 { return math.NaN() })
	each(x.shape, func(i []int) {
		at := 0
		for axis := range i {
			if !op.Axes.Has(axis) {
				at = at*x.shape.At(axis) + i[axis]
			}
		}
		if e := x.at(i...); math.IsNaN(y.data[at]) {
			y.data[at] = e
		} else {
			y.data[at] = function(folds[op.Op], y.data[at], e)
		}
	})
	return y
}

// along calls f with each run of elements along an axis.
func along(shape ir.Dims, axis int, f func(at []int)) {
	strides := shape.Strides()
	each(shape.With(axis, 1), func(i []int) {
		var at []int
		for k := range shape.At(axis) {
			i[axis] = k
			place := 0
			for a := range i {
				place += i[a] * strides.At(a)
			}
			at = append(at, place)
		}
		i[axis] = 0
		f(at)
	})
}

func softmax(v ir.Value, axis int, log bool, x array) array {
	y := array{v.Shape, make([]float64, len(x.data))}
	along(v.Shape, axis, func(at []int) {
		sum := 0.0
		for _, i := range at {
			sum += math.Exp(x.data[i])
		}
		for _, i := range at {
			if y.data[i] = math.Exp(x.data[i]) / sum; log {
				y.data[i] = x.data[i] - math.Log(sum)
			}
		}
	})
	return y
}

// softmaxGrad multiplies dy with the matrix of derivatives.
func softmaxGrad(v ir.Value, op ir.SoftMaxGrad, y, dy array) array {
	dx := array{v.Shape, make([]float64, len(y.data))}
	along(v.Shape, op.Axis, func(at []int) {
		for _, i := range at {
			for _, j := range at {
				d := 0.0
				if i == j {
					d = 1
				}
				if op.Log {
					dx.data[i] += dy.data[j] * (d - math.Exp(y.data[i]))
				} else {
					dx.data[i] += dy.data[j] * y.data[j] * (d - y.data[i])
				}
			}
		}
	})
	return dx
}

// zeros returns an array of zeros.
func zeros(shape ir.Dims) array { return array{shape, make([]float64, shape.Size())} }

// eachWeight calls f with each key that a query sees: their places in the arrays, and the key's weight.
func eachWeight(causal bool, scale float64, q, k array, f func(query, key int, weight float64)) (lse array) {
	queries, keys, size := q.shape.At(2), k.shape.At(2), q.shape.At(3)
	lse = zeros(q.shape.Without(3))
	for i := range lse.data {
		score := func(j int) float64 {
			s := 0.0
			for c := range size {
				s += q.data[i*size+c] * k.data[(i/queries*keys+j)*size+c]
			}
			return s * scale
		}
		sum := 0.0
		for _, add := range []bool{true, false} {
			for j := range keys {
				switch hidden := causal && j > i%queries+keys-queries; {
				case hidden:
				case add:
					sum += math.Exp(score(j))
				default:
					f(i*size, (i/queries*keys+j)*size, math.Exp(score(j))/sum)
				}
			}
		}
		lse.data[i] = math.Log(sum)
	}
	return lse
}

func attention(op ir.Attention, args []array) []array {
	q, k, v := args[0], args[1], args[2]
	y := zeros(q.shape)
	lse := eachWeight(op.Causal, op.Scale, q, k, func(query, key int, w float64) {
		for c := range q.shape.At(3) {
			y.data[query+c] += w * v.data[key+c]
		}
	})
	return []array{y, lse}
}

func attentionGrad(op ir.AttentionGrad, args []array) []array {
	q, k, v, y, dy := args[0], args[1], args[2], args[3], args[5]
	dq, dk, dv := zeros(q.shape), zeros(k.shape), zeros(k.shape)
	eachWeight(op.Causal, op.Scale, q, k, func(query, key int, w float64) {
		ds := 0.0
		for c := range q.shape.At(3) {
			ds += dy.data[query+c] * (v.data[key+c] - y.data[query+c])
		}
		for c := range q.shape.At(3) {
			dq.data[query+c] += op.Scale * w * ds * k.data[key+c]
			dk.data[key+c] += op.Scale * w * ds * q.data[query+c]
			dv.data[key+c] += w * dy.data[query+c]
		}
	})
	return []array{dq, dk, dv}
}

// image evaluates operations with windows.
func image(v ir.Value, args []array) array {
	x := args[0]
	switch op := v.Op.(type) {
	case ir.Im2Col:
		return fill(v.Shape, func(i []int) float64 {
			c, h, w, ok := pixel(op.Window, x.shape, i)
			if !ok {
				return 0
			}
			return x.at(i[0], c, h, w)
		})
	case ir.Col2Im:
		y := fill(v.Shape, func([]int) float64 { return 0 })
		each(x.shape, func(i []int) {
			if c, h, w, ok := pixel(op.Window, v.Shape, i); ok {
				y.data[((i[0]*v.Shape.At(1)+c)*v.Shape.At(2)+h)*v.Shape.At(3)+w] += x.at(i...)
			}
		})
		return y
	case ir.Convolution:
		return convolved(v, op, args)
	case ir.MaxPool:
		seen := rectified(x, op.Rectified)
		return fill(v.Shape, func(i []int) float64 { return seen.data[winner(op.Window, seen, i)] })
	case ir.MaxPoolGrad:
		dx, seen := fill(v.Shape, func([]int) float64 { return 0 }), rectified(x, op.Rectified)
		each(args[1].shape, func(i []int) {
			if at := winner(op.Window, seen, i); !op.Rectified || !(x.data[at] < 0) {
				dx.data[at] += args[1].at(i...)
			}
		})
		return dx
	}
	panic("an operation without a reference")
}

// rectified returns x without negative numbers.
func rectified(x array, relu bool) array {
	return fill(x.shape, func(i []int) float64 {
		if y := x.at(i...); !relu || !(y < 0) {
			return y
		}
		return 0
	})
}

// convolved evaluates a convolution or one of its gradients.
func convolved(v ir.Value, op ir.Convolution, args []array) array {
	dst := fill(v.Shape, func([]int) float64 { return 0 })
	x, w, y := args[0], args[1], dst
	switch op.Pass {
	case kernels.InputGradient:
		x, y = dst, args[0]
	case kernels.FilterGradient:
		w, y = dst, args[1]
	}
	each(y.shape, func(i []int) {
		each(w.shape.With(0, 1), func(k []int) {
			h, column := i[2]*op.Window.StrideH-op.Window.PadH+k[2]*op.Window.DilationH, i[3]*op.Window.StrideW-op.Window.PadW+k[3]*op.Window.DilationW
			if h < 0 || h >= x.shape.At(2) || column < 0 || column >= x.shape.At(3) {
				return
			}
			atX, atW, atY := x.place(i[0], k[1], h, column), w.place(i[1], k[1], k[2], k[3]), y.place(i...)
			switch op.Pass {
			case kernels.Forward:
				y.data[atY] += x.data[atX] * w.data[atW]
			case kernels.InputGradient:
				x.data[atX] += y.data[atY] * w.data[atW]
			case kernels.FilterGradient:
				w.data[atW] += x.data[atX] * y.data[atY]
			}
		})
	})
	return dst
}

// pixel returns which pixel element i of the patches shows.
func pixel(w ir.Window, image ir.Dims, i []int) (c, h, column int, ok bool) {
	c = i[3] / (w.H * w.W)
	h = i[1]*w.StrideH - w.PadH + i[3]/w.W%w.H*w.DilationH
	column = i[2]*w.StrideW - w.PadW + i[3]%w.W*w.DilationW
	return c, h, column, h >= 0 && h < image.At(2) && column >= 0 && column < image.At(3)
}

// winner returns the place of the first largest element of window i, or of the last NaN.
func winner(w ir.Window, x array, i []int) int {
	best := -1
	for kh := range w.H {
		for kw := range w.W {
			h, column := i[2]*w.StrideH-w.PadH+kh, i[3]*w.StrideW-w.PadW+kw
			if h < 0 || h >= x.shape.At(2) || column < 0 || column >= x.shape.At(3) {
				continue
			}
			at := ((i[0]*x.shape.At(1)+i[1])*x.shape.At(2)+h)*x.shape.At(3) + column
			if e := x.data[at]; best < 0 || e > x.data[best] || e != e {
				best = at
			}
		}
	}
	return best
}
