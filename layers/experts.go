package layers

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
)

// MoEOptions are the options of [Builder.MoE].
type MoEOptions struct {
	Experts int
	Choices int // how many experts compute a token; 0 stands for 1
	Hidden  int // units of an expert
	// Capacity is the most tokens of a sample that an expert computes, as a multiple of the mean,
	// Choices * positions / Experts: 1.25 in Switch Transformers. 0 stands for no limit.
	Capacity float64
	// Balance is the weight of the load-balancing loss: 0.01 in Switch Transformers.
	Balance float64
	// Tokens are what x is of, [batch, positions]: needed where a graph has [Tokens.Padding], which
	// then takes no capacity of experts, gets nothing from them, and counts in no Loss and Dropped.
	Tokens *Tokens
}

// Experts is the result of [Builder.MoE]. Loss and Dropped are shares of this rank, placed like the
// loss of [Builder.CrossEntropy]: the whole is the sum over the ranks of l.Data.
type Experts struct {
	Y Node
	// Loss is the load-balancing loss, which you add to the loss of the model: options.Balance *
	// experts * sum over the experts of (share of the tokens whose first choice it is) * (mean of
	// its probability), as a mean over all samples. Without the weight it is 1 if tokens are spread
	// evenly. Padding is left out: shares and means count a sample's other tokens, and the mean
	// takes the samples that have any, which ranks count as in [Builder.CrossEntropy].
	Loss Node
	// Dropped is the number of choices for which there was no capacity.
	Dropped Node
}

// MoE is a mixture of experts that the Tensor group shards: experts are blocks like
// [Builder.MLP], and a router sends each token to a few of them.
//
//	in   x  [batch, positions, n] Split(0) over the Sequence group,
//	        Replicated or Split(0) over the Tensor group
//	out  y  [batch, positions, n], placed like x
//
//	p = softmax(x router), over the experts
//	y = sum over the chosen experts e of g[e] * (gelu(x w1[e] + c1[e]) w2[e] + c2[e])
//
// The experts with the largest p are chosen. With one choice g is p; with several, g is p over the
// sum of the chosen ones. Tokens of a sample queue for an expert by the rank of the choice, then by
// position, and those beyond its capacity get nothing from it, so add y to x. Samples queue
// separately, so which tokens are dropped does not depend on the layout. Capacity's mean counts all
// positions of x, padding included.
//
// Learnables have the name plus ".router", [n, experts], ".in.weight", [experts, n, hidden],
// ".in.bias", ".out.weight" and ".out.bias". Each rank of a Tensor group has some of the experts,
// and routes the tokens of some of the samples: one all-to-all brings tokens to their experts, and
// one brings results back. If one group has all ranks, this is expert parallelism over data; with
// several groups, it is that and data parallelism.
//
// Cost: 4*n*hidden*experts*batch*capacity operations for all slots, backward twice that; the
// all-to-alls move batch*experts*capacity*n elements each.
// Errors: [ErrPlacement]; [backend.ErrArgument] for invalid options, and for tokens with padding in
// the graph that MoEOptions.Tokens does not name; [ops.ErrShape] if a Tensor group has more ranks
// than samples or experts, or the tokens have another shape than x.
// Source: Shazeer et al., Outrageously Large Neural Networks, 2017; Lepikhin et al., GShard, 2020;
// Fedus, Zoph and Shazeer, Switch Transformers, 2021, (4) to (6) for the loss.
func (b *Builder) MoE(name string, x Node, o MoEOptions) (e Experts) {
	e.Y = b.within("MoE "+name, func() Node {
		tokens := b.apply("tokens", func() (Node, error) {
			return x, cmp.Or(o.check(x), b.route(name, o.Tokens))
		}, "x", x)
		tokens = b.To(tokens, Tensor, Split(0))
		if b.err != nil {
			return Node{}
		}
		m := &mixture{Builder: b, o: o, name: name, x: tokens}
		y := b.apply("experts", m.build)
		e.Loss, e.Dropped = m.loss, m.dropped
		return b.To(y, Tensor, x.place[Tensor])
	})
	return e
}

