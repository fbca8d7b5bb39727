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

// stacking is a program with its inputs.
type stacking struct {
	ir.Program
	inputs []interpret.Array
	r      *rand.Rand
}

func (p *stacking) add(op ir.Op, shape ir.Dims, args ...ir.ID) ir.ID {
	return p.Add(ir.Value{Op: op, Shape: shape, DType: backend.BF16, Args: args})
}

func (p *stacking) input(shape ir.Dims) ir.ID {
	all := make([]float64, shape.Size())
	for i := range all {
		all[i] = float64(p.r.IntN(3))
	}
	p.inputs = append(p.inputs, interpret.Of(shape, all))
	return p.add(ir.Input{Index: len(p.inputs) - 1}, shape)
}

// stacked returns what becomes of the program, which has the same results.
func (p *stacking) stacked(t *testing.T, seed uint64) *ir.Program {
	t.Helper()
	outside := interpret.Outside{Inputs: p.inputs}
	want := require.Value(results(&p.Program, outside))(t)
	one := lower.Program(&p.Program)
	require.NoError(t, one.Check())
	got := require.Value(results(one, outside))(t)
	require.That(t, slices.Equal(got, want), "seed %d: %v, want %v", seed, got, want)
	return one
}

// TestAMatrixIsInOneStack: whatever values it multiplies, with which others, on either side, and
// what reads it before. What a run reads of it is its part.
func TestAMatrixIsInOneStack(t *testing.T) {
	shared := 0
	for seed := range uint64(500) {
		p := &stacking{Program: ir.Program{Stacks: true}, r: rand.New(rand.NewPCG(seed, 5))}
		var xs, matrices []ir.ID
		for range 1 + p.r.IntN(3) {
			xs = append(xs, p.input(ir.Of(2, 3)))
		}
		for range 1 + p.r.IntN(4) {
			w := p.input(ir.Of(3, 3))
			p.Frozen = append(p.Frozen, p.Values[w].Op)
			if p.r.IntN(3) == 0 {
				w = p.add(ir.Unary{Op: fuse.Neg}, ir.Of(3, 3), w)
			}
			matrices = append(matrices, w)
		}
		for range 1 + p.r.IntN(9) {
			x, w := xs[p.r.IntN(len(xs))], matrices[p.r.IntN(len(matrices))]
			switch p.r.IntN(6) {
			case 0:
				w = p.add(ir.Permute{Axes: ir.Of(1, 0)}, ir.Of(3, 3), w)
			case 1:
				p.Results = append(p.Results, p.add(ir.Binary{Op: fuse.Mul}, ir.Of(2, 3), x,
					p.add(ir.Slice{Start: 1, Step: 1}, ir.Of(2, 3), w)))
			}
			p.Results = append(p.Results, p.add(ir.MatMul{TransB: p.r.IntN(2) == 0}, ir.Of(2, 3),
				x, w))
		}
		one, in := p.stacked(t, seed), map[ir.ID]ir.ID{} // the stack of a matrix
		for i, v := range one.Values {
			if v.Op != (ir.Concat{}) && v.Op != (ir.Concat{Axis: 1}) {
				continue
			}
			for _, m := range v.Args {
				_, twice := in[m]
				require.That(t, !twice, "seed %d: a matrix is in two stacks", seed)
				in[m] = ir.ID(i)
			}
			shared = max(shared, len(one.Users()[i]))
		}
		for i, v := range one.Values {
			for _, a := range v.Args {
				for ir.View(one.Values[a].Op) {
					a = one.Values[a].Args[0]
				}
				is, stacked := in[a]
				require.That(t, !stacked || is == ir.ID(i), "seed %d: %v reads a matrix beside "+
					"its stack", seed, v.Op)
			}
		}
	}
	require.That(t, shared > 1, "no stack has two readers")
}

// TestProductsByFrozenMatricesAreOne: of one value, by matrices that lie alike, whatever else reads
// these. Others stay as they are.
func TestProductsByFrozenMatricesAreOne(t *testing.T) {
	const rows, k = 2, 3
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 4))
		p := &stacking{Program: ir.Program{Stacks: true}, r: r}
		alike := map[[3]int]int{} // the products of a value by frozen matrices of a layout
		var xs []ir.ID
		for range 1 + r.IntN(2) {
			xs = append(xs, p.input(ir.Of(rows, k)))
		}
		for range 1 + r.IntN(6) {
			i, n, layout, frozen := r.IntN(len(xs)), 1+r.IntN(3), r.IntN(3), r.IntN(4) > 0
			var w ir.ID // by rows, by rows and transposed, or by columns
			shape, op := ir.Of(n, k), ir.MatMul{TransB: layout == 0}
			if layout == 2 {
				shape = ir.Of(k, n)
			}
			of := p.input(shape)
			if w = of; frozen {
				p.Frozen = append(p.Frozen, p.Values[of].Op)
				alike[[3]int{i, layout}]++
			} else {
				alike[[3]int{len(p.Values), layout, 1}]++
			}
			if frozen && r.IntN(2) == 0 {
				w = p.add(ir.Unary{Op: fuse.Neg}, shape, of)
			}
			by := w
			if layout == 1 {
				by = p.add(ir.Permute{Axes: ir.Of(1, 0)}, ir.Of(k, n), w)
			}
			p.Results = append(p.Results, p.add(op, ir.Of(rows, n), xs[i], by))
			if r.IntN(3) == 0 { // as a gradient reads it
				p.Results = append(p.Results, p.add(ir.Unary{Op: fuse.Square}, shape, w))
			}
		}
		one, products := p.stacked(t, seed), 0
		for _, v := range one.Values {
			if _, ok := v.Op.(ir.MatMul); ok {
				products++
			}
		}
		require.That(t, products == len(alike), "seed %d: %d products, want %d", seed, products,
			len(alike))
	}
}
