package nn

import (
	"math"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
)

func attended(o AttentionOptions) builder {
	return func(x gorgonia.Nodes) (*gorgonia.Node, error) { return Attention(x[0], x[1], x[2], o) }
}

// composed is attention by products and a softmax, with -1e300 added to the scores that are hidden.
func composed(scale float64, hidden *operand) builder {
	return func(x gorgonia.Nodes) (*gorgonia.Node, error) {
		s, err := BatchedMatMul(false, true, x[0], x[1])
		if err == nil {
			s, err = gorgonia.Mul(s, gorgonia.NewConstant(scale))
		}
		if err == nil && hidden != nil {
			s, err = gorgonia.Add(s, hidden.node(x[0].Graph(), "hidden", tensor.Float64))
		}
		if err == nil {
			s, err = SoftMax(3, s)
		}
		if err != nil {
			return nil, err
		}
		return BatchedMatMul(false, false, s, x[2])
	}
}

func TestAttention(t *testing.T) {
	// One query with equal scores, and one with a key that is all.
	q, k, v := of([]int{1, 1, 2, 1}, 0, 800), of([]int{1, 1, 2, 1}, 1, 2),
		of([]int{1, 1, 2, 1}, 3, 5)
	checkForward(t, []operand{q, k, v}, attended(AttentionOptions{}), of([]int{1, 1, 2, 1}, 4, 5),
		1e-12)
	checkForward(t, []operand{q, k, v}, attended(AttentionOptions{Causal: true}),
		of([]int{1, 1, 2, 1}, 3, 5), 1e-12)
	// Scores of 0 and 1 with a scale of log 2: weights of 1/3 and 2/3.
	checkForward(t, []operand{of([]int{1, 1, 1, 1}, 1), of([]int{1, 1, 2, 1}, 0, 1),
		of([]int{1, 1, 2, 1}, 3, 6)},
		attended(AttentionOptions{Scale: math.Ln2}), of([]int{1, 1, 1, 1}, 5), 1e-6)
	// Three queries of one key: the last one alone sees it.
	checkForward(t, []operand{of([]int{1, 1, 3, 1}, 1, 1, 1), of([]int{1, 1, 1, 1}, 1),
		of([]int{1, 1, 1, 1}, 7)},
		attended(AttentionOptions{Causal: true}), of([]int{1, 1, 3, 1}, 0, 0, 7), 0)
	checkDistinct(t, []operand{normal(1, 1, 2, 3, 4), normal(2, 1, 2, 3, 4), normal(3, 1, 2, 3, 4)},
		attended(AttentionOptions{}), attended(AttentionOptions{Causal: true}), attended(
			AttentionOptions{Scale: 2}))
}

func TestAttentionIsProductsAndSoftMax(t *testing.T) {
	x := []operand{normal(1, 2, 3, 5, 4), normal(2, 2, 3, 7, 4), normal(3, 2, 3, 7, 4)}
	hidden := operand{shape: []int{2, 3, 5, 7}, data: make([]float64, 2*3*5*7)}
	for at := range hidden.data {
		if i, j := at/7%5, at%7; j > i+7-5 {
			hidden.data[at] = -1e300
		}
	}
	for _, test := range []struct {
		o      AttentionOptions
		hidden *operand
	}{{AttentionOptions{}, nil}, {AttentionOptions{Causal: true}, &hidden}} {
		got, want := results(t, x, attended(test.o)), results(t, x, composed(0.5, test.hidden))
		for i := range want {
			if math.Abs(got[i]-want[i]) > 1e-12 {
				t.Fatalf("%+v: element %d is %v, want %v", test.o, i, got[i], want[i])
			}
		}
	}
}

// results computes what build makes of operands.
func results(t *testing.T, x []operand, build builder) []float64 {
	t.Helper()
	g := gorgonia.NewGraph()
	var nodes gorgonia.Nodes
	for i, o := range x {
		nodes = append(nodes, o.node(g, string(rune('q'+i)), tensor.Float64))
	}
	y, err := build(nodes)
	if err != nil {
		t.Fatal(err)
	}
	m := gorgonia.NewTapeMachine(g)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	return numbers(t, y.Value())
}

func TestAttentionGradient(t *testing.T) {
	for _, o := range []AttentionOptions{{}, {Causal: true}, {Causal: true, Scale: 0.3}} {
		checkGradient(t, []operand{normal(1, 2, 2, 3, 4), normal(2, 2, 2, 3, 4),
			normal(3, 2, 2, 3, 4)}, attended(o))
		checkGradient(t, []operand{normal(1, 1, 1, 2, 3), normal(2, 1, 1, 4, 3),
			normal(3, 1, 1, 4, 3)}, attended(o))
		checkGradient(t, []operand{normal(1, 1, 1, 4, 3), normal(2, 1, 1, 2, 3),
			normal(3, 1, 1, 2, 3)}, attended(o))
	}
}

func TestAttentionErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	q, k := count(1, 2, 3, 4).node(g, "q", tensor.Float64), count(1, 2, 3, 5).node(g, "k",
		tensor.Float64)
	_, err := Attention(q, k, k, AttentionOptions{})
	checkRefused(t, err, ops.ErrShape,
		"q has shape (1, 2, 3, 4), k (1, 2, 3, 5) and v (1, 2, 3, 5)")
	_, err = Attention(q, q, k, AttentionOptions{})
	checkRefused(t, err, ops.ErrShape, "want (b, h, queries, d) and twice (b, h, keys, d)")
	_, err = Attention(q, q, q, AttentionOptions{Scale: -1})
	checkRefused(t, err, backend.ErrArgument, "the scale is -1")
	_, err = Attention(nil, q, q, AttentionOptions{})
	checkRefused(t, err, backend.ErrArgument, "q is nil")
}
