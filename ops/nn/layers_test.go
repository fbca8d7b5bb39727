package nn

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/terms"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops"
)

// two and three are builders of operations with as many operands.
func two(f func(a, b *gorgonia.Node) (*gorgonia.Node, error)) builder {
	return func(x gorgonia.Nodes) (*gorgonia.Node, error) { return f(x[0], x[1]) }
}

func normed(epsilon float64) builder {
	return func(x gorgonia.Nodes) (*gorgonia.Node, error) {
		return LayerNorm(epsilon, x[0], x[1], x[2])
	}
}

func TestGELU(t *testing.T) {
	// 0.841192 = 0.5*(1 + tanh(sqrt(2/pi)*1.044715)), 0.841345 = (1 + erf(1/sqrt 2))/2
	checkForward(t, []operand{of([]int{3}, 0, 1, -1)}, one(GELU),
		of([]int{3}, 0, 0.8413447, -0.1586553), 1e-6)
	checkForward(t, []operand{of([]int{3}, 0, 1, -1)}, one(GELUTanh),
		of([]int{3}, 0, 0.8411920, -0.1588080), 1e-6)
	checkForward(t, []operand{of([]int{2}, 30, -30)}, one(GELU), of([]int{2}, 30, 0), 0)
	checkGradient(t, []operand{normal(1, 3, 4)}, one(GELU))
	checkGradient(t, []operand{normal(1, 3, 4)}, one(GELUTanh))
	checkDistinct(t, []operand{count(3)}, one(GELU), one(GELUTanh))
}

func TestLayerNorm(t *testing.T) {
	// mean 3, variance 4
	in := []operand{of([]int{2, 2}, 1, 5, 5, 1), of([]int{2}, 10, 100), of([]int{2}, 1, 2)}
	checkForward(t, in, normed(0), of([]int{2, 2}, -9, 102, 11, -98), 1e-5)
	checkForward(t, in, normed(12), of([]int{2, 2}, -4, 52, 6, -48), 1e-5) // sqrt(4 + 12) = 4
	checkGradient(t, []operand{normal(1, 2, 3, 4), normal(2, 4), normal(3, 4)}, normed(1e-5))
	checkGradient(t, []operand{normal(1, 5), normal(2, 5), normal(3, 5)}, normed(0.1))
	checkDistinct(t, in, normed(1e-5), normed(1.01e-5), normed(1e-6))
}

func TestByIndices(t *testing.T) {
	by := func(axis int) builder {
		return two(func(x, i *gorgonia.Node) (*gorgonia.Node, error) {
			return ByIndices(axis, x, i)
		})
	}
	three := indices([]int{3}, 1, 0, 1)
	checkForward(t, []operand{count(2, 2), three}, by(0), of([]int{3, 2}, 3, 4, 1, 2, 3, 4), 0)
	checkForward(t, []operand{count(2, 2), three}, by(1), of([]int{2, 3}, 2, 1, 2, 4, 3, 4), 0)
	checkForward(t, []operand{count(2, 2, 2), three}, by(-2), of([]int{2, 3, 2}, 3, 4, 1, 2, 3, 4,
		7, 8, 5, 6, 7, 8), 0)
	checkForward(t, []operand{count(3), indices([]int{2, 2}, 2, 0, 1, 1)}, by(0),
		of([]int{2, 2}, 3, 1, 2, 2), 0)
	for axis := range 3 {
		checkGradient(t, []operand{normal(1, 3, 2, 2), three}, by(axis))
	}
	checkGradient(t, []operand{normal(1, 3), indices([]int{2, 2}, 2, 0, 1, 1)}, by(0))
	checkDistinct(t, []operand{count(2, 2), three}, by(0), by(1))
	checkGradient(t, []operand{normal(1, 3, 2), indices([]int{3}, 4, 0, 4)},
		two(func(dy, i *gorgonia.Node) (*gorgonia.Node, error) {
			return apply(byIndicesGradSpec{0, 5}, dy, i)
		}))
}

