package plan

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
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

// softmax is a softmax along an axis of a matrix.
func (p *program) softmax(axis int, x ir.ID) ir.ID {
	shape := p.Values[x].Shape
	along := func(op backend.ReduceOp, x ir.ID) ir.ID {
		y := p.add(ir.Reduce{Op: op, Axes: ir.Of(axis)}, shape.Without(axis), x)
		return p.add(ir.Broadcast{}, shape, p.add(ir.Reshape{}, shape.With(axis, 1), y))
	}
	e := p.unary(fuse.Exp, p.binary(fuse.Sub, x, along(backend.Max, x)))
	return p.binary(fuse.Div, e, along(backend.Sum, e))
}

// pool is a pooling of n x n pixels.
func pool(n int) ir.MaxPool {
	return ir.MaxPool{Window: ir.Window{H: n, W: n, StrideH: 1, StrideW: 1, DilationH: 1,
		DilationW: 1}}
}

// ops plans a program and returns the operations of its steps.
func ops(t *testing.T, p *program) (*Plan, []string) {
	t.Helper()
	require.NoError(t, p.Check())
	planned := p.planned(t)
	return planned, opsOf(planned)
}

// planned is a plan of the program that is proven.
func (p *program) planned(t *testing.T, updates ...lower.Update) *Plan {
	t.Helper()
	return p.trained(t, lower.Solver{Updates: updates})
}

// trained is planned with a solver.
func (p *program) trained(t *testing.T, s lower.Solver) *Plan {
	t.Helper()
	planned := require.Value(Trained(&p.Program, s))(t)
	err := errors.Join(planned.Doubt, Verify(planned))
	require.That(t, err == nil, "%v in\n%v", err, planned)
	return planned
}

// opsOf returns the operations of the steps.
func opsOf(p *Plan) (all []string) {
	for _, s := range p.Steps {
		all = append(all, s.Op.String())
	}
	return all
}

