package simd

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// UnaryLoop is what Unary means, and computes other types, too: dst[i] = op(x[i]). x has at least
// len(dst) elements and may be dst.
func UnaryLoop[T number](op Op, dst, x []T) {
	switch d := any(dst).(type) {
	case []float32:
		unaryFloat(op, d, any(x).([]float32))
	case []float64:
		unaryFloat(op, d, any(x).([]float64))
	default:
		unaryNumber(op, dst, x)
	}
}

// BinaryLoop is what Binary means, and computes other types, too: dst[i] = op(x[i], y[i]).
func BinaryLoop[T number](op Op, dst, x, y []T) {
	switch d := any(dst).(type) {
	case []float32:
		binaryFloat(op, d, any(x).([]float32), any(y).([]float32))
	case []float64:
		binaryFloat(op, d, any(x).([]float64), any(y).([]float64))
	default:
		binaryInt(op, dst, x, y)
	}
}

// each computes f of each element. It is inlined, and f in it.
func each[T number](d, x []T, f func(x T) T) {
	for i, v := range x[:len(d)] {
		d[i] = f(v)
	}
}

// unaryNumber is the functions that every type has.
func unaryNumber[T number](op Op, d, x []T) {
	switch op {
	case Neg:
		each(d, x, func(v T) T { return -v })
	case Abs:
		each(d, x, func(v T) T {
			if v < 0 {
				return -v
			}
			return v
		})
	case Sign:
		each(d, x, sign[T])
	case Square:
		each(d, x, func(v T) T { return v * v })
	case Cube:
		each(d, x, func(v T) T { return v * v * v })
	case Relu:
		each(d, x, func(v T) T {
			if v < 0 {
				return 0
			}
			return v
		})
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

// rounded returns a function that is right up to rounding, for f64 and for f32; nil for others.
func rounded(op Op) (double, single func(float64) float64) {
	switch op {
	case Exp:
		return math.Exp, exp32
	case Expm1:
		return math.Expm1, expm132
	case Log:
		return math.Log, log32
	case Log2:
		return log2, log232
	case Log1p:
		return math.Log1p, log1p32
	case Tanh:
		return math.Tanh, tanh32
	case Sigmoid:
		return sigmoid, sigmoid32
	case Softplus:
		return softplus, softplus32
	case Sin:
		return sine, sine
	case Cos:
		return cosine, cosine
	case Erf:
		return math.Erf, math.Erf
	}
	return nil, nil
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
func unaryFloat[T Float](op Op, d, x []T) {
	f, single := rounded(op)
	if _, is := any(d).([]float32); is {
		f = single
	}
	switch {
	case f != nil:
		each(d, x, func(v T) T { return T(f(float64(v))) })
	case op == Abs:
		each(d, x, func(v T) T { return T(math.Abs(float64(v))) })
	case op == Inv:
		each(d, x, func(v T) T { return 1 / v })
	case op == Sqrt:
		each(d, x, func(v T) T { return T(math.Sqrt(float64(v))) })
	case op == InvSqrt:
		each(d, x, func(v T) T { return 1 / T(math.Sqrt(float64(v))) })
	case op == Ceil:
		each(d, x, func(v T) T { return T(math.Ceil(float64(v))) })
	case op == Floor:
		each(d, x, func(v T) T { return T(math.Floor(float64(v))) })
	default:
		unaryNumber(op, d, x)
	}
}

// truth is a comparison's result.
func truth[T number](b bool) T {
	if b {
		return 1
	}
	return 0
}

// pairs computes f of each pair of elements, as each does of elements.
func pairs[T number](d, x, y []T, f func(x, y T) T) {
	x, y = x[:len(d)], y[:len(d)]
	for i := range d {
		d[i] = f(x[i], y[i])
	}
}

// binaryNumber is the functions that are the same for every type.
func binaryNumber[T number](op Op, d, x, y []T) {
	switch op {
	case Add:
		combine(backend.Sum, d, x, y)
	case Mul:
		combine(backend.Prod, d, x, y)
	case Minimum:
		combine(backend.Min, d, x, y)
	case Maximum:
		combine(backend.Max, d, x, y)
	case Sub:
		pairs(d, x, y, func(x, y T) T { return x - y })
	case Less:
		pairs(d, x, y, func(x, y T) T { return truth[T](x < y) })
	case LessEqual:
		pairs(d, x, y, func(x, y T) T { return truth[T](x <= y) })
	case Greater:
		pairs(d, x, y, func(x, y T) T { return truth[T](x > y) })
	case GreaterEqual:
		pairs(d, x, y, func(x, y T) T { return truth[T](x >= y) })
	case Equal:
		pairs(d, x, y, func(x, y T) T { return truth[T](x == y) })
	case NotEqual:
		pairs(d, x, y, func(x, y T) T { return truth[T](x != y) })
	}
}

func binaryFloat[T Float](op Op, d, x, y []T) {
	switch op {
	case Div:
		pairs(d, x, y, func(x, y T) T { return x / y })
	case Pow:
		f := math.Pow
		if _, single := any(x).([]float32); single {
			f = pow32
		}
		pairs(d, x, y, func(x, y T) T { return T(f(float64(x), float64(y))) })
	default:
		binaryNumber(op, d, x, y)
	}
}

func binaryInt[T number](op Op, d, x, y []T) {
	if op != Div {
		binaryNumber(op, d, x, y)
		return
	}
	pairs(d, x, y, func(x, y T) T {
		if y == 0 {
			return 0
		}
		return x / y
	})
}