func TestIndexCopy(t *testing.T) {
	put := func(axis int) builder {
		return three(func(x, i, rows *gorgonia.Node) (*gorgonia.Node, error) {
			return IndexCopy(axis, x, i, rows)
		})
	}
	twice := indices([]int{3}, 1, 0, 1)
	rows := of([]int{3, 2}, 10, 20, 30, 40, 50, 60)
	checkForward(t, []operand{count(4, 2), twice, rows}, put(0),
		of([]int{4, 2}, 30, 40, 50, 60, 5, 6, 7, 8), 0)
	checkForward(t, []operand{count(2, 3), indices([]int{1}, 2), of([]int{2, 1}, 10, 20)},
		put(-1), of([]int{2, 3}, 1, 2, 10, 4, 5, 20), 0)
	two := indices([]int{2}, 2, 0)
	checkGradient(t, []operand{normal(1, 3, 2, 2), two, normal(2, 2, 2, 2)}, put(0))
	checkGradient(t, []operand{normal(1, 2, 3, 2), two, normal(2, 2, 2, 2)}, put(1))
	checkDistinct(t, []operand{count(2, 2), two, count(2, 2)}, put(0), put(1))
	g := gorgonia.NewGraph()
	x, i := count(2, 3).node(g, "x", tensor.Float64), twice.node(g, "i", tensor.Int)
	_, err := IndexCopy(0, x, i, x)
	checkRefused(t, err, ops.ErrShape, "rows of shape (3, 3), not [(2, 3)]")
}

func TestEmbedding(t *testing.T) {
	embed := padded()
	in := []operand{count(3, 2), indices([]int{2, 2}, 2, 0, 0, 0)}
	checkForward(t, in, embed, of([]int{2, 2, 2}, 5, 6, 1, 2, 1, 2, 1, 2), 0)
	checkGradient(t, []operand{normal(1, 3, 2), in[1]}, embed)
}

// padded is a builder of an Embedding.
func padded(padding ...int) builder {
	return two(func(w, i *gorgonia.Node) (*gorgonia.Node, error) {
		return Embedding(w, i, padding...)
	})
}

// With padding, the result has that row, too, and the row has no gradient, which central
// differences do not know: other rows have theirs, also of a gradient.
func TestAPaddingRowHasNoGradient(t *testing.T) {
	in := []operand{normal(1, 3, 2), indices([]int{2, 2}, 2, 0, 1, 0)}
	_, want := forward(t, tensor.Float64, in, padded())
	for _, padding := range []int{0, 2, -2, terms.NoRow} {
		checkForward(t, in, padded(padding), of([]int{2, 2, 2}, want...), 1e-7)
		for _, lisp := range []bool{false, true} {
			rows := gradients(t, in, padded(), lisp)[0]
			if row := (padding + 3) % 3; padding != terms.NoRow {
				clear(rows[2*row:][:2])
			}
			if got := gradients(t, in, padded(padding), lisp)[0]; !slices.Equal(got, rows) {
				t.Errorf("padding %d, lisp machine %v: gradient %v, want %v", padding, lisp, got,
					rows)
			}
		}
	}
	checkGradient(t, in, two(func(dy, i *gorgonia.Node) (*gorgonia.Node, error) {
		return apply(exceptSpec{2}, gorgonia.Must(ByIndices(0, dy, i)), i)
	}))
	checkDistinct(t, in, padded(), padded(0), padded(1), padded(terms.NoRow))
	g := gorgonia.NewGraph()
	w, i := in[0].node(g, "w", tensor.Float64), in[1].node(g, "i", tensor.Int)
	for _, wrong := range [][]int{{3}, {4}, {-4}, {0, 1}, {terms.NoRow, 1}} {
		_, err := Embedding(w, i, wrong...)
		checkRefused(t, err, backend.ErrArgument, "of a table of 3 rows: give one index, -3 to 2")
	}
}

func TestIndexErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	x := count(2, 3).node(g, "x", tensor.Float64)
	i := indices([]int{2}, 0, 3).node(g, "i", tensor.Int)
	_, err := ByIndices(0, x, x)
	checkRefused(t, err, ops.ErrDType, "operand 1 is float64: indices are Int")
	_, err = ByIndices(2, x, i)
	checkRefused(t, err, ops.ErrShape, "axis 2 is out of range")
	_, err = Embedding(count(3).node(g, "v", tensor.Float64), i)
	checkRefused(t, err, ops.ErrShape, "weights have shape (3), want a matrix")
	y := require.Value(ByIndices(1, x, i))(t)
	_, err = y.Op().Do(x.Value(), i.Value())
	checkRefused(t, err, backend.ErrArgument, "index 1 is 3, out of range 0 to 2")
}

func TestCrossEntropy(t *testing.T) {
	with := func(ignore int) builder {
		return two(func(x, l *gorgonia.Node) (*gorgonia.Node, error) {
			o := CrossEntropyOptions{Ignore: ignore, IgnoreFirst: ignore == 0}
			return CrossEntropyWith(o, x, l)
		})
	}
	ln3 := math.Log(3)
	logits := of([]int{2, 2}, 0, ln3, 500, 500)
	checkForward(t, []operand{logits, indices([]int{2}, 1, 0)}, with(NoLabel),
		of(nil, (math.Log(4.0/3)+math.Ln2)/2), 1e-6)
	checkForward(t, []operand{logits, indices([]int{2}, NoLabel, 0)}, with(NoLabel),
		of(nil, math.Ln2), 1e-6)
	checkForward(t, []operand{logits, indices([]int{2}, 0, 1)}, with(0), of(nil, math.Ln2), 1e-6)
	checkForward(t, []operand{logits, indices([]int{2}, 7, 7)}, with(7), of(nil, 0), 0)
	checkGradient(t, []operand{normal(1, 3, 4), indices([]int{3}, 0, 3, 0)}, with(NoLabel))
	checkGradient(t, []operand{normal(1, 2, 3, 4), indices([]int{2, 3}, 0, 3, 9, 1, 2, 9)}, with(9))
	checkGradient(t, []operand{normal(1, 2, 2), indices([]int{2}, 9, 9)}, with(9))
	checkDistinct(t, []operand{logits, indices([]int{2}, 0, 1)}, with(0), with(1), with(256))
}

// Weights, smoothing and reductions: the values are torch's, in the tests of package vm.
func TestCrossEntropyOptions(t *testing.T) {
	for k := range 12 {
		weighted := k >= 6
		with := func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			o := CrossEntropyOptions{Ignore: 9, Smoothing: float64(k/3%2) / 4,
				Reduction: Reduction(k % 3)}
			if weighted {
				o.Weights = of([]int{4}, 1, 2, 0.5, 3).node(x[0].Graph(), "w", x[0].Dtype())
			}
			return CrossEntropyWith(o, x[0], x[1])
		}
		checkGradient(t, []operand{normal(1, 2, 3, 4), indices([]int{2, 3}, 0, 3, 9, 1, 2, 9)},
			with)
	}
	each := two(func(x, l *gorgonia.Node) (*gorgonia.Node, error) {
		return CrossEntropyWith(CrossEntropyOptions{Ignore: 9, Reduction: EachRow}, x, l)
	})
	checkForward(t, []operand{of([]int{2, 2}, 5, 5, math.NaN(), 1), indices([]int{2}, 1, 9)}, each,
		of([]int{2}, math.Ln2, 0), 1e-6)
	g := gorgonia.NewGraph()
	x := count(2, 3).node(g, "x", tensor.Float64)
	l := indices([]int{2}, 0, 1).node(g, "l", tensor.Int)
	_, err := CrossEntropyWith(CrossEntropyOptions{Smoothing: 1.5}, x, l)
	checkRefused(t, err, backend.ErrArgument, "a smoothing of 1.5")
	_, err = CrossEntropyWith(CrossEntropyOptions{Weights: x}, x, l)
	checkRefused(t, err, ops.ErrShape, "weights (2, 3): want a weight of each class")
}