// TestSteps: what programs become.
func TestSteps(t *testing.T) {
	tests := []struct {
		name  string
		build func(p *program) []ir.ID
		want  []string
	}{
		{"equal values are one", func(p *program) []ir.ID {
			x := p.input(0, 4)
			return []ir.ID{p.binary(fuse.Add, p.unary(fuse.Exp, x), p.unary(fuse.Exp, x))}
		}, []string{"loop exp add"}},
		{"slices with other limits are two values", func(p *program) []ir.ID {
			x := p.input(0, 768)
			a := p.add(ir.Slice{Start: 0, Step: 1}, ir.Of(256), x)
			b := p.add(ir.Slice{Start: 256, Step: 1}, ir.Of(256), x)
			return []ir.ID{p.unary(fuse.Exp, a), p.unary(fuse.Exp, b)}
		}, []string{"loop exp", "loop exp"}},
		{"what nobody wants goes", func(p *program) []ir.ID {
			x := p.input(0, 4)
			p.unary(fuse.Exp, x)
			return []ir.ID{p.unary(fuse.Neg, x)}
		}, []string{"loop neg"}},
		{"what has an effect stays, in order", func(p *program) []ir.ID {
			x := p.input(0, 4)
			p.add(ir.Opaque{Index: 0, Name: "a"}, ir.Of(4), p.unary(fuse.Exp, x))
			p.add(ir.Opaque{Index: 1, Name: "b"}, ir.Of(4), x)
			return nil
		}, []string{"loop exp", "host a", "host b"}},
		{"numbers are computed when planning", func(p *program) []ir.ID {
			two := p.add(ir.ScalarOf(2), ir.Dims{})
			half := p.binary(fuse.Div, p.unary(fuse.Neg, two), p.binary(fuse.Mul, two, two))
			x := p.input(0, 4)
			wide := p.add(ir.Broadcast{}, ir.Of(4), p.add(ir.Reshape{}, ir.Of(1), half))
			return []ir.ID{p.binary(fuse.Mul, x, wide)}
		}, []string{"loop mul"}},
		{"chains and reductions are one loop", func(p *program) []ir.ID {
			x, b := p.input(0, 3, 4), p.add(ir.Broadcast{}, ir.Of(3, 4), p.input(1, 1, 4))
			y := p.unary(fuse.Tanh, p.binary(fuse.Add, x, b))
			return []ir.ID{y, p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0)}, ir.Of(4), y)}
		}, []string{"loop add tanh reduce-sum over (0)"}},
		{"a loop waits for what runs between its parts", func(p *program) []ir.ID {
			y := p.unary(fuse.Exp, p.input(0, 4, 4))
			z := p.add(ir.MatMul{}, ir.Of(4, 4), y, y)
			return []ir.ID{p.binary(fuse.Add, y, z)}
		}, []string{"loop exp", "matmul NN", "loop add"}},
		{"rows are one loop with what reads their reductions", func(p *program) []ir.ID {
			x := p.input(0, 3, 4)
			e := p.unary(fuse.Exp, x)
			sum := p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(1)}, ir.Of(3), e)
			wide := p.add(ir.Broadcast{}, ir.Of(3, 4), p.add(ir.Reshape{}, ir.Of(3, 1), sum))
			return []ir.ID{p.binary(fuse.Div, e, wide)}
		}, []string{"loop exp reduce-sum over (1) div"}},
		{"a reduction of columns ends a loop for those that read it", func(p *program) []ir.ID {
			x := p.input(0, 3, 4)
			e := p.unary(fuse.Exp, x)
			sum := p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0)}, ir.Of(4), e)
			wide := p.add(ir.Broadcast{}, ir.Of(3, 4), p.add(ir.Reshape{}, ir.Of(1, 4), sum))
			return []ir.ID{p.binary(fuse.Div, e, wide)}
		}, []string{"loop exp reduce-sum over (0)", "loop div"}},
		{"a sum of sums is one sum, unless something else reads the inner one",
			func(p *program) []ir.ID {
				sum := func(x ir.ID, axis int) ir.ID {
					return p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(axis)},
						p.Values[x].Shape.Without(axis), x)
				}
				x := sum(p.input(0, 2, 3, 4, 5), 2)
				return []ir.ID{sum(sum(x, 2), 0), sum(sum(p.input(1, 2, 3, 4, 5), 1), 0), x}
			}, []string{"loop reduce-sum over (2)", "loop reduce-sum over (0,2)",
				"loop reduce-sum over (0,1)"}},
		{"rows that are too long are several loops", func(p *program) []ir.ID {
			return []ir.ID{p.softmax(1, p.input(0, 3, 9000))}
		}, []string{"loop reduce-max over (1)", "loop sub exp reduce-sum over (1)", "loop div"}},
		{"rows across memory are several loops", func(p *program) []ir.ID {
			x := p.add(ir.Permute{Axes: ir.Of(1, 0)}, ir.Of(4, 3), p.input(0, 3, 4))
			return []ir.ID{p.softmax(1, x)}
		}, []string{"loop reduce-max over (1)", "loop sub exp reduce-sum over (1)", "loop div"}},
		{"what has one element for each row joins the rows", func(p *program) []ir.ID {
			x, w := p.input(0, 3, 4), p.unary(fuse.Exp, p.input(1, 3))
			sum := p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(1)}, ir.Of(3), x)
			share := p.binary(fuse.Div, sum, w)
			wide := p.add(ir.Broadcast{}, ir.Of(3, 4), p.add(ir.Reshape{}, ir.Of(3, 1), share))
			return []ir.ID{p.binary(fuse.Mul, x, wide), share}
		}, []string{"loop exp reduce-sum over (1) div mul"}},
		{"a number does not wait for a large loop that could read it", func(p *program) []ir.ID {
			// as in a cross-entropy and its gradient
			x, w := p.input(0, 10000, 128), p.input(1, 10000)
			sum := func(axis int, x ir.ID) ir.ID {
				return p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(axis)},
					p.Values[x].Shape.Without(axis), x)
			}
			number := p.unary(fuse.Sqrt, sum(0, w))
			e := p.unary(fuse.Exp, x)
			loss := p.binary(fuse.Div, sum(0, p.binary(fuse.Mul, sum(1, e), w)), number)
			scale := p.add(ir.Broadcast{}, ir.Of(10000), p.add(ir.Reshape{}, ir.Of(1),
				p.unary(fuse.Inv, number)))
			share := p.add(ir.Reshape{}, ir.Of(10000, 1), p.binary(fuse.Mul, w, scale))
			return []ir.ID{loss, p.binary(fuse.Mul, e, p.add(ir.Broadcast{}, ir.Of(10000, 128),
				share))}
		}, []string{"loop reduce-sum over (0)", "loop sqrt inv",
			"loop exp reduce-sum over (1) mul mul mul", "loop reduce-sum over (0)", "loop div"}},
		{"products read transposed views", func(p *program) []ir.ID {
			x := p.input(0, 3, 4)
			return []ir.ID{p.add(ir.MatMul{}, ir.Of(4, 4), p.add(ir.Permute{Axes: ir.Of(1, 0)},
				ir.Of(4, 3), x), x)}
		}, []string{"matmul NN"}},
		{"layers read copies of what lies otherwise", func(p *program) []ir.ID {
			x := p.add(ir.Permute{Axes: ir.Of(0, 1, 3, 2)}, ir.Of(1, 2, 4, 3),
				p.input(0, 1, 2, 3, 4))
			return []ir.ID{p.add(pool(2), ir.Of(1, 2, 3, 2), x),
				p.add(pool(3), ir.Of(1, 2, 2, 1), x)}
		}, []string{"loop copy", pool(2).String(), pool(3).String()}},
		{"softmax of columns is three loops", func(p *program) []ir.ID {
			return []ir.ID{p.softmax(0, p.input(0, 3, 4))}
		}, []string{"loop reduce-max over (0)", "loop sub exp reduce-sum over (0)", "loop div"}},
		{"softmax of rows is one loop", func(p *program) []ir.ID {
			return []ir.ID{p.softmax(1, p.input(0, 3, 4))}
		}, []string{"loop reduce-max over (1) sub exp reduce-sum over (1) div"}},
		{"sums of columns of the same operand are one loop", func(p *program) []ir.ID {
			x, dy := p.input(0, 3, 4), p.input(1, 3, 4)
			sum := ir.Reduce{Op: backend.Sum, Axes: ir.Of(0)}
			return []ir.ID{p.add(sum, ir.Of(4), p.binary(fuse.Mul, x, dy)),
				p.add(sum, ir.Of(4), dy)}
		}, []string{"loop mul reduce-sum over (0) reduce-sum over (0)"}},
		{"rows and sums of columns are one loop", func(p *program) []ir.ID {
			x, dy := p.input(0, 3, 4), p.input(1, 3, 4)
			columns := ir.Reduce{Op: backend.Sum, Axes: ir.Of(0)}
			before := p.add(columns, ir.Of(4), p.binary(fuse.Mul, x, dy))
			sum := p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(1)}, ir.Of(3), dy)
			y := p.binary(fuse.Div, x, p.add(ir.Broadcast{}, ir.Of(3, 4),
				p.add(ir.Reshape{}, ir.Of(3, 1), sum)))
			return []ir.ID{before, y, p.add(columns, ir.Of(4), y)}
		}, []string{"loop mul reduce-sum over (0) reduce-sum over (1) div reduce-sum over (0)"}},
		{"a sum of columns ends a loop for those that read it as rows", func(p *program) []ir.ID {
			along := func(axis int, x ir.ID) ir.ID {
				sum := p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(axis)}, ir.Of(4), x)
				return p.add(ir.Broadcast{}, ir.Of(4, 4), p.add(ir.Reshape{}, ir.Of(4, 1), sum))
			}
			x := p.input(0, 4, 4)
			y := p.binary(fuse.Div, x, along(1, x))
			return []ir.ID{p.binary(fuse.Sub, y, along(0, y))}
		}, []string{"loop reduce-sum over (1) div reduce-sum over (0)", "loop sub"}},
		{"rows that are long and sums of columns are two loops", func(p *program) []ir.ID {
			x := p.softmax(1, p.input(0, 3, 2000))
			return []ir.ID{x, p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0)}, ir.Of(2000), x)}
		}, []string{"loop reduce-max over (1) sub exp reduce-sum over (1) div",
			"loop reduce-sum over (0)"}},
		{"a sum of parts with zeros is their concatenation, in the order that is wanted",
			func(p *program) []ir.ID {
				var parts []ir.ID
				for k := range 3 {
					parts = append(parts, p.add(ir.Unslice{Start: 2 - k, Step: 1}, ir.Of(3, 4, 5),
						p.input(k, 1, 4, 5)))
				}
				sum := p.binary(fuse.Add, p.binary(fuse.Add, parts[0], parts[1]), parts[2])
				return []ir.ID{p.add(ir.Reshape{}, ir.Of(4, 15), p.add(ir.Permute{Axes: ir.Of(1, 0,
					2)}, ir.Of(4, 3, 5), sum))}
			}, []string{"concat axis 1"}},
		{"a sum of parts with a gap stays one", func(p *program) []ir.ID {
			a := p.add(ir.Unslice{Start: 0, Step: 1}, ir.Of(3, 4), p.input(0, 1, 4))
			b := p.add(ir.Unslice{Start: 2, Step: 1}, ir.Of(3, 4), p.input(1, 1, 4))
			return []ir.ID{p.binary(fuse.Add, a, b)}
		}, []string{"unslice axis 0 from 0 step 1", "unslice axis 0 from 2 step 1", "loop add"}},
		{"what later loops can compute of what is in memory is not stored",
			func(p *program) []ir.ID {
				x := p.input(0, 1024, 1024)
				t := p.unary(fuse.Tanh, x)
				slope := p.unary(fuse.Neg, p.unary(fuse.Square, t))
				y := p.add(ir.MatMul{}, ir.Of(1024, 1024), t, t)
				return []ir.ID{p.binary(fuse.Mul, y, slope)}
			}, []string{"loop tanh", "matmul NN", "loop square neg mul"}},
		{"rows are normalised again by what is kept of them", func(p *program) []ir.ID {
			x := p.unary(fuse.Exp, p.input(0, 1024, 1024))
			sum := p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(1)}, ir.Of(1024), x)
			wide := p.add(ir.Broadcast{}, ir.Of(1024, 1024), p.add(ir.Reshape{}, ir.Of(1024, 1),
				sum))
			z := p.binary(fuse.Sub, x, wide)
			y := p.add(ir.MatMul{}, ir.Of(1024, 1024), p.unary(fuse.Neg, z), x)
			return []ir.ID{p.binary(fuse.Mul, y, z)}
		}, []string{"loop exp reduce-sum over (1) sub neg", "matmul NN", "loop sub mul"}},
		{"small values are stored", func(p *program) []ir.ID {
			t := p.unary(fuse.Tanh, p.input(0, 64, 64))
			slope := p.unary(fuse.Neg, p.unary(fuse.Square, t))
			y := p.add(ir.MatMul{}, ir.Of(64, 64), t, t)
			return []ir.ID{p.binary(fuse.Mul, y, slope)}
		}, []string{"loop tanh square neg", "matmul NN", "loop mul"}},
		{"views that change nothing go", func(p *program) []ir.ID {
			x := p.add(ir.Reshape{}, ir.Of(3, 4), p.add(ir.Reshape{}, ir.Of(12), p.input(0, 3, 4)))
			x = p.add(ir.Permute{Axes: ir.Of(1, 0)}, ir.Of(3, 4),
				p.add(ir.Permute{Axes: ir.Of(1, 0)}, ir.Of(4, 3), x))
			return []ir.ID{p.unary(fuse.Exp, x)}
		}, []string{"loop exp"}},
		{"a loop goes on behind a reshape, and so do the sums of its columns",
			func(p *program) []ir.ID {
				bias := p.add(ir.Broadcast{}, ir.Of(8, 8), p.input(2, 1, 8))
				x := p.binary(fuse.Add, p.product(p.input(0, 8, 8), p.input(1, 8, 8)), bias)
				x = p.unary(fuse.Exp, p.add(ir.Reshape{}, ir.Of(2, 4, 8), x))
				x = p.add(ir.Reshape{}, ir.Of(8, 8), x)
				return []ir.ID{p.reduced(x), p.product(x, p.input(1, 8, 8))}
			}, []string{"matmul NN", "loop add exp reduce-sum over (0)", "matmul NN"}},
		{"a sum in another shape goes on behind the norm of rows that it adds",
			func(p *program) []ir.ID {
				y := p.product(p.input(0, 8, 8), p.input(1, 8, 8))
				sum := p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(1)}, ir.Of(8),
					p.binary(fuse.Mul, y, p.input(2, 8, 8)))
				wide := p.add(ir.Broadcast{}, ir.Of(8, 8), p.add(ir.Reshape{}, ir.Of(8, 1), sum))
				x := p.add(ir.Reshape{}, ir.Of(2, 4, 8), p.binary(fuse.Sub, y, wide))
				x = p.binary(fuse.Add, x, p.input(3, 2, 4, 8))
				return []ir.ID{p.product(p.add(ir.Reshape{}, ir.Of(8, 8), x), p.input(1, 8, 8))}
			}, []string{"matmul NN", "loop mul reduce-sum over (1) sub add", "matmul NN"}},
		{"loops that wait for the same product are one", func(p *program) []ir.ID {
			y := p.product(p.input(0, 8, 8), p.input(1, 8, 8))
			z := p.product(p.unary(fuse.Exp, y), p.input(1, 8, 8))
			return []ir.ID{z, p.product(p.unary(fuse.Neg, y), p.input(1, 8, 8))}
		}, []string{"matmul NN", "loop exp neg", "matmul NN", "matmul NN"}},
		{"what is transposed stays as it is", func(p *program) []ir.ID {
			x := p.binary(fuse.Add, p.view(p.input(0, 8, 8)), p.input(1, 8, 8))
			return []ir.ID{p.unary(fuse.Exp, p.add(ir.Reshape{}, ir.Of(64), x))}
		}, []string{"loop add", "loop exp"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			p := &program{}
			p.Results = test.build(p)
			_, got := ops(t, p)
			require.Check(t, slices.Equal(got, test.want), "%q, want %q", got, test.want)
		})
	}
}

