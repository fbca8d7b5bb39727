package nn

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/kernels/fuse"
)

// This file computes logic, indices, reductions and norms by plain loops over indices.

// each calls f with every index of a shape, and the place of the element.
func each(shape tensor.Shape, f func(at int, i []int)) {
	for at := range product(shape) {
		i, rest := make([]int, len(shape)), at
		for axis := len(shape) - 1; axis >= 0; axis-- {
			i[axis], rest = rest%shape[axis], rest/shape[axis]
		}
		f(at, i)
	}
}

// place returns where the element at an index of a shape is in one that is repeated to it.
func place(shape tensor.Shape, i []int) int {
	at := 0
	for axis, n := range shape {
		at = at*n + i[len(i)-len(shape)+axis]%n
	}
	return at
}

func loopedBasics[T float](s spec, y array[T], x []array[T]) error {
	switch s := s.(type) {
	case gatherElementsSpec:
		each(y.shape, func(at int, i []int) {
			i[s.Axis] = x[1].ints[at]
			y.data[at] = x[0].data[place(x[0].shape, i)]
		})
	case whereSpec, logicSpec:
		each(y.shape, func(at int, i []int) {
			var v []float64
			for _, a := range x {
				v = append(v, float64(a.data[place(a.shape, i)]))
			}
			y.data[at] = T(chosen(s, v))
		})
	case castSpec:
		copy(y.data, x[0].data)
	case reduceSpec:
		loopedReduce(s, y, x[0])
	case cumSumSpec:
		loopedCumSum(s, y, x[0])
	default:
		return loopedNorms(s, y, x)
	}
	return nil
}

// loopedBasicsBack computes the gradient of an operation by operand k.
func loopedBasicsBack[T float](s spec, k int, dx array[T], x []array[T], y, dy array[T]) error {
	switch s := s.(type) {
	case gatherElementsSpec:
		each(dy.shape, func(at int, i []int) {
			i[s.Axis] = x[1].ints[at]
			dx.data[place(dx.shape, i)] += dy.data[at]
		})
	case whereSpec:
		each(dy.shape, func(at int, i []int) {
			if (x[0].data[place(x[0].shape, i)] != 0) == (k == 1) {
				dx.data[place(dx.shape, i)] += dy.data[at]
			}
		})
	case castSpec:
		copy(dx.data, dy.data)
	case reduceSpec:
		loopedReduceGrad(s, dx, []array[T]{x[0], y, dy})
	case rmsNormSpec:
		if k == 1 {
			loopedRMS(s, array[T]{}, dx, x, dy)
		} else {
			loopedRMSGrad(s, dx, x, dy)
		}
	case swiGLUSpec:
		for i, v := range x[0].data {
			g := float64(v)
			open := 1 / (1 + math.Exp(-g))
			slope := []float64{open * (1 + g*(1-open)) * float64(x[1].data[i]), g * open}[k]
			dx.data[i] = T(slope * float64(dy.data[i]))
		}
	default:
		return fmt.Errorf("no loop computes the gradient of %v", s)
	}
	return nil
}

// chosen is one element of Where or of logic.
func chosen(s spec, v []float64) float64 {
	a, b := v[0] != 0, v[1%len(v)] != 0
	if _, where := s.(whereSpec); where {
		return map[bool]float64{true: v[1], false: v[len(v)-1]}[a]
	}
	truth := map[fuse.Op]bool{fuse.Mul: a && b, fuse.Maximum: a || b, fuse.NotEqual: a != b,
		fuse.Equal: !a}[s.(logicSpec).Op]
	return map[bool]float64{true: 1}[truth]
}

// groups are the places of the elements that a reduction makes one of.
func groups(s reduceSpec, shape tensor.Shape) [][]int {
	kept := tensor.Shape(s.kept(shape))
	all := make([][]int, product(kept))
	each(shape, func(at int, i []int) { all[place(kept, i)] = append(all[place(kept, i)], at) })
	return all
}

func loopedReduce[T float](s reduceSpec, y, x array[T]) {
	for k, group := range groups(s, x.shape) {
		sum, product, least, most := 0.0, 1.0, math.Inf(1), math.Inf(-1)
		for _, at := range group {
			v := float64(x.data[at])
			product, least, most = product*v, min(least, v), max(most, v)
		}
		for _, at := range group {
			sum += math.Exp(float64(x.data[at]) - most)
		}
		y.data[k] = T(map[string]float64{"ReduceMax": most, "ReduceMin": least,
			"ReduceProd": product, "LogSumExp": math.Log(sum) + most}[s.Kind])
	}
}

