package vm_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/kernels/fuse"
	layered "github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

// feature is something that a training can have besides others. Those of one sort exclude each
// other.
type feature struct {
	name, sort string
	word       string // that refusals have
	about      string // for the page
}

// features are in the order of docs/combinations.md.
var features = []feature{
	{"SGD", "solver", "SGD", "`solver.SGD`"},
	{"Momentum", "solver", "Momentum", "`solver.Momentum`"},
	{"Nesterov", "solver", "Nesterov", "`solver.Nesterov`"},
	{"RMSProp", "solver", "RMSProp", "`solver.RMSProp`, with momentum"},
	{"Adam", "solver", "Adam", "`solver.Adam`"},
	{"AdamW", "solver", "AdamW", "`solver.AdamW`"},
	{"Custom", "solver", "Custom", "`solver.Custom`, a solver of one's own"},
	{"Groups", "groups", "Groups", "several `vm.WithSolver`: parameter groups"},
	{"EMA", "average", "EMA", "`solver.EMA`: moving averages of learnables"},
	{"ClipNorm", "clip", "ClipNorm", "`vm.ClipNorm`"},
	{"Accumulate", "step", "Accumulate", "`vm.Accumulate`, by `layers.Builder.Batches`"},
	{"WithTree", "step", "WithTree", "`vm.WithTree` ([reproducibility](reproducibility.md))"},
	{"WithElastic", "step", "WithElastic", "`vm.WithElastic` ([elastic training](elastic.md))"},
	{"ZeRO 1", "shards", "WithShards", "`vm.WithShards(SolverState)` ([shards](shards.md))"},
	{"ZeRO 2", "shards", "WithShards", "`vm.WithShards`, gradients, too"},
	{"ZeRO 3", "shards", "WithShards", "`vm.WithShards`, parameters, too"},
	{"BF16", "precision", "BF16", "`vm.WithPrecision(vm.BF16)`"},
	{"half wire", "wire", "WithCompression",
		"`autograd.WithCompression` to BF16 ([compression](compression.md))"},
	{"sparse wire", "wire", "WithCompression",
		"`autograd.WithCompression` to the largest elements"},
	{"least memory", "memory", "WithMemory",
		"`vm.WithMemory` with the lowest bound ([memory](memory.md))"},
	{"chunked cross-entropy", "tiles", "WithLossTiles", "`vm.WithLossTiles`"},
	{"batch norm", "norm", "BatchNorm", "`layers.Builder.BatchNorm`, each rank its own batch"},
	{"SyncBatchNorm", "norm", "SyncBatchNorm", "`vm.SyncBatchNorm`"},
	{"Padding", "padding", "Tokens.Padding", "`layers.Tokens.Padding`: targets that do not count"},
	{"Dropout", "dropout", "Dropout", "`layers.Builder.Dropout`"},
	{"row exchange", "lookup", "Embedding",
		"an embedding of whose gradient ranks exchange the rows that they look up"},
	{"Table", "table", "layers.Table", "`layers.Table`: an embedding whose rows ranks shard"},
	{"MoE", "experts", "MoE", "`layers.Builder.MoE`"},
	{"frozen", "frozen", "WithFrozen", "a variable that nothing trains, with `vm.WithFrozen`"},
	{"16-bit variable", "16 bits", "BFloat16",
		"a frozen variable of BF16, as those of mapped folders"},
	{"window", "window", "Window", "`layers.AttentionOptions.Window`"},
	{"packed documents", "documents", "KeyStarts", "`layers.Tokens.Documents`"},
	{"evaluation", "evaluation", "Eval",
		"a machine of `vm.Eval` beside, which has learnables frozen"},
	{"data ranks", "dp", "layers.Layout", "`layers.Layout` with several replicas"},
	{"sequence ranks", "sp", "layers.Layout", "`layers.Layout` that shards sequences"},
	{"tensor ranks", "tp", "layers.Layout", "`layers.Layout` that shards weights"},
}

// refusal is a pair of features that New refuses, with words that name both.
type refusal struct {
	a, b []string
	why  string                // for the page
	when func(s *setting) bool // nil for always
}

var refusals = []refusal{
	{[]string{"ZeRO 1", "ZeRO 2", "ZeRO 3"}, []string{"WithTree"}, "ranks that update a part " +
		"would add up other branches of the tree; one rank alone may", severalRanks},
	{[]string{"ZeRO 1", "ZeRO 2", "ZeRO 3"}, []string{"sparse wire"}, "residuals are of whole " +
		"buckets", severalRanks},
	{[]string{"half wire", "sparse wire"}, []string{"WithTree", "WithElastic"}, "the sum would " +
		"depend on what each rank has rounded", nil},
	{[]string{"SyncBatchNorm"}, []string{"WithTree", "WithElastic"}, "a micro-batch would depend " +
		"on which others run at the same time", nil},
	{[]string{"Padding"}, []string{"WithTree", "WithElastic"}, "the targets of a run are " +
		"counted, and not those of a step", nil},
	{[]string{"Table"}, []string{"Accumulate", "WithTree", "WithElastic"}, "rows travel before " +
		"and after each run", nil},
	{[]string{"Table"}, []string{"ClipNorm"}, "the norm would lack the gradients of rows", nil},
	{[]string{"chunked cross-entropy"}, []string{"tensor ranks"},
		"ranks that shard the logits add up all rows at once", nil},
	{[]string{"chunked cross-entropy"}, []string{"Padding"},
		"a tile would wait until ranks have counted the targets; one rank may, and with " +
			"Accumulate the program counts", func(s *setting) bool {
			return severalRanks(s) && !s.has["Accumulate"]
		}},
	{[]string{"sequence ranks"}, []string{"WithTree", "WithElastic"}, "a rank runs whole " +
		"micro-batches", nil},
	{[]string{"data ranks"}, []string{"WithElastic"}, "elastic ranks are data ranks themselves: " +
		"build on layers.NewElasticLayout, or on a layout of one rank", nil},
}

// placed are refusals of features by where ranks compute, or with a third one, with words of the
// error.
var placed = []refusal{
	{[]string{"Padding"}, nil, "not Tokens.Padding", func(s *setting) bool { // in its balance
		return s.has["MoE"] && s.has["Accumulate"]
	}},
	{[]string{"ZeRO 1", "ZeRO 2", "ZeRO 3", "SyncBatchNorm"}, nil, "use WithDataParallel, too",
		func(s *setting) bool { return s.alone }},
	{[]string{"ZeRO 2"}, nil, "compute on that device", func(s *setting) bool {
		return s.kind == testenv.Staged && severalRanks(s) && s.runs == 1
	}},
	{[]string{"ZeRO 3"}, nil, "compute on that device", func(s *setting) bool {
		return s.kind == testenv.Staged && severalRanks(s) && !s.has["WithElastic"]
	}},
	{[]string{"tensor ranks"}, nil, "EURYALE_BACKEND=host", func(s *setting) bool {
		return s.has["WithElastic"] && s.kind != testenv.Hosts
	}},
	{[]string{"ZeRO 1", "ZeRO 2", "ZeRO 3"}, nil, "whose ranks shard weights: leave one of them " +
		"out", func(s *setting) bool { return s.has["WithElastic"] && s.tp > 1 }},
}

func severalRanks(s *setting) bool { return s.dp*s.sp > 1 }

