package program

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// loop is a step under construction: values that are computed element by element, and folds of
// them. Members have its shape, or one element for each of its rows.
type loop struct {
	*fuse.Program
	values   map[Value]fuse.Value // members, what they read, and what is computed along with them
	members  []Value
	rows     bool // whether it has folds of rows
	dst, src []strided
}

// Rows are folded in a loop if they have at most longRow elements, or at most shortRow where there
// are fewer than manyRows of them: as in plans, so that sums are added in the same order.
const (
	shortRow = 8192
	longRow  = 65536
	manyRows = 64
)

// longCode is how many instructions a loop has before another one begins: half of what package fuse
// takes.
const longCode = 512

// foldsRows reports whether folding these axes of a shape is a fold of rows.
func foldsRows(shape, axes []int) bool {
	last := len(shape) - 1
	if len(axes) != 1 || axes[0] != last {
		return false
	}
	n := shape[last]
	return n <= longRow && (n <= shortRow || size(shape)/n >= manyRows)
}

// across reports whether axes are all but the last one, and rows short enough to be folded across.
func across(shape, axes []int) bool {
	last := len(shape) - 1
	return len(axes) == last && !slices.Contains(axes, last) && shape[last] <= fuse.MaxFoldedRow
}

// oncePerRow reports whether a shape has one element for each row of a loop.
func oncePerRow(shape, loop []int) bool {
	last := len(loop) - 1
	return len(shape) == len(loop) && last >= 0 && shape[last] == 1 &&
		slices.Equal(shape[:last], loop[:last])
}

func newLoop(shape []int) *loop {
	return &loop{Program: &fuse.Program{Shape: shape}, values: map[Value]fuse.Value{}}
}

// load returns the element of what lies in memory.
func (l *loop) load(d backend.DType, from strided) fuse.Value {
	l.src = append(l.src, from)
	return l.Load(d, from.along(l.Shape)...)
}

// store adds an output.
func (l *loop) store(x fuse.Value, d backend.DType, to strided) {
	l.dst = append(l.dst, to)
	l.Store(x, d, to.along(l.Shape)...)
}

// reduce adds a folded output.
func (l *loop) reduce(op backend.ReduceOp, axes []int, x fuse.Value, d backend.DType, to strided) {
	l.Reduced = make([]bool, len(l.Shape))
	for _, axis := range axes {
		l.Reduced[axis] = true
	}
	l.dst = append(l.dst, to)
	l.Fold(op, x, d, to.along(l.Shape)...)
}

// admits reports whether a fold may join the loop: one of its rows, or of axes that others fold.
func (l *loop) admits(shape, axes []int) bool {
	if !slices.Equal(shape, l.Shape) {
		return false
	}
	var folded []int // axes of the outputs
	for axis, reduced := range l.Reduced {
		if reduced {
			folded = append(folded, axis)
		}
	}
	switch {
	case foldsRows(shape, axes):
		return folded == nil || across(shape, folded)
	case l.rows && !across(shape, axes):
		return false
	}
	return folded == nil || slices.Equal(folded, axes)
}
