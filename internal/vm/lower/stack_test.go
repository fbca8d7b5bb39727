package lower_test

import (
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

// TestProductsByFrozenMatricesAreOne: of one value, by matrices that lie alike, whatever else reads
// these. Others stay as they are.
func TestProductsByFrozenMatricesAreOne(t *testing.T) {
	const rows, k = 2, 3
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 4))
		p := &ir.Program{Stacks: true}
		add := func(op ir.Op, shape ir.Dims, args ...ir.ID) ir.ID {
			return p.Add(ir.Value{Op: op, Shape: shape, DType: backend.BF16, Args: args})
		}
		var inputs []interpret.Array
		input := func(shape ir.Dims) ir.ID {
			all := make([]float64, shape.Size())
			for i := range all {
				all[i] = float64(r.IntN(3))
			}
			inputs = append(inputs, interpret.Of(shape, all))
			return add(ir.Input{Index: len(inputs) - 1}, shape)
		}
		alike := map[[3]int]int{} // the products of a value by frozen matrices of a layout
		var xs []ir.ID
		for range 1 + r.IntN(2) {
			xs = append(xs, input(ir.Of(rows, k)))
		}
		for range 1 + r.IntN(6) {
			i, n, layout, frozen := r.IntN(len(xs)), 1+r.IntN(3), r.IntN(3), r.IntN(4) > 0
			var w ir.ID // by rows, by rows and transposed, or by columns
			shape, op := ir.Of(n, k), ir.MatMul{TransB: layout == 0}
			if layout == 2 {
				shape = ir.Of(k, n)
			}
			of := input(shape)
			if w = of; frozen {
				p.Frozen = append(p.Frozen, p.Values[of].Op)
				alike[[3]int{i, layout}]++
			} else {
				alike[[3]int{len(p.Values), layout, 1}]++
			}
			if frozen && r.IntN(2) == 0 {
				w = add(ir.Unary{Op: fuse.Neg}, shape, of)
			}
			by := w
			if layout == 1 {
				by = add(ir.Permute{Axes: ir.Of(1, 0)}, ir.Of(k, n), w)
			}
			p.Results = append(p.Results, add(op, ir.Of(rows, n), xs[i], by))
			if r.IntN(3) == 0 { // as a gradient reads it
				p.Results = append(p.Results, add(ir.Unary{Op: fuse.Square}, shape, w))
			}
		}
		outside := interpret.Outside{Inputs: inputs}
		want := require.Value(results(p, outside))(t)
		one := lower.Program(p)
		require.NoError(t, one.Check())
		got := require.Value(results(one, outside))(t)
		require.That(t, slices.Equal(got, want), "seed %d: %v, want %v", seed, got, want)
		products := 0
		for _, v := range one.Values {
			if _, ok := v.Op.(ir.MatMul); ok {
				products++
			}
		}
		require.That(t, products == len(alike), "seed %d: %d products, want %d", seed, products,
			len(alike))
	}
}