// check checks options, with the operand.
func (o *MoEOptions) check(x Node) error {
	if x.Dims() != 3 {
		return fmt.Errorf("%w: x has shape %v: want 3 axes", ops.ErrShape, x.Shape())
	}
	o.Choices = cmp.Or(o.Choices, 1)
	if o.Experts < 1 || o.Choices < 1 || o.Choices > o.Experts || o.Hidden < 1 ||
		!(o.Capacity >= 0) || math.IsInf(o.Capacity, 1) {
		shown := *o
		shown.Tokens = nil
		return fmt.Errorf("%w: %+v", backend.ErrArgument, shown)
	}
	return cmp.Or(require("x", x, Sequence, Split(0)),
		require("x", x, Tensor, Replicated, Split(0)))
}

// route notes a MoE of tokens, and refuses one that does not know of padding.
func (b *Builder) route(name string, t *Tokens) error {
	switch known := t != nil && t.padded; {
	case known:
	case b.padded != "":
		return unpadded(name, b.padded)
	default:
		b.routes = name
	}
	return nil
}

func unpadded(moe, tokens string) error {
	return fmt.Errorf("%w: MoE %s and the padding of %s, which would take experts' capacity: call "+
		"Padding first, and set MoEOptions.Tokens", backend.ErrArgument, moe, tokens)
}

// mixture builds a MoE.
type mixture struct {
	*Builder
	o             MoEOptions
	name          string
	x             Node // of the samples whose tokens this rank routes
	loss, dropped Node

	// nil if no token is padding
	real    *gorgonia.Node // 1 for each token, 0 for padding, [batch, 1, positions]
	shares  *gorgonia.Node // of each token in its sample's mean, 0 for padding
	samples *gorgonia.Node // that have tokens
}

// mark finds out which tokens are padding.
func (m *mixture) mark() error {
	t, s := m.o.Tokens, m.x.Shape()
	if t == nil || !t.padded {
		return nil
	}
	all, err := t.placedNode(), error(nil)
	all.Node = t.mask(func(id, _, _ int) bool { return id != t.padding }, 0, 0, t.own()...)
	for _, g := range []Group{Sequence, Tensor} {
		if all, err = m.convert(all, g, Split(0)); err != nil {
			return err
		}
	}
	if !slices.Equal(all.Shape(), s[:2]) {
		return fmt.Errorf("%w: the tokens %s have shape %v on this rank, and x %v", ops.ErrShape,
			t.name, all.Shape(), s)
	}
	if m.real, err = reshape(all.Node, s[0], 1, s[1]); err != nil {
		return err
	}
	n, err := gorgonia.Sum(all.Node, 1)
	if err != nil {
		return err
	}
	one := gorgonia.NewConstant(m.number(1))
	if m.samples, err = nn.Where(n, one, n); err != nil {
		return err
	}
	if m.samples, err = gorgonia.Sum(m.samples); err != nil {
		return err
	}
	if n, err = nn.Where(n, n, one); err == nil {
		n, err = reshape(n, s[0], 1, 1)
	}
	if err == nil {
		m.shares, err = gorgonia.BroadcastHadamardDiv(m.real, n, nil, []byte{2})
	}
	return err
}

func (m *mixture) build() (Node, error) {
	s := m.x.Shape()
	if err := m.mark(); err != nil {
		return Node{}, err
	}
	p, err := m.router()
	if err != nil {
		return Node{}, err
	}
	gates, choices, err := nn.TopK(1, m.o.Choices, p) // [batch, choices, positions]
	if err != nil {
		return Node{}, err
	}
	if err = m.balance(p, choices); err == nil {
		gates, err = m.normalized(gates)
	}
	if err == nil && m.real != nil { // no expert computes padding
		choices, err = nn.Where(m.real, choices, gorgonia.NewConstant(-1))
	}
	if err != nil {
		return Node{}, err
	}
	ones := slices.Repeat([]float64{1}, size(gates.Shape()))
	slots, kept, err := nn.Slots(m.o.Experts, m.capacity(), choices,
		m.Constant(gates.Shape(), ones))
	if err != nil {
		return Node{}, err
	}
	if err = m.count(kept); err == nil {
		gates, err = gorgonia.HadamardProd(gates, kept)
	}
	if err != nil {
		return Node{}, err
	}
	rows, err := m.dispatch(kept, slots)
	if err == nil {
		rows, err = m.experts(rows)
	}
	if err == nil {
		rows, err = nn.ByIndices(0, rows, slots) // [batch, choices, positions, n]
	}
	if err != nil {
		return Node{}, err
	}
	gates, err = reshape(gates, s[0], m.o.Choices, s[1], 1)
	if err == nil {
		rows, err = gorgonia.BroadcastHadamardProd(rows, gates, nil, []byte{3})
	}
	if err == nil {
		rows, err = gorgonia.Sum(rows, 1)
	}
	return Place(rows, m.x), err
}

