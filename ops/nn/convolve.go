package nn

import (
	"slices"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// This file makes convolutions of one to three axes from convolutions of two.

// plane returns the convolution along height and width.
func (s convSpec) plane() program.Convolution {
	pair := func(x [3]int) [2]int { return [2]int(x[1:]) }
	w := program.Window{Kernel: pair(s.Kernel), Pad: pair(s.Pad), After: pair(s.After),
		Stride: pair(s.Stride), Dilation: pair(s.Dilation)}
	return program.Convolution{Window: w, Groups: s.Groups, Pass: s.Pass, Image: pair(s.Image)}
}

// convolve computes the pass of two operands.
func (s convSpec) convolve(b *program.Builder, x, y program.Value) program.Value {
	out, _ := s.shape([]tensor.Shape{b.Of(x).Shape, b.Of(y).Shape}) // checked before
	switch {
	case s.Axes == 1:
		flat := b.Convolve(s.plane(), unit(b, x), unit(b, y))
		return b.Reshape(flat, out...)
	case s.Axes == 2:
		return b.Convolve(s.plane(), x, y)
	case s.Pass == kernels.Forward:
		z := b.Convolve(s.plane(), s.slabs(b, x), folded(b, y, 1))
		return b.Permute(b.Reshape(z, out[0], out[2], out[1], out[3], out[4]), 0, 2, 1, 3, 4)
	case s.Pass == kernels.InputGradient:
		return s.unslabs(b, b.Convolve(s.plane(), sheets(b, x), folded(b, y, 1)), out)
	}
	return b.Reshape(b.Convolve(s.plane(), s.slabs(b, x), sheets(b, y)), out...)
}

// unit makes images [b, c, 1, n] of sequences [b, c, n].
func unit(b *program.Builder, x program.Value) program.Value {
	return b.Reshape(x, slices.Insert(b.Of(x).Shape, 2, 1)...)
}

// folded merges an axis and the next.
func folded(b *program.Builder, x program.Value, axis int) program.Value {
	shape := b.Of(x).Shape
	shape[axis] *= shape[axis+1]
	return b.Reshape(x, slices.Delete(shape, axis+1, axis+2)...)
}

// sheets makes images [b*d, c, h, w] of volumes [b, c, d, h, w].
func sheets(b *program.Builder, x program.Value) program.Value {
	return folded(b, b.Permute(x, 0, 2, 1, 3, 4), 0)
}

// slabs makes images [b*d', c*kd, h, w] of volumes [b, c, d, h, w]: one for each place along the
// depth, whose channels are what the windows there see.
func (s convSpec) slabs(b *program.Builder, x program.Value) program.Value {
	shape, n := b.Of(x).Shape, s.depth()
	if n > shape[2] {
		x = b.Unslice(x, 2, s.Pad[0], 1, n)
	}
	seen := slices.Insert(slices.Clone(shape), 2, 1)
	seen[3] = s.places(0)
	var all []program.Value
	for k := range s.Kernel[0] {
		from := b.Slice(x, 2, k*s.Dilation[0], s.Stride[0], seen[3])
		all = append(all, b.Reshape(from, seen...))
	}
	x = b.Permute(b.Concat(2, all...), 0, 3, 1, 2, 4, 5)
	return folded(b, folded(b, x, 2), 0)
}

// depth returns the depth of volumes with their padding.
func (s convSpec) depth() int { return s.Pad[0] + s.Image[0] + max(s.After[0], 0) }

// unslabs is the gradient of slabs: it adds them up to volumes.
func (s convSpec) unslabs(b *program.Builder, x program.Value, out []int) program.Value {
	places := s.places(0)
	x = b.Reshape(x, out[0], places, out[1], s.Kernel[0], out[3], out[4])
	var sum program.Value
	for k := range s.Kernel[0] {
		seen := b.Reshape(b.Slice(x, 3, k, 1, 1), out[0], places, out[1], out[3], out[4])
		term := b.Unslice(b.Permute(seen, 0, 2, 1, 3, 4), 2, k*s.Dilation[0], s.Stride[0],
			s.depth())
		if k == 0 {
			sum = term
			continue
		}
		sum = b.Do(fuse.Add, sum, term)
	}
	if s.depth() == out[2] {
		return sum
	}
	return b.Slice(sum, 2, s.Pad[0], 1, out[2])
}
