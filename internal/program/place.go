package program

import "slices"

// strided is where a value lies: elements of the buffer of a slot, in steps of strides.
type strided struct {
	slot, offset   int
	shape, strides []int
}

// rowMajor returns the strides of a shape in row-major order.
func rowMajor(shape []int) []int {
	strides, n := make([]int, len(shape)), 1
	for i, length := range slices.Backward(shape) {
		strides[i] = n
		n *= length
	}
	return strides
}

// size returns the number of elements of a shape.
func size(shape []int) int {
	n := 1
	for _, length := range shape {
		n *= length
	}
	return n
}

// dense reports whether elements lie in row-major order, without gaps.
func (p strided) dense() bool {
	for i, stride := range rowMajor(p.shape) {
		if p.shape[i] > 1 && p.strides[i] != stride {
			return false
		}
	}
	return true
}

// along returns the strides along the axes of a loop, whose shape p is repeated to.
func (p strided) along(loop []int) []int {
	strides := make([]int, len(loop))
	for i, length := range p.shape {
		if length > 1 {
			strides[len(loop)-len(p.shape)+i] = p.strides[i]
		}
	}
	return strides
}

// sliced returns n elements of an axis.
func (p strided) sliced(axis, start, step, n int) strided {
	p.offset += start * p.strides[axis]
	p.shape, p.strides = with(p.shape, axis, n), with(p.strides, axis, step*p.strides[axis])
	return p
}

// spans returns what elements of buffers places reach.
func spans(places []strided) (all []span) {
	for _, p := range places {
		last := p.offset
		for axis, n := range p.shape {
			last += (n - 1) * p.strides[axis]
		}
		all = append(all, span{p.slot, p.offset, last + 1})
	}
	return all
}
