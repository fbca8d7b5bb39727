package kernels

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// float is a type whose arithmetic is Go's own.
type float interface{ float32 | float64 }

// half is a 16-bit float, stored as its bits.
type half interface {
	backend.Float16 | backend.BFloat16
}

// toOdd rounds a float64 to float32 so that rounding the result once more, to
// 16 bits, is right: an inexact result gets an odd last bit.
func toOdd(x float64) float32 {
	f := float32(x)
	back := float64(f)
	if back == x || math.IsNaN(x) || math.IsInf(back, 0) {
		return f
	}
	bits := math.Float32bits(f)
	if math.Abs(back) > math.Abs(x) { // rounded away from zero: step back
		bits--
	}
	return math.Float32frombits(bits | 1)
}
