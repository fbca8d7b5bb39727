package layers

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/terms"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
)

// Tokens are numbers of a vocabulary, an input of the graph: one for each position of the samples
// of this rank's replica. The Sequence group shards them.
type Tokens struct {
	name  string
	b     *Builder
	shape []int // of all positions
	axis  int   // of the sequence
	end   int   // the least vocabulary among those that they were used with
	// padding is the token that does not count as a target, if padded is set.
	padding  int
	padded   bool
	embedded bool // whether an Embedding has them
	inputs   []func(ids []int) error
	total    *gorgonia.Node // of the targets that count in a step, as Count says it
	starts   *gorgonia.Node // of Documents
	begun    func(ids []int) error
	refused  func() error // tells other ranks that Set is wrong here; nil if none waits
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
			return Node{}, fmt.Errorf("%w: %d positions are sharded among %d ranks, and each "+
				"needs one: use fewer ranks", ops.ErrShape, shape[axis], b.layout.SP)
		}
		return Node{}, nil
	})
	return t
}

// Padding says which token fills up short samples: [Builder.CrossEntropy] leaves it out, and the
// loss is the mean over all other targets. It may be a number outside the vocabulary, unless the
// tokens are embedded, because an embedding looks up its row. Padding returns the tokens. A
// [Builder.MoE] needs the tokens (MoEOptions.Tokens), whose padding then takes no experts'
// capacity.
//
// Errors: [backend.ErrArgument] if something uses the tokens already, or a MoE knows of none.
func (t *Tokens) Padding(id int) *Tokens {
	t.b.apply("Padding of "+t.name, func() (Node, error) {
		if len(t.inputs) > 0 {
			return Node{}, fmt.Errorf("%w: the tokens are used already: call it before",
				backend.ErrArgument)
		}
		if t.b.routes != "" {
			return Node{}, unpadded(t.b.routes, t.name)
		}
		t.padding, t.padded, t.b.padded = id, true, t.name
		return Node{}, nil
	})
	return t
}

// counts reports whether a token is one of a part of the vocabulary, and a target.
func (t *Tokens) counts(id, start, end int) bool {
	return id >= start && id < end && !(t.padded && id == t.padding)
}

// Set sets all tokens of the replica, in row-major order of the shape; the rank keeps its part. Set
// them before each run: a run without any is an error.
//
// Errors: [backend.ErrArgument] for a wrong number of tokens, or one that is not in the vocabulary.
func (t *Tokens) Set(ids []int) error {
	if err := t.check(ids); err != nil {
		if t.refused != nil {
			err = errors.Join(err, t.refused())
		}
		return err
	}
	start, end := t.b.layout.shareOf(Sequence, t.shape[t.axis])
	own := sliceAxis(ids, t.shape, t.axis, start, end)
	err := t.setAll(own)
	if err == nil && t.begun != nil {
		err = t.begun(ids)
	}
	if err != nil {
		return fmt.Errorf("layers: %s: %w", t.name, err)
	}
	return nil
}

// setAll sets this rank's tokens. The first error ends it: a table's is one of all ranks, which
// then begin no exchange of the next input.
func (t *Tokens) setAll(own []int) error {
	for _, set := range t.inputs {
		if err := set(own); err != nil {
			return err
		}
	}
	return nil
}

// Count says how many targets count in a step, those that are not padding: of all samples of all
// ranks and runs. Call it before each run if a step has several ([Builder.Batches]), since the loss
// of a run divides by it. Otherwise ranks count themselves, and it does nothing. With 0 the loss is
// 0.
//
// Errors: [backend.ErrArgument] for a negative number.
func (t *Tokens) Count(n int) error {
	switch {
	case n < 0:
		return fmt.Errorf("layers: %s: %w: %d targets count", t.name, backend.ErrArgument, n)
	case t.total == nil:
		return nil
	}
	return gorgonia.Let(t.total, t.b.number(float64(max(1, n))))
}

// told returns the input of Count.
func (t *Tokens) told() *gorgonia.Node {
	if t.total == nil {
		t.total = gorgonia.NewScalar(t.b.graph, t.b.dtype, gorgonia.WithName(t.name+".count"))
	}
	return t.total
}

