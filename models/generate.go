package models

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
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
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// GenerateOptions are the options of [NewGenerator].
type GenerateOptions struct {
	Batch     int // the most rows that are continued at a time; 0 is 1
	Context   int // the most tokens of a prompt and its continuation; 0 is the model's positions
	Precision vm.Precision
	// Layout shards the weights and the heads in the caches among the ranks of its Tensor group,
	// all of which make the generator, and call Generate with the same arguments. nil is one rank.
	Layout *layers.Layout
	// Build is the lock of euryale.Run, for ranks that are goroutines of one process. The generator
	// holds it while it builds graphs; the caller does not.
	Build sync.Locker
	// Learnables belong to another graph of the model, such as one that trains on the same device.
	// They are of Float32, and whole, or what the layout gives a rank. The generator shares their
	// tensors, and reads all others from the files.
	Learnables gorgonia.Nodes
}

// Generator continues texts. It has one plan for a step of a token, which on a device chooses the
// likeliest tokens there, another one once tokens are drawn, and a few for pieces of prompts, which
// are made as they are needed: of 16, 32, 64, ... up to 512 tokens of 1, 2, 4, ... rows. The plans
// share weights and caches. It is not safe for concurrent use.
type Generator struct {
	model   *Model
	device  backend.Device
	options GenerateOptions
	tensors map[string]*tensor.Dense // of learnables and caches, by name
	layout  *layers.Layout
	graphs  map[form]*generating // nil once it is closed
}

const (
	// shortestPiece and longestPiece are the lengths of pieces of prompts: powers of two between
	// them, and mostTokens how many a run has at most. They bound the plans, and their memory.
	// Pieces up to paddedPiece are padded rather than split: on a GPU they take as long as reading
	// the weights does.
	shortestPiece, paddedPiece, longestPiece, mostTokens = 16, 128, 512, 1024
)

// form says which graph of a Generator one is. A step is one position of all rows.
type form struct {
	rows, positions int
	likeliest       bool // it chooses the likeliest tokens itself
}

// stepFor returns the form of a step. On the host, where logits need not be copied, a loop over
// them is faster than a graph.
func (g *Generator) stepFor(s Sampling) form {
	onHost := g.device == nil || g.device.Name() == "host"
	return form{g.options.Batch, 1, s.Temperature == 0 && !s.penalizes() && !onHost}
}

// generating is a graph of a Generator and its machine.
type generating struct {
	caching
	tokens *layers.Tokens
	ids    []int
	logits *gorgonia.Node // of the whole vocabulary, or the largest ones
	best   *gorgonia.Node // the tokens of these, nil with the whole vocabulary
	// ending is the number of this rank, from 1 on, if it ends the generation after a run, and
	// ended the largest one of all ranks that share the weights. nil on one rank.
	ending, ended *gorgonia.Node
	machine       *vm.Machine
}

