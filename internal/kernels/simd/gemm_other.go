//go:build !amd64

package simd

// multiply computes a tile.
func (t *tile[T]) multiply(Level) { t.multiplyGo() }

// copyVectors and transposeSquares are for levels that there are not.
func copyVectors[T Float](_, _ *T, _, _, _, _ int)   {}
func transposeSquares[T Float](_, _ *T, _, _, _ int) {}
