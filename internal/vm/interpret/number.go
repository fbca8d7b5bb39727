package interpret

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Number is an element, and how far that of a machine may lie from it. Where that has no bound, the
// machine's may be anything, even NaN, and the value, which may be NaN as well, decides nothing.
type Number struct{ Value, Err float64 }

// arithmetic rounds to a dtype.
type arithmetic struct {
	single, whole bool    // F32, or integers
	unit          float64 // the largest relative error of one rounding
	digits        int     // bits of a significand
}

// slack is how many roundings a function other than + - * / and square root may be wrong by.
const slack = 16

func in(d backend.DType) arithmetic {
	switch {
	case d == backend.F32:
		return arithmetic{true, false, 0x1p-24, 24}
	case d.Float():
		return arithmetic{false, false, 0x1p-53, 53}
	}
	return arithmetic{false, true, 0, 53}
}

// rounded returns x, which is exact or not, as the dtype has it, with the bound of an operation
// that begins with err. A machine's operands within err may be rounded where x is not.
func (a arithmetic) rounded(x, err float64, exact bool) Number {
	if err == 0 && !finite(x) {
		return Number{Value: x}
	}
	y := x
	if a.single {
		y = float64(float32(x))
	}
	if err > 0 || !exact || x != y {
		err = err*(1+4*a.unit) + 2*a.unit*math.Abs(x) + a.tiny()
	}
	if math.IsNaN(err) || err > 0 && math.Abs(x) > a.huge() {
		err = math.Inf(1)
	}
	return Number{y, err}
}