// setting is a training with some features.
type setting struct {
	has        map[string]bool
	dp, sp, tp int
	kind       testenv.Kind
	dtype      tensor.Dtype
	samples    int // of a run, on each replica
	runs       int // of a step, on each replica; of all ranks in a tree
	solver     string
	blocks     []string
	bucket     int
	share      float64 // of the elements that a sparse wire sends
	alone      bool    // one rank, without WithDataParallel
	mean       bool    // of gradients of ranks, in place of their sum
	saved      bool    // checkpoints have the frozen variable, and the place in random numbers
	untold     bool    // the machine does not know that the variable is frozen
	plain      bool    // the reference, on one rank
	parts      int     // of a step in which the reference runs it
	seed       uint64
	death      *death // nil for none
}

func (s *setting) String() string {
	return fmt.Sprintf("%v: dp%d sp%d tp%d on %v, %v, %d samples, %d runs, %s, blocks %v, "+
		"buckets of %d, share %v, alone %v, mean %v, saved %v, untold %v",
		slices.Sorted(maps.Keys(s.has)), s.dp, s.sp, s.tp, s.kind, s.dtype, s.samples, s.runs,
		s.solver, s.blocks, s.bucket, s.share, s.alone, s.mean, s.saved, s.untold)
}

func (s *setting) tree() bool { return s.has["WithTree"] || s.has["WithElastic"] }

func (s *setting) shards() int {
	for i := range 3 {
		if s.has[fmt.Sprint("ZeRO ", i+1)] {
			return i + 1
		}
	}
	return 0
}

// newSetting draws a training with features.
func newSetting(r *rand.Rand, kinds []testenv.Kind, of ...feature) *setting {
	s := &setting{has: map[string]bool{}, dp: 1, sp: 1, tp: 1, runs: 1, solver: "SGD", share: 1,
		kind: kinds[r.IntN(len(kinds))], dtype: tensor.Float64, seed: r.Uint64(),
		bucket: []int{1, 300, 1 << 20}[r.IntN(3)]}
	for _, f := range of {
		s.has[f.name] = true
		if f.sort == "solver" {
			s.solver = f.name
		}
	}
	if s.has["sequence ranks"] {
		s.sp = 2
	}
	if s.has["tensor ranks"] {
		s.tp = 2
	}
	most := 4 / s.sp / s.tp
	if s.kind == testenv.GPUs { // where NCCL adds more than two in an order of its own
		most = 2 / min(2, s.sp*s.tp)
	}
	if s.dp = 1 + r.IntN(most); s.has["data ranks"] {
		s.dp = max(s.dp, min(2, most))
	}
	if most > 1 && r.IntN(4) > 0 { // what ranks exchange is of several
		s.dp = max(s.dp, 2)
	}
	if s.samples = s.sp * (1 + r.IntN(2)); s.has["MoE"] { // whose samples both groups divide
		s.samples *= s.tp
	}
	switch {
	case s.has["Accumulate"]:
		s.runs = 2 + r.IntN(2)
	case s.tree():
		s.runs = s.dp*s.sp*s.tp + r.IntN(4)
	}
	if s.has["BF16"] || s.has["half wire"] || r.IntN(2) == 0 {
		s.dtype = tensor.Float32
	}
	for range 1 + r.IntN(3) {
		s.blocks = append(s.blocks, []string{"mlp", "attention", "norm", "swiglu", "rms",
			"dense"}[r.IntN(6)])
	}
	if s.has["window"] || s.has["packed documents"] {
		s.blocks[0] = "attention"
	}
	return s
}

// vary draws what is no feature: what else checkpoints have, and how ranks train.
func (s *setting) vary(r *rand.Rand) {
	yes := func() bool { return r.IntN(2) == 0 }
	s.saved, s.untold = yes(), yes()
	if s.has["sparse wire"] {
		s.share = 0.25
	}
	if s.sp*s.tp == 1 && yes() {
		s.blocks = append(s.blocks, "twice")
	}
	s.mean = s.runs == 1 && s.sp == 1 && !s.tree() && !s.has["Padding"] && !s.has["Table"] &&
		!s.has["MoE"] && yes()
	s.alone = s.mayBeAlone() && yes()
}

// mayBeAlone reports whether nothing that is passed to WithDataParallel is in checkpoints.
func (s *setting) mayBeAlone() bool {
	return s.ranks() == 1 && !s.saved && !s.has["WithElastic"] && !s.has["Table"] &&
		!s.has["half wire"] && !s.has["sparse wire"]
}

// refused returns why New refuses the training: one of these is to be its error.
func (s *setting) refused() (why []refusal) {
	for _, r := range slices.Concat(refusals, placed) {
		if s.word(r.a) != "" && (r.b == nil || s.word(r.b) != "") && (r.when == nil || r.when(s)) {
			why = append(why, r)
		}
	}
	return why
}

// word is what refusals have of the first of some features that the training has, "" for none.
func (s *setting) word(of []string) string {
	for _, f := range features {
		if s.has[f.name] && slices.Contains(of, f.name) {
			return f.word
		}
	}
	return ""
}

// says reports whether an error is one of these refusals, and names both features, or has its
// words.
func (s *setting) says(err error, why []refusal) bool {
	known := errors.Is(err, backend.ErrArgument) || errors.Is(err, backend.ErrUnsupported)
	return known && slices.ContainsFunc(why, func(r refusal) bool {
		if r.b == nil {
			return strings.Contains(err.Error(), r.why)
		}
		return strings.Contains(err.Error(), s.word(r.a)) &&
			strings.Contains(err.Error(), s.word(r.b))
	})
}

const (
	pairSteps, pairTokens, pairWords, pairWidth = 3, 4, 43, 8

	noTarget = 99 // of padding
)

// paired is the model of a rank.
type paired struct {
	b               *layered.Builder
	l               *layered.Layout
	tokens, targets *layered.Tokens
	labels          node // of the reference, in place of targets
	table           *layered.Table
	rows            node // of the reference, in place of table
	random          *nn.Random
	attention       layered.AttentionOptions
	positions       *layered.Tokens // in documents
	frozen, mapped  node
	learnables      nodes
	samples         int // of a run
	machine         *vm.Machine
	hidden          node        // what an evaluation leaves
	evaluates       *vm.Machine // nil for none
}

// counted reports whether the target at a position of a sample is not padding. Samples have
// different numbers of them, whose sum over a step is the same in each.
func (s *setting) counted(sample, at int) bool {
	return !s.has["Padding"] || at == 0 || sample%pairTokens >= at
}

// total returns how many samples a step has, and how many targets count.
func (s *setting) total() (samples, targets int) {
	samples = s.samples * s.runs
	if !s.tree() {
		samples *= s.dp
	}
	for i := range samples {
		for at := range pairTokens {
			if s.counted(i, at) {
				targets++
			}
		}
	}
	return samples, targets
}

