package simd

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// half is a 16-bit float, stored as its bits.
type half interface {
	backend.Float16 | backend.BFloat16
}

// WidenF16 returns the value of a 16-bit float. It moves exponent and mantissa into place and
// corrects the exponent's bias by a multiplication, which also normalises subnormals. A NaN keeps
// its payload and becomes quiet.
func WidenF16(h uint16) float32 {
	const rebias = 0x1p112 // 2^(127-15)
	sign := uint32(h&0x8000) << 16
	bits := uint32(h&0x7fff) << 13
	switch {
	case bits > 0x7c00<<13: // NaN
		return math.Float32frombits(sign | bits | 0x7fc00000)
	case bits == 0x7c00<<13: // Inf
		return math.Float32frombits(sign | 0x7f800000)
	}
	return math.Float32frombits(sign | math.Float32bits(math.Float32frombits(bits)*rebias))
}

// NarrowF16 rounds to nearest even. A NaN keeps the top of its payload and becomes quiet.
func NarrowF16(f float32) uint16 {
	const (
		overflow  = 0x47800000 // 2^16: rounds to Inf at the latest
		subnormal = 0x38800000 // 2^-14: smaller ones are subnormal
		aligner   = 0x3f000000 // 0.5: adding it leaves a subnormal's bits at the bottom
	)
	bits := math.Float32bits(f)
	sign := uint16(bits>>16) & 0x8000
	bits &= 0x7fffffff
	switch {
	case bits > 0x7f800000: // NaN
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

// NarrowBF16 rounds to nearest even. A NaN keeps the top of its payload and becomes quiet.
func NarrowBF16(f float32) uint16 {
	bits := math.Float32bits(f)
	if bits&0x7fffffff > 0x7f800000 {
		return uint16(bits>>16) | 0x40
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

// Widen is dst[i] = src[i], exactly.
func Widen[H half](l Level, dst []float32, src []H) {
	src = src[:len(dst)]
	if l > Go && len(dst) > 0 {
		widenVectors(l, backend.DTypeOf[H](), address(backend.Of(dst)), address(backend.Of(src)),
			len(dst))
		return
	}
	switch src := any(src).(type) {
	case []backend.BFloat16:
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(src[i]) << 16)
		}
	case []backend.Float16:
		for i := range dst {
			dst[i] = WidenF16(uint16(src[i]))
		}
	}
}

// Narrow is dst[i] = src[i], rounded to nearest even.
func Narrow[H half](l Level, dst []H, src []float32) {
	src = src[:len(dst)]
	if l > Go && len(dst) > 0 {
		narrowVectors(l, backend.DTypeOf[H](), address(backend.Of(dst)), address(backend.Of(src)),
			len(dst))
		return
	}
	switch dst := any(dst).(type) {
	case []backend.BFloat16:
		for i := range dst {
			dst[i] = backend.BFloat16(NarrowBF16(src[i]))
		}
	case []backend.Float16:
		for i := range dst {
			dst[i] = backend.Float16(NarrowF16(src[i]))
		}
	}
}
