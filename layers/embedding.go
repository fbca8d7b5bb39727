package layers

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
)

// Tokens are numbers of a vocabulary, an input of the graph: one for each position of the samples
// of this rank's replica. The Sequence group divides them.
type Tokens struct {
	name   string
	b      *Builder
	shape  []int // of all positions
	axis   int   // of the sequence
	end    int   // the least vocabulary among those that they were used with
	inputs []func(ids []int) error
}

// Tokens returns tokens of a shape, such as [batch, positions] with axis 1, or [positions, batch]
// with axis 0. axis is the axis of the sequence. batch is the batch of this rank's replica, the
// same on all ranks.
func (b *Builder) Tokens(name string, axis int, shape ...int) *Tokens {
	t := &Tokens{name: name, b: b, shape: shape, axis: axis}
	b.apply("Tokens "+name, func() (Node, error) {
		if axis < 0 || axis >= len(shape) {
			return Node{}, fmt.Errorf("%w: shape %v has no axis %d", ops.ErrShape, shape, axis)
		}
		if shape[axis] < b.layout.SP {
			return Node{}, fmt.Errorf("%w: %d positions are divided among %d ranks, and each "+
				"needs one: use fewer ranks", ops.ErrShape, shape[axis], b.layout.SP)
		}
		return Node{}, nil
	})
	return t
}

// Set gives all tokens of the replica, in row-major order of the shape, of which the rank keeps its
// part. Set them before each run: a run without any is an error.
//
// Errors: [backend.ErrArgument] for a wrong number of tokens, or one that is not in the vocabulary.
func (t *Tokens) Set(ids []int) error {
	if len(ids) != size(t.shape) {
		return fmt.Errorf("layers: %w: %d tokens for %s, of shape %v", backend.ErrArgument,
			len(ids), t.name, t.shape)
	}
	for i, id := range ids {
		if id < 0 || id >= t.end {
			return fmt.Errorf("layers: %w: token %d of %s is %d, out of range 0 to %d",
				backend.ErrArgument, i, t.name, id, t.end-1)
		}
	}
	start, end := t.b.layout.shareOf(Sequence, t.shape[t.axis])
	own := sliceAxis(ids, t.shape, t.axis, start, end)
	for _, set := range t.inputs {
		if err := set(own); err != nil {
			return fmt.Errorf("layers: %s: %w", t.name, err)
		}
	}
	return nil
}

// placedNode returns a node without a value that is placed like the tokens.
func (t *Tokens) placedNode() Node {
	return Node{place: [2]Placement{Split(t.axis), Replicated},
		parts: [2][]int{backend.Even(t.shape[t.axis], t.b.layout.SP), nil}}
}

// own returns the shape of this rank's tokens.
func (t *Tokens) own() []int {
	own := append([]int{}, t.shape...)
	start, end := t.b.layout.shareOf(Sequence, t.shape[t.axis])
	own[t.axis] = end - start
	return own
}

// numbers adds an input of the rank's tokens as numbers from start, of a vocabulary of which the
// rank has start to end; others are none.
func (t *Tokens) numbers(vocabulary, start, end, none int) *gorgonia.Node {
	if t.end == 0 || vocabulary < t.end {
		t.end = vocabulary
	}
	shape := t.own()
	data := make([]int, size(shape))
	return t.feed(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data)),
		func(ids []int) {
			for i, id := range ids {
				data[i] = none
				if id >= start && id < end {
					data[i] = id - start
				}
			}
		})
}

// feed adds an input whose value is filled by Set. It has none before, so that a run without tokens
// is an error.
func (t *Tokens) feed(value *tensor.Dense, fill func(ids []int)) *gorgonia.Node {
	n := gorgonia.NewTensor(t.b.graph, value.Dtype(), value.Dims(),
		gorgonia.WithShape(value.Shape()...), gorgonia.WithName(t.input()))
	t.inputs = append(t.inputs, func(ids []int) error {
		fill(ids)
		if n.Value() == value {
			return nil
		}
		return gorgonia.Let(n, value)
	})
	return n
}

// input returns a name for another input.
func (t *Tokens) input() string { return fmt.Sprintf("%s.%d", t.name, len(t.inputs)) }

// mask adds an input that is 1 for each token from start to end, and 0 for others.
func (t *Tokens) mask(start, end int, shape ...int) *gorgonia.Node {
	value := t.b.tensor(shape, make([]float64, size(shape)))
	return t.feed(value, func(ids []int) {
		switch data := value.Data().(type) {
		case []float32:
			within(data, ids, start, end)
		case []float64:
			within(data, ids, start, end)
		}
	})
}

// within sets an element for each number from start to end to 1, and others to 0.
func within[T float32 | float64](data []T, ids []int, start, end int) {
	for i, id := range ids {
		data[i] = 0
		if id >= start && id < end {
			data[i] = 1
		}
	}
}

// vocabulary returns the length of a learnable's first axis and which part of it this rank has.
func (b *Builder) vocabulary(words Node) (n, start, end int) {
	if words.place[Tensor] == Split(0) {
		n = sum(words.parts[Tensor])
		start, end = b.layout.shareOf(Tensor, n)
		return n, start, end
	}
	n = words.Shape()[0]
	return n, 0, n
}