// build builds the model for so many samples of a run.
func (s *setting) build(l *layered.Layout, samples int) (*paired, error) {
	m := &paired{l: l, samples: samples, random: nn.NewRandom(5),
		b: layered.NewBuilder(gorgonia.NewGraph(), l, s.dtype, s.seed%7)}
	b := m.b
	switch {
	case s.plain:
		b.Batches(s.parts) // of the loss of MoE
	case s.tree() || s.mean:
		b.Batches(1)
	case s.has["Accumulate"]:
		b.Batches(s.runs * s.dp)
	}
	m.tokens = b.Tokens("tokens", 1, samples, pairTokens)
	m.targets = b.Tokens("targets", 1, samples, pairTokens)
	if s.has["Padding"] {
		m.targets.Padding(noTarget)
	}
	m.attention = layered.AttentionOptions{Heads: 4, Causal: true}
	if s.has["window"] {
		m.attention.Window = 2
	}
	if s.has["packed documents"] {
		m.positions = b.Tokens("positions", 1, samples, pairTokens)
		m.attention.KeyStarts = m.positions.Documents()
	}
	embedding := b.Learn("words", layered.Normal(0.5), 0, pairWords, pairWidth)
	x := b.To(b.Embedding(embedding, m.tokens, s.unlearnt()...), layered.Tensor, layered.Replicated)
	if s.has["row exchange"] {
		more := b.Learn("more", layered.Normal(0.5), layered.Undivided, pairWords, pairWidth)
		x = b.Add(x, b.Embedding(more, m.tokens, s.unlearnt()...))
	}
	if s.has["Table"] {
		x = b.Add(x, m.lookup(s))
	}
	for i, kind := range s.blocks {
		x = m.block(fmt.Sprint(kind, i), kind, x)
	}
	if s.has["frozen"] {
		x = m.freeze(x)
	}
	if s.has["16-bit variable"] {
		x = m.widen(x)
	}
	if s.has["Dropout"] {
		x = b.Dropout(0.25, m.random, x)
	}
	x = b.LayerNorm("last", m.normed(s, x))
	var balance layered.Node
	if s.has["MoE"] {
		h := b.To(x, layered.Sequence, layered.Split(0))
		o := layered.MoEOptions{Experts: 4, Choices: 4, Hidden: 5, Balance: 0.1}
		if s.has["Padding"] {
			o.Tokens = m.targets
		}
		e := b.MoE("experts", h, o)
		x, balance = b.To(b.Add(h, e.Y), layered.Sequence, layered.Split(1)), e.Loss
	}
	if s.has["evaluation"] {
		m.hidden = b.To(x, layered.Sequence, layered.Replicated).Node
	}
	loss := m.loss(s, b.Logits(x, embedding), balance)
	if s.has["MoE"] {
		loss = b.Add(loss, balance)
	}
	var err error
	m.learnables, err = b.Grad(loss)
	return m, err
}

// lookup looks rows up in a table of the layout's ranks; the reference has a learnable of its rows.
func (m *paired) lookup(s *setting) layered.Node {
	m.table = m.b.Table("rows", layered.Normal(0.5), pairWords, pairWidth)
	if !s.plain {
		return m.table.Lookup(m.tokens)
	}
	m.b.Begin(func(string, []int) (backend.Buffer, int, error) {
		return m.table.State()[""], 0, nil
	})
	rows := m.b.Learn("rows", layered.Normal(0), layered.Undivided, pairWords, pairWidth)
	m.b.Begin(nil)
	m.rows = rows.Node
	return m.b.Embedding(rows, m.tokens)
}

// block is a part of the network.
func (m *paired) block(name, kind string, x layered.Node) layered.Node {
	b := m.b
	switch kind {
	case "mlp":
		return b.Add(x, b.MLP(name, x, 2*pairWidth))
	case "swiglu":
		return b.Add(x, b.SwiGLU(name, x, 2*pairWidth))
	case "attention":
		return b.Add(x, b.Attention(name, x, m.attention))
	case "rms":
		return b.RMSNorm(name, 1e-2, x)
	case "dense":
		return b.GELU(b.Bias(name, b.Dense(name, x, pairWidth)))
	case "twice":
		return m.twice(name, x)
	}
	return b.LayerNorm(name, x)
}

// twice reads a matrix in two products, and in a loop.
func (m *paired) twice(name string, x layered.Node) layered.Node {
	w := m.b.Learn(name, layered.Normal(0.5), layered.Undivided, pairWidth, pairWidth)
	return m.b.Apply(name, func() (layered.Node, error) {
		shape := x.Shape()
		flat := reshape(x.Node, tensor.Shape{shape[0] * shape[1], shape[2]})
		y := add(mul(flat, w.Node), mul(square(flat), w.Node))
		y = add(y, mul(flat, tanh(w.Node)))
		y, err := gorgonia.Reshape(y, shape)
		return layered.Place(y, x), err
	})
}

// freeze adds a variable that nothing trains.
func (m *paired) freeze(x layered.Node) layered.Node {
	return m.b.Apply("frozen", func() (layered.Node, error) {
		value := m.b.Constant([]int{1, 1, pairWidth}, []float64{1, -1, 2, 0, 0.5, 1, 3, -2}).Value()
		m.frozen = gorgonia.NewTensor(m.b.Graph(), value.Dtype(), 3, gorgonia.WithName("frozen"),
			gorgonia.WithShape(1, 1, pairWidth), gorgonia.WithValue(value))
		y, err := gorgonia.BroadcastAdd(x.Node, m.frozen, nil, []byte{0, 1})
		return layered.Place(y, x), err
	})
}

// widen adds the product with a variable of 16 bits.
func (m *paired) widen(x layered.Node) layered.Node {
	return m.b.Apply("16 bits", func() (layered.Node, error) {
		bits := make([]backend.BFloat16, pairWidth*pairWidth)
		for i := range bits {
			bits[i] = backend.BFloat16([]uint16{0, 0x3f80, 0xbf80, 0x3f00}[i*i%7%4])
		}
		value := tensor.New(tensor.WithShape(pairWidth, pairWidth), tensor.WithBacking(bits))
		m.mapped = gorgonia.NewMatrix(m.b.Graph(), value.Dtype(), gorgonia.WithName("16 bits"),
			gorgonia.WithShape(pairWidth, pairWidth), gorgonia.WithValue(value))
		wide, err := nn.Cast(x.Node.Dtype(), m.mapped)
		if err != nil {
			return layered.Node{}, err
		}
		shape := x.Shape()
		flat := reshape(x.Node, tensor.Shape{shape[0] * shape[1], shape[2]})
		y, err := gorgonia.Reshape(add(flat, mul(flat, wide)), shape)
		return layered.Place(y, x), err
	})
}

// normed normalises the channels of a batch.
func (m *paired) normed(s *setting, x layered.Node) layered.Node {
	if !s.has["batch norm"] && !s.has["SyncBatchNorm"] {
		return x
	}
	b := m.b
	x = b.To(x, layered.Sequence, layered.Split(0))
	reshaped := func(n, like layered.Node, shape ...int) layered.Node {
		return b.Apply("reshape", func() (layered.Node, error) {
			y, err := gorgonia.Reshape(n.Node, shape)
			return layered.Place(y, like), err
		})
	}
	if b.Err() != nil {
		return x
	}
	shape := x.Shape()
	y := b.BatchNorm("norm", reshaped(x, x, shape[0]*shape[1], shape[2]))
	return b.To(reshaped(y, x, shape...), layered.Sequence, layered.Split(1))
}

// loss is the cross-entropy; of the reference it is made of other operations, and placed like
// another loss, if there is one.
func (m *paired) loss(s *setting, logits, like layered.Node) layered.Node {
	if !s.plain {
		return m.b.CrossEntropy(logits, m.targets)
	}
	return m.b.Apply("loss", func() (layered.Node, error) {
		shape := logits.Shape()
		rows := shape[0] * shape[1]
		m.labels = gorgonia.NewVector(m.b.Graph(), tensor.Int, gorgonia.WithShape(rows),
			gorgonia.WithName("labels"), gorgonia.WithValue(tensor.New(tensor.WithShape(rows),
				tensor.Of(tensor.Int))))
		flat, err := gorgonia.Reshape(logits.Node, tensor.Shape{rows, shape[2]})
		if err != nil {
			return layered.Node{}, err
		}
		sum, err := nn.CrossEntropyWith(nn.CrossEntropyOptions{Reduction: nn.SumOfRows}, flat,
			m.labels)
		if err != nil {
			return layered.Node{}, err
		}
		_, targets := s.total()
		loss, err := gorgonia.HadamardProd(sum, constant(s.dtype, 1/float64(targets)))
		if like.Node == nil {
			like = layered.Whole(loss)
		}
		return layered.Place(loss, like), err
	})
}