func loopedReduceGrad[T float](s reduceSpec, dx array[T], x []array[T]) {
	for k, group := range groups(s, dx.shape) {
		y, same := x[1].data[k], 0
		for _, at := range group {
			if x[0].data[at] == y {
				same++
			}
		}
		for _, at := range group {
			slope := 0.0
			switch v := x[0].data[at]; s.Kind {
			case "LogSumExp":
				slope = math.Exp(float64(v) - float64(y))
			case "ReduceProd":
				slope = 1
				for _, other := range group {
					if other != at {
						slope *= float64(x[0].data[other])
					}
				}
			default:
				if v == y {
					slope = 1 / float64(same)
				}
			}
			dx.data[at] = T(float64(x[2].data[k]) * slope)
		}
	}
}

func loopedCumSum[T float](s cumSumSpec, y, x array[T]) {
	lines(x.shape, s.Axis, func(at func(k int) int, n int) {
		sum := 0.0
		for k := range n {
			if s.Reverse {
				k = n - 1 - k
			}
			v := float64(x.data[at(k)])
			if y.data[at(k)] = T(sum); !s.Exclusive {
				y.data[at(k)] = T(sum + v)
			}
			sum += v
		}
	})
}

func loopedNorms[T float](s spec, y array[T], x []array[T]) error {
	switch s := s.(type) {
	case rmsNormSpec:
		loopedRMS(s, y, array[T]{}, x, array[T]{})
	case rotarySpec:
		loopedRotary(s, y, x)
	case swiGLUSpec:
		for i, g := range x[0].data {
			y.data[i] = T(float64(g) / (1 + math.Exp(-float64(g))) * float64(x[1].data[i]))
		}
	default:
		return fmt.Errorf("no loop computes %v", s)
	}
	return nil
}

// loopedRMS computes y, or dgain from dy.
func loopedRMS[T float](s rmsNormSpec, y, dgain array[T], x []array[T], dy array[T]) {
	n := len(x[1].data)
	for from := 0; from < len(x[0].data); from += n {
		row, squares := x[0].data[from:from+n], 0.0
		for _, v := range row {
			squares += float64(v) * float64(v)
		}
		scale := 1 / math.Sqrt(squares/float64(n)+s.Epsilon)
		for i, v := range row {
			if dgain.data != nil {
				dgain.data[i] += T(float64(dy.data[from+i]) * float64(v) * scale)
			} else {
				y.data[from+i] = T(float64(v) * scale * float64(x[1].data[i]))
			}
		}
	}
}

func loopedRMSGrad[T float](s rmsNormSpec, dx array[T], x []array[T], dy array[T]) {
	n := len(x[1].data)
	for from := 0; from < len(x[0].data); from += n {
		squares, along := 0.0, 0.0
		for i, v := range x[0].data[from : from+n] {
			squares += float64(v) * float64(v)
			along += float64(v) * float64(dy.data[from+i]) * float64(x[1].data[i])
		}
		scale := 1 / math.Sqrt(squares/float64(n)+s.Epsilon)
		for i, v := range x[0].data[from : from+n] {
			g := float64(dy.data[from+i]) * float64(x[1].data[i])
			dx.data[from+i] = T(scale * (g - float64(v)*scale*scale*along/float64(n)))
		}
	}
}

// loopedRotary multiplies complex numbers.
func loopedRotary[T float](s rotarySpec, y array[T], x []array[T]) {
	copy(y.data, x[0].data)
	last := len(y.shape) - 1
	angles := x[1].shape
	half := angles[len(angles)-1]
	each(append(slices.Clone(y.shape[:last]), half), func(_ int, i []int) {
		pair := i[last]
		angle := place(angles, i)
		turn := complex(float64(x[1].data[angle]), float64(x[2].data[angle]))
		if s.Back {
			turn = complex(real(turn), -imag(turn))
		}
		first, second := slices.Clone(i), slices.Clone(i)
		first[last], second[last] = pair, pair+half
		if s.Interleaved {
			first[last], second[last] = 2*pair, 2*pair+1
		}
		at, to := place(y.shape, first), place(y.shape, second)
		z := complex(float64(x[0].data[at]), float64(x[0].data[to])) * turn
		y.data[at], y.data[to] = T(real(z)), T(imag(z))
	})
}