// capacity returns how many slots an expert has for a sample.
func (m *mixture) capacity() int {
	positions := m.x.Shape()[1]
	mean := float64(m.o.Choices*positions) / float64(m.o.Experts)
	if c := math.Ceil(m.o.Capacity * mean); m.o.Capacity > 0 && c < float64(positions) {
		return int(c)
	}
	return positions
}

// router returns the probabilities of the experts, [batch, experts, positions].
func (m *mixture) router() (*gorgonia.Node, error) {
	w, err := m.learnFor(m.x, m.name+".router", Normal(deviation), lastOf(m.x), m.o.Experts)
	if err != nil {
		return nil, err
	}
	scores, err := linear(m.x.Node, 1, w.Node, nil, []int{m.o.Experts})
	if err == nil {
		scores, err = gorgonia.Transpose(scores, 0, 2, 1)
	}
	if err != nil {
		return nil, err
	}
	return nn.SoftMax(1, scores)
}

// normalized returns gates that add up to 1, unless there is one choice.
func (m *mixture) normalized(gates *gorgonia.Node) (*gorgonia.Node, error) {
	s := gates.Shape()
	if s[1] == 1 {
		return gates, nil
	}
	sums, err := gorgonia.Sum(gates, 1)
	if err == nil {
		sums, err = reshape(sums, s[0], 1, s[2])
	}
	if err != nil {
		return nil, err
	}
	return gorgonia.BroadcastHadamardDiv(gates, sums, nil, []byte{1})
}

// balance adds the load-balancing loss. The share of the tokens times the mean probability, summed
// over the experts, is the mean over the tokens of the mean probability of their first choices.
func (m *mixture) balance(p, choices *gorgonia.Node) error {
	s := m.x.Shape()
	means, err := m.mean(p)
	if err != nil {
		return err
	}
	first, err := nn.Slice(1, 0, 1, 1, choices)
	if err == nil {
		first, err = reshape(first, s[0], s[1])
	}
	if err != nil {
		return err
	}
	loss, err := nn.GatherElements(1, means, first)
	if err != nil {
		return err
	}
	if m.real != nil {
		return m.balanceOfReal(loss)
	}
	if loss, err = gorgonia.Mean(loss); err != nil {
		return err
	}
	whole, _ := m.wholeShape(m.x)
	weight := m.o.Balance * float64(m.o.Experts*s[0]) / float64(whole[0]*m.batches)
	if loss, err = m.scaled(loss, weight); err == nil {
		m.loss, err = m.share(loss)
	}
	return err
}

// mean returns means over the tokens of each sample that are no padding, [batch, experts].
func (m *mixture) mean(p *gorgonia.Node) (*gorgonia.Node, error) {
	if m.real == nil {
		return gorgonia.Mean(p, 2)
	}
	p, err := gorgonia.BroadcastHadamardProd(p, m.shares, nil, []byte{1})
	if err != nil {
		return nil, err
	}
	return gorgonia.Sum(p, 2)
}

