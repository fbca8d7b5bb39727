package nn

import (
	"math"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops"
)

// attended is attention of q, k and v, and of a mask of floats, lengths and starts if there are
// any.
func attended(o AttentionOptions) builder {
	return func(x gorgonia.Nodes) (*gorgonia.Node, error) {
		o := o
		for _, n := range x[3:] {
			switch {
			case n.Dtype() != tensor.Int:
				o.Mask = n
			case n.Dims() == 1:
				o.KeyLengths = n
			default:
				o.KeyStarts = n
			}
		}
		return Attention(x[0], x[1], x[2], o)
	}
}

// hidingCase is attention with what models ask for besides: shared heads, values of another width,
// soft caps, masks, windows, lengths and starts.
type hidingCase struct {
	AttentionOptions
	q, k    []int // shapes
	e       int   // the width of values
	mask    []int
	lengths []int
	starts  []int
}

var hidingOptions = []hidingCase{
	{AttentionOptions{Causal: true}, []int{2, 4, 3, 5}, []int{2, 2, 3, 5}, 3, nil, nil, nil},
	{AttentionOptions{SoftCap: 0.8, MaskGradient: true}, []int{1, 4, 3, 2}, []int{1, 1, 4, 2}, 2,
		[]int{3, 4}, nil, nil},
	{AttentionOptions{MaskGradient: true}, []int{2, 2, 3, 2}, []int{2, 2, 2, 2}, 3,
		[]int{2, 1, 3, 2}, nil, nil},
	{AttentionOptions{Causal: true, SoftCap: 2}, []int{2, 2, 3, 2}, []int{2, 1, 4, 2}, 2,
		[]int{4}, []int{4, 2}, nil},
	{AttentionOptions{}, []int{3, 2, 2, 3}, []int{3, 2, 5, 3}, 3, nil, []int{5, 0, 2},
		nil},
	{AttentionOptions{Causal: true, Appended: true}, []int{3, 4, 2, 3}, []int{3, 2, 5, 3}, 3, nil,
		[]int{5, 1, 2}, nil},
	{AttentionOptions{Causal: true, Window: 2}, []int{1, 2, 4, 3}, []int{1, 2, 5, 3}, 3, nil, nil,
		nil},
	{AttentionOptions{Causal: true, Window: 2, Appended: true}, []int{2, 2, 2, 3},
		[]int{2, 2, 5, 3}, 3, nil, []int{4, 1}, nil},
	{AttentionOptions{Causal: true}, []int{2, 2, 4, 3}, []int{2, 1, 4, 3}, 2, nil, nil,
		[]int{0, 0, 2, 2, 0, 1, 1, 3}},
	{AttentionOptions{}, []int{1, 2, 4, 3}, []int{1, 2, 5, 3}, 2, []int{5}, nil,
		[]int{0, 3, 4, 5}},
}