// NewGenerator builds the graph of a step on a device; nil is the host. Weights and caches of keys
// and values, of Batch*Context positions, stay there until Close. The model may be closed after
// NewGenerator, and the layout after Close.
//
// Errors: [backend.ErrArgument] for a negative option, more positions than GPT-2 has, and
// Learnables that the model lacks or that have other shapes or dtypes; [backend.ErrUnsupported] for
// a Context in which the angles of rotary positions would change (types "dynamic" and "longrope"),
// and for a layout that shards positions; those of [Model.Logits], such as for fewer heads of keys
// than ranks that shard them, and of vm.New. Ranks that share the weights have an error if one of
// them has, which it names; NewGenerator waits for them.
func NewGenerator(m *Model, device backend.Device, o GenerateOptions) (_ *Generator, err error) {
	defer named(&err, "generator")
	g := &Generator{device: device, options: o, graphs: map[form]*generating{},
		tensors: map[string]*tensor.Dense{}, layout: o.Layout}
	err = g.prepare(m)
	if _, err = g.graph(g.stepFor(Sampling{}), err); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// prepare checks the arguments, and has what all graphs have in common.
func (g *Generator) prepare(m *Model) (err error) {
	o := &g.options
	if err := backend.Given("", "m", m, "o.Learnables", o.Learnables); err != nil {
		return err
	}
	o.Batch, o.Context = cmp.Or(o.Batch, 1), cmp.Or(o.Context, m.Positions)
	if o.Batch < 0 || o.Context < 0 || m.Type == gpt2 && o.Context > m.Positions {
		return fmt.Errorf("%w: a batch of %d with a context of %d, of a model of %d positions",
			backend.ErrArgument, o.Batch, o.Context, m.Positions)
	}
	if o.Layout != nil && o.Layout.SP > 1 {
		return fmt.Errorf("%w: a layout of %v shards positions, which come one at a time: "+
			"use its ranks for weights or samples", backend.ErrUnsupported, o.Layout)
	}
	if err := m.grows(o.Context); err != nil {
		return err
	}
	now := *m // later graphs have the adapter that the first one has
	now.Random = nil
	g.model = &now
	for _, n := range o.Learnables {
		if t, ok := n.Value().(*tensor.Dense); ok {
			g.tensors[n.Name()] = t
		}
	}
	if g.layout == nil {
		g.layout, err = layers.NewLayout(autograd.Solo(), 1, 1, 1)
	}
	return err
}

// graph returns a graph, which it makes once, unless a rank that shares the weights has a problem.
func (g *Generator) graph(f form, problem error) (r *generating, err error) {
	if r := g.graphs[f]; r != nil {
		return r, nil
	}
	if err = problem; err == nil {
		r, err = g.build(f)
	}
	var machine *vm.Machine
	if err == nil {
		machine, err = vm.New(r.logits.Graph(), g.device, append(r.options, vm.Eval(),
			vm.WithPrecision(g.options.Precision))...)
	}
	o := g.options
	err = g.agree(fmt.Sprintf("a batch of %d, a context of %d, precision %v, a graph of %+v",
		o.Batch, o.Context, o.Precision, f), err)
	if err != nil {
		if machine != nil {
			err = errors.Join(err, machine.Close())
		}
		return nil, err
	}
	r.machine, g.graphs[f] = machine, r
	return r, nil
}

// agree returns an error on all ranks that share the weights if one of them has an error, or
// describes something else than the first one.
func (g *Generator) agree(description string, err error) error {
	if g.layout == nil || g.layout.TP == 1 { // of a closed generator the caller's layout is there
		return err
	}
	return autograd.Agree(g.layout.Comm(layers.Tensor), description, err)
}

// cached returns the dtype of the caches: that to which attention rounds keys and values.
func (g *Generator) cached() tensor.Dtype {
	if g.options.Precision == vm.BF16 {
		return tensor.Dtype{Type: reflect.TypeFor[backend.BFloat16]()}
	}
	return tensor.Float32
}

// build builds a graph.
func (g *Generator) build(f form) (*generating, error) {
	if g.options.Build != nil {
		g.options.Build.Lock()
		defer g.options.Build.Unlock()
	}
	b := layers.NewBuilder(gorgonia.NewGraph(), g.layout, tensor.Float32, 0)
	tokens, batch := f.rows*f.positions, g.options.Batch
	r := &generating{tokens: b.Tokens("tokens", 1, f.rows, f.positions), ids: make([]int, tokens),
		caching: caching{context: g.options.Context, batch: batch, dtype: g.cached(),
			tensors: g.tensors, slots: integers(b, "slots", tokens),
			places: integers(b, "places", tokens), lengths: integers(b, "lengths", f.rows)}}
	if f.rows < batch {
		r.which = integers(b, "which", f.rows)
	}
	if f.positions > 1 {
		r.ends = integers(b, "ends", f.rows)
	}
	logits, err := g.model.build(b, r.tokens, &r.caching)
	r.logits = b.To(logits, layers.Tensor, layers.Replicated).Node
	if err = errors.Join(err, b.Err()); err != nil {
		return nil, err
	}
	if f.likeliest {
		err = r.choose()
	}
	if err == nil && g.layout.TP > 1 {
		err = r.share(b.Graph(), g.layout.Comm(layers.Tensor))
	}
	if err != nil {
		return nil, err
	}
	for _, n := range g.options.Learnables {
		if len(b.Graph().ByName(n.Name())) == 0 {
			return nil, fmt.Errorf("%w: the model has no learnable %s", backend.ErrArgument,
				n.Name())
		}
	}
	return r, g.bind(r, b.Graph())
}

// bind gives a graph the tensors that there are, and keeps those that it has besides.
func (g *Generator) bind(r *generating, graph *gorgonia.ExprGraph) error {
	for _, n := range graph.Inputs() {
		value, ok := n.Value().(*tensor.Dense)
		if !ok || n.Dtype() == tensor.Int || n == r.ending {
			continue
		}
		if t := g.tensors[n.Name()]; t == nil {
			g.tensors[n.Name()] = value
		} else if !t.Shape().Eq(n.Shape()) || t.Dtype() != n.Dtype() {
			return fmt.Errorf("%w: %s is %v %v, want %v %v: train on a layout that divides it as "+
				"the generator's does", backend.ErrArgument, n.Name(), t.Dtype(), t.Shape(),
				n.Dtype(), n.Shape())
		} else if err := gorgonia.Let(n, t); err != nil {
			return err
		}
		if !isCache(n.Name()) {
			r.options = append(r.options, vm.WithFrozen(n))
		}
	}
	return nil
}

// share adds what ranks tell each other: whether one of them ends the generation.
func (r *generating) share(graph *gorgonia.ExprGraph, comm backend.Communicator) (err error) {
	r.ending = gorgonia.NewVector(graph, tensor.Float32, gorgonia.WithShape(1),
		gorgonia.WithName("ending"),
		gorgonia.WithValue(tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(1))))
	r.ended, err = ops.AllReduce(comm, backend.Max, r.ending)
	return err
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
	if g.graphs = nil; g.options.Layout == nil && g.layout != nil {
		errs = append(errs, g.layout.Close())
		g.layout = nil
	}
	return errors.Join(errs...)
}

