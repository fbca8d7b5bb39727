//go:build !amd64

package simd

import "github.com/euryale-ml/euryale/backend"

func reduceVector(Level, backend.ReduceOp, backend.Buffer, []backend.Buffer) bool { return false }
func widenVector[H half](Level, []float32, []H) bool                              { return false }
func narrowVector[H half](Level, []H, []float32) bool                             { return false }
func scaleVector[T float32 | float64](Level, []T, []T, T) bool                    { return false }