// operands are normal: q, k and v, a mask, which hides every third key but all keys of its second
// row if it has rows, and lengths.
func (c hidingCase) operands() []operand {
	v := slices.Clone(c.k)
	v[3] = c.e
	x := []operand{normal(1, c.q...), normal(2, c.k...), normal(3, v...)}
	if c.mask != nil {
		m := normal(4, c.mask...)
		for i := range m.data {
			if last := c.mask[len(c.mask)-1]; i%3 == 2 || i/last == 1 {
				m.data[i] = math.Inf(-1)
			}
		}
		x = append(x, m)
	}
	if c.lengths != nil {
		x = append(x, indices([]int{len(c.lengths)}, c.lengths...))
	}
	if c.starts != nil {
		x = append(x, indices([]int{c.q[0], c.q[2]}, c.starts...))
	}
	return x
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
	checkForward(t, []operand{of([]int{1, 1, 1, 1}, 1), of([]int{1, 1, 2, 1}, 0, 1), of([]int{1, 1,
		2, 1}, 3, 6)}, attended(AttentionOptions{Scale: math.Ln2}), of([]int{1, 1, 1, 1}, 5), 1e-6)
	// Three queries of one key: the last one alone sees it.
	checkForward(t, []operand{of([]int{1, 1, 3, 1}, 1, 1, 1), of([]int{1, 1, 1, 1}, 1), of([]int{1,
		1, 1, 1}, 7)}, attended(AttentionOptions{Causal: true}), of([]int{1, 1, 3, 1}, 0, 0, 7), 0)
	// Two queries behind one key, and behind none.
	checkForward(t, []operand{of([]int{2, 1, 2, 1}, 0, 0, 0, 0), of([]int{2, 1, 4, 1}, 1, 1, 1, 1,
		1, 1, 1, 1), of([]int{2, 1, 4, 1}, 2, 4, 9, 7, 6, 8, 7, 7), indices([]int{2}, 3, 2)},
		attended(AttentionOptions{Causal: true, Appended: true}),
		of([]int{2, 1, 2, 1}, 3, 5, 6, 7), 1e-12)
	checkDistinct(t, []operand{normal(1, 1, 2, 3, 4), normal(2, 1, 2, 3, 4), normal(3, 1, 2, 3, 4)},
		attended(AttentionOptions{}), attended(AttentionOptions{Causal: true}), attended(
			AttentionOptions{Scale: 2}), attended(AttentionOptions{SoftCap: 2}))
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
	y := require.Value(build(nodes))(t)
	m := gorgonia.NewTapeMachine(g)
	defer m.Close()
	require.NoError(t, m.RunAll())
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

// TestAttentionGradientOfWhatHidesKeys: gradients equal differences, of the mask too, and are 0
// where a query sees no key.
func TestAttentionGradientOfWhatHidesKeys(t *testing.T) {
	for _, c := range hidingOptions {
		in := c.operands()
		if len(in) > 3 && in[3].ints == nil && !c.MaskGradient {
			mask := in[3]
			build := attended(c.AttentionOptions)
			checkGradient(t, slices.Delete(slices.Clone(in), 3, 4),
				func(x gorgonia.Nodes) (*gorgonia.Node, error) {
					m := mask.node(x[0].Graph(), "mask", tensor.Float64)
					return build(slices.Insert(slices.Clone(x), 3, m))
				})
			continue
		}
		checkGradient(t, in, attended(c.AttentionOptions))
	}
}

// TestAttentionOfAQueryWithoutKeysIsZero: not NaN, and it gives no gradient.
func TestAttentionOfAQueryWithoutKeysIsZero(t *testing.T) {
	hidden := math.Inf(-1)
	in := []operand{normal(1, 1, 1, 2, 3), normal(2, 1, 1, 2, 3), of([]int{1, 1, 2, 1}, 5, 7),
		of([]int{2, 2}, hidden, hidden, hidden, 4)}
	checkForward(t, in, attended(AttentionOptions{}), of([]int{1, 1, 2, 1}, 0, 7), 1e-12)
	in[3] = indices([]int{1}, 0)
	checkForward(t, in, attended(AttentionOptions{}), of([]int{1, 1, 2, 1}, 0, 0), 0)
	for i, g := range gradients(t, in, attended(AttentionOptions{}), false)[:3] {
		require.Check(t, !slices.ContainsFunc(g, func(x float64) bool { return x != 0 }),
			"the gradient of operand %d is %v, want 0", i, g)
	}
}

// TestMaskWithoutMaskGradientIsAConstant: asking for its gradient is an error, not zeros.
func TestMaskWithoutMaskGradientIsAConstant(t *testing.T) {
	_, x, y := graph(t, tensor.Float64, []operand{normal(1, 1, 1, 2, 3), normal(2, 1, 1, 2, 3),
		normal(3, 1, 1, 2, 3), normal(4, 2, 2)}, attended(AttentionOptions{}))
	_, err := gorgonia.Grad(lossOf(t, y), x[3])
	require.Check(t, err != nil, "a mask without MaskGradient has a gradient")
}

func TestAttentionErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	q, k := count(1, 2, 3, 4).node(g, "q", tensor.Float64), count(1, 2, 3, 5).node(g, "k",
		tensor.Float64)
	_, err := Attention(q, k, k, AttentionOptions{})
	checkRefused(t, err, ops.ErrShape,
		"q has shape (1, 2, 3, 4), k (1, 2, 3, 5) and v (1, 2, 3, 5)")
	fewer := count(1, 2, 2, 4).node(g, "fewer", tensor.Float64)
	_, err = Attention(q, q, fewer, AttentionOptions{})
	checkRefused(t, err, ops.ErrShape, "(b, g, keys, d) and (b, g, keys, e), of which g divides h")
	three := count(1, 3, 3, 4).node(g, "three", tensor.Float64)
	_, err = Attention(three, q, q, AttentionOptions{})
	checkRefused(t, err, ops.ErrShape, "of which g divides h")
	_, err = Attention(q, q, q, AttentionOptions{SoftCap: -1})
	checkRefused(t, err, backend.ErrArgument, "the soft cap -1")
	_, err = Attention(q, q, q, AttentionOptions{Mask: k})
	checkRefused(t, err, ops.ErrShape,
		"the mask has shape (1, 2, 3, 5), want one that is repeated to (1, 2, 3, 3)")
	_, err = Attention(q, q, q, AttentionOptions{Causal: true, Appended: true})
	checkRefused(t, err, backend.ErrArgument, "for Causal attention with KeyLengths")
	_, err = Attention(q, q, q, AttentionOptions{MaskGradient: true})
	checkRefused(t, err, backend.ErrArgument, "without Causal, KeyLengths and KeyStarts")
	lengths := indices([]int{2}, 1, 2).node(g, "lengths", tensor.Int)
	_, err = Attention(q, q, q, AttentionOptions{KeyLengths: lengths})
	checkRefused(t, err, ops.ErrShape, "the lengths have shape (2), want (1)")
	_, err = Attention(q, q, q, AttentionOptions{KeyLengths: q})
	checkRefused(t, err, ops.ErrDType, "indices are Int")
	y := require.Value(Attention(q, q, q, AttentionOptions{KeyLengths: indices([]int{1}, 4).node(g,
		"long", tensor.Int)}))(t)
	m := gorgonia.NewTapeMachine(y.Graph())
	defer m.Close()
	require.Fails(t, "a length that is too large", m.RunAll(), "length 0 is 4, out of range 0 to 3")
	starts := indices([]int{1, 3}, 0, 2, 1).node(g, "starts", tensor.Int)
	_, err = Attention(q, q, q, AttentionOptions{KeyStarts: lengths})
	checkRefused(t, err, ops.ErrShape, "the starts have shape (2), want (1, 3)")
	_, err = Attention(q, q, q, AttentionOptions{KeyStarts: starts, KeyLengths: lengths})
	checkRefused(t, err, backend.ErrArgument, "KeyLengths and KeyStarts: give one of them")
	_, err = Attention(q, q, q, AttentionOptions{Window: 1})
	checkRefused(t, err, backend.ErrArgument, "Window is 1")
	y = require.Value(Attention(q, q, q, AttentionOptions{KeyStarts: starts}))(t)
	descending := gorgonia.NewTapeMachine(g.SubgraphRoots(y))
	defer descending.Close()
	require.Fails(t, "starts that descend", descending.RunAll(),
		"the start of query 2 is 1, less than 2 before it")
	_, err = Attention(q, q, q, AttentionOptions{Scale: -1})
	checkRefused(t, err, backend.ErrArgument, "the scale is -1")
	_, err = Attention(nil, q, q, AttentionOptions{})
	checkRefused(t, err, backend.ErrArgument, "q is nil")
}
