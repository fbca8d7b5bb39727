package kernels

import (
	"fmt"

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
	h.ReduceChecked(a, op, dst, srcs, nil)
	return nil
}

// SumBranches adds branches of a [backend.Tree], which are sums of so many terms each, to the sum
// of all terms: see [backend.Branches]. Together they are the whole tree, from its first term on.
func (h Host) SumBranches(dst backend.Buffer, srcs []backend.Buffer, terms []int) error {
	if err := (Check{}).Reduce(backend.Sum, dst, srcs...); err != nil {
		return err
	}
	if len(terms) != len(srcs) || dst.DType().Float() && dst.DType().Size() == 2 {
		return fmt.Errorf("%w: sum of %d branches of %v: got the terms of %d, of f32 or wider",
			backend.ErrArgument, len(srcs), dst.DType(), len(terms))
	}
	h.ReduceChecked(backend.Tree, backend.Sum, dst, srcs, terms)
	return nil
}

// ReduceChecked is ReduceIn, or with terms SumBranches, of arguments that these would not refuse.
// To check a few elements takes as long as to add them.
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

// treeBlock is how many elements a tree adds at a time: a block of all levels stays in the
// first-level cache.
const treeBlock = 256

// sumTree adds sources in the association Tree, a block at a time. They are branches of so many
// terms, or terms themselves. It writes the result of a block to dst last, so that dst may be one
// of the sources.
func sumTree[T number](op backend.ReduceOp, dst backend.Buffer, srcs []backend.Buffer,
	terms []int) {
	var t tree[T]
	d := backend.View[T](dst)
	for lo := 0; lo < len(d); lo += treeBlock {
		out := d[lo:min(lo+treeBlock, len(d))]
		t.begin(len(out))
		operand := func(i int) []T { return backend.View[T](srcs[i])[lo : lo+len(out)] }
		for i := 0; i < len(srcs); i++ {
			size := 1
			if len(terms) > 0 {
				size = terms[i]
			}
			switch {
			case t.terms&size != 0:
				sum := t.sum(t.open - 1)
				combine(backend.Sum, sum, sum, operand(i))
			case i+1 < len(srcs) && (len(terms) == 0 || terms[i+1] == size):
				combine(backend.Sum, t.next(), operand(i), operand(i+1))
				t.terms += size
				i++
			default:
				copy(t.next(), operand(i))
				t.terms += size
				continue
			}
			t.carry(size)
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
				t.terms++
				t.carry(1)
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
	terms int            // so far: a sum is open for each of its binary digits that is 1
}

// begin starts a tree of blocks of n elements.
func (t *tree[T]) begin(n int) { t.n, t.open, t.terms = n, 0, 0 }

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

// carry adds sums of the same size, after so many terms were added to the last one of this size.
func (t *tree[T]) carry(size int) {
	for sum := 2 * size; t.terms&sum != 0; sum *= 2 {
		t.close()
	}
	t.terms += size
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
