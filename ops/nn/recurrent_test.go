package nn

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/ops"
)

// recurrentLayer builds y, or y and the last states in one, [steps+1 or 2, batch, h].
func recurrentLayer(o RecurrentOptions, states bool) builder {
	return func(x gorgonia.Nodes) (*gorgonia.Node, error) {
		var y, h, c *gorgonia.Node
		var err error
		parts := gorgonia.Nodes{}
		if len(x) == 7 {
			y, h, c, err = LSTM(o, x[0], x[1], x[2], x[3], x[4], x[5], x[6])
			parts = append(parts, c)
		} else {
			y, h, err = GRU(o, x[0], x[1], x[2], x[3], x[4], x[5])
		}
		if err != nil || !states {
			return y, err
		}
		return Concat(0, append(parts, y, h)...)
	}
}

// TestRecurrentLayers: package vm compares with PyTorch.
func TestRecurrentLayers(t *testing.T) {
	// One step of one unit, whose gates are 1/2: c = 4/2 + tanh(0)/2, h = tanh(2)/2.
	zero := func(shape ...int) operand { return of(shape, make([]float64, product(shape))...) }
	in := []operand{of([]int{1, 1, 1}, 1), zero(1, 1, 1), of([]int{1, 1, 1}, 4), zero(4, 1),
		zero(4, 1), zero(4), zero(4)}
	checkForward(t, in, recurrentLayer(RecurrentOptions{}, true),
		of([]int{3, 1, 1}, 2, 0.4820138, 0.4820138), 1e-6)
	// h = (1 - 1/2) tanh(0) + 4/2
	in = []operand{in[0], of([]int{1, 1, 1}, 4), zero(3, 1), zero(3, 1), zero(3), zero(3)}
	checkForward(t, in, recurrentLayer(RecurrentOptions{}, true), of([]int{2, 1, 1}, 2, 2), 0)
	for _, gates := range []int{4, 3} {
		const n, h = 2, 3
		in := []operand{normal(1, 2, 2, n), normal(2, 1, 2, h), normal(3, gates*h, n),
			normal(4, gates*h, h), normal(5, gates*h), normal(6, gates*h)}
		if gates == 4 {
			in = append(in[:2:2], append([]operand{normal(7, 1, 2, h)}, in[2:]...)...)
		}
		reverse := RecurrentOptions{Reverse: true}
		checkGradient(t, in, recurrentLayer(RecurrentOptions{}, true))
		checkGradient(t, in, recurrentLayer(reverse, true))
		checkDistinct(t, in, recurrentLayer(RecurrentOptions{}, false), recurrentLayer(reverse,
			false), recurrentLayer(RecurrentOptions{BatchFirst: true}, false))
	}
}

func TestRecurrentErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	node := func(name string, shape ...int) *gorgonia.Node {
		return count(shape...).node(g, name, tensor.Float64)
	}
	x, h, w, b := node("x", 5, 2, 3), node("h", 1, 2, 4), node("w", 12, 3), node("b", 12)
	_, _, err := GRU(RecurrentOptions{}, x, h, w, w, b, b)
	checkRefused(t, err, ops.ErrShape, "5 steps of 2 samples of 3, and h0 of (1, 2, 4): ")
	_, _, err = GRU(RecurrentOptions{BatchFirst: true}, x, h, w, w, b, b)
	checkRefused(t, err, ops.ErrShape, "2 steps of 5 samples")
	_, _, _, err = LSTM(RecurrentOptions{}, node("m", 5, 3), h, h, w, w, b, b)
	checkRefused(t, err, ops.ErrShape, "want 3 axes")
}
