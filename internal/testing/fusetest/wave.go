package fusetest

import (
	"math"
	"math/big"
	"sync"
)

// exactBits hold an angle of up to 2^1024 and its sine's digits behind the point.
const exactBits = 1400

func exact(x float64) *big.Float { return new(big.Float).SetPrec(exactBits).SetFloat64(x) }

// pi is John Machin's series.
var pi = sync.OnceValue(func() *big.Float {
	sum := exact(0).Mul(exact(16), arctan(5))
	return sum.Sub(sum, exact(0).Mul(exact(4), arctan(239)))
})

// arctan returns arctan(1/n).
func arctan(n float64) *big.Float {
	sum, power := exact(0), exact(0).Quo(exact(1), exact(n))
	for k := 1.0; k < 1300; k += 2 {
		if term := exact(0).Quo(power, exact(k)); int(k)%4 == 1 {
			sum.Add(sum, term)
		} else {
			sum.Sub(sum, term)
		}
		power.Quo(power, exact(n*n))
	}
	return sum
}

// Wave returns sin(x), or cos(x) as sin(x + pi/2), rounded once. Package math is off by many units
// where an angle beyond 2^29 is near a multiple of pi/2.
func Wave(x float64, cosine bool) float64 {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return math.NaN()
	}
	angle, quarter := exact(x), exact(0).Quo(pi(), exact(2))
	if cosine {
		angle.Add(angle, quarter)
	}
	turns, _ := exact(0).Quo(angle, pi()).Int(nil)
	angle.Sub(angle, exact(0).Mul(pi(), exact(0).SetInt(turns)))
	sum, term, square := exact(0), exact(0).Set(angle), exact(0).Mul(angle, angle)
	for k := 1.0; k < 100; k += 2 {
		sum.Add(sum, term)
		term.Mul(term, square)
		term.Quo(term, exact(-(k+1)*(k+2)))
	}
	if turns.Bit(0) == 1 {
		sum.Neg(sum)
	}
	y, _ := sum.Float64()
	return y
}
