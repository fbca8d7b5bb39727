package ir

import (
	"fmt"
	"slices"
	"strings"
)

// MaxDims is the largest number of axes of a value.
const MaxDims = 8

// Dims is a list of at most MaxDims integers: a shape, strides, a permutation, axes. It is
// comparable, so that operations which contain it are. The zero Dims is empty: the shape of
// a scalar.
type Dims struct {
	n  int
	at [MaxDims]int
}

// Of returns the list of its arguments. It panics if there are more than MaxDims, so check
// lists of unknown length first.
func Of(list ...int) Dims {
	if len(list) > MaxDims {
		panic(fmt.Sprintf("ir: %d axes, at most %d are supported", len(list), MaxDims))
	}
	d := Dims{n: len(list)}
	copy(d.at[:], list)
	return d
}

// Len returns the length of the list.
func (d Dims) Len() int { return d.n }

// At returns the element at i.
func (d Dims) At(i int) int { return d.at[:d.n][i] }

// Slice returns the elements as a slice of its own.
func (d Dims) Slice() []int { return append([]int{}, d.at[:d.n]...) }

// With returns the list with x at i.
func (d Dims) With(i, x int) Dims {
	d.at[:d.n][i] = x
	return d
}

// Without returns the list without the element at i.
func (d Dims) Without(i int) Dims {
	copy(d.at[i:], d.at[i+1:d.n])
	d.n--
	d.at[d.n] = 0
	return d
}

// Insert returns the list with x before the element at i; i may be the length.
func (d Dims) Insert(i, x int) Dims {
	list := append(d.Slice(), 0)
	copy(list[i+1:], list[i:])
	list[i] = x
	return Of(list...)
}

// Has reports whether x is in the list.
func (d Dims) Has(x int) bool {
	return slices.Contains(d.at[:d.n], x)
}

// Size returns the product: the number of elements of a shape.
func (d Dims) Size() int {
	size := 1
	for _, x := range d.at[:d.n] {
		size *= x
	}
	return size
}

// Strides returns the strides of a shape in row-major order, in elements.
func (d Dims) Strides() Dims {
	s, stride := Dims{n: d.n}, 1
	for i := d.n - 1; i >= 0; i-- {
		s.at[i] = stride
		stride *= d.at[i]
	}
	return s
}

// Dense reports whether a value of a shape and strides lies in row-major order without gaps.
func Dense(shape, strides Dims) bool {
	want := shape.Strides()
	for i := range shape.Len() {
		if shape.At(i) != 1 && strides.At(i) != want.At(i) {
			return false
		}
	}
	return true
}

// Reshaped returns the strides by which the elements of a value of shape x and some strides, in
// row-major order, become those of a value of shape y; false if there are none.
//
// Axes of x that lie in order are taken together, and y must divide each such group.
func Reshaped(x, strides, y Dims) (Dims, bool) {
	become := y.Strides()
	if x.Size() == 0 || Dense(x, strides) {
		return become, true
	}
	to := y.Len() - 1
	for axis := x.Len() - 1; axis >= 0; {
		size, stride := x.At(axis), strides.At(axis)
		for axis--; axis >= 0 && (x.At(axis) == 1 || size == 1 ||
			strides.At(axis) == size*stride); axis-- {
			if size == 1 {
				stride = strides.At(axis)
			}
			size *= x.At(axis)
		}
		for ; size > 1; to-- {
			if to < 0 || size%y.At(to) != 0 {
				return become, false
			}
			become = become.With(to, stride)
			stride *= y.At(to)
			size /= y.At(to)
		}
	}
	for ; to >= 0; to-- { // only axes of length 1 are left
		become = become.With(to, 0)
	}
	return become, true
}

// String returns the list as "(2,3)".
func (d Dims) String() string {
	return "(" + strings.ReplaceAll(strings.Trim(fmt.Sprint(d.at[:d.n]), "[]"), " ", ",") + ")"
}