// balanceOfReal is the balance of terms of each token, [batch, positions], without padding.
func (m *mixture) balanceOfReal(terms *gorgonia.Node) error {
	shares, err := reshape(m.shares, terms.Shape()...)
	if err == nil {
		terms, err = gorgonia.HadamardProd(terms, shares)
	}
	if err == nil {
		terms, err = gorgonia.Sum(terms)
	}
	if err != nil {
		return err
	}
	loss, err := m.share(terms)
	if err != nil {
		return err
	}
	samples, err := m.share(m.samples)
	if err != nil {
		return err
	}
	if loss.Node, err = m.perCount(loss.Node, samples.Node, m.o.Tokens); err == nil {
		loss.Node, err = m.scaled(loss.Node, m.o.Balance*float64(m.o.Experts))
	}
	m.loss = loss
	return err
}

// count adds the number of choices that are not kept.
func (m *mixture) count(kept *gorgonia.Node) error {
	n, err := gorgonia.Sum(kept)
	if err != nil {
		return err
	}
	all := gorgonia.NewConstant(m.number(float64(size(kept.Shape()))))
	if m.real != nil {
		if all, err = gorgonia.Sum(m.real); err == nil {
			all, err = m.scaled(all, float64(m.o.Choices))
		}
	}
	if err == nil {
		n, err = gorgonia.Sub(all, n)
	}
	if err == nil {
		m.dropped, err = m.share(n)
	}
	return err
}

// share is a term of a loss that each rank of the Tensor group computes for its samples.
func (m *mixture) share(term *gorgonia.Node) (Node, error) {
	n := Node{Node: term, place: [2]Placement{Partial, Partial}}
	return m.convert(n, Tensor, Replicated)
}

// dispatch moves tokens to their slots: [experts*batch*capacity, n].
func (m *mixture) dispatch(kept, slots *gorgonia.Node) (*gorgonia.Node, error) {
	s := m.x.Shape()
	x, err := reshape(m.x.Node, s[0], 1, s[1], s[2])
	if err != nil {
		return nil, err
	}
	if kept, err = reshape(kept, s[0], m.o.Choices, s[1], 1); err != nil {
		return nil, err
	}
	if x, err = gorgonia.BroadcastHadamardProd(x, kept, []byte{1}, []byte{3}); err != nil {
		return nil, err
	}
	return nn.ScatterAdd(0, m.o.Experts*s[0]*m.capacity(), x, slots)
}

// experts computes the rows of all slots of this rank's samples, [experts*batch*capacity, n], on
// the ranks that have the experts.
func (m *mixture) experts(rows *gorgonia.Node) (*gorgonia.Node, error) {
	s, comm := m.x.Shape(), m.layout.groups[Tensor]
	owned, slots := backend.Even(m.o.Experts, comm.Size()), slices.Clone(m.x.parts[Tensor])
	for i := range slots {
		slots[i] *= m.capacity()
	}
	h, err := reshape(rows, m.o.Experts, s[0]*m.capacity(), s[2])
	if err == nil && comm.Size() > 1 {
		h, err = ops.AllToAll(comm, 0, 1, h, ops.AllToAllSplits(owned, slots))
	}
	if err != nil {
		return nil, err
	}
	if h, err = m.perExpert(".in", h, m.o.Hidden); err == nil {
		h, err = nn.GELUTanh(h)
	}
	if err == nil {
		h, err = m.perExpert(".out", h, s[2])
	}
	if err == nil && comm.Size() > 1 {
		h, err = ops.AllToAll(comm, 1, 0, h, ops.AllToAllSplits(slots, owned))
	}
	if err != nil {
		return nil, err
	}
	return reshape(h, rows.Shape()...)
}

// perExpert is a linear layer of each of this rank's experts, of [experts, rows, n].
func (m *mixture) perExpert(name string, x *gorgonia.Node, out int) (*gorgonia.Node, error) {
	w := m.Learn(m.name+name+".weight", Normal(deviation), 0, m.o.Experts, x.Shape()[2], out)
	c := m.Learn(m.name+name+".bias", Constant(0), 0, m.o.Experts, out)
	if m.err != nil {
		return nil, m.err
	}
	y, err := nn.BatchedMatMul(false, false, x, w.Node)
	if err != nil {
		return nil, err
	}
	bias, err := reshape(c.Node, c.Shape()[0], 1, out)
	if err != nil {
		return nil, err
	}
	return gorgonia.BroadcastAdd(y, bias, nil, []byte{1})
}
