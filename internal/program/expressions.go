package program

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// With is a function of x and a number.
func With(b *Builder, f fuse.Op, x Value, number float64) Value {
	return b.Do(f, x, b.Number(number, x))
}

// Cast converts x to another type. As an integer of 32 or 64 bits NaN is the least one, which is in
// no range of indices or labels, rather than 0.
func Cast(b *Builder, d backend.DType, x Value) Value {
	y, least := b.Cast(d, x), math.MinInt64+0.0
	if d == backend.I32 {
		least = math.MinInt32
	}
	if !b.Of(x).DType.Float() || d != backend.I32 && d != backend.I64 {
		return y
	}
	return b.Do(fuse.Where, b.Do(fuse.Equal, x, x), y, b.Number(least, y))
}

// Sum is the sum along axes, which stay with length 1.
func Sum(b *Builder, x Value, axes ...int) Value { return b.Reduce(backend.Sum, x, axes...) }

// Mean is the mean along axes, which stay with length 1.
func Mean(b *Builder, x Value, axes ...int) Value {
	n := 1
	for _, axis := range axes {
		n *= b.Of(x).Shape[axis]
	}
	return With(b, fuse.Mul, Sum(b, x, axes...), 1/float64(n))
}

// Axes returns the axes of x from first on.
func Axes(b *Builder, x Value, first int) (axes []int) {
	for axis := first; axis < len(b.Of(x).Shape); axis++ {
		axes = append(axes, axis)
	}
	return axes
}

// Moments are mean and variance along axes, which stay with length 1. The variance divides by the
// number of elements.
func Moments(b *Builder, x Value, axes ...int) (mean, variance Value) {
	mean = Mean(b, x, axes...)
	return mean, Mean(b, b.Do(fuse.Square, b.Do(fuse.Sub, x, mean)), axes...)
}

// Standardized is z = (x - mean) * scale, and scale = 1 / sqrt(variance + epsilon): NaN if the
// variance overflows, where 0 would make zeros of numbers that differ.
func Standardized(b *Builder, x, mean, variance Value, epsilon float64) (z, scale Value) {
	scale = b.Do(fuse.InvSqrt, With(b, fuse.Add, variance, epsilon))
	scale = b.Do(fuse.Add, scale, b.Do(fuse.Sub, variance, variance)) // 0, or NaN
	return b.Do(fuse.Mul, b.Do(fuse.Sub, x, mean), scale), scale
}

// StandardizedGrad is dx of Standardized by moments of x: (dz - mean(dz) - z mean(dz z)) * scale.
func StandardizedGrad(b *Builder, z, scale, dz, mean, meanAlong Value) Value {
	along := b.Do(fuse.Mul, z, meanAlong)
	return b.Do(fuse.Mul, b.Do(fuse.Sub, b.Do(fuse.Sub, dz, mean), along), scale)
}

// Normalized is Standardized by the moments of x along axes.
func Normalized(b *Builder, x Value, epsilon float64, axes ...int) (z, scale Value) {
	mean, variance := Moments(b, x, axes...)
	return Standardized(b, x, mean, variance, epsilon)
}

// NormalizedGrad is dx of Normalized from dz.
func NormalizedGrad(b *Builder, x, dz Value, epsilon float64, axes ...int) Value {
	z, scale := Normalized(b, x, epsilon, axes...)
	mean, along := Mean(b, dz, axes...), Mean(b, b.Do(fuse.Mul, dz, z), axes...)
	return StandardizedGrad(b, z, scale, dz, mean, along)
}

// SoftMax is exp(x-max) / sum(exp(x-max)) along an axis, or its logarithm.
func SoftMax(b *Builder, x Value, axis int, log bool) Value {
	less := b.Do(fuse.Sub, x, b.Reduce(backend.Max, x, axis))
	exp := b.Do(fuse.Exp, less)
	if log {
		return b.Do(fuse.Sub, less, b.Do(fuse.Log, Sum(b, exp, axis)))
	}
	return b.Do(fuse.Div, exp, Sum(b, exp, axis))
}

// SoftMaxGrad is dx of SoftMax from y and dy: y (dy - sum(dy y)), or dy - exp(y) sum(dy).
func SoftMaxGrad(b *Builder, y, dy Value, axis int, log bool) Value {
	if log {
		return b.Do(fuse.Sub, dy, b.Do(fuse.Mul, b.Do(fuse.Exp, y), Sum(b, dy, axis)))
	}
	sum := Sum(b, b.Do(fuse.Mul, dy, y), axis)
	return b.Do(fuse.Mul, y, b.Do(fuse.Sub, dy, sum))
}

// Border says how many rows of padding above, columns to the left, rows below and columns to the
// right of images count in means, as zeros.
type Border [4]int

// AveragePool is the mean of each patch of images [b, c, h, w], of pixels inside and of those of a
// border. Every plane is a separate image, so that patches lie in the order of the result.
func AveragePool(b *Builder, x Value, w Window, counted Border) Value {
	s := b.Of(x).Shape
	if w.isImage(s) {
		return w.share(b, Sum(b, x, 2, 3), counted, s[2], s[3])
	}
	rows, columns := w.Places(s[2], s[3])
	sums := Sum(b, b.Patches(w, b.Reshape(x, s[0]*s[1], 1, s[2], s[3])), 3)
	return b.Reshape(w.share(b, sums, counted, s[2], s[3]), s[0], s[1], rows, columns)
}

// share divides a number for each window, [planes, rows, columns, 1], by how many pixels count
// there.
func (w Window) share(b *Builder, x Value, counted Border, height, width int) Value {
	image := [2]int{height, width}
	rows, columns := w.Places(height, width)
	all, places := true, [2]int{rows, columns}
	for i := range 2 {
		end := (places[i]-1)*w.Stride[i] - w.Pad[i] + w.Reach(i)
		all = all && counted[i] >= w.Pad[i] && end <= image[i]+counted[2+i]
		w.Pad[i], w.After[i] = w.Pad[i]-counted[i], w.After[i]-counted[2+i]
		image[i] += counted[i] + counted[2+i]
	}
	if all {
		return With(b, fuse.Mul, x, 1/float64(w.Kernel[0]*w.Kernel[1]))
	}
	ones := b.Broadcast(b.Reshape(b.Number(1, x), 1, 1, 1, 1), 1, 1, image[0], image[1])
	return b.Do(fuse.Div, x, Sum(b, b.Patches(w, ones), 3))
}

// AveragePoolGrad gives every pixel of a patch its share of dy, for images of a height and width.
func AveragePoolGrad(b *Builder, dy Value, w Window, counted Border, height, width int) Value {
	s, n := b.Of(dy).Shape, w.Kernel[0]*w.Kernel[1]
	if image := []int{s[0], s[1], height, width}; w.isImage(image) {
		return b.Broadcast(w.share(b, dy, counted, height, width), image...)
	}
	planes := s[0] * s[1]
	share := w.share(b, b.Reshape(dy, planes, s[2], s[3], 1), counted, height, width)
	patches := b.Broadcast(share, planes, s[2], s[3], n)
	return b.Reshape(b.Images(w, patches, height, width), s[0], s[1], height, width)
}

// isImage reports whether the window is the whole image.
func (w Window) isImage(image []int) bool {
	return w.Pad == [2]int{} && w.After == [2]int{} && w.Dilation == [2]int{1, 1} &&
		w.Kernel == [2]int(image[2:])
}
