package kernels

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/internal/simd"
)

// narrowOne rounds one float64 to 16 bits, once.
func narrowOne[H half](x float64) H {
	wide, narrow := [1]float32{toOdd(x)}, [1]H{}
	narrowAll(narrow[:], wide[:])
	return narrow[0]
}

func fill[T backend.Element](dst backend.Buffer, value T) {
	d := backend.View[T](dst)
	for i := range d {
		d[i] = value
	}
}

// unary is the functions that every type has.
func unary[T number](op backend.UnaryOp, d, x []T) {
	x = x[:len(d)]
	switch op {
	case backend.Neg:
		for i := range d {
			d[i] = -x[i]
		}
	case backend.Abs:
		for i, v := range x {
			if v < 0 {
				v = -v
			}
			d[i] = v
		}
	case backend.Sign:
		for i := range d {
			d[i] = sign(x[i])
		}
	case backend.Square:
		for i := range d {
			d[i] = x[i] * x[i]
		}
	case backend.Cube:
		for i := range d {
			d[i] = x[i] * x[i] * x[i]
		}
	case backend.Relu:
		for i, v := range x {
			if v < 0 {
				v = 0
			}
			d[i] = v
		}
	}
}

func sign[T number](x T) T {
	switch {
	case x > 0:
		return 1
	case x < 0:
		var zero T
		return zero - 1
	}
	return x
}

// rounded are the functions that are right up to rounding, from Exp on.
var rounded = [...]func(float64) float64{
	math.Exp, math.Expm1, math.Log, log2, math.Log1p, math.Tanh, sigmoid, softplus,
}

// log2 keeps the digits of results near 0, where math.Log2 subtracts two numbers near 1.
func log2(x float64) float64 {
	fraction, exponent := math.Frexp(x)
	if fraction < math.Sqrt2/2 {
		fraction, exponent = 2*fraction, exponent-1
	}
	return float64(exponent) + math.Log(fraction)*(1/math.Ln2)
}

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }

// softplus keeps exp from overflowing.
func softplus(x float64) float64 { return max(x, 0) + math.Log1p(math.Exp(-math.Abs(x))) }

// unaryFloat is all functions.
func unaryFloat[T float](op backend.UnaryOp, d, x []T) {
	x = x[:len(d)]
	switch {
	case simd.Unary(simd.Best(), op, d, x):
		return
	case op.Rounded():
		f := rounded[op-backend.Exp]
		if _, single := any(d).([]float32); single {
			f = rounded32[op-backend.Exp]
		}
		for i := range d {
			d[i] = T(f(float64(x[i])))
		}
		return
	case op == backend.Abs:
		for i := range d {
			d[i] = T(math.Abs(float64(x[i])))
		}
		return
	}
	switch op {
	case backend.Inv:
		for i := range d {
			d[i] = 1 / x[i]
		}
	case backend.Sqrt:
		for i := range d {
			d[i] = T(math.Sqrt(float64(x[i])))
		}
	case backend.InvSqrt:
		for i := range d {
			d[i] = 1 / T(math.Sqrt(float64(x[i])))
		}
	case backend.Ceil:
		for i := range d {
			d[i] = T(math.Ceil(float64(x[i])))
		}
	case backend.Floor:
		for i := range d {
			d[i] = T(math.Floor(float64(x[i])))
		}
	default:
		unary(op, d, x)
	}
}

// unaryHalf computes in 32 bits, a block at a time.
func unaryHalf[H half](op backend.UnaryOp, dst, x backend.Buffer) {
	var scratch [block]float32
	d, s := backend.View[H](dst), backend.View[H](x)
	for lo := 0; lo < len(d); lo += block {
		hi := min(lo+block, len(d))
		wide := scratch[:hi-lo]
		widenAll(wide, s[lo:hi])
		unaryFloat(op, wide, wide)
		narrowAll(d[lo:hi], wide)
	}
}

// truth is a comparison's result.
func truth[T number](b bool) T {
	if b {
		return 1
	}
	return 0
}

// binary is the functions that are the same for every type.
func binary[T number](op backend.BinaryOp, d, x, y []T) {
	x, y = x[:len(d)], y[:len(d)]
	switch op {
	case backend.Add:
		combine(backend.Sum, d, x, y)
	case backend.Mul:
		combine(backend.Prod, d, x, y)
	case backend.Minimum:
		combine(backend.Min, d, x, y)
	case backend.Maximum:
		combine(backend.Max, d, x, y)
	case backend.Sub:
		for i := range d {
			d[i] = x[i] - y[i]
		}
	case backend.Less:
		for i := range d {
			d[i] = truth[T](x[i] < y[i])
		}
	case backend.LessEqual:
		for i := range d {
			d[i] = truth[T](x[i] <= y[i])
		}
	case backend.Greater:
		for i := range d {
			d[i] = truth[T](x[i] > y[i])
		}
	case backend.GreaterEqual:
		for i := range d {
			d[i] = truth[T](x[i] >= y[i])
		}
	case backend.Equal:
		for i := range d {
			d[i] = truth[T](x[i] == y[i])
		}
	case backend.NotEqual:
		for i := range d {
			d[i] = truth[T](x[i] != y[i])
		}
	}
}

func binaryFloat[T float](op backend.BinaryOp, d, x, y []T) {
	x, y = x[:len(d)], y[:len(d)]
	if simd.Binary(simd.Best(), op, d, x, y) {
		return
	}
	switch op {
	case backend.Div:
		for i := range d {
			d[i] = x[i] / y[i]
		}
	case backend.Pow:
		f := math.Pow
		if _, single := any(x).([]float32); single {
			f = pow32
		}
		for i := range d {
			d[i] = T(f(float64(x[i]), float64(y[i])))
		}
	default:
		binary(op, d, x, y)
	}
}

func binaryInt[T int32 | int64 | byte](op backend.BinaryOp, d, x, y []T) {
	if op != backend.Div {
		binary(op, d, x, y)
		return
	}
	x, y = x[:len(d)], y[:len(d)]
	for i := range d {
		if y[i] == 0 {
			d[i] = 0
		} else {
			d[i] = x[i] / y[i]
		}
	}
}

// binaryHalf computes in 32 bits, a block at a time.
func binaryHalf[H half](op backend.BinaryOp, dst, x, y backend.Buffer) {
	var left, right [block]float32
	d, a, b := backend.View[H](dst), backend.View[H](x), backend.View[H](y)
	for lo := 0; lo < len(d); lo += block {
		hi := min(lo+block, len(d))
		l, r := left[:hi-lo], right[:hi-lo]
		widenAll(l, a[lo:hi])
		widenAll(r, b[lo:hi])
		binaryFloat(op, l, l, r)
		narrowAll(d[lo:hi], l)
	}
}

// load reads elements as the type they are computed in.
func load[T number, S backend.Element](out []T, x []S) {
	switch x := any(x).(type) {
	case []backend.Float16:
		widenAll(any(out).([]float32), x)
	case []backend.BFloat16:
		widenAll(any(out).([]float32), x)
	case []T:
		copy(out, x)
	}
}

// copyStrided moves elements, whatever their type.
func copyStrided[T any](d, s []T, shape, strides []int) {
	switch {
	case len(shape) == 0:
		d[0] = s[0]
	case len(shape) > 1:
		row := len(d) / shape[0]
		for i := range shape[0] {
			copyStrided(d[i*row:(i+1)*row], s[i*strides[0]:], shape[1:], strides[1:])
		}
	case strides[0] == 1:
		copy(d, s)
	default:
		for i := range d {
			d[i] = s[i*strides[0]]
		}
	}
}