// text is a prompt that is being continued.
type text struct {
	row    int   // the number of the prompt
	tokens []int // so far
	fed    int   // tokens whose keys and values are in the caches
	left   int   // tokens to come
	random *rand.Rand
	room   candidates
	logits []float32 // of the next token, penalized
}

// ready reports whether a step continues the text: other tokens before the next one are fed in
// pieces.
func (t *text) ready() bool { return t.fed == len(t.tokens)-1 }

// Generate continues prompts as s says, and for fields that are zero as the folder's
// generation_config.json does (see [Sampling]), and calls next with each token as soon as there is
// one. Each prompt is one row, by its number. There may be any number of prompts: of more than
// Batch the others wait, and each takes the place of a row that has ended. A row's tokens are in
// their order; rows take turns.
//
// Rows do not depend on each other: sampling draws from a random sequence of the seed and the row's
// number. Prompts are fed in pieces of 16, 32, 64, ... tokens, between steps, and only the last one
// is padded. Each step computes the logits of one position of all rows, and reads the caches.
// Without a temperature only the likeliest tokens come from a device; otherwise these logits do,
// and the host draws tokens from them, for several rows at once.
//
// It is collective over the ranks that share the weights. All have the same logits, bit for bit,
// and so the same tokens. If ctx ends on one of them, or next returns an error, it ends on all
// after the same step.
//
// Errors: [backend.ErrArgument] for no prompt, an empty one or one that is longer than Context,
// tokens outside of the vocabulary, and invalid sampling; those of [Model.Sampling]; what next
// returns; the cause of ctx; those of the machine, which abort the layout's group; the error of
// another rank that shares the weights, which it names: [backend.ErrMismatch] for other arguments,
// and [backend.ErrAborted] where its ctx or next has ended it.
func (g *Generator) Generate(ctx context.Context, prompts [][]int, s Sampling,
	next func(row, token int) error) (err error) {
	defer named(&err, "generate")
	s, err = g.model.Sampling(s)
	err = errors.Join(backend.Given("", "ctx", ctx, "next", next), err)
	if err == nil {
		err = g.check(prompts, s)
	}
	h := fnv.New64a()
	fmt.Fprint(h, prompts, s)
	if err = g.agree(fmt.Sprintf("prompts and sampling of hash %x", h.Sum64()), err); err != nil {
		return err
	}
	var stop error // of this rank
	waiting, rows, f := g.texts(prompts, s), make([]*text, g.options.Batch), form{}
	for {
		for i, t := range rows {
			if (t == nil || t.left == 0) && len(waiting) > 0 {
				rows[i], waiting = waiting[0], waiting[1:]
			} else if t != nil && t.left == 0 {
				rows[i] = nil
			}
		}
		var entries []int
		if f, entries = g.turn(rows, s, f); entries == nil {
			return stop
		}
		if stop == nil {
			stop = context.Cause(ctx)
		}
		r, err := g.graph(f, nil)
		if err == nil { // others hear of what ends this rank in the run
			err = r.run(g.layout, cmp.Or(stop, r.feed(rows, entries)))
		}
		if err == nil {
			err = r.add(rows, entries, s, &stop, next)
		}
		if err != nil {
			return err
		}
	}
}

