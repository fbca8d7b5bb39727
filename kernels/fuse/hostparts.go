package fuse

import "slices"

// How a loop is cut depends only on the program, so results do not depend on the workers.

// The bounds of blocks and parts.
const (
	// From longRow elements on, a block ends where the innermost axis ends, so operands are read
	// where they lie. Shorter runs are gathered into blocks of whole rows.
	longRow = blockSize / 2
	// copyBlock is how much is copied at a time where a block needs no memory.
	copyBlock = 1 << 15
	// partWork is the least work of a part, in additions of an element. The host does about ten of
	// these in a nanosecond, so it is 15 us; starting a part takes about 1.
	partWork = 150_000
	// maxParts is enough for the largest machines. Each part of a fold along the first axes has its
	// own sums, which are added up at the end: maxSums bounds them.
	maxParts = 128
	maxSums  = 1 << 17
)

// divide cuts the loop into parts and blocks.
func (h *host) divide() {
	axes := len(h.layout.shape)
	switch {
	case h.rows != nil:
		h.block = max(blockSize/h.inner, 1) * h.inner
		h.cut = h.block == h.inner
	case h.copies():
		h.block = min(max(copyBlock/h.inner, 1)*h.inner, h.n)
	case axes == 1:
		h.block = min(blockSize, h.n)
	case h.inner >= longRow:
		pieces := (h.inner + blockSize - 1) / blockSize
		h.block = min(multiple((h.inner+pieces-1)/pieces, 16), h.inner)
		h.cut = true
	default:
		h.block = min(blockSize/h.inner*h.inner, h.n)
	}
	unit, most := h.unit()
	h.part = multiple(max(partWork/h.work(), (h.n+most-1)/most, 1), unit)
	h.parts = (h.n + h.part - 1) / h.part
}

// copies reports whether the loop only copies elements that are one run of memory, which needs no
// block of them.
func (h *host) copies() bool {
	in, out := h.p.Inputs, h.p.Outputs
	return len(h.p.Code) == 1 && h.p.Code[0].Op == Load && len(out) == 1 && !out[0].Folded &&
		in[0].DType == out[0].DType && in[0].DType == h.p.Code[0].Type &&
		h.cursor(h.layout.inputs[0], false).dense() && !h.cursor(h.layout.outputs[0], false).dense()
}

// multiple returns the least multiple of unit that is not less than n.
func multiple(n, unit int) int { return (n + unit - 1) / unit * unit }

// unit returns the number of elements of which a part has a multiple, and how many parts there may
// be. A fold along other axes than the first ones has separate sums for each index of the first
// axes, which one part adds up.
func (h *host) unit() (unit, most int) {
	if !slices.ContainsFunc(h.p.Outputs, func(o Output) bool { return o.Folded }) {
		return h.block, maxParts
	}
	axis := 0
	for axis < len(h.layout.shape) && h.layout.reduced[axis] == h.layout.reduced[0] {
		axis++
	}
	unit = 1
	for _, extent := range h.layout.shape[axis:] {
		unit *= extent
	}
	if axis == len(h.layout.shape) {
		unit = h.block
	}
	if _, kept := h.layout.size(); h.split() {
		return unit, max(min(maxParts, maxSums/kept), 1)
	}
	return unit, maxParts
}

// split reports whether parts share elements of folded outputs.
func (h *host) split() bool { return h.layout.reduced[0] }

// work estimates what an element of the loop costs, in additions, on a processor with vector
// instructions: parts are the same on all.
func (h *host) work() int {
	work := len(h.p.Inputs) + len(h.p.Outputs)
	for _, c := range h.p.Code {
		switch {
		case !c.Op.computes() || c.Op == Index:
		case h.hasVectors(c) && c.Op.Rounded():
			work += 6
		case h.hasVectors(c) || c.Op.FoldsRows():
			work++
		case c.Op.Rounded():
			work += 200
		default:
			work += 10
		}
	}
	return max(work, 1)
}