// TestCarriedInBF16: an operation that only moves elements moves those of BF16 if it gets them, or
// if all that read them want them, and those of F32 where somebody needs all digits.
func TestCarriedInBF16(t *testing.T) {
	carried := ir.Opaque{Name: "carry", Placed: true, Carries: true}
	for name, test := range map[string]struct {
		op    ir.Opaque
		sum   bool // what is carried is a sum of F32, else a product
		reads func(p *program, w, y ir.ID) []ir.ID
		want  backend.DType
	}{
		"a product": {carried, false, func(p *program, _, y ir.ID) []ir.ID {
			return []ir.ID{p.reduced(y)}
		}, backend.BF16},
		"a sum for products": {carried, true, func(p *program, w, y ir.ID) []ir.ID {
			return []ir.ID{p.product(p.view(y), w)}
		}, backend.BF16},
		"a sum for others": {carried, true, func(p *program, w, y ir.ID) []ir.ID {
			return []ir.ID{p.product(y, w), p.unary(fuse.Exp, y)}
		}, backend.F32},
		"a result": {carried, false, func(p *program, _, y ir.ID) []ir.ID {
			return []ir.ID{y}
		}, backend.F32},
		"another operation": {ir.Opaque{Name: "add", Placed: true}, false,
			func(p *program, w, y ir.ID) []ir.ID { return []ir.ID{p.product(y, w)} }, backend.F32},
		"a product for a loop": {carried, false, func(p *program, _, y ir.ID) []ir.ID {
			return []ir.ID{p.unary(fuse.Exp, y)}
		}, backend.F32},
	} {
		p := &program{}
		p.Precision = ir.BF16
		w := p.input(0, 8, 8)
		x := p.product(p.input(1, 8, 8), w)
		if test.sum {
			x = p.binary(fuse.Add, x, p.input(2, 8, 8))
		}
		p.Results = test.reads(p, w, p.add(test.op, ir.Of(8, 8), x))
		planned, _ := ops(t, p)
		for _, s := range planned.Steps {
			if _, ok := s.Op.(ir.Opaque); ok && (s.Args[0].DType != test.want ||
				s.Dsts[0].DType != test.want) {
				t.Errorf("%s: it moves %v to %v, want %v in\n%v", name, s.Args[0].DType,
					s.Dsts[0].DType, test.want, planned)
			}
		}
	}
}

