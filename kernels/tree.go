package kernels

import (
	"fmt"
	"math/bits"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/internal/simd"
)

// ReduceIn is Reduce in an association. Only sums and averages have one other than rank order.
//
// Cost of a tree: that of Reduce, with log2(len(srcs)) blocks of scratch in the first-level cache.
func (h Host) ReduceIn(a backend.Association, op backend.ReduceOp, dst backend.Buffer,
	srcs ...backend.Buffer) error {
	if err := (Check{}).Reduce(op, dst, srcs...); err != nil {
		return err
	}
	if a != backend.InRankOrder && (a != backend.Tree || op != backend.Sum && op != backend.Avg) {
		return fmt.Errorf("%w: reduce by %v, %v: only sums and averages have an association",
			backend.ErrArgument, op, a)
	}
	h.ReduceChecked(a, op, dst, srcs)
	return nil
}

// ReduceChecked is ReduceIn of arguments that it would not refuse. To check a few elements takes as
// long as to add them.
func (Host) ReduceChecked(a backend.Association, op backend.ReduceOp, dst backend.Buffer,
	srcs []backend.Buffer) {
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
		sumTree[float32](op, dst, srcs)
	case backend.F64:
		sumTree[float64](op, dst, srcs)
	case backend.I32:
		sumTree[int32](op, dst, srcs)
	case backend.I64:
		sumTree[int64](op, dst, srcs)
	case backend.U8:
		sumTree[byte](op, dst, srcs)
	}
}

// treeBlock is how many elements a tree adds at a time: a block of all levels stays in the
// first-level cache.
const treeBlock = 256

// sumTree adds sources in the association Tree, a block at a time. It writes the result of a block
// to dst last, so that dst may be one of the sources.
func sumTree[T number](op backend.ReduceOp, dst backend.Buffer, srcs []backend.Buffer) {
	var t tree[T]
	d := backend.View[T](dst)
	for lo := 0; lo < len(d); lo += treeBlock {
		out := d[lo:min(lo+treeBlock, len(d))]
		t.begin(len(out))
		operand := func(i int) []T { return backend.View[T](srcs[i])[lo : lo+len(out)] }
		for i := 0; i+1 < len(srcs); i += 2 {
			combine(backend.Sum, t.next(), operand(i), operand(i+1))
			t.carry()
		}
		if n := len(srcs); n%2 == 1 {
			copy(t.next(), operand(n-1))
		}
		copy(out, t.end())
		if op == backend.Avg {
			divide(out, len(srcs))
		}
	}
}

// sumTreeHalf is sumTree in 32 bits, rounded once at the end.
func sumTreeHalf[H half](op backend.ReduceOp, dst backend.Buffer, srcs []backend.Buffer) {
	var t tree[float32]
	var wide [treeBlock]float32
	d := backend.View[H](dst)
	for lo := 0; lo < len(d); lo += treeBlock {
		out := d[lo:min(lo+treeBlock, len(d))]
		t.begin(len(out))
		for i := 0; i < len(srcs); i += 2 {
			sum := t.next()
			widenAll(sum, backend.View[H](srcs[i])[lo:lo+len(out)])
			if i+1 < len(srcs) {
				y := wide[:len(out)]
				widenAll(y, backend.View[H](srcs[i+1])[lo:lo+len(out)])
				combine(backend.Sum, sum, sum, y)
				t.carry()
			}
		}
		sum := t.end()
		if op == backend.Avg {
			divide(sum, len(srcs))
		}
		narrowAll(out, sum)
	}
}

// tree is the sums of a tree whose leaves come in order: like the digits of a binary counter, at
// most one of each size is open.
type tree[T number] struct {
	few   [8][treeBlock]T
	more  [][treeBlock]T // of trees with more than 256 leaves
	n     int            // elements of a block
	open  int            // sums
	pairs int            // of leaves, so far
}

// begin starts a tree of blocks of n elements.
func (t *tree[T]) begin(n int) { t.n, t.open, t.pairs = n, 0, 0 }

// next opens a sum.
func (t *tree[T]) next() []T {
	t.open++
	return t.sum(t.open - 1)
}

// sum returns open sum number i, the largest first.
func (t *tree[T]) sum(i int) []T {
	if i < len(t.few) {
		return t.few[i][:t.n]
	}
	if i -= len(t.few); i == len(t.more) {
		t.more = append(t.more, [treeBlock]T{})
	}
	return t.more[i][:t.n]
}

// carry adds sums of the same size, after that of a pair of leaves was opened.
func (t *tree[T]) carry() {
	for range bits.TrailingZeros(^uint(t.pairs)) {
		t.close()
	}
	t.pairs++
}

// close adds the last open sum to the one before.
func (t *tree[T]) close() {
	t.open--
	sum := t.sum(t.open - 1)
	combine(backend.Sum, sum, sum, t.sum(t.open))
}

// end adds what is open, the smallest first, and returns the sum of all leaves.
func (t *tree[T]) end() []T {
	for t.open > 1 {
		t.close()
	}
	return t.sum(0)
}
