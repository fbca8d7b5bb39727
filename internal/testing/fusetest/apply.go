package fusetest

import (
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// apply computes one operation, and how far a device may be off.
func apply(o fuse.Op, t backend.DType, args []number) number {
	v := compute(o, t, args)
	exact := !o.Rounded()
	for _, a := range args {
		v.loose = v.loose || a.loose
		exact = exact && a.err == 0
	}
	if v.loose || exact {
		return v
	}
	return bound(o, v, args)
}

// bound looks at what the operation gives at the corners of its operands' errors. All operations
// are monotone between them, except those that jump, and waves.
func bound(o fuse.Op, v number, args []number) number {
	wave := 0.0
	for corner := range 1 << len(args) {
		moved := slices.Clone(args)
		for i := range moved {
			if corner>>i&1 == 1 {
				moved[i].f += moved[i].err
			} else {
				moved[i].f -= moved[i].err
			}
			if moved[i].t == backend.F32 && o != fuse.Cast && o != fuse.Where {
				moved[i].t = backend.F64
			}
			wave += moved[i].err
		}
		t := v.t
		if t == backend.F32 && o != fuse.Cast {
			t = backend.F64
		}
		w := compute(o, t, moved)
		switch {
		case !v.t.Float():
			v.loose = v.loose || w.i != v.i
		case v.f != v.f || math.IsInf(v.f, 0):
			v.loose = v.loose || !(w.f == v.f || w.f != w.f && v.f != v.f)
		default:
			v.loose = v.loose || w.f != w.f || jumps(o) && w.f != v.f
			v.err = max(v.err, 2*math.Abs(w.f-v.f))
		}
	}
	divides := o == fuse.Div || o == fuse.Inv || o == fuse.Pow || o == fuse.InvSqrt
	if last := args[len(args)-1]; divides && math.Abs(last.f) <= last.err || divides &&
		math.Abs(args[0].f) <= args[0].err {
		v.loose = true
	}
	if equality := o == fuse.Equal || o == fuse.NotEqual; equality &&
		math.Abs(args[0].f-args[1].f) <= args[0].err+args[1].err {
		v.loose = true // no corner need be where the operands meet
	}
	if o == fuse.Pow && args[0].f < args[0].err && args[1].err > 0 {
		v.loose = true // of negative numbers, only integers are powers
	}
	if !v.t.Float() || v.f != v.f || math.IsInf(v.f, 0) {
		return v
	}
	if o == fuse.Sin || o == fuse.Cos {
		v.err += wave
	}
	if v.err += 5 * ulp(v.t, v.f); o == fuse.Pow {
		v.err += 64 * ulp(backend.F64, v.f) // of math.Pow
	}
	v.loose = v.loose || math.Abs(v.f)+v.err > largest(v.t)
	return v
}

// jumps reports whether an operation is not continuous.
func jumps(o fuse.Op) bool {
	return o == fuse.Sign || o == fuse.Ceil || o == fuse.Floor || o >= fuse.Less &&
		o <= fuse.NotEqual
}

func largest(t backend.DType) float64 {
	if t == backend.F32 {
		return math.MaxFloat32 / 2
	}
	return math.MaxFloat64 / 2
}

// compute computes one operation as its documentation says.
func compute(o fuse.Op, t backend.DType, args []number) number {
	x := args[0]
	switch {
	case o == fuse.Cast:
		return cast(t, x)
	case o == fuse.Where:
		if x.f != 0 || x.i != 0 || x.f != x.f {
			return number{t: t, f: args[1].f, i: args[1].i, err: args[1].err}
		}
		return number{t: t, f: args[2].f, i: args[2].i, err: args[2].err}
	case o == fuse.Uniform:
		return number{t: t, f: uniform(args[0].i, args[1].i, args[2].i, args[3].i, t)}
	case t.Float() && len(args) == 1:
		return number{t: t, f: round(t, floats1(o, t, x.f))}
	case t.Float():
		return number{t: t, f: round(t, floats2(o, x.f, args[1].f))}
	case len(args) == 1:
		return number{t: t, i: wrap(t, integers1(o, x.i))}
	}
	return number{t: t, i: wrap(t, integers2(o, x.i, args[1].i))}
}

// round rounds a result to its type. Sums, products, quotients and square roots of float32
// may be rounded to float64 before.
func round(t backend.DType, f float64) float64 {
	if t == backend.F32 {
		return float64(float32(f))
	}
	return f
}

func wrap(t backend.DType, i int64) int64 {
	if t == backend.I32 {
		return int64(int32(i))
	}
	return i
}

func floats1(o fuse.Op, t backend.DType, x float64) float64 {
	switch o {
	case fuse.Neg:
		return -x
	case fuse.Abs:
		return math.Abs(x)
	case fuse.Sign:
		if x > 0 {
			return 1
		} else if x < 0 {
			return -1
		}
		return x
	case fuse.Square:
		return x * x
	case fuse.Cube:
		return round(t, x*x) * x
	case fuse.Relu:
		if x < 0 {
			return 0
		}
		return x
	case fuse.Inv:
		return 1 / x
	case fuse.InvSqrt:
		return 1 / round(t, math.Sqrt(x))
	case fuse.Sigmoid:
		return 1 / (1 + math.Exp(-x))
	case fuse.Sin, fuse.Cos:
		if math.Abs(x) > 1<<29 {
			return Wave(x, o == fuse.Cos)
		} else if o == fuse.Sin {
			return math.Sin(x)
		}
		return math.Cos(x)
	case fuse.Softplus:
		return max(x, 0) + math.Log1p(math.Exp(-math.Abs(x)))
	}
	return map[fuse.Op]func(float64) float64{
		fuse.Sqrt: math.Sqrt, fuse.Ceil: math.Ceil, fuse.Floor: math.Floor, fuse.Exp: math.Exp,
		fuse.Expm1: math.Expm1,
		fuse.Log:   math.Log, fuse.Log2: binaryLogarithm, fuse.Log1p: math.Log1p,
		fuse.Tanh: math.Tanh,
		fuse.Erf:  math.Erf,
	}[o](x)
}

// binaryLogarithm is exact near 1, unlike math.Log2.
func binaryLogarithm(x float64) float64 {
	m, k := math.Frexp(x)
	if m < math.Sqrt2/2 {
		m, k = 2*m, k-1
	}
	return float64(k) + math.Log(m)*(1/math.Ln2)
}

func floats2(o fuse.Op, x, y float64) float64 {
	switch o {
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
	case fuse.Minimum:
		return min(x, y)
	case fuse.Maximum:
		return max(x, y)
	}
	if compare(o, x < y, x == y, x > y) {
		return 1
	}
	return 0
}

func integers1(o fuse.Op, x int64) int64 {
	switch o {
	case fuse.Neg:
		return -x
	case fuse.Abs:
		if x < 0 {
			return -x
		}
		return x
	case fuse.Sign:
		if x > 0 {
			return 1
		} else if x < 0 {
			return -1
		}
		return 0
	case fuse.Square:
		return x * x
	case fuse.Cube:
		return x * x * x
	}
	return max(x, 0) // Relu
}

func integers2(o fuse.Op, x, y int64) int64 {
	switch o {
	case fuse.Add:
		return x + y
	case fuse.Sub:
		return x - y
	case fuse.Mul:
		return x * y
	case fuse.Div:
		if y == 0 {
			return 0
		}
		return x / y
	case fuse.Minimum:
		return min(x, y)
	case fuse.Maximum:
		return max(x, y)
	}
	if compare(o, x < y, x == y, x > y) {
		return 1
	}
	return 0
}

// compare returns the result of a comparison; a NaN is neither less, nor equal, nor greater.
func compare(o fuse.Op, less, equal, greater bool) bool {
	switch o {
	case fuse.Less:
		return less
	case fuse.LessEqual:
		return less || equal
	case fuse.Greater:
		return greater
	case fuse.GreaterEqual:
		return greater || equal
	case fuse.Equal:
		return equal
	}
	return !equal
}

// cast is Cast.
func cast(t backend.DType, x number) number {
	switch {
	case x.t.Float() && t.Float():
		return number{t: t, f: round(t, x.f)}
	case t == backend.F32:
		return number{t: t, f: float64(float32(x.i))}
	case t.Float():
		return number{t: t, f: float64(x.i)}
	case !x.t.Float():
		return number{t: t, i: wrap(t, x.i)}
	}
	least, most := int64(math.MinInt64), int64(math.MaxInt64)
	if t == backend.I32 {
		least, most = math.MinInt32, math.MaxInt32
	}
	switch {
	case x.f != x.f:
		return number{t: t}
	case x.f <= float64(least):
		return number{t: t, i: least}
	case x.f >= float64(most):
		return number{t: t, i: most}
	}
	return number{t: t, i: int64(x.f)}
}

// uniform is Uniform, step by step as in the paper.
//
// Origin: Philox
func uniform(key, step, sample, element int64, t backend.DType) float64 {
	var counter = [4]uint32{uint32(element >> 2), uint32(sample), uint32(step), uint32(step >> 32)}
	k := [2]uint32{uint32(key), uint32(key >> 32)}
	for range 10 {
		left, right := uint64(0xD2511F53)*uint64(counter[0]), uint64(0xCD9E8D57)*uint64(counter[2])
		counter = [4]uint32{
			uint32(right>>32) ^ counter[1] ^ k[0], uint32(right),
			uint32(left>>32) ^ counter[3] ^ k[1], uint32(left),
		}
		k[0] += 0x9E3779B9
		k[1] += 0xBB67AE85
	}
	w := counter[element&3]
	if t == backend.F32 {
		return float64(w>>8) / (1 << 24)
	}
	return float64(w) / (1 << 32)
}

// fold folds values in order, floats in float64, and bounds what the order may change.
func fold(op backend.ReduceOp, list []number) number {
	t := list[0].t
	v := number{t: t, f: list[0].f, i: list[0].i}
	sum, err, logs := 0.0, 0.0, 0.0
	for i, x := range list {
		v.loose = v.loose || x.loose
		if !math.IsInf(x.f, 0) {
			sum += math.Abs(x.f)
		}
		if logs += math.Abs(math.Log2(math.Abs(x.f))); x.f == x.f && op == backend.Prod {
			err += x.err/math.Abs(x.f) + ulp(t, 1)
		} else {
			err += x.err
		}
		if i == 0 {
			continue
		}
		switch op {
		case backend.Sum, backend.Avg:
			v.f, v.i = v.f+x.f, v.i+x.i
		case backend.Prod:
			v.f, v.i = v.f*x.f, v.i*x.i
		case backend.Min:
			v.f, v.i = min(v.f, x.f), min(v.i, x.i)
		case backend.Max:
			v.f, v.i = max(v.f, x.f), max(v.i, x.i)
		}
	}
	v.i = wrap(t, v.i)
	if op == backend.Avg {
		v.f, v.i = v.f/float64(len(list)), v.i/int64(len(list))
	}
	if v.f == v.f && t.Float() {
		v.err = err
		switch op {
		case backend.Sum, backend.Avg:
			v.err += float64(len(list)) * ulp(t, sum)
			v.loose = v.loose || sum > largest(t) // an order may overflow
		case backend.Prod:
			v.err = 2 * err * math.Abs(v.f)
			v.loose = v.loose || logs > 100 || math.IsNaN(v.err)
		}
	}
	v.f = round(t, v.f)
	return v
}
