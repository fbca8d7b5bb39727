package simd

import "golang.org/x/sys/cpu"

// Best returns the highest level of this processor and its operating system.
func Best() Level {
	x := &cpu.X86
	switch {
	case !x.HasAVX2 || !x.HasFMA || !x.HasF16C:
		return Go
	case !x.HasAVX512F || !x.HasAVX512BW || !x.HasAVX512DQ || !x.HasAVX512VL:
		return AVX2
	}
	return AVX512
}
