package checkpoint

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Region says where consecutive elements belong in a tensor: they begin at element From of a part
// that has Length places along Axis, from Start on. In the files of checkpoints it describes a
// rank's elements.
type Region struct {
	Shape  []int `json:"shape"` // of the whole tensor
	Axis   int   `json:"axis"`
	Start  int   `json:"start"`
	Length int   `json:"length"`
	From   int   `json:"from"`
	N      int   `json:"-"` // elements
}

// All is the region of all elements of a tensor.
func All(shape []int) Region {
	return Region{Shape: shape, Length: Elements(shape[:min(1, len(shape))]), N: Elements(shape)}
}

// Of returns the region's elements of those of its part, or these if they are given alone.
func (r Region) Of(part backend.Buffer) backend.Buffer {
	if part.Len() == r.N {
		return part
	}
	return part.Slice(r.From, r.From+r.N)
}

// row and block return how many elements belong to one place along the axis, and to all places.
func (r Region) row() int   { return Elements(r.Shape[min(r.Axis+1, len(r.Shape)):]) }
func (r Region) block() int { return Elements(r.Shape[min(r.Axis, len(r.Shape)):]) }

// check refuses a region of a file, of a tensor of more elements than its files may have.
func (r Region) check(most int64) error {
	axes := max(1, len(r.Shape)) // a number has one, of one place
	ok := r.Axis >= 0 && r.Axis < axes && r.Start >= 0 && r.Length >= 0 && r.From >= 0
	n := int64(1)
	for _, d := range r.Shape {
		ok = ok && d >= 0 && (d == 0 || n <= most/int64(d))
		n *= int64(max(d, 0))
	}
	if ok {
		places := r.block() / max(1, r.row())
		ok = r.Length <= places && r.Start <= places-r.Length &&
			r.From <= Elements(r.Shape)/max(1, r.block())*r.Length*r.row()-r.N
	}
	if !ok {
		return fmt.Errorf("%d elements are not of a tensor of %v as it says (%+v)", r.N, r.Shape, r)
	}
	return nil
}

// Meet calls f with each run of elements that two regions of a tensor have in common: n elements,
// from i on in r and from k on in o.
func (r Region) Meet(o Region, f func(i, k, n int)) {
	for i := 0; i < r.N; {
		part := r.Length * r.row()
		at := (r.From + i) % part
		k, n, in := o.find((r.From+i)/part*r.block() + r.Start*r.row() + at)
		if n = min(n, part-at, r.N-i); in {
			f(i, k, n)
		}
		i += n
	}
}

// find returns which element of the region is at a place in the whole, if any is, and for how many
// places from there on this holds.
func (r Region) find(at int) (i, n int, in bool) {
	block, from, to := r.block(), r.Start*r.row(), (r.Start+r.Length)*r.row()
	switch c := at % block; {
	case c < from:
		return 0, from - c, false
	case c >= to:
		return 0, block - c, false
	default:
		i, n = at/block*(to-from)+c-from-r.From, to-c
	}
	switch {
	case i < 0:
		return 0, min(n, -i), false
	case i >= r.N:
		return 0, n, false
	}
	return i, min(n, r.N-i), true
}

// Elements returns how many elements a tensor of a shape has.
func Elements(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}
