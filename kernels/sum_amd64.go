package kernels

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

//go:noescape
func sumF32(dst, x, y *float32, n int)

//go:noescape
func sumF64(dst, x, y *float64, n int)

// sumVector is out[i] = x[i] + y[i] by vector instructions, if there are some
// for T on this processor: it reports whether it was done. What it gains is not
// arithmetic but memory: a scalar loop has too few loads under way to hide how
// long another core's data takes to arrive.
func sumVector[T number](out, x, y []T) bool {
	if len(out) == 0 || !cpu.X86.HasAVX {
		return false
	}
	d, a, b := unsafe.Pointer(&out[0]), unsafe.Pointer(&x[0]), unsafe.Pointer(&y[0])
	switch any(*new(T)).(type) {
	case float32:
		sumF32((*float32)(d), (*float32)(a), (*float32)(b), len(out))
	case float64:
		sumF64((*float64)(d), (*float64)(a), (*float64)(b), len(out))
	default:
		return false
	}
	return true
}