// feed gives the model the samples of a run, of which first is the first one.
func (m *paired) feed(s *setting, step, first, samples int) error {
	m.random.Seek(uint64(step), first)
	var ids, next, positions []int
	for i := range samples {
		for at := range pairTokens {
			k := (first + i) * pairTokens
			if positions = append(positions, 0); at > 0 && (first+i+at)%3 > 0 {
				positions[len(positions)-1] = 1 + positions[len(positions)-2]
			}
			ids = append(ids, (3*(k+at)*(k+at)+5*step)%pairWords)
			next = append(next, (7*(k+at)+3*step+1)%pairWords)
			if !s.counted(first+i, at) {
				next[len(next)-1] = noTarget
			}
		}
	}
	if m.positions != nil {
		if err := m.positions.Set(positions); err != nil {
			return err
		}
	}
	if m.labels == nil {
		_, targets := s.total()
		return errors.Join(m.tokens.Set(ids), m.targets.Set(next), m.targets.Count(targets))
	}
	for i, id := range next {
		if m.labels.Value().Data().([]int)[i] = id; id == noTarget {
			m.labels.Value().Data().([]int)[i] = nn.NoLabel
		}
	}
	if s.has["MoE"] && s.has["Padding"] { // its Tokens
		return errors.Join(m.tokens.Set(ids), m.targets.Set(next))
	}
	return m.tokens.Set(ids)
}

// solvers returns what updates the learnables. Epsilons are so large that roundings of small
// gradients stay small.
func (s *setting) solvers(m *paired) []vm.Option {
	params := m.learnables
	var options []vm.Option
	if i := slices.Index(params, m.rows); i >= 0 {
		options = append(options, vm.WithSolver(&solver.SGD{Rate: 0.05}, m.rows))
		params = slices.Delete(slices.Clone(params), i, i+1)
	}
	newSolver := func() solver.Solver {
		const rate, epsilon = 0.05, 0.05
		var by solver.Solver
		switch s.solver {
		case "Momentum":
			by = &solver.Momentum{Rate: rate, Momentum: 0.5, WeightDecay: 0.125}
		case "Nesterov":
			by = &solver.Nesterov{Rate: rate, Momentum: 0.5}
		case "RMSProp":
			by = &solver.RMSProp{Rate: rate, Epsilon: epsilon, Momentum: 0.25}
		case "Adam":
			by = &solver.Adam{Rate: rate, Epsilon: epsilon}
		case "AdamW":
			by = &solver.AdamW{Rate: rate, Epsilon: epsilon, WeightDecay: 0.1}
		case "Custom":
			by = &solver.Custom{Name: "heavy-ball", Rate: rate, Keep: []string{"v"},
				Update: heavyBall}
		default:
			by = &solver.SGD{Rate: rate}
		}
		if s.has["EMA"] {
			by = &solver.EMA{Solver: by, Decay: 0.75}
		}
		return by
	}
	if s.has["Groups"] {
		other := &solver.Adam{Rate: 0.02, Epsilon: 0.05}
		options = append(options, vm.WithSolver(other, params[0]))
		params = params[1:]
	}
	return append(options, vm.WithSolver(newSolver(), params...))
}

// heavyBall is the update v = g + v/2, w = w - rate v.
func heavyBall(u *solver.Update) {
	v := u.Do(fuse.Add, u.Gradient(), u.With(fuse.Mul, u.Kept(0), 0.5))
	u.SetKept(0, v)
	u.SetParam(u.Do(fuse.Sub, u.Param(), u.With(fuse.Mul, v, u.Rate())))
}

// options returns the options of a machine.
func (s *setting) options(r ranked, m *paired) []vm.Option {
	options := append(s.solvers(m), vm.Notice(func(string) {}))
	add := func(name string, option vm.Option) {
		if s.has[name] {
			options = append(options, option)
		}
	}
	add("ClipNorm", vm.ClipNorm(0.125))
	if !s.untold {
		options = append(options, vm.WithFrozen(m.still()...))
	}
	add("BF16", vm.WithPrecision(vm.BF16))
	if s.plain {
		return append(options, vm.Accumulate(s.parts))
	}
	data := []autograd.Option{autograd.WithBuckets(1, s.bucket)}
	switch {
	case s.has["half wire"]:
		data = append(data, autograd.WithCompression(half.Wrap(backend.BF16)))
	case s.has["sparse wire"]:
		data = append(data, autograd.WithCompression(sparse.Wrap(sparse.TopK(s.share))))
	}
	if s.saved {
		data = append(data, autograd.WithRandom(m.random))
		if s.has["frozen"] {
			data = append(data, autograd.WithFrozen(m.frozen))
		}
	}
	add("SyncBatchNorm", vm.SyncBatchNorm())
	add("least memory", vm.WithLeastMemory())
	add("chunked cross-entropy", vm.WithLossTiles(4))
	add("row exchange", vm.WithAnyTable())
	add("WithTree", vm.WithTree(s.runs))
	if n := s.shards(); n > 0 {
		options = append(options, vm.WithShards(stages[n-1]))
	}
	if s.has["WithElastic"] {
		return append(options, vm.WithElastic(context.Background(), r.job, s.runs, data...))
	}
	if s.alone {
		add("Accumulate", vm.Accumulate(s.runs))
		return options
	}
	return append(options, m.b.Training(data...))
}

// still are the variables that nothing trains.
func (m *paired) still() nodes {
	return slices.DeleteFunc(nodes{m.frozen, m.mapped}, func(n node) bool { return n == nil })
}

// evaluation makes a machine beside the one that trains, before it: so others than rank 0 have
// values which they are not to keep anything of.
func (m *paired) evaluation(s *setting, r ranked) (err error) {
	if !s.has["evaluation"] {
		return nil
	}
	options := []vm.Option{vm.Eval(), vm.Keep(m.hidden), vm.Notice(func(string) {})}
	if s.has["BF16"] {
		options = append(options, vm.WithPrecision(vm.BF16))
	}
	if !s.plain {
		options = append(options, vm.WithFrozen(append(m.still(), m.learnables...)...))
	}
	if m.l.Data.Rank() > 0 || s.has["WithElastic"] && r.Comm.Rank() >= s.tp {
		for _, n := range m.learnables {
			set(n.Value().(*tensor.Dense), 0, 3)
		}
		if s.saved && m.frozen != nil {
			set(m.frozen.Value().(*tensor.Dense), 0, 3)
		}
	}
	if m.evaluates, err = vm.New(m.b.Graph(), r.device, options...); err != nil {
		return err
	}
	if s.has["WithElastic"] && s.tp > 1 { // ranks are together once they train
		return nil
	}
	return m.evaluate(s)
}

