package lower_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/interpret"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// TestWhatIsComputedOnceIsWhatRunsComputed: on random graphs, some of whose variables are frozen.
func TestWhatIsComputedOnceIsWhatRunsComputed(t *testing.T) {
	hoisted := 0
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 8))
		g, inputs := drawn(r)
		if g == nil {
			continue
		}
		var frozen []ir.Op
		for i := range inputs {
			if r.IntN(3) > 0 {
				frozen = append(frozen, ir.Input{Index: i})
			}
		}
		all := lower.Program(&g.Program)
		want, err := results(all, interpret.Outside{Inputs: inputs})
		if err != nil {
			continue // an operation that is run by its Do
		}
		rest, once := lower.Hoist(all, frozen, nil)
		hoisted += len(once)
		constants := make([]interpret.Array, len(once))
		for _, o := range once {
			p, leaves, _ := o.Recipe()
			require.NoError(t, p.Check())
			var of []interpret.Array
			for _, op := range leaves {
				require.That(t, slices.Contains(frozen, op), "seed %d: %v is not frozen", seed, op)
				of = append(of, inputs[op.(ir.Input).Index])
			}
			values := require.Value(interpret.Program(p, interpret.Outside{Inputs: of}))(t)
			constants[o.Index] = values[p.Results[0]]
		}
		require.NoError(t, rest.Check())
		got := require.Value(results(rest, interpret.Outside{Inputs: inputs,
			Constants: constants}))(t)
		for k, x := range got {
			if y := want[k]; math.Abs(x.Value-y.Value) > x.Err+y.Err {
				t.Fatalf("seed %d: number %d of the results is %v, was %v", seed, k, x, y)
			}
		}
	}
	require.Check(t, hoisted > 100, "%d values are computed once", hoisted)
}

// TestWhatIsHoistedPays: what takes more room than its leaves is not kept, unless something else
// than a loop reads it, and then at most twice as much. What loops compute for free is not.
func TestWhatIsHoistedPays(t *testing.T) {
	matrix, row, column := ir.Of(8, 8), ir.Of(1, 8), ir.Of(8, 1)
	p := &ir.Program{}
	add := func(op ir.Op, shape ir.Dims, d backend.DType, args ...ir.ID) ir.ID {
		return p.Add(ir.Value{Op: op, Shape: shape, DType: d, Args: args})
	}
	input := func(shape ir.Dims, d backend.DType) ir.ID {
		return add(ir.Input{Index: len(p.Values)}, shape, d)
	}
	x, w := input(matrix, backend.F32), input(matrix, backend.F32)
	half, a, b := input(matrix, backend.BF16), input(row, backend.F32), input(column, backend.F32)
	frozen := []ir.Op{p.Values[w].Op, p.Values[half].Op, p.Values[a].Op, p.Values[b].Op}
	times := func(y ir.ID) ir.ID {
		return add(ir.Binary{Op: fuse.Mul}, matrix, p.Values[y].DType, x, y)
	}
	product := func(y ir.ID) ir.ID { return add(ir.MatMul{}, matrix, backend.F32, x, y) }
	wide := func() ir.ID { return add(ir.Cast{}, matrix, backend.F32, half) }
	sum := add(ir.Binary{Op: fuse.Add}, matrix, backend.F32,
		add(ir.Broadcast{}, matrix, backend.F32, a), add(ir.Broadcast{}, matrix, backend.F32, b))
	scaled := add(ir.Unary{Op: fuse.Exp}, matrix, backend.F32, w)
	turned := add(ir.Permute{Axes: ir.Of(1, 0)}, matrix, backend.F32, w)
	for _, test := range []struct {
		what  string
		reads ir.ID
		once  int
	}{
		{"a function of a weight", times(scaled), 1},
		{"what a product reads of it", product(scaled), 1},
		{"a view", product(turned), 0},
		{"a view that needs a copy", product(add(ir.Reshape{}, matrix, backend.F32, add(
			ir.Permute{Axes: ir.Of(1, 0, 2)}, ir.Of(2, 8, 4), backend.F32, add(ir.Reshape{},
				ir.Of(8, 2, 4), backend.F32, w)))), 1},
		{"what loops widen", times(wide()), 0},
		{"what is widened for a product", product(wide()), 1},
		{"a matrix of two vectors", times(sum), 0},
		{"a matrix of two vectors for a product", product(sum), 0},
		{"a sum", times(add(ir.Broadcast{}, matrix, backend.F32, add(ir.Reshape{}, column,
			backend.F32, add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(1)}, ir.Of(8), backend.F32,
				w)))), 1},
	} {
		q := *p
		q.Results = []ir.ID{test.reads}
		_, once := lower.Hoist(lower.Program(&q), frozen, nil)
		require.Equal(t, test.what, len(once), test.once)
	}
	q := *p
	q.Results = []ir.ID{scaled}
	_, once := lower.Hoist(&q, frozen, []lower.Update{{Gradient: scaled}})
	require.Equal(t, "a gradient", len(once), 0)
}
