//go:build !amd64

package simd

// None of these is called: Go is the only level.

func sum[T Float](Level, *T, int) float64 { panic("simd: no vectors") }

func extreme[T Float](Level, bool, *T, int) T { panic("simd: no vectors") }

func accumulate[T Float](Level, *float64, *T, int) { panic("simd: no vectors") }

func spread[T Float](Level, *T, *T, int, int) { panic("simd: no vectors") }
