package main

import (
	"math"
	"math/rand/v2"
	"slices"
)

// array is what the loops of this command compute with: elements in row-major order.
type array struct {
	shape []int
	data  []float64
}

// at returns one element.
func (a array) at(index ...int) float64 {
	place := 0
	for axis, i := range index {
		place = place*a.shape[axis] + i
	}
	return a.data[place]
}

// generate makes an array of a function of the index, which f must not keep.
func generate(shape []int, f func(i []int) float64) array {
	n := 1
	for _, d := range shape {
		n *= d
	}
	a := array{shape, make([]float64, n)}
	index := make([]int, len(shape))
	for place := range a.data {
		a.data[place] = f(index)
		for axis := len(shape) - 1; axis >= 0; axis-- {
			if index[axis]++; index[axis] < shape[axis] {
				break
			}
			index[axis] = 0
		}
	}
	return a
}

// apply is f of every element.
func (a array) apply(f func(float64) float64) array {
	return generate(a.shape, func(i []int) float64 { return f(a.at(i...)) })
}

// zip is f of the elements of two arrays, of which one may be a scalar. An axis of length 1 of one
// is repeated to the length of the other's.
func zip(a, b array, f func(x, y float64) float64) array {
	shape := slices.Clone(a.shape)
	if len(shape) == 0 {
		shape = slices.Clone(b.shape)
	}
	for axis := range shape {
		if axis < len(b.shape) {
			shape[axis] = max(shape[axis], b.shape[axis])
		}
	}
	return generate(shape, func(i []int) float64 { return f(a.repeated(i), b.repeated(i)) })
}

// repeated is at for an index of a shape to which the array is repeated.
func (a array) repeated(index []int) float64 {
	if len(a.shape) == 0 {
		return a.data[0]
	}
	own := slices.Clone(index)
	for axis, d := range a.shape {
		if d == 1 {
			own[axis] = 0
		}
	}
	return a.at(own...)
}

// reduce folds the elements along the axes, in order; the axes disappear.
func (a array) reduce(f func(sum, x float64) float64, axes ...int) array {
	if len(axes) == 0 {
		for axis := range a.shape {
			axes = append(axes, axis)
		}
	}
	var shape, kept []int
	for axis, d := range a.shape {
		if !slices.Contains(axes, axis) {
			shape, kept = append(shape, d), append(kept, axis)
		}
	}
	y := generate(shape, func([]int) float64 { return math.NaN() })
	generate(a.shape, func(i []int) float64 {
		place := 0
		for k, axis := range kept {
			place = place*shape[k] + i[axis]
		}
		if x := a.at(i...); math.IsNaN(y.data[place]) {
			y.data[place] = x
		} else {
			y.data[place] = f(y.data[place], x)
		}
		return 0
	})
	return y
}

func plus(a, b float64) float64 { return a + b }

// reshape returns the same elements in another shape.
func (a array) reshape(shape ...int) array { return array{shape, a.data} }

// transpose exchanges axes: axis k of the result is axes[k] of a.
func (a array) transpose(axes ...int) array {
	shape := make([]int, len(axes))
	for k, axis := range axes {
		shape[k] = a.shape[axis]
	}
	return generate(shape, func(i []int) float64 {
		own := make([]int, len(axes))
		for k, axis := range axes {
			own[axis] = i[k]
		}
		return a.at(own...)
	})
}

// cut returns a[..., start:end:step, ...] along an axis, which stays.
func (a array) cut(axis, start, end, step int) array {
	shape := slices.Clone(a.shape)
	shape[axis] = (end - start + step - 1) / step
	return generate(shape, func(i []int) float64 {
		own := slices.Clone(i)
		own[axis] = start + i[axis]*step
		return a.at(own...)
	})
}

// join concatenates arrays along an axis.
func join(axis int, parts ...array) array {
	shape := slices.Clone(parts[0].shape)
	shape[axis] = 0
	for _, p := range parts {
		shape[axis] += p.shape[axis]
	}
	return generate(shape, func(i []int) float64 {
		own := slices.Clone(i)
		for _, p := range parts {
			if own[axis] < p.shape[axis] {
				return p.at(own...)
			}
			own[axis] -= p.shape[axis]
		}
		return math.NaN()
	})
}

// matmul is the product of two matrices, or of the last two axes of two batches of them.
func matmul(a, b array) array {
	batch := len(a.shape) - 2
	shape := append(slices.Clone(a.shape[:batch+1]), b.shape[batch+1])
	return generate(shape, func(i []int) float64 {
		sum := 0.0
		for k := range a.shape[batch+1] {
			left := append(slices.Clone(i[:batch+1]), k)
			right := append(append(slices.Clone(i[:batch]), k), i[batch+1])
			sum += a.at(left...) * b.at(right...)
		}
		return sum
	})
}

// softmax is exp(x) divided by the sum of exp(x) along the axis.
func softmax(a array, axis int) array {
	e := a.apply(math.Exp)
	sum := e.reduce(plus, axis)
	shape := slices.Clone(a.shape)
	shape[axis] = 1
	return zip(e, sum.reshape(shape...), func(x, s float64) float64 { return x / s })
}

// input is one operand of a row.
type input struct {
	shape  []int
	kind   kind
	ints   []int     // of kind integers
	floats []float64 // if not nil, the elements
}

// kind says which values an operand has.
type kind int

const (
	signed   kind = iota // both signs, no zero
	positive             // at least 0.3
	interval             // between 0.1 and 0.9
	integers             // those of the row; they have no gradient
)

// values are the operand's elements, which float32 holds without rounding. They depend only on the
// operand's place.
func (in input) values(place int) array {
	if in.floats != nil {
		return array{in.shape, slices.Clone(in.floats)}
	}
	rng := rand.New(rand.NewPCG(3, uint64(place)))
	next := 0
	return generate(in.shape, func([]int) float64 {
		if in.kind == integers {
			next++
			return float64(in.ints[next-1])
		}
		x := rng.NormFloat64()
		switch in.kind {
		case positive:
			x = math.Abs(x) + 0.3
		case interval:
			x = 0.1 + 0.8*rng.Float64()
		default:
			x += math.Copysign(0.05, x)
		}
		return float64(float32(x))
	})
}
