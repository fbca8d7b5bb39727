//go:build !amd64

package kernels

func sumVector[T number](out, x, y []T) bool { return false }