// evaluate runs it with the first samples, which are the same on all ranks.
func (m *paired) evaluate(s *setting) error {
	if m.evaluates == nil {
		return nil
	}
	elsewhere := s.has["WithElastic"] && s.kind == testenv.Staged // on the ranks' device
	if m.machine != nil && (s.shards() > 0 || elsewhere || s.seed%3 == 0) {
		if err := m.machine.Pull(); err != nil {
			return err
		}
	}
	return errors.Join(m.feed(s, 9, 0, m.samples), m.evaluates.RunAll())
}

// generation is an elastic job whose ranks do not change.
type generation struct {
	comm backend.Communicator
	job  *elastic.Job
}

func newGeneration(r ranked) *generation {
	ids := make([]elastic.ID, r.Comm.Size())
	for i := range ids {
		ids[i] = elastic.ID(i + 1)
	}
	job := elastic.Start(r.register, ids[r.Comm.Rank()],
		elastic.Limits{Least: len(ids), Most: len(ids)}, elastic.First(ids...), time.Minute, nil)
	return &generation{r.Comm, job}
}

// Next implements [autograd.Job].
func (g *generation) Next(ctx context.Context, leave func(elastic.View) error) (
	backend.Communicator, elastic.View, error) {
	v, _, err := g.job.Next(ctx)
	if err == nil {
		err = leave(v)
	}
	if err == nil {
		g.job.Connected(v.Generation)
	}
	return g.comm, v, err
}

func (g *generation) Job() *elastic.Job                  { return g.job }
func (g *generation) Release(backend.Communicator) error { return nil }

// Close implements [autograd.Job].
func (g *generation) Close(bool) error {
	g.job.Finish(0)
	g.job.Close()
	return nil
}

// first returns the number of the first sample of a run.
func (s *setting) first(m *paired, run int) int {
	if s.tree() {
		first, _, _ := m.machine.MicroBatches()
		return (first + run) * s.samples
	}
	return (run*s.dp + m.l.Replica) * s.samples
}

// step does a step.
func (s *setting) step(m *paired, step int) (err error) {
	run := func(first, samples int) error {
		return errors.Join(m.feed(s, step, first, samples), m.machine.RunAll())
	}
	_, n, _ := m.machine.MicroBatches()
	switch e := m.machine.Elastic(); {
	case s.plain:
		all, _ := s.total()
		for i := range s.parts {
			err = errors.Join(err, run(i*all/s.parts, all/s.parts))
		}
	case e != nil:
		_, err = e.Step(func(i int) (float64, error) { return 0, run(i*s.samples, s.samples) })
	default:
		for i := range n {
			if err == nil {
				err = run(s.first(m, i), s.samples)
			}
		}
	}
	if err == nil && m.table != nil && m.rows == nil {
		err = m.table.Step(&solver.SGD{Rate: 0.05})
	}
	return err
}

// outcome is what a training leaves: whole tensors, by name.
type outcome struct {
	sync.Mutex
	pieces map[string]map[int]piece // by rank of the group that divides it
}

type piece struct {
	axis  int // that is divided
	shape []int
	data  []float64
}

func (o *outcome) add(name string, rank int, p piece) {
	o.Lock()
	defer o.Unlock()
	if o.pieces[name] == nil {
		o.pieces[name] = map[int]piece{}
	}
	p.data = slices.Clone(p.data)
	o.pieces[name][rank] = p
}

// whole puts the pieces of a name together.
func (o *outcome) whole(name string) (all []float64) {
	pieces := o.pieces[name]
	if p := pieces[0]; p.axis < 0 || len(pieces) == 1 {
		return p.data
	}
	outer := 1
	for _, n := range pieces[0].shape[:pieces[0].axis] {
		outer *= n
	}
	for i := range outer {
		for rank := range len(pieces) {
			data := pieces[rank].data
			all = append(all, data[i*len(data)/outer:(i+1)*len(data)/outer]...)
		}
	}
	return all
}

// collect adds what a rank has.
func (m *paired) collect(t testing.TB, o *outcome, suffix string) {
	axes := m.b.Sharded()
	for _, n := range m.learnables {
		if n == m.rows && suffix != "" { // of which tables have no average
			continue
		}
		axis, divided := axes[n.Name()]
		rank := m.l.Comm(layered.Tensor).Rank()
		if !divided {
			axis, rank = -1, 0
		}
		o.add(n.Name()+suffix, rank, piece{axis, n.Shape(), floats(t, n.Value())})
	}
	if suffix != "" {
		return
	}
	if m.frozen != nil {
		o.add("frozen", 0, piece{-1, nil, floats(t, m.frozen.Value())})
	}
	if m.table != nil && m.rows == nil {
		P := m.l.Data.Size()
		for i, row := range slices.Collect(slices.Chunk(floats(t, m.table.Rows()), pairWidth)) {
			o.add("rows", i*P+m.l.Data.Rank(), piece{0, []int{1, pairWidth}, row})
		}
	}
	for _, n := range m.b.Graph().AllNodes() {
		if norm, ok := n.Op().(*gorgonia.BatchNormOp); ok {
			mean, variance := norm.Stats()
			o.add("moving mean", 0, piece{-1, nil, floats(t, mean)})
			o.add("moving variance", 0, piece{-1, nil, floats(t, variance)})
		}
	}
}

// leg is a part of a training: from a checkpoint, "" for none, for some steps from number first on.
// It saves before the last one, if that is wanted.
type leg struct {
	from        string
	first, n    int
	save, async string // directories
	plain       string // where the plain way saves
}

// load loads the checkpoint; of a step from other parameters, and of another frozen variable,
// nothing is left.
func (l leg) load(s *setting, m *paired) error {
	if l.from == "" {
		return nil
	}
	if e := m.machine.Elastic(); e != nil {
		return e.Load(l.from)
	}
	return errors.Join(s.step(m, 7), m.machine.DataParallel().Load(l.from, m.machine.Solver(), nil))
}

// write saves in both ways.
func (l leg) write(m *paired) (err error) {
	dp := m.machine.DataParallel()
	if l.save != "" {
		err = dp.Save(l.save, m.machine.Solver(), nil)
	}
	if l.async != "" {
		err = errors.Join(err, dp.SaveAsync(l.async, m.machine.Solver(), nil))
	}
	return err
}

// shift gives a frozen variable that checkpoints have another value.
func (l leg) shift(s *setting, m *paired) {
	if l.from == "" || !s.saved || m.frozen == nil {
		return
	}
	set(m.frozen.Value().(*tensor.Dense), 0, elements(m.frozen.Value())[0]+1)
}