// The loss is scaled before its gradient is taken, as for accumulation.
func TestCrossEntropyOfAScaledLoss(t *testing.T) {
	checkGradient(t, []operand{normal(1, 3, 4), indices([]int{3}, 0, 3, 0)},
		two(func(x, l *gorgonia.Node) (*gorgonia.Node, error) {
			loss, err := CrossEntropy(NoLabel, x, l)
			if err != nil {
				return nil, err
			}
			return gorgonia.Mul(loss, gorgonia.NewConstant(0.25))
		}))
}

func TestCrossEntropyErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	x := count(2, 3).node(g, "x", tensor.Float64)
	l := indices([]int{2}, 0, 3).node(g, "l", tensor.Int)
	_, err := CrossEntropy(NoLabel, x, indices([]int{3}, 0, 0, 0).node(g, "m", tensor.Int))
	checkRefused(t, err, ops.ErrShape, "logits have shape (2, 3) and labels (3): want (d..., n) "+
		"and (d...)")
	_, err = CrossEntropy(0, x, l)
	checkRefused(t, err, backend.ErrArgument, "ignore is 0: pass nn.NoLabel if all labels count")
	y := require.Value(CrossEntropy(NoLabel, x, l))(t)
	_, err = y.Op().Do(x.Value(), l.Value())
	checkRefused(t, err, backend.ErrArgument, "label 1 is 3, out of range 0 to 2")
	dx := require.Value(gorgonia.Grad(y, x))(t)
	_, err = gorgonia.Grad(gorgonia.Must(gorgonia.Sum(dx[0])), x)
	if says := "gradients of this operation cannot be differentiated again"; err == nil ||
		!strings.Contains(err.Error(), says) {
		// Gorgonia hides what the error wraps
		t.Errorf("the gradient of a gradient: %v, want %q", err, says)
	}
}

// A machine hides the error of an operation; ops.Cause finds it.
func TestCause(t *testing.T) {
	for _, lisp := range []bool{false, true} {
		if lisp && proctest.Race {
			continue // Gorgonia's lisp machine has a race when an operation fails
		}
		g, _, _ := graph(t, tensor.Float64, []operand{count(2, 3), indices([]int{2}, 0, 3)},
			two(func(x, l *gorgonia.Node) (*gorgonia.Node, error) {
				return CrossEntropy(NoLabel, x, l)
			}))
		var m gorgonia.VM = gorgonia.NewTapeMachine(g)
		if lisp {
			m = gorgonia.NewLispMachine(g)
		}
		err := ops.Cause(m.RunAll())
		checkRefused(t, err, backend.ErrArgument, "nn: CrossEntropy{ignore -100}: bad argument: "+
			"label 1 is 3, out of range 0 to 2")
		if failed := (*Error)(nil); !errors.As(err, &failed) ||
			failed.Op != "CrossEntropy{ignore -100}" {
			t.Errorf("lisp %v: %T is not the operation's error", lisp, err)
		}
		_ = m.Close()
	}
}

func TestLayerNormErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	x, v := count(2, 3).node(g, "x", tensor.Float64), count(2).node(g, "v", tensor.Float64)
	_, err := LayerNorm(1e-5, x, v, v)
	checkRefused(t, err, ops.ErrShape, "x has shape (2, 3), so gain and bias must have shape "+
		"(3), not (2)")
	_, err = LayerNorm(math.NaN(), x, v, v)
	checkRefused(t, err, backend.ErrArgument, "epsilon is NaN")
}