func (p *program) product(x, y ir.ID) ir.ID { return p.add(ir.MatMul{}, ir.Of(8, 8), x, y) }

func (p *program) view(x ir.ID) ir.ID {
	return p.add(ir.Permute{Axes: ir.Of(1, 0)}, ir.Of(8, 8), x)
}

func (p *program) reduced(x ir.ID) ir.ID {
	return p.add(ir.Reduce{Op: backend.Sum, Axes: ir.Of(0)}, ir.Of(8), x)
}

// TestLongChainsAreOneLoop: what counts is how much a loop reads and writes, not how much it
// computes, up to a limit.
func TestLongChainsAreOneLoop(t *testing.T) {
	for n, want := range map[int]int{40: 1, Standard().LoopValues: 1, Standard().LoopValues +
		1: 2} {
		p := &program{}
		x, y := p.input(0, 4), p.input(1, 4)
		for range n {
			x = p.binary(fuse.Add, x, y)
		}
		p.Results = []ir.ID{x}
		if planned, names := ops(t, p); len(planned.Steps) != want {
			t.Errorf("%d additions are %d steps, want %d: %q", n, len(names), want, names)
		}
	}
	p := &program{}
	var sum ir.ID
	for i := range 40 {
		if x := p.input(i, 4); i == 0 {
			sum = x
		} else {
			sum = p.binary(fuse.Add, sum, x)
		}
	}
	p.Results = []ir.ID{sum}
	planned, names := ops(t, p)
	for _, s := range planned.Steps {
		n := len(s.Args) + len(s.Dsts)
		require.Check(t, n <= Standard().LoopOperands, "a loop of %d operands in %q", n, names)
	}
	require.Check(t, len(planned.Steps) == 2, "40 operands are %d loops, want 2",
		len(planned.Steps))
}