// train trains.
func (s *setting) train(t *testing.T, part leg) (*outcome, error) {
	o := &outcome{pieces: map[string]map[int]piece{}}
	register := rendezvous.NewMemStore()
	name := fmt.Sprint("deaths-", rand.Uint64())
	return o, testranks.Join(together(t, s.kind, s.ranks(), func(r ranked) (err error) {
		r.register = register
		switch {
		case s.death != nil:
			r.job = s.death.join(r, name)
			defer func() { err = r.bury(recover(), err) }()
		case s.has["WithElastic"]:
			r.job = newGeneration(r)
		}
		l := testranks.Must(s.layout(r))
		defer l.Close()
		samples := s.samples
		if s.plain {
			samples, _ = s.total()
			samples /= s.parts
		}
		r.lock.Lock()
		m, err := s.build(l, samples)
		r.lock.Unlock()
		testranks.NoError(err)
		device := r.device
		if part.shift(s, m); s.has["WithElastic"] {
			device = nil
		}
		testranks.NoError(m.evaluation(s, r))
		if m.machine, err = vm.New(m.b.Graph(), device, s.options(r, m)...); err != nil {
			return err
		}
		err = errors.Join(m.evaluate(s), part.load(s, m))
		for step := range part.n {
			if err == nil && step == part.n-1 {
				err = s.turn(m, func() error { return part.write(m) })
			}
			if err == nil {
				err = s.step(m, part.first+step)
			}
			if err == nil {
				err = m.evaluate(s)
			}
		}
		if err == nil && m.evaluates != nil { // of the first sample
			o.add("evaluated", 0, piece{-1, nil,
				floats(t, m.hidden.Value())[:pairTokens*pairWidth]})
			err = m.evaluates.Close()
		}
		if err == nil && !s.plain {
			err = s.turn(m, func() error { return m.machine.DataParallel().Check() })
		}
		if err == nil && s.has["EMA"] { // which pulls them, too
			err = s.turn(m, func() error {
				return m.machine.Averaged(func() error { m.collect(t, o, " averaged"); return nil })
			})
		}
		if err == nil {
			err = s.turn(m, func() error { return m.machine.Pull() })
		}
		err = errors.Join(err, m.machine.Close())
		if err == nil {
			m.collect(t, o, "")
		}
		return err
	}))
}

func (s *setting) ranks() int {
	if s.plain {
		return 1
	}
	return s.dp * s.sp * s.tp
}

// layout returns the layout of the ranks. Elastic ranks have one of their own, unless that is
// refused.
func (s *setting) layout(r ranked) (*layered.Layout, error) {
	if s.has["WithElastic"] && s.sp == 1 && !s.has["data ranks"] {
		return layered.NewElasticLayout(context.Background(), r.job, s.tp)
	}
	if s.plain {
		return layered.NewLayout(r.Comm, 1, 1, 1)
	}
	return layered.NewLayout(r.Comm, s.dp, s.sp, s.tp)
}

// reference is a plain training on one rank, as few runs as the batch norms allow.
func (s *setting) reference() *setting {
	p := *s
	p.has = map[string]bool{}
	for _, name := range []string{"Groups", "EMA", "ClipNorm", "batch norm", "SyncBatchNorm",
		"Padding", "Dropout", "row exchange", "Table", "MoE", "frozen", "WithTree", "Accumulate",
		"16-bit variable", "window", "packed documents", "evaluation"} {
		p.has[name] = s.has[name]
	}
	p.has["BF16"] = s.has["BF16"] // layouts round alike
	p.has["WithTree"] = s.tree()
	p.plain, p.kind, p.parts, p.untold, p.death = true, testenv.Hosts, 1, false, nil
	switch all, _ := s.total(); {
	case s.has["batch norm"]:
		p.parts = all / (s.samples / s.sp)
	case s.has["SyncBatchNorm"]:
		p.parts = s.runs
	}
	return &p
}

// exact returns the training whose bits this one has: without what does not change them.
func (s *setting) exact() *setting {
	p := *s
	p.has = maps.Clone(s.has)
	delete(p.has, "least memory")
	p.untold, p.death = true, nil
	rounds := s.has["ClipNorm"] || s.has["half wire"] // see docs/shards.md
	if n := s.shards(); s.has["WithElastic"] || n > 0 && !rounds && !s.has["row exchange"] {
		delete(p.has, fmt.Sprint("ZeRO ", n))
	}
	if s.tree() && s.kind != testenv.GPUs {
		delete(p.has, "WithElastic")
		p.has["WithTree"], p.dp = true, 1
		p.alone = p.mayBeAlone() && p.shards() == 0
	}
	p.bucket = 1
	if s.has["sparse wire"] || s.shards() > 0 && rounds {
		p.bucket = s.bucket
	}
	return &p
}

// halfNear is near of numbers that are rounded to 16 bits.
const halfNear = 0.05

// near is by how much numbers may differ from the reference, or by what share of those above 1
// where they are rounded to 16 bits.
func (s *setting) near() float64 {
	switch {
	case s.has["BF16"] || s.has["half wire"]:
		return halfNear
	case s.has["sparse wire"] && s.dtype == tensor.Float64:
		return 1e-6
	case s.dtype == tensor.Float32 && s.kind == testenv.GPUs: // functions of other roundings
		return 1e-3
	case s.dtype == tensor.Float32:
		return 1e-4
	case s.kind == testenv.GPUs:
		return 1e-8
	}
	return 1e-10
}

// unlearnt is the token whose row lookups do not learn, which half of all trainings have.
func (s *setting) unlearnt() []int {
	if s.seed%2 == 0 {
		return []int{1}
	}
	return nil
}

// slack returns how many times the bound of near a value may differ from the reference: without a
// bound a running statistic, which is of what each rank sees, and what is evaluated with it. A bias
// that a batch norm takes away again has a gradient of 0, of which rounding to 16 bits leaves that
// of each rank's terms: it may differ by 4 bounds (1.2 was the most in 1,000 triples), and without
// one where the solver divides by the size of gradients.
func (s *setting) slack(name string) float64 {
	normed := s.has["batch norm"] || s.has["SyncBatchNorm"]
	adaptive := s.has["RMSProp"] || s.has["Adam"] || s.has["AdamW"]
	taken := s.near() == halfNear && normed && strings.HasSuffix(name, ".bias")
	switch {
	case strings.HasPrefix(name, "moving"), taken && adaptive, name == "evaluated" && normed:
		return math.Inf(1)
	case taken:
		return 4
	}
	return 1
}

// differ says where two trainings differ by more than a bound, times the slack of a value if there
// is one, "" if they do not.
func differ(a, b *outcome, most float64, slack func(name string) float64) string {
	for _, name := range slices.Sorted(maps.Keys(b.pieces)) {
		x, y := a.whole(name), b.whole(name)
		times := 1.
		if slack != nil {
			times = slack(name)
		}
		if len(x) != len(y) {
			return fmt.Sprintf("%s has %d elements in place of %d", name, len(x), len(y))
		}
		for i := range x {
			bound := most
			if most >= halfNear {
				bound *= max(1, math.Abs(y[i]))
			}
			if d := math.Abs(x[i] - y[i]); times < math.Inf(1) && !(d <= bound*times) {
				return fmt.Sprintf("element %d of %s is %v in place of %v", i, name, x[i], y[i])
			}
		}
	}
	return ""
}

// check trains, compares, and returns what is left, nil where New refuses that.
func (s *setting) check(t *testing.T, part leg) *outcome {
	t.Helper()
	got, err := s.train(t, part)
	if why := s.refused(); why != nil {
		require.Check(t, s.says(err, why), "%v: %v, want an error as of %v", s, err, why)
		return nil
	}
	if err != nil {
		t.Errorf("%v: %v", s, err)
		return nil
	}
	// one rank would take a run for each rank's batch norm, which a count of targets refuses
	one := s.reference()
	// a wire may leave elements for later steps
	if s.share == 1 && (one.parts == 1 || !s.has["MoE"] || !s.has["Padding"]) {
		want := one.must(t, leg{n: part.n})
		d := differ(got, want, s.near(), s.slack)
		require.Check(t, d == "", "%v: not as one rank: %s", s, d)
	}
	want := s.exact().must(t, leg{n: part.n, save: part.plain})
	d := differ(got, want, 0, nil)
	require.Check(t, d == "", "%v: not the bits of the plain way: %s", s, d)
	return got
}

// must is train of what nothing refuses.
func (s *setting) must(t *testing.T, part leg) *outcome {
	t.Helper()
	o, err := s.train(t, part)
	require.That(t, err == nil, "%v: %v", s, err)
	return o
}

