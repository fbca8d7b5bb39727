//go:build !amd64

package simd

func unary[T Float](Level, Op, *T, *T, int) bool { return false }

func binary[T Float](Level, Op, *T, *T, *T, int, int, int) bool { return false }

func where[T Float](Level, *T, *T, *T, *T, int, int, int, int) bool { return false }
