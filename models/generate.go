package models

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// GenerateOptions are the options of [NewGenerator].
type GenerateOptions struct {
	Batch     int // the most prompts of one call; 0 is 1
	Context   int // the most tokens of a prompt and its continuation; 0 is the model's positions
	Precision vm.Precision
	// Learnables belong to another graph of the model, such as one that trains on the same device.
	// They are whole, of Float32. The generator shares their tensors, and reads all others from the
	// files.
	Learnables gorgonia.Nodes
}

// Generator continues texts. It has one plan for a step of a token, which on a device chooses the
// likeliest tokens there, another one once tokens are drawn, and one for each length of prompts,
// which are padded at the end to 16, 32, 64 and so on. The plans share weights and caches. It runs
// on one rank, and is not safe for concurrent use.
type Generator struct {
	model   *Model
	device  backend.Device
	options GenerateOptions
	tensors map[string]*tensor.Dense // of learnables and caches, by name
	layout  *layers.Layout
	graphs  map[form]*generating // nil once it is closed
}

// form says which graph of a Generator one is.
type form struct {
	positions int
	step      bool
	likeliest bool // it chooses the likeliest tokens itself
}

// stepFor returns the form of a step. On the host, where logits need not be copied, a loop over
// them is faster than a graph.
func (g *Generator) stepFor(s Sampling) form {
	onHost := g.device == nil || g.device.Name() == "host"
	return form{1, true, s.Temperature == 0 && !s.penalizes() && !onHost}
}

// generating is a graph of a Generator and its machine.
type generating struct {
	caching
	tokens  *layers.Tokens
	ids     []int
	logits  *gorgonia.Node // of the whole vocabulary, or the largest ones
	best    *gorgonia.Node // the tokens of these, nil with the whole vocabulary
	machine *vm.Machine
}

