//go:build !amd64

package simd

import "github.com/euryale-ml/euryale/backend"

func unary[T Float](Level, backend.UnaryOp, *T, *T, int) bool { return false }

func binary[T Float](Level, backend.BinaryOp, *T, *T, *T, int, int, int) bool { return false }

func where[T Float](Level, *T, *T, *T, *T, int, int, int, int) bool { return false }
