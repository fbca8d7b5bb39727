package fuse

import (
	"math/bits"
	"strconv"
)

// tileWidth is how many elements of the innermost axis a tile has.
const tileWidth = 32

// crossing returns the axis along which operands are contiguous that are not so along the
// innermost one, or -1 if there is none. Neighbours along that axis are in one sector of
// memory, so a block takes a tile of both axes, and the first-level cache keeps the sectors.
func (w *writer) crossing() int {
	inner := len(w.l.shape) - 1
	for _, list := range [][][]int{w.l.inputs, w.l.outputs} {
		for _, strides := range list {
			for k, s := range strides[:inner] {
				if strides[inner] > 1 && s == 1 && w.l.shape[k] > 1 {
					return k
				}
			}
		}
	}
	return -1
}

// tiles writes a loop in tiles of axis k and the innermost one, a tile for each block, and returns
// how many there are.
func (w *writer) tiles(k int) (blocks int) {
	inner := len(w.l.shape) - 1
	across := tileWidth / w.lanes // threads along the innermost axis
	down := threads / across
	tilesAcross := (w.l.shape[inner]/w.lanes + across - 1) / across
	tilesDown := (w.l.shape[k] + down - 1) / down
	others, rest := []int{}, 1
	for axis, extent := range w.l.shape[:inner] {
		if axis != k {
			others = append(others, axis)
			rest *= extent
		}
	}
	thread := w.get(b32, "mov.u32", "%tid.x")
	x := w.toWord(w.get(b32, "and.b32", thread, strconv.Itoa(across-1)))
	y := w.toWord(w.get(b32, "shr.u32", thread, strconv.Itoa(bits.TrailingZeros(uint(across)))))
	first, step := w.toWord(w.get(b32, "mov.u32", "%ctaid.x")),
		w.toWord(w.get(b32, "mov.u32", "%nctaid.x"))
	blocks = tilesAcross * tilesDown * rest
	w.count(first, strconv.Itoa(blocks), step, func(tile string) {
		outer, column := w.split(tile, tilesAcross)
		outer, row := w.split(outer, tilesDown)
		column = w.get(w.word, w.op("mad.lo.u"), column, strconv.Itoa(across), x)
		row = w.get(w.word, w.op("mad.lo.u"), row, strconv.Itoa(down), y)
		skip := w.label()
		w.line("@%s bra %s;", w.get(pred, w.op("setp.ge.u"), column,
			strconv.Itoa(w.l.shape[inner]/w.lanes)), skip)
		w.line("@%s bra %s;", w.get(pred, w.op("setp.ge.u"), row, strconv.Itoa(w.l.shape[k])), skip)
		at := w.place(nil, others, outer)
		w.element(w.place(w.place(at, []int{k}, row), []int{inner}, column))
		w.line("%s:", skip)
	})
	return blocks
}

// split writes i / n and i % n.
func (w *writer) split(i string, n int) (quotient, rest string) {
	quotient = w.divide(i, n)
	return quotient, w.get(w.word, w.op("sub.u"), i, w.get(w.word, w.op("mul.lo.u"), quotient,
		strconv.Itoa(n)))
}