// TestEpilogues: element-wise loops over the whole result of the product before them, whose
// operands they leave alone.
func TestEpilogues(t *testing.T) {
	p := &program{}
	square := ir.Of(8, 8)
	x := p.unary(fuse.Exp, p.input(0, 8, 8))
	y := p.add(ir.MatMul{}, square, x, p.input(1, 8, 8))
	biased := p.binary(fuse.Add, y, p.add(ir.Broadcast{}, square, p.input(2, 1, 8)))
	z := p.add(ir.MatMul{}, square, biased, biased)
	// reads what is not finished
	turned := p.binary(fuse.Add, z, p.add(ir.Permute{Axes: ir.Of(1, 0)}, square, z))
	v := p.add(ir.MatMul{}, square, turned, turned)
	p.Results = []ir.ID{p.binary(fuse.Mul, v, turned)}
	planned, names := ops(t, p)
	var got []bool
	for _, s := range planned.Steps {
		got = append(got, s.Epilogue)
	}
	want := []bool{false, false, true, false, false, false, true}
	require.That(t, slices.Equal(got, want), "epilogues of %q are %v, want %v", names, got, want)
	planned.Steps[2].Dsts[0].Buffer,
		planned.Steps[3].Args[0].Buffer = planned.Steps[1].Args[0].Buffer,
		planned.Steps[1].Args[0].Buffer
	require.Fails(t, "Verify", Verify(planned), "operand of step 1")
}

