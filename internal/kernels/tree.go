package kernels

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
)

// ReduceChecked is Reduce in an association, for arguments that are already checked: checking a few
// elements takes as long as adding them. With terms the sources are branches of a [backend.Tree],
// each a sum of so many terms: see [sumtree.Branches]. Together they are the whole tree.
//
// Cost of a tree: that of Reduce, with log2(len(srcs)) blocks of scratch in the first-level cache.
func (Host) ReduceChecked(a backend.Association, op backend.ReduceOp, dst backend.Buffer,
	srcs []backend.Buffer, terms []int) {
	if a == backend.InRankOrder || len(srcs) < 3 { // two operands have one order
		simd.Reduce(simd.Best(), op, dst, srcs)
		return
	}
	switch dst.DType() {
	case backend.F16:
		sumTreeHalf[backend.Float16](op, dst, srcs)
	case backend.BF16:
		sumTreeHalf[backend.BFloat16](op, dst, srcs)
	case backend.F32:
		sumTree[float32](op, dst, srcs, terms)
	case backend.F64:
		sumTree[float64](op, dst, srcs, terms)
	case backend.I32:
		sumTree[int32](op, dst, srcs, terms)
	case backend.I64:
		sumTree[int64](op, dst, srcs, terms)
	case backend.U8:
		sumTree[byte](op, dst, srcs, terms)
	}
}

// A tree adds up blocks of elements, so that sums stay in the first-level cache: small ones need no
// memory but the stack's, and of large ones there are fewer.
const (
	treeBlock  = 256
	largeBlock = 2048
)

// sumTree adds sources in the association Tree, a block at a time unless they are one chain. They
// are branches of the given numbers of terms, or terms themselves. dst may be one of the sources,
// since the result of a block is written last.
func sumTree[T number](op backend.ReduceOp, dst backend.Buffer, srcs []backend.Buffer,
	terms []int) {
	var t tree[T]
	d := backend.View[T](dst)
	lo, hi, block := 0, 0, treeBlock
	part := func(i int) []T { return backend.View[T](srcs[i])[lo:hi] }
	switch rows := t.add(d[:0], len(srcs), part, terms); {
	case rows == 0:
		block = len(d)
	case rows > len(t.few) || len(d) > 2*largeBlock:
		block = largeBlock
		t.rows = make([]T, rows*largeBlock)
	}
	for ; lo < len(d); lo = hi {
		hi = min(lo+block, len(d))
		t.add(d[lo:hi], len(srcs), part, terms)
	}
	if op == backend.Avg {
		divide(d, len(srcs))
	}
}

// sumTreeHalf is sumTree in 32 bits, rounded once at the end.
func sumTreeHalf[H half](op backend.ReduceOp, dst backend.Buffer, srcs []backend.Buffer) {
	var t, wide tree[float32]
	rows := t.add(nil, len(srcs), func(int) []float32 { return nil }, nil)
	t.rows, wide.rows = make([]float32, rows*largeBlock), make([]float32, len(srcs)*largeBlock)
	d := backend.View[H](dst)
	for lo := 0; lo < len(d); lo += largeBlock {
		out := d[lo:min(lo+largeBlock, len(d))]
		for i, src := range srcs {
			widenAll(wide.row(i, len(out)), backend.View[H](src)[lo:lo+len(out)])
		}
		sum := wide.row(0, len(out))
		t.add(sum, len(srcs), func(i int) []float32 { return wide.row(i, len(out)) }, nil)
		if op == backend.Avg {
			divide(sum, len(srcs))
		}
		narrowAll(out, sum)
	}
}

// tree has the sums of a block that are under way: few, or rows of larger blocks.
type tree[T number] struct {
	few  [8][treeBlock]T
	rows []T
}

// row returns n elements of scratch memory.
func (t *tree[T]) row(i, n int) []T {
	switch {
	case n == 0:
		return nil
	case t.rows != nil:
		return t.rows[i*largeBlock:][:n]
	}
	return t.few[i][:n]
}

// chain is a sum that is not added up yet, of operands one after the other, some of them in scratch
// memory. It has at most one operand for each level of the tree, and one more.
type chain struct{ operands, scratch int }

const longestChain = 32

// add adds n operands to out, and returns how many rows of scratch memory that took.
//
// Sums are open as the digits of a binary counter are. Two of one size become one chain, since
// x + (y + z) has the bits of (y + z) + x; where both have several operands, one is added up first.
func (t *tree[T]) add(out []T, n int, operand func(i int) []T, terms []int) (used int) {
	var few [longestChain]int // operands of all chains, those in scratch memory below 0
	var chains [longestChain]chain
	list, open, scratch, done := few[:0], chains[:0], 0, 0
	reduce := func(dst []T, list []int) {
		var srcs [longestChain]backend.Buffer
		for k, i := range list {
			if i < 0 {
				srcs[k] = backend.Of(t.row(^i, len(out)))
			} else {
				srcs[k] = backend.Of(operand(i))
			}
		}
		simd.Reduce(simd.Best(), backend.Sum, backend.Of(dst), srcs[:len(list)])
	}
	merge := func() {
		right, left, at := open[len(open)-1], &open[len(open)-2], len(list)
		switch at -= right.operands; {
		case right.operands > 1 && left.operands > 1:
			scratch -= right.scratch
			reduce(t.row(scratch, len(out)), list[at:])
			list, right = append(list[:at], ^scratch), chain{1, 1}
			scratch++
			used = max(used, scratch)
		case right.operands > 1:
			x := list[at-1]
			copy(list[at-1:], list[at:])
			list[len(list)-1] = x
		}
		left.operands, left.scratch = left.operands+right.operands, left.scratch+right.scratch
		open = open[:len(open)-1]
	}
	for i := range n {
		list, open = append(list, i), append(open, chain{operands: 1})
		size := 1
		if len(terms) > 0 {
			size = terms[i]
		}
		for sum := size; done&sum != 0; sum *= 2 {
			merge()
		}
		done += size
	}
	for len(open) > 1 {
		merge()
	}
	reduce(out, list)
	return used
}