func (t *Tokens) check(ids []int) error {
	if len(ids) != size(t.shape) {
		return fmt.Errorf("layers: %w: %d tokens for %s, of shape %v", backend.ErrArgument,
			len(ids), t.name, t.shape)
	}
	for i, id := range ids {
		filler := t.padded && !t.embedded && id == t.padding
		unread := t.end == 0 && id >= 0 // but for which of them are padding
		if (id < 0 || id >= t.end) && !filler && !unread {
			return fmt.Errorf("layers: %w: token %d of %s is %d, out of range 0 to %d",
				backend.ErrArgument, i, t.name, id, t.end-1)
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
// rank has start to end, where in holds; others are what none says.
func (t *Tokens) numbers(vocabulary, start, end int, none func(id int) int,
	in func(id, start, end int) bool) *gorgonia.Node {
	t.bound(vocabulary)
	shape := t.own()
	data := make([]int, size(shape))
	return t.feed(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data)),
		func(ids []int) error {
			for i, id := range ids {
				if data[i] = id - start; !in(id, start, end) {
					data[i] = none(id)
				}
			}
			return nil
		})
}

// bound notes a vocabulary with which the tokens are used.
func (t *Tokens) bound(vocabulary int) {
	if t.end == 0 || vocabulary < t.end {
		t.end = vocabulary
	}
}

// feed adds an input whose value is filled by Set, from this rank's tokens.
func (t *Tokens) feed(value *tensor.Dense, fill func(ids []int) error) *gorgonia.Node {
	n, set := t.fed(value, fill)
	t.inputs = append(t.inputs, set)
	return n
}

// fed returns an input and what sets it. It has no value before, so that a run without tokens is an
// error.
func (t *Tokens) fed(value *tensor.Dense, fill func(ids []int) error) (n *gorgonia.Node,
	set func(ids []int) error) {
	n = gorgonia.NewTensor(t.b.graph, value.Dtype(), value.Dims(),
		gorgonia.WithShape(value.Shape()...), gorgonia.WithName(t.input()))
	return n, func(ids []int) error {
		if err := fill(ids); err != nil || n.Value() == value {
			return err
		}
		return gorgonia.Let(n, value)
	}
}

// input returns a name for another input.
func (t *Tokens) input() string { return fmt.Sprintf("%s.%d", t.name, len(t.inputs)) }

// mask adds an input that is 1 for each token from start to end where in holds, and 0 for others.
func (t *Tokens) mask(in func(id, start, end int) bool, start, end int,
	shape ...int) *gorgonia.Node {
	value := t.b.tensor(shape, make([]float64, size(shape)))
	return t.feed(value, func(ids []int) error {
		switch data := value.Data().(type) {
		case []float32:
			marked(data, ids, in, start, end)
		case []float64:
			marked(data, ids, in, start, end)
		}
		return nil
	})
}

// within reports whether a number is one from start to end.
func within(id, start, end int) bool { return id >= start && id < end }

// marked sets an element to 1 for each number that is in, and others to 0.
func marked[T float32 | float64](data []T, ids []int, in func(id, start, end int) bool, start,
	end int) {
	for i, id := range ids {
		data[i] = 0
		if in(id, start, end) {
			data[i] = 1
		}
	}
}

// vocabulary returns the length of a learnable's first axis and which part of it this rank has.
func (b *Builder) vocabulary(embedding Node) (n, start, end int) {
	if embedding.place[Tensor] == Split(0) {
		n = sum(embedding.parts[Tensor])
		start, end = b.layout.shareOf(Tensor, n)
		return n, start, end
	}
	n = embedding.Shape()[0]
	return n, 0, n
}

// Documents are the KeyStarts of attention for samples that several documents share. The tokens are
// the positions of a text's tokens in their documents, so a document begins at each 0:
//
//	positions := b.Tokens("positions", 1, batch, context) // such as 0 1 2 0 1 0 1 2
//	o.KeyStarts = positions.Documents()                   // and then  0 0 0 3 3 5 5 5
//
// They are integers, [batch, positions]: where in the sample the document of each position begins,
// which with Causal hides those of other documents. They are the same on all ranks of both groups.
func (t *Tokens) Documents() *gorgonia.Node {
	return t.b.apply("Documents of "+t.name, func() (n Node, err error) {
		if len(t.shape) != 2 {
			return n, fmt.Errorf("%w: shape %v: want two axes", ops.ErrShape, t.shape)
		}
		if t.starts == nil {
			batch, positions := t.shape[1-t.axis], t.shape[t.axis]
			starts := make([]int, batch*positions)
			value := tensor.New(tensor.WithShape(batch, positions), tensor.WithBacking(starts))
			t.starts, t.begun = t.fed(value, func(ids []int) error {
				for i := range starts {
					sample, at := i/positions, i%positions
					id := ids[i]
					if t.axis == 0 {
						id = ids[at*batch+sample]
					}
					if starts[i] = at; at > 0 && id != 0 {
						starts[i] = starts[i-1]
					}
				}
				return nil
			})
		}
		n.Node = t.starts
		return n, nil
	}).Node
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
//	in   embedding  [vocabulary, n]   a learnable, Split(0) over the Tensor group or not sharded
//	     tokens     [d...]
//	out  y          [d..., n]         Partial over the Tensor group if it shards the embedding,
//	                                  else Replicated
//
// A rank has zeros for tokens of other ranks' parts of the vocabulary: To adds them up. The row of
// a padding token, of which one may be given, has no gradient: see [nn.Embedding].
//
// Cost: a copy of y; backward a pass over the gradient of the embedding, and with padding one
// over dy.
// Errors: [ErrPlacement] if the embedding is sharded along another axis; [backend.ErrArgument] for
// a padding that is not -vocabulary to vocabulary-1, or more than one.
func (b *Builder) Embedding(embedding Node, tokens *Tokens, padding ...int) Node {
	return b.apply("Embedding"+tokens.of(), func() (Node, error) {
		if err := cmp.Or(require("embedding", embedding, Sequence, Copied),
			require("embedding", embedding, Tensor, Split(0), Replicated)); err != nil {
			return Node{}, err
		}
		if embedding.Dims() != 2 {
			return Node{}, fmt.Errorf("%w: the embedding has shape %v: want a matrix", ops.ErrShape,
				embedding.Shape())
		}
		n, start, end := b.vocabulary(embedding)
		unlearnt, err := ownRows(padding, n, start, end)
		if err != nil {
			return Node{}, err
		}
		tokens.embedded = true
		y := tokens.placedNode()
		// Tokens of other ranks take rows in turn: the gradient of a row is a sum, in order, over
		// all tokens that took it.
		turn := func(id int) int { return id % (end - start) }
		y.Node, err = nn.Embedding(embedding.Node, tokens.numbers(n, start, end, turn, within),
			unlearnt...)
		if err != nil || embedding.place[Tensor] != Split(0) {
			return y, err
		}
		y.place[Tensor] = Partial
		if b.layout.TP > 1 {
			shape := tokens.own()
			y.Node, err = gorgonia.BroadcastHadamardProd(y.Node,
				tokens.mask(within, start, end, append(shape, 1)...), nil, []byte{byte(len(shape))})
		}
		return y, err
	}, "embedding", embedding, "tokens", tokens)
}

// ownRows returns which of a rank's rows, from start to end of n, the given ones are: NoRow for
// those of other ranks.
func ownRows(rows []int, n, start, end int) (own []int, err error) {
	if len(rows) > 1 {
		return nil, fmt.Errorf("%w: paddings %v of an embedding: give one, or none",
			backend.ErrArgument, rows)
	}
	for _, row := range rows {
		if row < -n || row >= n {
			return nil, fmt.Errorf("%w: padding %d of a vocabulary of %d: use -%d to %d",
				backend.ErrArgument, row, n, n, n-1)
		}
		if row = (row+n)%n - start; row < 0 || row >= end-start {
			row = terms.NoRow
		}
		own = append(own, row)
	}
	return own, nil
}

// Positions adds a learnable vector to each position.
//
//	in   x  [batch, positions, n] Split(1) over the Sequence group,
//	        or [positions, batch, n] Split(0)
//	out  y  like x, and placed like x
//
// The learnable, [positions, n], has the name. Each rank has the whole of it: [Builder.Sinusoids]
// needs less memory.
//
// Errors: [ErrPlacement] if x is a partial sum or n is sharded.
func (b *Builder) Positions(name string, x Node) Node {
	return b.within("Positions "+name, func() Node {
		rows := b.wholeSequence(x)
		return b.PositionsOf(b.Learn(name, Normal(deviation), Undivided, rows, lastOf(x)), x)
	})
}

// wholeSequence returns the number of positions of x on all ranks together.
func (b *Builder) wholeSequence(x Node) (rows int) {
	b.apply("positions", func() (Node, error) {
		_, err := alongSequence(x)
		if err == nil {
			rows = sum(x.parts[x.order()[1]])
		}
		return Node{}, err
	}, "x", x)
	return rows
}

// PositionsOf is [Builder.Positions] with the first rows of an existing learnable, [most, n]: one
// for each position, and more for longer sequences.
//
// Errors: [ErrPlacement]; [ops.ErrShape] if the sequence is longer than most.
func (b *Builder) PositionsOf(p, x Node) Node {
	rows := b.wholeSequence(x)
	return b.apply("PositionsOf", func() (Node, error) {
		axis, err := alongSequence(x)
		if err != nil {
			return Node{}, err
		}
		if p.Dims() != 2 || p.Shape()[0] < rows || p.Shape()[1] != lastOf(x) {
			return Node{}, fmt.Errorf("%w: positions have shape %v, and x has %d of %d elements: "+
				"use shorter sequences", ops.ErrShape, p.Shape(), rows, lastOf(x))
		}
		p, err = b.learnableFor(p, x)
		if err == nil && p.Shape()[0] > rows {
			p.Node, err = nn.Slice(0, 0, rows, 1, p.Node)
		}
		order := x.order()
		for _, g := range []Group{order[1], order[0]} {
			if err == nil && x.place[g] == Split(axis) && b.layout.groups[g].Size() > 1 {
				p.Node, err = own(b.layout.groups[g], p.Node, 0, x.parts[g])
			}
		}
		if err != nil {
			return Node{}, err
		}
		return addRows(x, p.Node, axis)
	}, "p", p, "x", x)
}

// Sinusoids adds sines and cosines, times the scale, to each position p: to element 2i the sine of
// p / 10000^(2i/n), and to element 2i+1 the cosine of that (Vaswani et al., "Attention Is All
// You Need", 2017). A scale near the deviation of x keeps them from drowning out x.
//
//	in   x  [batch, positions, n] Split(1) over the Sequence group,
//	        or [positions, batch, n] Split(0)
//	out  y  like x, and placed like x
//
// Nothing is learnt, and a rank has only the numbers of its positions.
//
// Errors: [ErrPlacement] if x is a partial sum or n is sharded.
func (b *Builder) Sinusoids(scale float64, x Node) Node {
	return b.apply("Sinusoids", func() (Node, error) {
		axis, err := alongSequence(x)
		if err != nil {
			return Node{}, err
		}
		first := b.firstOf(x, axis)
		rows, n := x.Shape()[axis], lastOf(x)
		values := make([]float64, rows*n)
		for i := range values {
			angle := float64(first+i/n) * math.Pow(10000, -float64(i%n/2*2)/float64(n))
			if values[i] = scale * math.Sin(angle); i%n%2 == 1 {
				values[i] = scale * math.Cos(angle)
			}
		}
		return addRows(x, b.Constant([]int{rows, n}, values), axis)
	}, "x", x)
}

// firstOf returns which element of the whole of an axis is this rank's first one.
func (b *Builder) firstOf(x Node, axis int) int {
	first := 0
	for _, g := range x.order() {
		if x.place[g] == Split(axis) {
			first += sum(x.parts[g][:b.layout.groups[g].Rank()])
		}
	}
	return first
}

// RotaryOptions are the options of [Builder.Rotary].
type RotaryOptions struct {
	nn.RotaryOptions
	Base  float64 // of the wavelengths; 0 is 10000
	First int     // the number of the first position
}

// Rotary turns pairs of elements of queries or keys by angles in proportion to their position:
// nn.Rotary, before [Builder.Attend].
//
//	in   x  [batch, positions, heads, d] with axis 1, or [positions, batch, heads, d] with axis 0
//	out  y  like x, and placed like x
//
// Nothing is learnt. A rank has only the angles of its positions, and any group may shard the
// positions.
//
// Errors: [ErrPlacement] if x is a partial sum or d is sharded; [ops.ErrShape]; those of
// nn.RotaryAngles.
func (b *Builder) Rotary(x Node, axis int, o RotaryOptions) Node {
	return b.apply("Rotary", func() (Node, error) {
		last := x.Dims() - 1
		if axis < 0 || axis >= last {
			return Node{}, fmt.Errorf("%w: x has shape %v, with positions along axis %d",
				ops.ErrShape, x.Shape(), axis)
		}
		if err := cmp.Or(summed("x", x), wholeAxis("x", x, last)); err != nil {
			return Node{}, err
		}
		shape := x.Shape()
		cos, sin, err := nn.RotaryAngles(b.dtype, cmp.Or(o.Base, 10000),
			o.First+b.firstOf(x, axis), shape[axis], shape[last])
		if err != nil {
			return Node{}, err
		}
		along := slices.Repeat([]int{1}, last+1-axis) // of the axes from that of positions on
		along[0], along[last-axis] = shape[axis], shape[last]/2
		if err := cmp.Or(cos.Reshape(along...), sin.Reshape(along...)); err != nil {
			return Node{}, err
		}
		y, err := nn.Rotary(o.RotaryOptions, x.Node, b.graph.Constant(cos), b.graph.Constant(sin))
		return Place(y, x), err
	}, "x", x)
}

// alongSequence returns the axis of the positions of [batch, positions, n] or [positions, batch,
// n].
func alongSequence(x Node) (axis int, err error) {
	axis = sequenceAxis(x)
	if axis != 0 && axis != 1 || x.Dims() != 3 {
		return 0, misplaced("x", x, Sequence, Split(1), Split(0))
	}
	return axis, cmp.Or(summed("x", x), wholeAxis("x", x, 2))
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
