package reference

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// ReduceIn is Reduce in an association. Only sums and averages have associations other than rank
// order.
func ReduceIn(a backend.Association, op backend.ReduceOp, dst backend.Buffer,
	srcs ...backend.Buffer) error {
	if err := (kernels.Check{}).Reduce(op, dst, srcs...); err != nil {
		return err
	}
	if a != backend.InRankOrder && (a != backend.Tree || op != backend.Sum && op != backend.Avg) {
		return fmt.Errorf("%w: reduce by %v, %v: only sums and averages have an association",
			backend.ErrArgument, op, a)
	}
	kernels.Host{}.ReduceChecked(a, op, dst, srcs, nil)
	return nil
}

// SumBranches adds up branches of a [backend.Tree], each a sum of the given number of terms, to the
// sum of all terms: see [sumtree.Branches]. Together they are the whole tree, from its first term
// on.
func SumBranches(dst backend.Buffer, srcs []backend.Buffer, terms []int) error {
	if err := (kernels.Check{}).Reduce(backend.Sum, dst, srcs...); err != nil {
		return err
	}
	if len(terms) != len(srcs) || dst.DType().Float() && dst.DType().Size() == 2 {
		return fmt.Errorf("%w: sum of %d branches of %v: got the terms of %d, of f32 or wider",
			backend.ErrArgument, len(srcs), dst.DType(), len(terms))
	}
	kernels.Host{}.ReduceChecked(backend.Tree, backend.Sum, dst, srcs, terms)
	return nil
}