// NewGenerator builds the graph of a step on a device; nil is the host. Weights and caches of keys
// and values, of Batch*Context positions, stay there until Close. The model may be closed after
// NewGenerator.
//
// Errors: [backend.ErrArgument] for a negative option, more positions than GPT-2 has, and
// Learnables that the model lacks or that have other shapes or dtypes; [backend.ErrUnsupported] for
// a Context in which the angles of rotary positions would change (types "dynamic" and "longrope");
// those of [Model.Logits] and vm.New.
func NewGenerator(m *Model, device backend.Device, o GenerateOptions) (_ *Generator, err error) {
	defer named(&err, "generator")
	if err := backend.Given("", "m", m, "o.Learnables", o.Learnables); err != nil {
		return nil, err
	}
	o.Batch, o.Context = cmp.Or(o.Batch, 1), cmp.Or(o.Context, m.Positions)
	if o.Batch < 0 || o.Context < 0 || m.Type == gpt2 && o.Context > m.Positions {
		return nil, fmt.Errorf("%w: a batch of %d with a context of %d, of a model of %d positions",
			backend.ErrArgument, o.Batch, o.Context, m.Positions)
	}
	if err := m.grows(o.Context); err != nil {
		return nil, err
	}
	now := *m // later graphs have the adapter that the first one has
	now.Random = nil
	g := &Generator{model: &now, device: device, options: o, graphs: map[form]*generating{},
		tensors: map[string]*tensor.Dense{}}
	for _, n := range o.Learnables {
		if t, ok := n.Value().(*tensor.Dense); ok {
			g.tensors[n.Name()] = t
		}
	}
	if g.layout, err = layers.NewLayout(autograd.Solo(), 1, 1, 1); err != nil {
		return nil, err
	}
	step, err := g.graph(g.stepFor(Sampling{}))
	for _, n := range o.Learnables {
		if err == nil && len(step.logits.Graph().ByName(n.Name())) == 0 {
			err = fmt.Errorf("%w: the model has no learnable %s", backend.ErrArgument, n.Name())
		}
	}
	if err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// graph returns a graph, which it makes once.
func (g *Generator) graph(f form) (*generating, error) {
	if r := g.graphs[f]; r != nil {
		return r, nil
	}
	r, err := g.newGraph(f)
	if err == nil {
		g.graphs[f] = r
	}
	return r, err
}

// cached returns the dtype of the caches: that to which attention rounds keys and values.
func (g *Generator) cached() tensor.Dtype {
	if g.options.Precision == vm.BF16 {
		return tensor.Dtype{Type: reflect.TypeFor[backend.BFloat16]()}
	}
	return tensor.Float32
}

func (g *Generator) newGraph(f form) (*generating, error) {
	batch := g.options.Batch
	b := layers.NewBuilder(gorgonia.NewGraph(), g.layout, tensor.Float32, 0)
	r := &generating{tokens: b.Tokens("tokens", 1, batch, f.positions),
		ids: make([]int, batch*f.positions),
		caching: caching{context: g.options.Context, step: f.step, dtype: g.cached(),
			tensors: g.tensors,
			slots:   integers(b, "slots", batch*f.positions), ends: integers(b, "ends", batch)}}
	if f.step {
		r.lengths = integers(b, "lengths", batch)
		r.windowed(b, g.model, batch)
	}
	logits, err := g.model.build(b, r.tokens, &r.caching)
	if err != nil {
		return nil, err
	}
	if r.logits = logits.Node; f.likeliest {
		if err := r.choose(); err != nil {
			return nil, err
		}
	}
	for _, n := range b.Graph().Inputs() {
		value, ok := n.Value().(*tensor.Dense)
		if !ok || n.Dtype() == tensor.Int || n == r.hidden {
			continue
		}
		if t := g.tensors[n.Name()]; t == nil {
			g.tensors[n.Name()] = value
		} else if !t.Shape().Eq(n.Shape()) || t.Dtype() != n.Dtype() {
			return nil, fmt.Errorf("%w: %s is %v %v, want %v %v: train on a layout that does not "+
				"divide it", backend.ErrArgument, n.Name(), t.Dtype(), t.Shape(), n.Dtype(),
				n.Shape())
		} else if err := gorgonia.Let(n, t); err != nil {
			return nil, err
		}
		if !isCache(n.Name()) {
			r.options = append(r.options, vm.WithFrozen(n))
		}
	}
	r.machine, err = vm.New(b.Graph(), g.device, append(r.options, vm.Eval(),
		vm.WithPrecision(g.options.Precision))...)
	return r, err
}

// choose makes the graph find the largest logits. NaN is never one of them.
func (r *generating) choose() error {
	nan, err := gorgonia.Ne(r.logits, r.logits, false)
	if err == nil {
		r.logits, err = nn.MaskedFill(r.logits, nan, math.Inf(-1))
	}
	if err == nil {
		r.best, err = nn.ArgMax(-1, true, r.logits)
	}
	if err == nil {
		r.logits, err = nn.ReduceMax([]int{-1}, true, r.logits)
	}
	return err
}

// Close frees the memory of the generator.
func (g *Generator) Close() error {
	var errs []error
	for _, r := range g.graphs {
		errs = append(errs, r.machine.Close())
	}
	if g.graphs = nil; g.layout != nil {
		errs = append(errs, g.layout.Close())
		g.layout = nil
	}
	return errors.Join(errs...)
}

// text is a prompt that is being continued.
type text struct {
	tokens []int // so far
	left   int   // tokens to come, 0 at the end
	random *rand.Rand
	room   candidates
	logits []float32 // of the next token, penalized
}

// Generate continues prompts as s says, and for fields that are zero as the folder's
// generation_config.json does (see [Sampling]), and calls next with each token as soon as there is
// one: for all rows that have not ended, in their order, again and again. Each prompt is one row.
// Rows do not depend on each other, except that sampling draws from a random sequence of the seed
// and the row's number.
//
// Each step computes the logits of one position of all rows, and reads the caches for the others.
// Without a temperature only the likeliest tokens come from a device; otherwise these logits do,
// and the host draws tokens from them, for several rows at once.
//
// Errors: [backend.ErrArgument] for no prompt or more than Batch, an empty one or one that is
// longer than Context, tokens outside of the vocabulary, and invalid sampling; those of
// [Model.Sampling]; what next returns; the cause of ctx; those of the machine.
func (g *Generator) Generate(ctx context.Context, prompts [][]int, s Sampling,
	next func(row, token int) error) (err error) {
	defer named(&err, "generate")
	s, err = g.model.Sampling(s)
	if err = errors.Join(backend.Given("", "ctx", ctx, "next", next), err,
		g.check(prompts, s)); err != nil {
		return err
	}
	texts, longest := make([]text, len(prompts)), 0
	for row, p := range prompts {
		left := g.options.Context - len(p)
		if s.Max > 0 {
			left = min(left, s.Max)
		} else if s.MaxLength > 0 {
			left = min(left, s.MaxLength-len(p))
		}
		random := rand.New(rand.NewPCG(s.Seed, uint64(row)))
		texts[row] = text{tokens: slices.Clone(p), left: left, random: random}
		longest = max(longest, len(p))
	}
	padded := max(16, 1<<bits.Len(uint(longest-1)))
	f, going := form{positions: min(padded, g.options.Context)}, true
	for going {
		r, err := g.graph(f)
		if err == nil {
			err = r.feed(texts)
		}
		if err == nil {
			err = context.Cause(ctx)
		}
		if err == nil {
			err = r.machine.RunAll()
		}
		if err == nil {
			going, err = r.add(texts, s, next)
		}
		if err != nil {
			return err
		}
		f = g.stepFor(s)
	}
	return nil
}

func (g *Generator) check(prompts [][]int, s Sampling) error {
	if g.graphs == nil {
		return fmt.Errorf("%w: the generator is closed", backend.ErrArgument)
	}
	if n := len(prompts); n == 0 || n > g.options.Batch {
		return fmt.Errorf("%w: %d prompts, for a batch of 1 to %d", backend.ErrArgument, n,
			g.options.Batch)
	}
	for row, p := range prompts {
		if len(p) == 0 || len(p) > g.options.Context {
			return fmt.Errorf("%w: prompt %d has %d tokens, want 1 to %d", backend.ErrArgument, row,
				len(p), g.options.Context)
		}
		if s.Max == 0 && s.MaxLength > 0 && len(p) >= s.MaxLength {
			return fmt.Errorf("%w: prompt %d has %d tokens, and with its continuation at most %d "+
				"(max_length): set Sampling.Max", backend.ErrArgument, row, len(p), s.MaxLength)
		}
	}
	return nil
}

// feed makes texts the input: all tokens of prompts, or in a step the last one of each text.
// Padding follows a prompt: no position before it sees it, and its rows of the caches are written
// before they are read. Texts that have ended stay where they are.
func (r *generating) feed(texts []text) error {
	slots, ends, positions := ints(r.slots), ints(r.ends), len(r.ids)/len(ints(r.ends))
	clear(r.ids)
	for row := range ends {
		var tokens []int
		if row < len(texts) {
			tokens = texts[row].tokens
		}
		first, last := 0, max(0, len(tokens)-1)
		ends[row] = row*positions + last
		if r.step {
			first, ends[row], ints(r.lengths)[row] = last, last, last+1
			r.hide(row, last)
		}
		copy(r.ids[row*positions:], tokens[first:])
		for i := range positions {
			slots[row*positions+i] = row*r.context + first + i
		}
	}
	return r.tokens.Set(r.ids)
}

// add adds the next tokens to the texts that have not ended, and reports whether any still has not.
func (r *generating) add(texts []text, s Sampling, next func(row, token int) error) (going bool,
	err error) {
	tokens, err := r.draw(texts, s)
	if err != nil {
		return false, err
	}
	for row, token := range tokens {
		t := &texts[row]
		if t.left == 0 {
			continue
		}
		if t.left--; slices.Contains(s.Stop, token) {
			t.left = 0
			continue
		}
		t.tokens = append(t.tokens, token)
		if err := next(row, token); err != nil {
			return false, err
		}
		going = going || t.left > 0
	}
	return going, nil
}

// draw returns the next tokens of the texts that have not ended.
func (r *generating) draw(texts []text, s Sampling) ([]int, error) {
	logits, tokens := r.logits.Value().Data().([]float32), make([]int, len(texts))
	n, errs := len(logits)/r.ends.Shape()[0], make([]error, len(texts))
	var drawing sync.WaitGroup
	for row := range texts {
		t, of := &texts[row], logits[row*n:][:n]
		switch {
		case t.left == 0:
		case r.best != nil:
			tokens[row], errs[row] = ints(r.best)[row], finite(of[0])
		default:
			drawing.Go(func() {
				tokens[row], errs[row] = s.draw(s.penalized(of, t), t.random, &t.room)
			})
		}
	}
	drawing.Wait()
	for row, err := range errs {
		if err != nil {
			return nil, fmt.Errorf("row %d: %w", row, err)
		}
	}
	return tokens, nil
}

func ints(n *gorgonia.Node) []int { return n.Value().Data().([]int) }