// of names tokens in errors.
func (t *Tokens) of() string {
	if t == nil {
		return ""
	}
	return " of " + t.name
}

// Embedding returns the row of each token.
//
//	in   words   [vocabulary, n]   a learnable, Split(0) over the Tensor group or undivided
//	     tokens  [d...]
//	out  y       [d..., n]         Partial over the Tensor group if it divides words,
//	                               else Replicated
//
// A rank has zeros for tokens of other ranks' parts of the vocabulary: To adds them up.
//
// Cost: a copy of y; backward a pass over the gradient of words.
// Errors: [ErrPlacement] if words are divided along another axis.
func (b *Builder) Embedding(words Node, tokens *Tokens) Node {
	return b.apply("Embedding"+tokens.of(), func() (Node, error) {
		if err := backend.Given("", "tokens", tokens); err != nil {
			return Node{}, err
		}
		if err := firstOf(require("words", words, Sequence, Copied), require("words", words, Tensor,
			Split(0), Replicated)); err != nil {
			return Node{}, err
		}
		if words.Dims() != 2 {
			return Node{}, fmt.Errorf("%w: words have shape %v: want a matrix", ops.ErrShape,
				words.Shape())
		}
		n, start, end := b.vocabulary(words)
		y := tokens.placedNode()
		var err error
		y.Node, err = nn.Embedding(words.Node, tokens.numbers(n, start, end, 0))
		if err != nil || words.place[Tensor] != Split(0) {
			return y, err
		}
		y.place[Tensor] = Partial
		if b.layout.TP > 1 {
			shape := tokens.own()
			y.Node, err = gorgonia.BroadcastHadamardProd(y.Node,
				tokens.mask(start, end, append(shape, 1)...), nil, []byte{byte(len(shape))})
		}
		return y, err
	})
}

// Positions adds a learnable to each position.
//
//	in   x  [batch, positions, n] Split(1) over the Sequence group,
//	        or [positions, batch, n] Split(0)
//	out  y  like x, and placed like x
//
// The learnable, [positions, n], has the name. Each rank has the whole of it: [Builder.Sinusoids]
// needs less memory.
//
// Errors: [ErrPlacement] if x is a partial sum or n is divided.
func (b *Builder) Positions(name string, x Node) Node {
	return b.apply("Positions "+name, func() (Node, error) {
		axis, err := alongSequence(x)
		if err != nil {
			return Node{}, err
		}
		order := x.order()
		p := b.Learn(name, Normal(deviation), Undivided, sum(x.parts[order[1]]), lastOf(x))
		if b.err != nil {
			return Node{}, b.err
		}
		p, err = b.learnableFor(p, x)
		for _, g := range []Group{order[1], order[0]} {
			if err == nil && x.place[g] == Split(axis) && b.layout.groups[g].Size() > 1 {
				p.Node, err = own(b.layout.groups[g], p.Node, 0, x.parts[g])
			}
		}
		if err != nil {
			return Node{}, err
		}
		return addRows(x, p.Node, axis)
	})
}

// Sinusoids adds sines and cosines of its number to each position p: to elements 2i and 2i+1 those
// of p / 10000^(2i/n), times the scale (Vaswani et al., "Attention Is All You Need", 2017). A scale
// like the deviation of x leaves room for what x says.
//
//	in   x  [batch, positions, n] Split(1) over the Sequence group,
//	        or [positions, batch, n] Split(0)
//	out  y  like x, and placed like x
//
// Nothing is learnt, and a rank has the numbers of its own positions alone.
//
// Errors: [ErrPlacement] if x is a partial sum or n is divided.
func (b *Builder) Sinusoids(scale float64, x Node) Node {
	return b.apply("Sinusoids", func() (Node, error) {
		axis, err := alongSequence(x)
		if err != nil {
			return Node{}, err
		}
		first := 0
		for _, g := range x.order() {
			if x.place[g] == Split(axis) {
				first += sum(x.parts[g][:b.layout.groups[g].Rank()])
			}
		}
		rows, n := x.Shape()[axis], lastOf(x)
		values := make([]float64, rows*n)
		for i := range values {
			angle := float64(first+i/n) * math.Pow(10000, -float64(i%n/2*2)/float64(n))
			if values[i] = scale * math.Sin(angle); i%n%2 == 1 {
				values[i] = scale * math.Cos(angle)
			}
		}
		return addRows(x, b.graph.Constant(b.tensor([]int{rows, n}, values)), axis)
	})
}

// alongSequence returns the axis of the positions of [batch, positions, n] or [positions, batch,
// n].
func alongSequence(x Node) (axis int, err error) {
	axis = sequenceAxis(x)
	if axis != 0 && axis != 1 || x.Dims() != 3 {
		return 0, misplaced("x", x, Sequence, Split(1), Split(0))
	}
	return axis, firstOf(summed("x", x), whole("x", x, 2))
}

// addRows adds row i of p, [positions, n], to position i of every sample.
func addRows(x Node, p *gorgonia.Node, axis int) (Node, error) {
	shape := []int{1, 1, lastOf(x)}
	shape[axis] = x.Shape()[axis]
	p, err := reshape(p, shape...)
	if err != nil {
		return Node{}, err
	}
	y, err := gorgonia.BroadcastAdd(x.Node, p, nil, []byte{byte(1 - axis)})
	return Place(y, x), err
}