// huge is beyond what the square of a number may be: another order of operations may overflow.
func (a arithmetic) huge() float64 {
	if a.single {
		return 0x1p60
	}
	return 0x1p500
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// tiny is what may become of a number too small for the dtype: devices make it 0.
func (a arithmetic) tiny() float64 {
	if a.single {
		return 0x1p-126
	}
	return 0x1p-1022
}

func (a arithmetic) add(x, y Number) Number {
	s := x.Value + y.Value
	t := s - x.Value
	return a.rounded(s, x.Err+y.Err, (x.Value-(s-t))+(y.Value-t) == 0)
}

func (a arithmetic) neg(x Number) Number { return Number{-x.Value, x.Err} }

func (a arithmetic) sub(x, y Number) Number { return a.add(x, a.neg(y)) }

func (a arithmetic) mul(x, y Number) Number {
	p := x.Value * y.Value
	return a.rounded(p, productErr(x, y), math.FMA(x.Value, y.Value, -p) == 0)
}

func productErr(x, y Number) float64 {
	if x.Err == 0 && y.Err == 0 {
		return 0
	}
	return math.Abs(x.Value)*y.Err + math.Abs(y.Value)*x.Err + x.Err*y.Err
}

func (a arithmetic) div(x, y Number) Number {
	q := x.Value / y.Value
	if y.Err == 0 && x.Err == 0 {
		return a.rounded(q, 0, math.FMA(q, y.Value, -x.Value) == 0)
	}
	least := math.Abs(y.Value) - y.Err
	if !(least > 0) {
		return Number{q, math.Inf(1)}
	}
	return a.rounded(q, (x.Err+math.Abs(q)*y.Err)/least, false)
}

// function returns f(x).
func (a arithmetic) function(f fuse.Op, x Number) (Number, error) {
	of, ok := functions[f]
	if !ok {
		return x, fmt.Errorf("interpret: no function %v", f)
	}
	y := of.f(x.Value)
	if math.IsInf(x.Err, 1) { // of NaN, y is NaN, too
		return Number{y, x.Err}, nil
	}
	err := 0.0
	if x.Err > 0 {
		low, high := of.f(x.Value-x.Err), of.f(x.Value+x.Err)
		err = max(math.Abs(low-y), math.Abs(high-y))
		if of.turns && math.Abs(x.Value) <= x.Err { // its extreme lies between
			err = max(err, math.Abs(of.f(0)-y))
		}
		if of.waves {
			err = x.Err
		}
	}
	if of.exact {
		return Number{y, err}, nil
	}
	if err == 0 && !finite(y) {
		return Number{Value: y}, nil
	}
	err += slack * a.unit * max(math.Abs(y), 1e-3)
	if of.waves {
		err += slack * a.unit * math.Abs(x.Value)
		if math.Abs(x.Value) > 1<<20 { // a machine may give up
			err = math.Inf(1)
		}
	}
	return a.rounded(y, err, false), nil
}

// function is how one of [fuse.Op] is computed: what is monotone has its extremes at the ends
// of an interval.
type function struct {
	f     func(x float64) float64
	exact bool // gives a number of the dtype
	turns bool // at 0, and is monotone on both sides
	waves bool // is no steeper than x, and not monotone
}

var functions = map[fuse.Op]function{
	fuse.Abs: {f: math.Abs, exact: true, turns: true}, fuse.Neg: {f: func(x float64) float64 {
		return -x
	}, exact: true},
	fuse.Relu: {f: relu, exact: true},
	fuse.Sign: {f: sign, exact: true, turns: true},
	fuse.Ceil: {f: math.Ceil, exact: true}, fuse.Floor: {f: math.Floor, exact: true},
	fuse.Sin: {f: math.Sin, waves: true}, fuse.Cos: {f: math.Cos, waves: true},
	fuse.Exp: {f: math.Exp}, fuse.Expm1: {f: math.Expm1},
	fuse.Log: {f: math.Log}, fuse.Log2: {f: math.Log2}, fuse.Log1p: {f: math.Log1p},
	fuse.Sqrt: {f: math.Sqrt}, fuse.InvSqrt: {f: func(x float64) float64 {
		return 1 / math.Sqrt(x)
	}},
	fuse.Inv:  {f: func(x float64) float64 { return 1 / x }, turns: true},
	fuse.Tanh: {f: math.Tanh}, fuse.Sigmoid: {f: func(x float64) float64 {
		return 1 / (1 + math.Exp(-x))
	}},
	fuse.Softplus: {f: softplus}, fuse.Erf: {f: math.Erf},
}

func relu(x float64) float64 {
	if x < 0 {
		return 0
	}
	return x // NaN, too
}

func sign(x float64) float64 {
	if math.IsNaN(x) {
		return x
	}
	return truth(x > 0) - truth(x < 0)
}

func softplus(x float64) float64 { return max(x, 0) + math.Log1p(math.Exp(-math.Abs(x))) }

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// unary returns f(x).
func (a arithmetic) unary(f fuse.Op, x Number) (Number, error) {
	switch f {
	case fuse.Square:
		return a.mul(x, x), nil
	case fuse.Cube:
		return a.mul(a.mul(x, x), x), nil
	}
	return a.function(f, x)
}

// binary returns f(x, y).
func (a arithmetic) binary(f fuse.Op, x, y Number) (Number, error) {
	switch f {
	case fuse.Add:
		return a.add(x, y), nil
	case fuse.Sub:
		return a.sub(x, y), nil
	case fuse.Mul:
		return a.mul(x, y), nil
	case fuse.Div:
		return a.div(x, y), nil
	case fuse.Pow:
		return a.power(x, y), nil
	case fuse.Minimum:
		return Number{min(x.Value, y.Value), max(x.Err, y.Err)}, nil
	case fuse.Maximum:
		return Number{max(x.Value, y.Value), max(x.Err, y.Err)}, nil
	}
	compare, ok := comparisons[f]
	if !ok {
		return x, fmt.Errorf("interpret: no function %v", f)
	}
	z := Number{Value: truth(compare(x.Value, y.Value))}
	if e := x.Err + y.Err; e > 0 && !(math.Abs(x.Value-y.Value) > e) {
		z.Err = 1
	}
	return z, nil
}

var comparisons = map[fuse.Op]func(x, y float64) bool{
	fuse.Less:         func(x, y float64) bool { return x < y },
	fuse.LessEqual:    func(x, y float64) bool { return x <= y },
	fuse.Greater:      func(x, y float64) bool { return x > y },
	fuse.GreaterEqual: func(x, y float64) bool { return x >= y },
	fuse.Equal:        func(x, y float64) bool { return x == y },
	fuse.NotEqual:     func(x, y float64) bool { return x != y },
}

// power is monotone in each operand where x is positive.
func (a arithmetic) power(x, y Number) Number {
	z := math.Pow(x.Value, y.Value)
	if x.Err+y.Err > 0 && x.Value <= x.Err {
		return Number{z, math.Inf(1)}
	}
	err := 0.0
	for _, dx := range [...]float64{-x.Err, x.Err} {
		for _, dy := range [...]float64{-y.Err, y.Err} {
			err = max(err, math.Abs(math.Pow(x.Value+dx, y.Value+dy)-z))
		}
	}
	long := 1 + math.Abs(y.Value*math.Log(math.Abs(x.Value)))
	return a.rounded(z, err+slack*a.unit*math.Abs(z)*long, false)
}

// lowest returns the value of the lowest bit of x that is set.
func lowest(x float64) float64 {
	if x == 0 || math.IsInf(x, 0) || math.IsNaN(x) {
		return math.Inf(1)
	}
	fraction, exponent := math.Frexp(x)
	whole := int64(math.Ldexp(math.Abs(fraction), 53))
	return math.Ldexp(1, exponent-53+bits.TrailingZeros64(uint64(whole)))
}

// Allows reports whether a machine's element is right.
func (n Number) Allows(got float64) bool {
	if !finite(n.Value) {
		return n.Err != 0 || got == n.Value || math.IsNaN(got) && math.IsNaN(n.Value)
	}
	return got == n.Value || math.Abs(got-n.Value) <= n.Err || math.IsInf(n.Err, 1)
}