// chain is a program of steps that cannot be one loop.
func chain(n int) *program {
	p := &program{}
	x := p.input(0, 8, 8)
	for range n {
		x = p.add(ir.MatMul{}, ir.Of(8, 8), x, x)
	}
	p.Results = []ir.ID{x}
	return p
}

// TestArenaIsUsedAgain: a chain needs the memory of two values, however long it is, and
// element-wise steps none of their own.
func TestArenaIsUsedAgain(t *testing.T) {
	for _, n := range []int{2, 10, 50} {
		if planned, _ := ops(t, chain(n)); planned.ArenaBytes != 2*256 {
			t.Errorf("%d steps need %d bytes", n, planned.ArenaBytes)
		}
	}
	p := chain(3)
	p.Results = []ir.ID{p.unary(fuse.Exp, p.Results[0])}
	if planned, _ := ops(t, p); planned.ArenaBytes != 2*256 ||
		planned.Steps[3].Dsts[0].Buffer != planned.Steps[3].Args[0].Buffer {
		t.Errorf("the last step is not in place: %v", planned)
	}
}

// TestVerifyFindsOverwrites: each fault in a plan is found.
func TestVerifyFindsOverwrites(t *testing.T) {
	for want, damage := range map[string]func(p *Plan){
		"written over it": func(p *Plan) {
			p.Results[0], p.ResultBytes = p.Steps[0].Dsts[0], p.ArenaBytes
		},
		"2 results": func(p *Plan) { p.Results = append(p.Results, p.Results[0]) },
		"result 0":  func(p *Plan) { p.Results[0] = p.Steps[0].Args[0] },
		"over an operand": func(p *Plan) {
			p.Steps[1].Dsts[0].Buffer = p.Steps[0].Dsts[0].Buffer
			p.Steps[2].Args[0].Buffer = p.Steps[0].Dsts[0].Buffer
		},
		"outside":        func(p *Plan) { p.ArenaBytes-- },
		"before":         func(p *Plan) { p.Steps[0].Args[0] = p.Steps[1].Dsts[0] },
		"reaches over":   func(p *Plan) { p.Steps[1].Args[0].Offset++ },
		"writes a value": func(p *Plan) { p.Steps[0].Dsts[0].Step = 1 },
	} {
		planned, _ := ops(t, chain(4))
		damage(planned)
		require.Fails(t, "Verify", Verify(planned), want)
	}
}

// TestPlanIsTextual: the text shows steps, places and counts.
func TestPlanIsTextual(t *testing.T) {
	p := &program{}
	x := p.input(0, 3, 4)
	p.Results = []ir.ID{p.add(ir.MatMul{TransB: true}, ir.Of(3, 3),
		p.unary(fuse.Exp, p.unary(fuse.Neg, x)), x)}
	planned, _ := ops(t, p)
	text := planned.String()
	for _, want := range []string{"loop neg exp", "of test f32(3,4)", "matmul NT", "fused=2",
		"arena_bytes=", "host_ops=0", "# test"} {
		require.Check(t, strings.Contains(text, want), "no %q in\n%s", want, text)
	}
}
