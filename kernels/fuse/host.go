package fuse

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// BlockSize is how many elements the host computes at a time. A block of float32 is 4 KiB, so
// that the few values that an instruction needs stay in the first-level cache.
const BlockSize = 1024

// host runs a program on host memory.
type host struct {
	p      *Program
	layout *layout
	n      int   // elements of the loop
	rows   *rows // nil if the program folds none
	row    int   // elements of a row
	block  int   // elements that are computed at a time: whole rows
	values

	loads, computes, stores []step
	folds                   []finisher

	dst, src []backend.Buffer // of the run under way
}

// step does elements lo to lo+n, with n up to a block; of values that are alike along rows, one for each
// row.
type step func(lo, n int) error

// finisher is a fold: it begins before the first block, and stores after the last one.
type finisher interface {
	begin()
	finish() error
}

// values are the blocks of the values, each in the slice of its type, and nil in the others.
type values struct {
	f32 [][]float32
	f64 [][]float64
	i32 [][]int32
	i64 [][]int64
}

func makeValues(n int) values {
	return values{make([][]float32, n), make([][]float64, n), make([][]int32, n), make([][]int64, n)}
}

// set makes value k the elements of memory.
func (v *values) set(k int, memory backend.Buffer) {
	switch memory.DType() {
	case backend.F32:
		v.f32[k] = backend.View[float32](memory)
	case backend.F64:
		v.f64[k] = backend.View[float64](memory)
	case backend.I32:
		v.i32[k] = backend.View[int32](memory)
	case backend.I64:
		v.i64[k] = backend.View[int64](memory)
	}
}

// get returns the first n elements of value k.
func (v *values) get(k int, d backend.DType, n int) backend.Buffer {
	switch d {
	case backend.F32:
		return backend.Of(v.f32[k][:n])
	case backend.F64:
		return backend.Of(v.f64[k][:n])
	case backend.I32:
		return backend.Of(v.i32[k][:n])
	}
	return backend.Of(v.i64[k][:n])
}

// Host returns the Loop of a program on host memory. It runs on the calling goroutine and needs no
// scratch; Run allocates nothing.
func Host(p *Program) (Loop, error) {
	if err := p.Check(); err != nil {
		return nil, err
	}
	h := &host{p: p, layout: layoutOf(p), rows: rowsOf(p), block: BlockSize, values: makeValues(2 * len(p.Code))}
	h.n, _ = h.layout.size()
	if h.rows != nil {
		h.row = h.layout.shape[len(h.layout.shape)-1]
		h.block = max(BlockSize/h.row, 1) * h.row
	}
	h.place()
	for k, c := range p.Code {
		switch c.Op {
		case Const:
			h.fillConst(k, c)
		case Load:
			h.loads = append(h.loads, h.once(k, h.load(k, c)))
		case Index:
			h.loads = append(h.loads, h.once(k, h.index(k, c)))
		case SumRow, MaxRow, MinRow:
			do := h.foldRows(k, c.Op.folds(), h.each(c.Args[0]))
			h.computes = append(h.computes, do)
		default:
			if !h.alike(k) {
				for i := range c.Args[:c.Op.Operands()] {
					c.Args[i] = h.each(c.Args[i])
				}
			}
			h.computes = append(h.computes, h.once(k, h.compute(k, c)))
		}
	}
	for k, out := range p.Outputs {
		if out.Folded {
			h.fold(k, out)
		} else {
			h.stores = append(h.stores, h.store(k, out))
		}
	}
	return h, nil
}

// place gives every value a block. Blocks of values that are not needed any more are used
// again, except those of constants, which are filled once. Inputs take none that was used
// before: they are loaded before anything is computed.
func (h *host) place() {
	last := h.lastUses()
	blocks := make([]backend.Buffer, len(h.p.Code))
	var idle []backend.Buffer
	for k, c := range h.p.Code {
		if n := len(idle); n > 0 && c.Op.computes() {
			blocks[k], idle = idle[n-1], idle[:n-1]
		} else {
			blocks[k] = backend.Of(make([]float64, h.block))
		}
		h.set(k, blocks[k].As(c.Type).Slice(0, h.block))
		for x := range k + 1 {
			if last[x] == k && h.p.Code[x].Op != Const {
				idle = append(idle, blocks[x])
			}
		}
	}
}

// lastUses returns for each value the number of the last instruction that reads it, that of the
// value itself if none does, and more than any for values of outputs.
func (h *host) lastUses() []int {
	last := make([]int, len(h.p.Code))
	for k, c := range h.p.Code {
		last[k] = k
		for _, x := range c.Args[:c.Op.Operands()] {
			last[x] = k
		}
	}
	for _, out := range h.p.Outputs {
		last[out.Value] = len(h.p.Code)
	}
	return last
}

// fillConst fills the block of a constant.
func (h *host) fillConst(k int, c Instr) {
	switch c.Type {
	case backend.F32:
		fill(h.f32[k], float32(c.float()))
	case backend.F64:
		fill(h.f64[k], c.float())
	case backend.I32:
		fill(h.i32[k], int32(c.Bits))
	case backend.I64:
		fill(h.i64[k], int64(c.Bits))
	}
}

func fill[T any](block []T, x T) {
	for i := range block {
		block[i] = x
	}
}

// Scratch implements [Loop].
func (h *host) Scratch() int { return 0 }

// Run implements [Loop].
func (h *host) Run(dst, src []backend.Buffer, _ backend.Buffer) error {
	if err := h.p.CheckBuffers(dst, src, false); err != nil {
		return err
	}
	h.dst, h.src = dst, src
	defer func() { h.dst, h.src = nil, nil }() // the caller's memory
	for _, f := range h.folds {
		f.begin()
	}
	for lo := 0; lo < h.n; lo += h.block {
		n := min(h.block, h.n-lo)
		for _, steps := range [...][]step{h.loads, h.computes, h.stores} {
			for _, do := range steps {
				if err := do(lo, n); err != nil {
					return fmt.Errorf("element %d of the loop: %w", lo, err)
				}
			}
		}
	}
	for _, f := range h.folds {
		if err := f.finish(); err != nil {
			return err
		}
	}
	return nil
}

// cursor walks through an operand in row-major order of the loop, in runs along the
// innermost axis.
type cursor struct {
	shape, strides []int
	index          [backend.MaxAxes]int
	at             int // of the operand, in elements
}

// seek goes to element lo of the loop.
func (c *cursor) seek(lo int) {
	c.at = 0
	for k := len(c.shape) - 1; k >= 0; k-- {
		c.index[k] = lo % c.shape[k]
		c.at += c.index[k] * c.strides[k]
		lo /= c.shape[k]
	}
}

// next returns where the next run of up to n elements begins, and its length, and goes behind it.
func (c *cursor) next(n int) (at, count int) {
	k := len(c.shape) - 1
	at, count = c.at, min(n, c.shape[k]-c.index[k])
	c.index[k] += count
	c.at += count * c.strides[k]
	for ; k > 0 && c.index[k] == c.shape[k]; k-- {
		c.at += c.strides[k-1] - c.shape[k]*c.strides[k]
		c.index[k] = 0
		c.index[k-1]++
	}
	return at, count
}

// dense reports whether the operand is one run of memory.
func (c *cursor) dense() bool {
	at := 1
	for k := len(c.shape) - 1; k >= 0; k-- {
		if c.shape[k] > 1 && c.strides[k] != at {
			return false
		}
		at *= c.shape[k]
	}
	return true
}

// run is the innermost stride.
func (c *cursor) run() int { return c.strides[len(c.strides)-1] }
