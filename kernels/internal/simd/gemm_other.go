//go:build !amd64

package simd

// multiply computes a tile.
func (t *tile[T]) multiply(Level) { t.multiplyGo() }