// fits reports whether features can be together: none excludes another.
func fits(of ...feature) bool {
	for i, f := range of {
		for _, g := range of[:i] {
			if f.sort == g.sort {
				return false
			}
		}
	}
	return true
}

// allPairs returns all pairs of features of which none excludes the other.
func allPairs() (all [][]feature) {
	for i, f := range features {
		for _, g := range features[:i] {
			if fits(g, f) {
				all = append(all, []feature{g, f})
			}
		}
	}
	return all
}

// TestPairsOfFeatures: every two features together train as one rank does without them, or New
// refuses them by a sentence that names both. EURYALE_PAIRS is a number of pairs, and EURYALE_PAIR
// one of them, to run it alone.
func TestPairsOfFeatures(t *testing.T) {
	pairsOfFeatures(t, 12, testenv.Hosts, testenv.Devices)
}

// pairsOfFeatures tests a sample of so many pairs, unless variables say otherwise.
func pairsOfFeatures(t *testing.T, sample int, kinds ...testenv.Kind) {
	number := func(name string, otherwise int) int {
		text := os.Getenv(name)
		if text == "" {
			return otherwise
		}
		return require.Value(strconv.Atoi(text))(t)
	}
	if one := number("EURYALE_PAIR", -1); one >= 0 {
		combination(t, one, kinds)
		return
	}
	if full() {
		sample = len(allPairs())
	}
	for i := range number("EURYALE_PAIRS", sample) {
		combination(t, i, kinds)
	}
}

// combination trains with a pair of features. Numbers go through all pairs, in an order in which
// neighbours have little in common.
func combination(t *testing.T, number int, kinds []testenv.Kind) {
	r := rand.New(rand.NewPCG(2*uint64(number), 3))
	all := allPairs()
	of := all[number*197%len(all)]
	t.Run(fmt.Sprint(number, " ", of[0].name, " and ", of[1].name), func(t *testing.T) {
		newSetting(r, kinds, of...).check(t, leg{n: pairSteps})
	})
}

// TestTriplesOfFeatures: so do every three.
func TestTriplesOfFeatures(t *testing.T) {
	seeds := 4
	if full() {
		seeds = 1000
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(uint64(seed), 5))
			of := slices.Clone(allPairs()[r.IntN(len(allPairs()))])
			for len(of) < 3 {
				if f := features[r.IntN(len(features))]; fits(append(slices.Clone(of), f)...) {
					of = append(of, f)
				}
			}
			kinds := []testenv.Kind{testenv.Hosts, testenv.Devices, testenv.Staged}
			newSetting(r, kinds, of...).check(t, leg{n: pairSteps})
		})
	}
}

// TestATreeOverTensorRanksTakesUnequalShares: on devices that record graphs, too, where the runs
// before a rank's last one have collectives that other ranks of the tree have no part in.
func TestATreeOverTensorRanksTakesUnequalShares(t *testing.T) {
	s := &setting{has: map[string]bool{"WithTree": true, "tensor ranks": true}, dp: 2, sp: 1, tp: 2,
		kind: testenv.Devices, dtype: tensor.Float64, samples: 1, runs: 3, solver: "SGD",
		blocks: []string{"mlp", "attention"}, bucket: 1, share: 1}
	s.check(t, leg{n: pairSteps})
}

// TestFullyShardedElasticRanksTakeUnequalShares: each gathers as often as the one that runs most
// micro-batches, on devices that record graphs, too.
func TestFullyShardedElasticRanksTakeUnequalShares(t *testing.T) {
	for _, k := range []testenv.Kind{testenv.Hosts, testenv.Devices, testenv.Staged} {
		s := &setting{has: map[string]bool{"WithElastic": true, "ZeRO 3": true, "Groups": true,
			"evaluation": true}, dp: 4, sp: 1, tp: 1, kind: k, dtype: tensor.Float64, samples: 1,
			runs: 30, solver: "SGD", blocks: []string{"mlp", "attention"}, bucket: 1, share: 1}
		s.check(t, leg{n: pairSteps})
	}
}

// TestSparseRanksWithPartsStayAlike: what tensor ranks all have stays the same on them where a
// compression leaves elements for later steps.
func TestSparseRanksWithPartsStayAlike(t *testing.T) {
	for seed := range uint64(2) {
		s := &setting{has: map[string]bool{"sparse wire": true, "tensor ranks": true,
			"row exchange": true, "Padding": true}, dp: 2, sp: 1, tp: 2, kind: testenv.Hosts,
			dtype: tensor.Float32, samples: 2, runs: 1, solver: "AdamW", bucket: 1 << 20,
			blocks: []string{"swiglu", "norm", "norm"}, share: 0.25, seed: seed}
		s.check(t, leg{n: pairSteps})
	}
}

// TestManyFeatures: trainings with as many features as go together are as those of pairs, and go
// on from their checkpoints in other ways: on other numbers of ranks, with other shards, in less
// memory, alone, all with the bits that plain ways have.
func TestManyFeatures(t *testing.T) {
	seeds := 15
	if full() {
		seeds = 1500
	}
	manyFeatures(t, seeds, testenv.Hosts, testenv.Devices, testenv.Staged)
}

// noticing are trainings with many features that notice what few others do, whatever else there is
// to draw: a snapshot that is the memory itself; files of weights that were rounded; an average of
// a shard for the whole, with ranks in every direction; a norm without the squares of other ranks.
var noticing = map[string]setting{
	"ClipNorm, batch norm, frozen, sparse wire": {dp: 2, sp: 1, tp: 1, kind: testenv.Devices,
		dtype: tensor.Float32, samples: 1, runs: 1, solver: "SGD", blocks: []string{"rms", "twice"},
		bucket: 300, share: 0.25, mean: true, untold: true, seed: 7138617234060604974},
	"BF16, Dropout, SyncBatchNorm, ZeRO 3, chunked cross-entropy": {dp: 4, sp: 1, tp: 1,
		kind: testenv.Hosts, dtype: tensor.Float32, samples: 1, runs: 1, solver: "SGD",
		blocks: []string{"mlp", "twice"}, bucket: 300, share: 1, mean: true,
		seed: 12811991589257609026},
	"EMA, MoE, ZeRO 3, batch norm, sequence ranks, tensor ranks": {dp: 1, sp: 2, tp: 2,
		kind: testenv.Devices, dtype: tensor.Float64, samples: 4, runs: 1, solver: "SGD",
		blocks: []string{"norm", "mlp", "rms"}, bucket: 1 << 20, share: 1, untold: true,
		seed: 10339910992160445284},
	"ClipNorm, Groups, RMSProp, ZeRO 1, frozen, least memory, tensor ranks": {dp: 2, sp: 1, tp: 2,
		kind: testenv.Staged, dtype: tensor.Float64, samples: 1, runs: 1, solver: "RMSProp",
		blocks: []string{"mlp"}, bucket: 300, share: 1, saved: true, untold: true,
		seed: 3156357247796213042},
}

// TestManyNoticingFeatures: the trainings of noticing are as those of TestManyFeatures.
func TestManyNoticingFeatures(t *testing.T) {
	for list, s := range noticing {
		t.Run(list, func(t *testing.T) {
			s.has = map[string]bool{}
			for name := range strings.SplitSeq(list, ", ") {
				require.That(t, slices.ContainsFunc(features, func(f feature) bool {
					return f.name == name
				}), "%q is no feature", name)
				s.has[name] = true
			}
			s.goesOn(t, s.exact())
		})
	}
}

