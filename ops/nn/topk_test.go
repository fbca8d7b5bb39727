package nn

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops"
)

// checkInts checks a result of tensor.Int in both dtypes of operands, in three runs.
func checkInts(t *testing.T, in []operand, build builder, shape []int, want ...int) {
	t.Helper()
	for _, dt := range []tensor.Dtype{tensor.Float64, tensor.Float32} {
		g, _, y := graph(t, dt, in, build)
		var v gorgonia.Value
		gorgonia.Read(y, &v)
		m := gorgonia.NewTapeMachine(g)
		for range 3 {
			require.NoError(t, m.RunAll())
			memory, err := elements(v)
			if err != nil || v.Dtype() != tensor.Int {
				t.Fatalf("%v: %v (%v)", dt, v.Dtype(), err)
			}
			if got := integers(memory); !slices.Equal(got, want) ||
				!slices.Equal(v.Shape(), tensor.Shape(shape)) {
				t.Errorf("%v: %v %v, want %v %v", dt, v.Shape(), got, shape, want)
			}
			m.Reset()
		}
		_ = m.Close()
	}
}

func TestArgMaxIsTheFirstOfTheLargest(t *testing.T) {
	most := func(axis int, keep bool) builder {
		return one(func(x *gorgonia.Node) (*gorgonia.Node, error) { return ArgMax(axis, keep, x) })
	}
	least := one(func(x *gorgonia.Node) (*gorgonia.Node, error) { return ArgMin(1, false, x) })
	inf, nan := math.Inf(1), math.NaN()
	x := of([]int{2, 3}, 1, 3, 3, 5, 5, 4)
	checkInts(t, []operand{x}, most(1, false), []int{2}, 1, 0)
	checkInts(t, []operand{x}, most(-1, true), []int{2, 1}, 1, 0)
	checkInts(t, []operand{x}, most(0, false), []int{3}, 1, 1, 1)
	checkInts(t, []operand{x}, least, []int{2}, 0, 2)
	checkInts(t, []operand{of([]int{3}, -inf, -inf, -inf)}, most(0, false), nil, 0)
	checkInts(t, []operand{of([]int{4}, 1, nan, inf, nan)}, most(0, false), nil, 1)
	checkDistinct(t, []operand{x}, most(1, false), most(1, true), most(0, false), least)
}

// topK are the values, or the indices, of the k largest.
func topK(axis, k int, places bool) builder {
	return one(func(x *gorgonia.Node) (*gorgonia.Node, error) {
		values, indices, err := TopK(axis, k, x)
		if places {
			return indices, err
		}
		return values, err
	})
}

func TestTopKTakesTheFirstOfEqualElements(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	x := of([]int{2, 4}, 1, 4, 4, 2, 7, -inf, -inf, 8)
	checkForward(t, []operand{x}, topK(1, 3, false), of([]int{2, 3}, 4, 4, 2, 8, 7, -inf), inf)
	checkInts(t, []operand{x}, topK(1, 3, true), []int{2, 3}, 1, 2, 3, 3, 0, 1)
	checkInts(t, []operand{x}, topK(0, 2, true), []int{2, 4}, 1, 0, 0, 1, 0, 1, 1, 0)
	checkInts(t, []operand{of([]int{4}, -inf, nan, -inf, 3)}, topK(0, 4, true), []int{4},
		1, 3, 0, 2)
	long := normal(1, 3, 200)
	order := make([]int, 200)
	for i := range order {
		order[i] = i
	}
	row := long.data[:200]
	slices.SortStableFunc(order, func(a, b int) int {
		return map[bool]int{true: -1, false: 1}[row[a] > row[b]]
	})
	checkInts(t, []operand{of([]int{200}, row...)}, topK(0, 150, true), []int{150}, order[:150]...)
	checkGradient(t, []operand{normal(1, 3, 5)}, topK(1, 2, false))
	checkGradient(t, []operand{normal(1, 3, 2, 2)}, topK(0, 3, false))
}

func TestGatherElements(t *testing.T) {
	by := func(axis int) builder {
		return two(func(x, i *gorgonia.Node) (*gorgonia.Node, error) {
			return GatherElements(axis, x, i)
		})
	}
	i := indices([]int{2, 3}, 1, 0, 1, 0, 0, 1)
	checkForward(t, []operand{count(2, 2), i}, by(1), of([]int{2, 3}, 2, 1, 2, 3, 3, 4), 0)
	checkForward(t, []operand{count(4, 3), i}, by(0), of([]int{2, 3}, 4, 2, 6, 1, 2, 6), 0)
	checkForward(t, []operand{of([]int{1, 2}, math.Inf(1), 5), indices([]int{1, 1}, 1)}, by(1),
		of([]int{1, 1}, 5), 0)
	checkGradient(t, []operand{normal(1, 2, 2), i}, by(-1))
	checkGradient(t, []operand{normal(1, 4, 3), i}, by(0))
	g := gorgonia.NewGraph()
	x, list := count(2, 2).node(g, "x", tensor.Float64), i.node(g, "i", tensor.Int)
	_, err := GatherElements(0, x, list)
	checkRefused(t, err, ops.ErrShape, "they may differ in axis 0 alone")
	y := require.Value(GatherElements(1, x, indices([]int{2, 1}, 0, 2).node(g, "j", tensor.Int)))(t)
	_, err = y.Op().Do(x.Value(), indices([]int{2, 1}, 0, 2).node(g, "k", tensor.Int).Value())
	checkRefused(t, err, backend.ErrArgument, "index 1 is 2, out of range 0 to 1")
}

func TestScatterAdd(t *testing.T) {
	by := func(axis, n int) builder {
		return two(func(x, i *gorgonia.Node) (*gorgonia.Node, error) {
			return ScatterAdd(axis, n, x, i)
		})
	}
	i := indices([]int{3}, 2, 0, 2)
	checkForward(t, []operand{count(3, 2), i}, by(0, 4), of([]int{4, 2}, 3, 4, 0, 0, 6, 8, 0, 0), 0)
	checkGradient(t, []operand{normal(1, 2, 3), i}, by(1, 3))
	g := gorgonia.NewGraph()
	_, err := ScatterAdd(0, 3, count(2).node(g, "x", tensor.Float64), i.node(g, "i", tensor.Int))
	checkRefused(t, err, ops.ErrShape, "x has shape (2) and indices (3)")
}

// Rows are gathered by computed indices, and go back to where they came from, in all machines.
func TestComputedIndicesRouteRows(t *testing.T) {
	for _, lisp := range []bool{false, true} {
		routed := func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			weight, to, err := TopK(1, 1, x[1])
			if err != nil {
				return nil, err
			}
			flat := gorgonia.Must(gorgonia.Reshape(to, tensor.Shape{3}))
			rows, err := ByIndices(0, x[0], flat)
			if err != nil {
				return nil, err
			}
			rows, err = gorgonia.BroadcastHadamardProd(rows, weight, nil, []byte{1})
			if err != nil {
				return nil, err
			}
			return ScatterAdd(0, 4, rows, flat)
		}
		t.Run(fmt.Sprint("lisp ", lisp), func(t *testing.T) {
			checkGradientOf(t, lisp, []operand{normal(1, 4, 2), normal(2, 3, 4)}, routed)
		})
	}
}
