//go:build !amd64

package simd

// Best returns the highest level of this processor.
func Best() Level { return Go }
