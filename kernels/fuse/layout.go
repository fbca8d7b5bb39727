package fuse

import "slices"

// layout is how a program's loop goes over memory: axes of one element are left out, and
// neighbours are merged where every operand allows it, so that most loops have one axis
// or two. Row-major order stays the same.
type layout struct {
	shape   []int
	rows    bool // whether the innermost axis is a row, which then stays by itself
	reduced []bool
	inputs  [][]int // strides
	indices [][]int
	outputs [][]int
}

func layoutOf(p *Program) *layout {
	l := &layout{}
	folds := slices.ContainsFunc(p.Outputs, func(o Output) bool { return o.Folded })
	l.rows = rowsOf(p) != nil
	stays := func(k int) bool { return p.Shape[k] > 1 || l.rows && k == len(p.Shape)-1 }
	for k, extent := range p.Shape {
		if stays(k) {
			l.shape = append(l.shape, extent)
			l.reduced = append(l.reduced, folds && p.reduces(k))
		}
	}
	long := func(strides []int) []int {
		var kept []int
		for k := range p.Shape {
			if stays(k) {
				kept = append(kept, strides[k])
			}
		}
		return kept
	}
	for _, in := range p.Inputs {
		l.inputs = append(l.inputs, long(in.Strides))
	}
	for _, strides := range p.Indices {
		l.indices = append(l.indices, long(strides))
	}
	for _, out := range p.Outputs {
		l.outputs = append(l.outputs, long(out.Strides))
	}
	for k := len(l.shape) - 2; k >= 0; k-- {
		if l.mergeable(k) {
			l.merge(k)
		}
	}
	if len(l.shape) == 0 {
		l.pad()
	}
	return l
}

// all returns the strides of everything that moves with the loop.
func (l *layout) all() [][]int { return slices.Concat(l.inputs, l.indices, l.outputs) }

// mergeable reports whether axes k and k+1 are one run for everything. An axis of a fold and
// another one are not: folded outputs have a stride of 0 along one of them. Nor is a row.
func (l *layout) mergeable(k int) bool {
	if l.rows && k == len(l.shape)-2 {
		return false
	}
	return !slices.ContainsFunc(l.all(), func(s []int) bool { return s[k] != s[k+1]*l.shape[k+1] })
}

// merge makes axes k and k+1 one.
func (l *layout) merge(k int) {
	l.shape[k] *= l.shape[k+1]
	l.shape = slices.Delete(l.shape, k+1, k+2)
	l.reduced = slices.Delete(l.reduced, k, k+1)
	for _, list := range [][][]int{l.inputs, l.indices, l.outputs} {
		for i := range list {
			list[i] = slices.Delete(list[i], k, k+1)
		}
	}
}

// pad gives a loop of one element an axis, so that every loop has an inner one.
func (l *layout) pad() {
	l.shape, l.reduced = []int{1}, []bool{false}
	for _, list := range [][][]int{l.inputs, l.indices, l.outputs} {
		for i := range list {
			list[i] = []int{0}
		}
	}
}

// size returns the number of elements of the loop, and of its kept axes.
func (l *layout) size() (all, kept int) {
	all, kept = 1, 1
	for k, extent := range l.shape {
		all *= extent
		if !l.reduced[k] {
			kept *= extent
		}
	}
	return all, kept
}

// dense returns the strides of a row-major tensor of the kept axes: 0 along the others.
func (l *layout) dense() []int {
	strides, at := make([]int, len(l.shape)), 1
	for k := len(l.shape) - 1; k >= 0; k-- {
		if !l.reduced[k] {
			strides[k] = at
			at *= l.shape[k]
		}
	}
	return strides
}
