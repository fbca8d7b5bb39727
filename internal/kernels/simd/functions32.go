package simd

import "math"

// The functions of float32, computed in float64 by short polynomials: they are right up to one unit
// in the last place. Those of package math compute digits that a float32 does not hold, and take
// about twice as long.

// exp32 leaves what is far beyond float32 to package math.
func exp32(x float64) float64 {
	if !(math.Abs(x) <= 700) {
		return math.Exp(x)
	}
	return power32(x)
}

// power32 is e^x = 2^k e^r with |r| <= ln 2 / 2, and e^r by its series: the error is below 2^-27 of
// the result. |x| is at most 700. It is short enough to be inlined, so that neighbours of a loop
// overlap.
func power32(x float64) float64 {
	shifted := x*math.Log2E + nearest // whose low bits are the integer next to it
	r := x - (shifted-nearest)*math.Ln2
	r2 := r * r // pairs of terms do not wait for each other
	return ((1 + r) + r2*((1.0/2+r*(1.0/6))+r2*((1.0/24+r*(1.0/120))+r2*(1.0/720+r*(1.0/5040))))) *
		math.Float64frombits(math.Float64bits(shifted)<<52+1023<<52)
}

// nearest leaves no room for a fraction in a float64 that it is added to.
const nearest = 3 << 51

// expm132 is the series where exp32(x) - 1 would lose digits.
func expm132(x float64) float64 {
	if math.Abs(x) < 1.0/16 {
		return x * (1 + x*(1.0/2+x*(1.0/6+x*(1.0/24+x*(1.0/120+x*(1.0/720))))))
	}
	return exp32(x) - 1
}

// fraction returns ln m and k with x = m 2^k and sqrt(1/2) <= m < sqrt 2, for normal x > 0.
func fraction(x float64) (lnm, k float64) {
	const (
		mantissa = 1<<52 - 1
		below    = 0x3fe6a09e667f3bcd // the bits of sqrt(1/2)
	)
	bits := math.Float64bits(x) - below
	k = float64(int64(bits) >> 52)
	m := math.Float64frombits(bits&mantissa + below)
	s := (m - 1) / (m + 1)
	z := s * s
	return 2 * s * (1 + z*(1.0/3+z*(1.0/5+z*(1.0/7+z*(1.0/9+z*(1.0/11+z*(1.0/13))))))), k
}

// normal reports whether x is a number above 0 with its exponent.
func normal(x float64) bool { return x >= 0x1p-1022 && x <= math.MaxFloat64 }

func log32(x float64) float64 {
	if !normal(x) {
		return math.Log(x)
	}
	lnm, k := fraction(x)
	return lnm + k*math.Ln2
}

// log232 is exact at powers of two.
func log232(x float64) float64 {
	if !normal(x) {
		return math.Log(x)
	}
	lnm, k := fraction(x)
	return lnm*(1/math.Ln2) + k
}

func log1p32(x float64) float64 {
	if math.Abs(x) < 0x1p-20 {
		return x - x*x/2
	}
	return log32(1 + x)
}

// tanh32 is the series of small arguments, and 1 - 2/(e^2x + 1) of others, which is 1 from 10 on.
func tanh32(x float64) float64 {
	switch a := math.Abs(x); {
	case a < 1.0/4:
		z := x * x
		return x * (1 + z*(-1.0/3+z*(2.0/15+z*(-17.0/315+z*(62.0/2835+z*(-1382.0/155925))))))
	case a < 10:
		return 1 - 2/(power32(2*x)+1)
	case x != x:
		return x
	}
	return math.Copysign(1, x)
}

func sigmoid32(x float64) float64 { return 1 / (1 + exp32(-x)) }

// softplus32 keeps exp32 from overflowing.
func softplus32(x float64) float64 { return max(x, 0) + log1p32(exp32(-math.Abs(x))) }

// pow32 is e^(y ln x) where that is a number, with ln x to the digits that a float32 needs.
func pow32(x, y float64) float64 {
	if normal(x) && math.Abs(y) <= 0x1p100 {
		lnm, k := fraction(x)
		return exp32(y * (lnm + k*math.Ln2))
	}
	return math.Pow(x, y)
}
