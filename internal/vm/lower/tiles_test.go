package lower_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/interpret"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/internal/vm/proof"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// program makes programs of F32 values.
type program struct{ ir.Program }

func (p *program) add(op ir.Op, shape ir.Dims, args ...ir.ID) ir.ID {
	return p.Add(ir.Value{Op: op, Args: args, Shape: shape, DType: backend.F32, Name: "test"})
}

func (p *program) input(index int, shape ...int) ir.ID {
	return p.add(ir.Input{Index: index}, ir.Of(shape...))
}

func (p *program) unary(f fuse.Op, x ir.ID) ir.ID {
	return p.add(ir.Unary{Op: f}, p.Values[x].Shape, x)
}

func (p *program) binary(f fuse.Op, x, y ir.ID) ir.ID {
	return p.add(ir.Binary{Op: f}, p.Values[x].Shape, x, y)
}

// classifier has logits x wᵀ of 8 rows and 6 columns, a sum of what follows from each row and from
// its label, and the gradients of x and w. Its elements are integers.
func classifier(more func(p *program, logits ir.ID)) *program {
	p := &program{}
	x, w, labels := p.input(0, 8, 3), p.input(1, 6, 3), p.input(2, 8)
	logits := p.add(ir.MatMul{TransB: true}, ir.Of(8, 6), x, w)
	wide := func(x ir.ID) ir.ID {
		return p.add(ir.Broadcast{}, ir.Of(8, 6), p.add(ir.Reshape{}, ir.Of(8, 1), x))
	}
	most := p.add(ir.Reduce{Op: backend.Max, Axes: ir.Of(1)}, ir.Of(8), logits)
	less := p.binary(fuse.Sub, logits, wide(most))
	each := p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(1)}, ir.Of(8),
		p.binary(fuse.Mul, less, wide(labels)))
	loss := p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0)}, ir.Dims{}, each)
	three := p.add(ir.Broadcast{}, ir.Of(8, 6), p.add(ir.Reshape{}, ir.Of(1, 1),
		p.add(ir.ScalarOf(3), ir.Dims{})))
	d := p.add(ir.Select{Axis: 1}, ir.Of(8, 6), wide(labels), less,
		p.binary(fuse.Mul, p.unary(fuse.Neg, three), less))
	p.Results = []ir.ID{loss, p.add(ir.MatMul{}, ir.Of(8, 3), d, w), p.add(ir.MatMul{TransA: true},
		ir.Of(6, 3), d, x), p.unary(fuse.Neg, each), p.binary(fuse.Mul, each, p.add(ir.Broadcast{},
		ir.Of(8), p.add(ir.Reshape{}, ir.Of(1), loss)))} // which waits for all tiles
	if more != nil {
		more(p, logits)
	}
	return p
}

func integers(shape ir.Dims, most int) interpret.Array {
	data := make([]float64, shape.Size())
	for i := range data {
		data[i] = float64(i * 5 % most)
	}
	return interpret.Of(shape, data)
}

// elements returns the elements of a program's results.
func elements(t *testing.T, p *ir.Program, inputs ...interpret.Array) (all []float64) {
	t.Helper()
	numbers := require.Value(results(p, interpret.Outside{Inputs: inputs}))(t)
	for _, x := range numbers {
		all = append(all, x.Value)
	}
	return all
}

// TestTiles: in tiles of rows a program has the same results, its plan is proven, and no value has
// all rows of the logits.
func TestTiles(t *testing.T) {
	lowered := lower.Program(&classifier(nil).Program)
	of := func(p *ir.Program) []float64 {
		return elements(t, p, integers(ir.Of(8, 3), 7), integers(ir.Of(6, 3), 11),
			integers(ir.Of(8), 6))
	}
	want := of(lowered)
	l := plan.Standard()
	for _, tiles := range []int{2, 4} {
		l.Tiles = tiles
		tiled := require.Value(lower.Tile(lowered, tiles))(t)
		if got := of(tiled); !slices.Equal(got, want) || len(got) != 1+24+18+8+8 {
			t.Errorf("%d tiles: %v, want %v", tiles, got, want)
		}
		for _, v := range tiled.Values {
			require.Check(t, v.Shape.Size() < 8*6 || ir.Leaf(v.Op), "%d tiles: %v of %v", tiles,
				v.Op, v.Shape)
		}
		planned, err := l.New(proof.Verify, &classifier(nil).Program, lower.Solver{})
		if err != nil || planned.Doubt != nil {
			t.Fatal(err, planned.Doubt)
		}
		sums := strings.Count(planned.String(), "epilogue loop add")
		if n := strings.Count(planned.String(), "matmul NT"); n != tiles || sums != tiles-1 {
			t.Errorf("%d tiles, %d matrix multiplications, %d sums in\n%v", tiles, n, sums, planned)
		}
	}
}

// TestTilesOfSimilarities: the largest matrix multiplication is x xᵀ. A tile takes its rows of the
// one x, and all of the other.
func TestTilesOfSimilarities(t *testing.T) {
	p := &program{}
	x := p.input(0, 8, 3)
	all := p.add(ir.MatMul{TransB: true}, ir.Of(8, 8), x, x)
	p.Results = []ir.ID{p.add(ir.Reduce{Op: backend.Max, Axes: ir.Of(1)}, ir.Of(8), all),
		p.add(ir.MatMul{}, ir.Of(8, 3), all, x), p.add(ir.MatMul{TransA: true}, ir.Of(8, 3), all,
			x)}
	tiled := require.Value(lower.Tile(&p.Program, 4))(t)
	in := integers(ir.Of(8, 3), 7)
	got, want := elements(t, tiled, in), elements(t, &p.Program, in)
	require.Check(t, slices.Equal(got, want), "%v, want %v", got, want)
}

// TestTilesThatCannotBe: who reads all logits, or what depends on more than a row.
func TestTilesThatCannotBe(t *testing.T) {
	for name, more := range map[string]func(p *program, logits ir.ID){
		"the logits are a result": func(p *program, logits ir.ID) {
			p.Results = append(p.Results, logits)
		},
		"somebody reads them in another order": func(p *program, logits ir.ID) {
			p.Results = append(p.Results, p.unary(fuse.Exp, p.add(ir.Permute{Axes: ir.Of(1, 0)},
				ir.Of(6, 8), logits)))
		},
		"a gradient depends on the loss": func(p *program, logits ir.ID) {
			wide := p.add(ir.Broadcast{}, ir.Of(8, 6), p.add(ir.Reshape{}, ir.Of(1, 1),
				p.Results[0]))
			p.Results = append(p.Results, p.add(ir.MatMul{}, ir.Of(8, 3), p.binary(fuse.Mul, logits,
				wide), 1))
		},
		"an operation of the graph reads them": func(p *program, logits ir.ID) {
			p.add(ir.Opaque{}, ir.Of(8, 6), logits)
		},
	} {
		_, err := lower.Tile(lower.Program(&classifier(more).Program), 4)
		require.Fails(t, name, err, backend.ErrUnsupported)
	}
}
