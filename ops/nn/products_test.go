package nn

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/ops"
)

func multiplied(transA, transB bool) builder {
	return two(func(a, b *gorgonia.Node) (*gorgonia.Node, error) {
		return BatchedMatMul(transA, transB, a, b)
	})
}

func TestBatchedMatMul(t *testing.T) {
	// [1 2; 3 4] [5 6; 7 8] in all four forms
	a, aT := of([]int{1, 2, 2}, 1, 2, 3, 4), of([]int{1, 2, 2}, 1, 3, 2, 4)
	b, bT := of([]int{1, 2, 2}, 5, 6, 7, 8), of([]int{1, 2, 2}, 5, 7, 6, 8)
	want := of([]int{1, 2, 2}, 19, 22, 43, 50)
	checkForward(t, []operand{a, b}, multiplied(false, false), want, 0)
	checkForward(t, []operand{aT, b}, multiplied(true, false), want, 0)
	checkForward(t, []operand{a, bT}, multiplied(false, true), want, 0)
	checkForward(t, []operand{aT, bT}, multiplied(true, true), want, 0)
	checkForward(t, []operand{count(2, 1, 3), count(2, 3, 1)}, multiplied(false, false),
		of([]int{2, 1, 1}, 14, 77), 0)
	checkForward(t, []operand{count(1, 3), count(3, 2)}, multiplied(false, false),
		of([]int{1, 2}, 22, 28), 0)

	checkGradient(t, []operand{normal(1, 2, 3, 4), normal(2, 2, 4, 2)}, multiplied(false, false))
	checkGradient(t, []operand{normal(1, 2, 4, 3), normal(2, 2, 4, 2)}, multiplied(true, false))
	checkGradient(t, []operand{normal(1, 2, 3, 4), normal(2, 2, 2, 4)}, multiplied(false, true))
	checkGradient(t, []operand{normal(1, 2, 2, 4, 3), normal(2, 2, 2, 2, 4)},
		multiplied(true, true))
	checkDistinct(t, []operand{a, b}, multiplied(false, false), multiplied(true, false),
		multiplied(false, true), multiplied(true, true))
}

func TestOuterProd(t *testing.T) {
	checkForward(t, []operand{count(2), count(3)}, two(OuterProd), of([]int{2, 3}, 1, 2, 3, 2, 4,
		6), 0)
	checkGradient(t, []operand{normal(1, 3), normal(2, 4)}, two(OuterProd))
	checkGradient(t, []operand{normal(1, 1), normal(2, 1)}, two(OuterProd))
	for _, trans := range []bool{false, true} {
		n := map[bool]int{false: 4, true: 3}[trans]
		checkGradient(t, []operand{normal(1, 3, 4), normal(2, n)},
			two(func(m, v *gorgonia.Node) (*gorgonia.Node, error) {
				return apply(matVecSpec{trans}, m, v)
			}))
	}
}

func TestProductErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	a, b := count(2, 3, 4).node(g, "a", tensor.Float64), count(2, 3, 5).node(g, "b", tensor.Float64)
	_, err := BatchedMatMul(false, false, a, b)
	checkRefused(t, err, ops.ErrShape, "(2, 3, 4) and (2, 3, 5) of BatchedMatMul{NN} do not fit: "+
		"4 columns and 3 rows")
	_, err = BatchedMatMul(false, false, a, count(3, 4, 5).node(g, "c", tensor.Float64))
	checkRefused(t, err, ops.ErrShape, "batches of (2, 3, 4) and (3, 4, 5) differ")
	_, err = OuterProd(a, b)
	checkRefused(t, err, ops.ErrShape, "want two vectors")
}

func averaged(kernel, pad, stride int) builder {
	return one(func(x *gorgonia.Node) (*gorgonia.Node, error) {
		return AvgPool2D([2]int{kernel, kernel}, [2]int{pad, pad}, [2]int{stride, stride}, x)
	})
}

func TestAvgPool2D(t *testing.T) {
	checkForward(t, []operand{count(1, 1, 2, 4)}, averaged(2, 0, 2),
		of([]int{1, 1, 1, 2}, 3.5, 5.5), 0)
	checkForward(t, []operand{count(1, 1, 2, 3)}, averaged(2, 0, 1), of([]int{1, 1, 1, 2}, 3, 4), 0)
	checkForward(t, []operand{count(1, 2, 2, 2)}, averaged(2, 1, 2), of([]int{1, 2, 2, 2}, 0.25,
		0.5, 0.75, 1, 1.25, 1.5, 1.75, 2), 0)
	checkForward(t, []operand{count(1, 1, 3, 4)},
		one(func(x *gorgonia.Node) (*gorgonia.Node, error) {
			return AvgPool2D([2]int{3, 1}, [2]int{0, 0}, [2]int{1, 2}, x)
		}), of([]int{1, 1, 1, 2}, 5, 7), 0)
	checkForward(t, []operand{count(1, 2, 2, 2)}, one(GlobalAvgPool2D),
		of([]int{1, 2, 1, 1}, 2.5, 6.5), 0)
	checkGradient(t, []operand{normal(1, 2, 2, 4, 4)}, averaged(2, 0, 2))
	checkGradient(t, []operand{normal(1, 1, 2, 5, 5)}, averaged(3, 1, 2))
	checkGradient(t, []operand{normal(1, 1, 1, 4, 4)}, averaged(3, 0, 1))
	checkGradient(t, []operand{normal(1, 2, 2, 3, 3)}, one(GlobalAvgPool2D))
	checkGradient(t, []operand{normal(1, 1, 1, 2, 2)},
		one(func(dy *gorgonia.Node) (*gorgonia.Node, error) {
			return apply(avgPool2DGradSpec{avgPool2DSpec{Window: program.Window{
				Kernel: [2]int{2, 2}, Stride: [2]int{2, 2}, Dilation: [2]int{1, 1},
			}}, [2]int{5, 4}}, dy)
		}))
	checkDistinct(t, []operand{count(1, 1, 4, 4)}, averaged(2, 0, 2), averaged(2, 1, 2),
		averaged(2, 0, 1), averaged(4, 0, 2), one(GlobalAvgPool2D))
}

func TestPoolErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	x := count(1, 1, 2, 2).node(g, "x", tensor.Float64)
	for _, test := range []struct {
		kernel, pad, stride int
		wraps               error
		says                string
	}{
		{3, 0, 1, ops.ErrShape, "kernel [3 3] does not fit into (1, 1, 2, 2) with pad [0 0]"},
		{2, 2, 1, backend.ErrArgument, "kernel [2 2], pad [2 2] and [2 2], stride [1 1]"},
		{2, 0, 0, backend.ErrArgument, "stride [0 0]"},
	} {
		_, err := averaged(test.kernel, test.pad, test.stride)(gorgonia.Nodes{x})
		checkRefused(t, err, test.wraps, test.says)
	}
	_, err := GlobalAvgPool2D(count(2, 2).node(g, "y", tensor.Float64))
	checkRefused(t, err, ops.ErrShape, "x has shape (2, 2), want (b, c, h, w)")
	_, err = GlobalAvgPool2D(nil)
	checkRefused(t, err, backend.ErrArgument, "x is nil")
}