func (g *Generator) check(prompts [][]int, s Sampling) error {
	if g.graphs == nil {
		return fmt.Errorf("%w: the generator is closed", backend.ErrArgument)
	}
	if len(prompts) == 0 {
		return fmt.Errorf("%w: there is no prompt", backend.ErrArgument)
	}
	for row, p := range prompts {
		if len(p) == 0 || len(p) > g.options.Context {
			return fmt.Errorf("%w: prompt %d has %d tokens, want 1 to %d", backend.ErrArgument, row,
				len(p), g.options.Context)
		}
		if token := slices.Max(p); min(token, slices.Min(p)) < 0 || token >= g.model.Vocabulary {
			return fmt.Errorf("%w: prompt %d has tokens %d to %d, of a vocabulary of %d",
				backend.ErrArgument, row, slices.Min(p), token, g.model.Vocabulary)
		}
		if s.Max == 0 && s.MaxLength > 0 && len(p) >= s.MaxLength {
			return fmt.Errorf("%w: prompt %d has %d tokens, and with its continuation at most %d "+
				"(max_length): set Sampling.Max", backend.ErrArgument, row, len(p), s.MaxLength)
		}
	}
	return nil
}

// texts returns the texts of prompts, without those for which there is no token to come.
func (g *Generator) texts(prompts [][]int, s Sampling) (all []*text) {
	for row, p := range prompts {
		left := g.options.Context - len(p)
		if s.Max > 0 {
			left = min(left, s.Max)
		} else if s.MaxLength > 0 {
			left = min(left, s.MaxLength-len(p))
		}
		if left > 0 {
			random := rand.New(rand.NewPCG(s.Seed, uint64(row)))
			all = append(all, &text{row: row, tokens: slices.Clone(p), left: left, random: random})
		}
	}
	return all
}

// turn returns which graph runs after another one, for which rows; none if there are no texts.
// Steps and pieces of prompts take turns once as many texts are continued as have prompts to feed.
// Pieces follow from a text alone, so that it has the same ones whatever runs beside it; rows whose
// next pieces have one length are fed together.
func (g *Generator) turn(rows []*text, s Sampling, last form) (f form, entries []int) {
	ready, first := 0, (*text)(nil)
	for i, t := range rows {
		switch {
		case t == nil:
		case t.ready():
			ready++
		default:
			if entries = append(entries, i); first == nil || t.row < first.row {
				first = t
			}
		}
	}
	if first == nil || last.positions != 1 && ready >= len(entries) {
		if entries = nil; ready > 0 {
			for i := range rows {
				entries = append(entries, i)
			}
		}
		return g.stepFor(s), entries
	}
	p := g.piece(first)
	entries = slices.DeleteFunc(entries, func(i int) bool { return g.piece(rows[i]) != p })
	n, most := len(entries), max(1, mostTokens/p)
	if n < len(rows) || n > most {
		n = 1 << (bits.Len(uint(min(n, most))) - 1)
	}
	slices.SortFunc(entries, func(a, b int) int { return rows[a].row - rows[b].row })
	slices.Sort(entries[:n])
	return form{rows: n, positions: p}, entries[:n]
}

