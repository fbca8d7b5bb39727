//go:build !amd64

package simd

// None of these is called: Go is the only level.

func largest[T Float](Level, *T, *T, *T, *Windows, T) { panic("simd: no vectors") }

func givePairs[T Float](Level, *T, *T, *T, *T, *Windows, int, T) { panic("simd: no vectors") }
