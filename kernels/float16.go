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

// widenF16 moves exponent and mantissa into place and corrects the exponent's
// bias by a multiplication, which also normalises subnormals.
func widenF16(h uint16) float32 {
	const rebias = 0x1p112 // 2^(127-15)
	sign := uint32(h&0x8000) << 16
	bits := uint32(h&0x7fff) << 13
	if bits >= 0x7c00<<13 { // Inf, NaN
		return math.Float32frombits(sign | bits | 0x7f800000)
	}
	return math.Float32frombits(sign | math.Float32bits(math.Float32frombits(bits)*rebias))
}

func narrowF16(f float32) uint16 {
	const (
		overflow  = 0x47800000 // 2^16: rounds to Inf at the latest
		subnormal = 0x38800000 // 2^-14: smaller ones are subnormal
		aligner   = 0x3f000000 // 0.5: adding it leaves a subnormal's bits at the bottom
	)
	bits := math.Float32bits(f)
	sign := uint16(bits>>16) & 0x8000
	bits &= 0x7fffffff
	switch {
	case bits > 0x7f800000: // NaN: keep the top of its payload, quiet
		return sign | 0x7e00 | uint16(bits>>13)&0x1ff
	case bits >= overflow:
		return sign | 0x7c00
	case bits < subnormal:
		sum := math.Float32frombits(bits) + math.Float32frombits(aligner)
		return sign | uint16(math.Float32bits(sum)-aligner)
	}
	odd := bits >> 13 & 1
	bits += 0xfff + odd - 112<<23 // round half to even, rebias the exponent
	return sign | uint16(bits>>13)
}

func narrowBF16(f float32) uint16 {
	bits := math.Float32bits(f)
	if bits&0x7fffffff > 0x7f800000 {
		return uint16(bits>>16) | 0x40
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
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