// piece returns the length of the next piece of a text's prompt: for what is left of it, or, where
// much of that would be padding, half as much. A short one does not pay for another run.
func (g *Generator) piece(t *text) int {
	left := len(t.tokens) - t.fed
	n := 1 << bits.Len(uint(left-1))
	if n > paddedPiece && left <= n-n/4 {
		n /= 2
	}
	return min(max(n, shortestPiece), longestPiece, g.options.Context)
}

// feed makes tokens of texts the input, from the first one that is not in the caches. Padding
// follows them: no position before it sees it, and its rows of the caches are written before they
// are read. So it is with texts for which it is not the turn, and where there is none. Where the
// caches have no room for padding, a piece begins with tokens that are in the caches.
func (r *generating) feed(rows []*text, entries []int) error {
	slots, places, positions := ints(r.slots), ints(r.places), len(r.ids)/len(entries)
	clear(r.ids)
	for e, i := range entries {
		start, n := 0, 0
		if t := rows[i]; t != nil {
			start = min(t.fed, r.context-positions)
			if positions > 1 || t.ready() {
				n = copy(r.ids[e*positions:][:positions], t.tokens[start:])
				t.fed = start + n
			}
		}
		for p := range positions {
			slots[e*positions+p], places[e*positions+p] = i*r.context+start+p, start+p
		}
		ints(r.lengths)[e] = start + positions
		if r.which != nil {
			ints(r.which)[e] = i
		}
		if r.ends != nil {
			ints(r.ends)[e] = e*positions + n - 1
		}
	}
	return r.tokens.Set(r.ids)
}

// run runs the graph, unless there is a reason to stop. Ranks that share weights stop after a run
// in which all have learnt of it.
func (r *generating) run(l *layers.Layout, stop error) error {
	if r.ending == nil {
		if stop != nil {
			return stop
		}
		return r.machine.RunAll()
	}
	ending := r.ending.Value().Data().([]float32)
	if ending[0] = 0; stop != nil {
		ending[0] = float32(1 + l.Comm(layers.Tensor).Rank())
	}
	if err := r.machine.RunAll(); err != nil {
		comm := l.Comm(layers.Tensor) // where the others are in the middle of the run
		comm.Abort(fmt.Errorf("rank %d cannot go on: %w", comm.Rank(), err))
		return err
	}
	by := int(r.ended.Value().Data().([]float32)[0])
	if stop == nil && by > 0 {
		stop = fmt.Errorf("%w: rank %d of those that share the weights has ended it",
			backend.ErrAborted, by-1)
	}
	return stop
}

// add adds the next tokens to the texts whose tokens all are in the caches. What next returns
// becomes a reason to stop, after which it is not called.
func (r *generating) add(rows []*text, entries []int, s Sampling, stop *error,
	next func(row, token int) error) error {
	texts := make([]*text, len(entries))
	for e, i := range entries {
		if t := rows[i]; t != nil && t.fed == len(t.tokens) {
			texts[e] = t
		}
	}
	tokens, err := r.draw(texts, s)
	if err != nil {
		return err
	}
	for e, t := range texts {
		if t == nil {
			continue
		}
		if t.left--; slices.Contains(s.Stop, tokens[e]) {
			t.left = 0
			continue
		}
		t.tokens = append(t.tokens, tokens[e])
		if *stop == nil {
			*stop = next(t.row, tokens[e])
		}
	}
	return nil
}

// draw returns the next tokens of texts that are not nil.
func (r *generating) draw(texts []*text, s Sampling) ([]int, error) {
	logits, tokens := r.logits.Value().Data().([]float32), make([]int, len(texts))
	n, errs := len(logits)/len(texts), make([]error, len(texts))
	var drawing sync.WaitGroup
	for e, t := range texts {
		of := logits[e*n:][:n]
		switch {
		case t == nil:
		case r.best != nil:
			tokens[e], errs[e] = ints(r.best)[e], finite(of[0])
		default:
			drawing.Go(func() {
				tokens[e], errs[e] = s.draw(s.penalized(of, t), t.random, &t.room)
			})
		}
	}
	drawing.Wait()
	for e, err := range errs {
		if err != nil {
			return nil, fmt.Errorf("row %d: %w", texts[e].row, err)
		}
	}
	return tokens, nil
}

func ints(n *gorgonia.Node) []int { return n.Value().Data().([]int) }