func manyFeatures(t *testing.T, seeds int, kinds ...testenv.Kind) {
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(uint64(seed), 1))
			s := newSetting(r, kinds, drawMany(r, features[9*seed%len(features)])...)
			s.vary(r)
			s.goesOn(t, s.other(r, kinds))
		})
	}
}

// goesOn trains, and once more from the last step on, from checkpoints: in the same way, with the
// bits of a training that never ended, and in another one.
func (s *setting) goesOn(t *testing.T, other *setting) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	part := leg{n: pairSteps, save: at("save"), async: at("async"), plain: at("plain")}
	if s.has["sparse wire"] && s.tp > 1 {
		part = leg{n: pairSteps} // residuals of parts cannot be saved
	}
	got := s.check(t, part)
	if got == nil || part.save == "" {
		return
	}
	last := func(from string) leg { return leg{from: from, first: pairSteps - 1, n: 1} }
	d := differ(s.must(t, last(part.async)), got, 0, nil)
	require.Check(t, d == "", "%v, from its checkpoint: %s", s, d)
	want := other.exact().must(t, last(part.plain))
	if d := differ(other.must(t, last(part.save)), want, 0, nil); d != "" {
		t.Errorf("%v, from a checkpoint of %v: %s", other, s, d)
	}
}

// drawMany draws features to one, few of which refuse each other.
func drawMany(r *rand.Rand, first feature) []feature {
	of := []feature{first}
	for range 4 + r.IntN(9) {
		f := features[r.IntN(len(features))]
		if !fits(append(slices.Clone(of), f)...) {
			continue
		}
		if !slices.ContainsFunc(of, func(g feature) bool { return refuse(f, g) >= 0 }) ||
			r.IntN(8) == 0 {
			of = append(of, f)
		}
	}
	return of
}

// changing are the sorts of features that checkpoints do not depend on.
var changing = []string{"step", "clip", "shards", "precision", "memory", "tiles", "norm", "dp"}

// other draws a setting that can load checkpoints of this one.
func (s *setting) other(r *rand.Rand, kinds []testenv.Kind) *setting {
	var of []feature
	for _, f := range features {
		if s.has[f.name] && !slices.Contains(changing, f.sort) {
			of = append(of, f)
		}
	}
	for _, sort := range changing {
		f := features[r.IntN(len(features))]
		for f.sort != sort {
			f = features[r.IntN(len(features))]
		}
		has := slices.ContainsFunc(features, func(g feature) bool {
			return g.sort == sort && s.has[g.name]
		})
		switch {
		case sort == "norm" && !has, sort == "precision" && s.dtype == tensor.Float64:
		case sort == "norm", r.IntN(2) == 0:
			of = append(of, f)
		}
	}
	o := newSetting(r, kinds, of...)
	o.vary(r)
	o.dtype, o.seed, o.blocks, o.saved, o.share = s.dtype, s.seed, s.blocks, s.saved, s.share
	o.mean = s.mean
	if s.has["sparse wire"] { // residuals are of ranks, and of buckets
		o.dp, o.bucket = s.dp, s.bucket
		if s.has["row exchange"] { // its buckets are others on a device
			o.kind = s.kind
		}
	}
	o.alone = o.alone && o.mayBeAlone()
	if o.tree() {
		o.runs = s.runs
	}
	if o.tree() != s.tree() || o.tree() && o.runs < o.ranks() || o.mean && o.runs > 1 ||
		len(o.refused()) > 0 {
		return s.exact()
	}
	return o
}

// combinationsPage is written by TestThePageOfCombinations.
const combinationsPage = "../docs/combinations.md"

// TestThePageOfCombinations: docs/combinations.md says of every two features what
// TestPairsOfFeatures tests. EURYALE_UPDATE=1 writes it.
func TestThePageOfCombinations(t *testing.T) {
	if os.Getenv("EURYALE_UPDATE") == "1" {
		require.NoError(t, os.WriteFile(combinationsPage, []byte(combinations()), 0o666))
	}
	page, err := os.ReadFile(combinationsPage)
	require.Check(t, err == nil && string(page) == combinations(),
		"%s is not what this test writes (%v): run it with EURYALE_UPDATE=1", combinationsPage, err)
}

// combinations returns the page.
func combinations() string {
	var s strings.Builder
	s.WriteString(`# What goes together

Of every two features of a training, ` + "`vm.New`" + ` takes both, and they train as one rank does
without them, or it refuses them by an error that names both. A test draws pairs, and many
features at once, with random graphs on 1 to 4 ranks, and compares each with a plain training on
one rank (` + "`vm/pairs_test.go`" + `); another one writes this page.

Labels that are ignored (` + "`nn.CrossEntropy`" + `) count in no mean. A run's loss is the mean
over its other labels, and a step of several runs or ranks takes the mean of these, as in PyTorch's
DistributedDataParallel. So where runs ignore different numbers of labels, these have different
weights. With ` + "`layers.Tokens.Padding`" + ` ranks count the targets together; those of several
runs the program counts (` + "`layers.Tokens.Count`" + `).

For Gorgonia's own machines there is ` + "`autograd.DataParallel.Sync`" + `, whose steps are one
run of each rank. It refuses ` + "`autograd.WithTree`" + ` and losses of
` + "`layers.Builder.Batches`" + ` that want more runs; a hook refuses a second run before Sync.
These errors say which options of ` + "`vm.New`" + ` to use instead.

| | feature | what it is |
|--:|---|---|
`)
	for i, f := range features {
		fmt.Fprintf(&s, "| %d | %s | %s |\n", i+1, f.name, f.about)
	}
	s.WriteString(`
## Pairs

● both together, – one of the two, a letter: refused, for the reason below.

| | |`)
	for i := range features {
		fmt.Fprintf(&s, " %d |", i+1)
	}
	s.WriteString("\n|--:|---|" + strings.Repeat(":-:|", len(features)) + "\n")
	for i, f := range features {
		fmt.Fprintf(&s, "| %d | %s |", i+1, f.name)
		for _, g := range features {
			fmt.Fprintf(&s, " %s |", cell(f, g))
		}
		s.WriteString("\n")
	}
	s.WriteString("\n## Refused\n\n| | features | why |\n|---|---|---|\n")
	for i, r := range refusals {
		fmt.Fprintf(&s, "| %c | %s with %s | %s |\n", 'a'+i, strings.Join(r.a, ", "),
			strings.Join(r.b, ", "), r.why)
	}
	s.WriteString(`
Three features that are refused together: ZeRO, WithElastic and tensor ranks, since each part of the
weights has its copies on other replicas; and Padding, Accumulate and MoE, whose balance of experts
is a mean over the targets of one run.

Where ranks of WithElastic die, in whatever call, the others have the same bits, with many features
at once (` + "`vm/deaths_test.go`" + `).
`)
	return s.String()
}

// cell is what the page says of two features.
func cell(f, g feature) string {
	switch i := refuse(f, g); {
	case f.sort == g.sort:
		return "–"
	case i >= 0:
		return string(rune('a' + i))
	}
	return "●"
}

// refuse returns which refusal is of two features, -1 for none.
func refuse(f, g feature) int {
	return slices.IndexFunc(refusals, func(r refusal) bool {
		return slices.Contains(r.a, f.name) && slices.Contains(r.b, g.name) ||
			slices.Contains(r.a, g.name) && slices.Contains(r.b, f.name)
	})
}
