package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/bucket"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/vm"
)

const (
	clipNorm    = 1.0 // of the gradients
	weightDecay = 0.01
	beta2       = 0.99 // few tokens in a step
	finalRate   = 0.1  // of the highest
	longestRise = 100  // of the learning rate, in steps
	evalBatches = 20
	lastLosses  = 20 // of the loss that is printed last

	seed        = 1    // of the first weights, the batches, and what the model writes
	deviation   = 0.02 // GPT-2's, of embeddings
	written     = 300  // characters
	temperature = 0.8  // less than 1, so that likely characters become more likely
)

// trainer is a model that all ranks train.
type trainer struct {
	config
	comm            backend.Communicator
	layout          *layers.Layout
	device          backend.Device // nil for the host, or where elastic ranks are
	corpus          corpus
	micro           int            // micro-batches of a step
	tokens, targets *layers.Tokens // of a micro-batch
	loss            layers.Node
	learnables      gorgonia.Nodes
	machine, eval   *vm.Machine
	solver          *solver.AdamW
	rate            solver.Schedule
	training        string // what must be the same on all ranks, and on resuming
	began           time.Time
	past            past
}

// past is what a checkpoint has besides weights and solver, and what replacements get with these.
type past struct {
	Training  string    // empty before it begins
	Losses    []float64 // of each step
	Eval      float64   // of held-out text, after the last evaluation
	Evaluated int       // after which step that was
}

func newTrainer(comm backend.Communicator, job autograd.Job, cfg config) *trainer {
	t := &trainer{config: cfg, comm: comm, corpus: loadCorpus(cfg.data), began: time.Now(),
		device: map[string]backend.Device{"auto": comm.Device(), "cpu": nil}[cfg.device]}
	t.solver = &solver.AdamW{Rate: cfg.lr, Beta2: beta2, WeightDecay: weightDecay}
	rise := min(longestRise, cfg.steps/10)
	fall := solver.Cosine(cfg.lr, finalRate*cfg.lr, max(1, cfg.steps-rise))
	t.rate = solver.Warmup(rise, fall)
	all := slices.Concat(t.corpus.characters, t.corpus.training, t.corpus.heldOut)
	cfg.data = fmt.Sprintf("%x", sha256.Sum256(all))
	cfg.device, cfg.checkpoint, cfg.every, cfg.sp, cfg.tp = "", "", 0, 0, 0
	t.training = fmt.Sprintf("%+v", cfg) // what the bits depend on
	var err error
	if least := cfg.context + 2; min(len(t.corpus.training), len(t.corpus.heldOut)) < least {
		err = fmt.Errorf("--data has %d characters and %d held out: %d characters are needed, "+
			"and as many held out", len(t.corpus.training), len(t.corpus.heldOut), least)
	}
	check(autograd.Agree(comm, t.training, err)) // machines may have different versions of Go
	if job == nil {
		t.layout = must(layers.NewLayout(comm, 0, t.sp, t.tp))
	} else {
		t.layout = must(layers.NewElasticLayout(context.Background(), job, t.tp))
	}
	t.micro = cmp.Or(cfg.tree, t.layout.DP)
	t.compile(job)
	return t
}

// compile makes the graph and its machines.
func (t *trainer) compile(job autograd.Job) {
	b := layers.NewBuilder(gorgonia.NewGraph(), t.layout, tensor.Float32, seed)
	samples := t.batch / t.micro
	if t.tree > 0 { // the loss is a mean; else it is a part of the mean, to be summed
		b.Batches(1)
	}
	t.tokens = b.Tokens("tokens", 1, samples, t.context)
	t.targets = b.Tokens("targets", 1, samples, t.context)
	t.loss = b.CrossEntropy(t.logits(b, t.tokens, len(t.corpus.characters)), t.targets)
	check(b.Err())
	options := []vm.Option{vm.Keep(t.loss.Node), vm.WithPrecision(precisions[t.precision])}
	t.eval = must(vm.New(b.Graph(), t.device, append(options, vm.Eval())...))
	t.learnables = must(b.Grad(t.loss)) // behind the machine for evaluation, which has no gradients
	// Checkpoints may be in an object store.
	store := autograd.WithStore(bucket.Open)
	together := []vm.Option{b.Training(store)}
	switch {
	case job != nil:
		together = []vm.Option{vm.WithElastic(context.Background(), job, t.tree, store)}
	case t.tree > 0:
		together = append(together, vm.WithTree(t.tree))
	}
	options = append(options, vm.WithSolver(t.solver, t.learnables...), vm.ClipNorm(clipNorm))
	if t.shards > 0 {
		together = append(together, vm.WithShards(1<<t.shards-1)) // each needs those before it
	}
	machine, err := vm.New(b.Graph(), t.device, append(options, together...)...)
	if errors.Is(err, autograd.ErrFinished) {
		os.Exit(0) // a standby that nobody has needed
	}
	check(err)
	t.machine = machine
}

// train trains until all steps are done, or until a signal ends it, which is an error. What ranks
// exchange is in turns, which those of an elastic training repeat if one is lost; which turn comes
// next depends on t.past alone.
func (t *trainer) train(ctx context.Context) error {
	if err := t.join(); err != nil {
		return err
	}
	took, first := time.Duration(0), len(t.past.Losses)
	for t.past.Evaluated < t.steps {
		done := len(t.past.Losses)
		stop, err := t.stopped(ctx)
		switch {
		case err != nil:
		case done > t.past.Evaluated && (done%t.every == 0 || done == t.steps):
			err = t.turn(t.evaluate)
			t.print("step %d/%d: loss=%.4f eval=%.4f tokens/s=%.0f", done, t.steps,
				mean(t.past.Losses[(done-1)/t.every*t.every:]), t.past.Eval,
				float64((done-first)*t.batch*t.context)/took.Seconds())
		case stop != nil:
			if err = t.turn(t.save); err == nil {
				stop, err = t.stopped(ctx) // none if a replacement has come
			}
			if err == nil && stop != nil {
				t.print("ended after step %d: start it again to go on from %s", done,
					cmp.Or(t.checkpoint, "step 0, nothing is saved without --checkpoint"))
				return stop
			}
		default:
			t.solver.SetRate(t.rate(done))
			began := time.Now()
			err = t.do(autograd.Turn{Run: t.over(t.corpus.training, t.random(done), t.machine),
				Apply: func(loss float64) { t.past.Losses = append(t.past.Losses, loss) }})
			took += time.Since(began)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// join begins the training, or goes on with its checkpoint, or with the others.
func (t *trainer) join() error {
	who, err := "the other ranks have", error(nil)
	if e := t.machine.Elastic(); e != nil {
		err = e.Share(&t.past)
	}
	if err == nil && t.past.Training == "" {
		who, err = "--checkpoint has", t.turn(t.resume)
	}
	if err == nil && t.past.Training != t.training { // Close would end that of the other ranks
		check(fmt.Errorf("%s a training with %s, and this one is with %s", who, t.past.Training,
			t.training))
	}
	return err
}

// resume restores the training from its checkpoint, if there is one.
func (t *trainer) resume(next *past) error {
	next.Training = t.training
	err := autograd.Agree(t.ranks(), t.training, nil)
	if t.checkpoint == "" || err != nil {
		return err
	}
	var kept past
	err = t.machine.DataParallel().Load(t.checkpoint, t.solver, &kept)
	if errors.Is(err, fs.ErrNotExist) { // training begins
		return nil
	}
	if *next = kept; err == nil {
		t.print("going on after step %d, from %s", len(kept.Losses), t.checkpoint)
	}
	return err
}

// stopped returns why the training ends early, the same on all ranks, or nil. A rank of an elastic
// training that is told to end leaves after its next turn, unless all are.
func (t *trainer) stopped(ctx context.Context) (stop, err error) {
	e := t.machine.Elastic()
	switch {
	case e != nil:
		if stop, err = autograd.Stopped(ctx, autograd.Solo()); stop != nil {
			e.Retire(stop)
		}
		if !e.Ends() {
			stop = nil
		}
	case t.checkpoint != "":
		stop, err = autograd.Stopped(ctx, t.comm)
	}
	return stop, err
}

// turn makes collective calls, which change the past once all ranks have made them.
func (t *trainer) turn(calls func(next *past) error) error {
	var next past
	return t.do(autograd.Turn{Exchange: func() error { next = t.past; return calls(&next) },
		Apply: func(float64) { t.past = next }})
}

// do does a turn.
func (t *trainer) do(turn autograd.Turn) (err error) {
	if e := t.machine.Elastic(); e != nil {
		return e.Do(turn)
	}
	loss := 0.0
	if turn.Run != nil {
		loss, err = t.mean(turn.Run)
	} else {
		err = turn.Exchange()
	}
	if err == nil {
		turn.Apply(loss)
	}
	return err
}

// random returns where the samples of a step begin, the same for every layout.
func (t *trainer) random(step int) []int {
	r := rand.New(rand.NewPCG(seed, uint64(step)))
	starts := make([]int, t.batch)
	for i := range starts {
		starts[i] = r.IntN(len(t.corpus.training) - t.context)
	}
	return starts
}

// over returns what runs a machine on a micro-batch of a batch, whose samples begin in a text at
// starts, and returns its loss.
func (t *trainer) over(text []byte, starts []int, m *vm.Machine) func(micro int) (float64, error) {
	return func(micro int) (float64, error) {
		samples := t.batch / t.micro
		var tokens, targets []int // which are the tokens behind them
		for _, start := range starts[micro*samples:][:samples] {
			for i := range t.context {
				tokens = append(tokens, int(text[start+i]))
				targets = append(targets, int(text[start+i+1]))
			}
		}
		err := errors.Join(t.tokens.Set(tokens), t.targets.Set(targets))
		if err == nil {
			err = m.RunAll()
		}
		if err != nil {
			return 0, err
		}
		return float64(t.loss.Value().Data().(float32)), nil
	}
}

// mean returns the loss of a whole batch, of which each rank runs its micro-batches.
func (t *trainer) mean(run func(micro int) (float64, error)) (loss float64, err error) {
	first, n := t.layout.Replica, 1
	if t.tree > 0 {
		first, n, _ = t.machine.MicroBatches()
	}
	losses := make([]float64, n)
	for i := 0; i < n && err == nil; i++ {
		losses[i], err = run(first + i)
	}
	if err != nil {
		return 0, err
	}
	data := t.machine.DataParallel().Comm()
	if t.tree > 0 {
		return autograd.TreeMean(data, losses)
	}
	err = autograd.Sum(data, &losses[0]) // there is one
	return losses[0], err
}

// evaluate evaluates samples that are spread evenly over the text that was held out, and saves.
func (t *trainer) evaluate(next *past) error {
	starts := make([]int, evalBatches*t.batch)
	for i := range starts {
		starts[i] = i * (len(t.corpus.heldOut) - t.context - 1) / (len(starts) - 1)
	}
	var err error
	if t.machine.Elastic() != nil || t.shards > 2 { // on another device, or in parts
		err = t.machine.Pull()
	}
	losses := make([]float64, evalBatches)
	for i := 0; i < evalBatches && err == nil; i++ {
		losses[i], err = t.mean(t.over(t.corpus.heldOut, starts[i*t.batch:], t.eval))
	}
	if err != nil {
		return err
	}
	next.Eval, next.Evaluated = mean(losses), len(next.Losses)
	return t.save(next)
}

// save saves, if there is a place for it.
func (t *trainer) save(next *past) error {
	if t.checkpoint == "" {
		return nil
	}
	return t.machine.DataParallel().Save(t.checkpoint, t.solver, *next)
}

// report verifies that all ranks have the same model, and prints what it has learnt.
func (t *trainer) report() {
	var params, text string
	check(t.turn(func(*past) (err error) {
		data := t.machine.DataParallel()
		if err = errors.Join(t.machine.Pull(t.learnables...), data.Check()); err == nil {
			params, err = data.Hash()
		}
		if err == nil {
			text, err = t.write()
		}
		return err
	}))
	check(errors.Join(t.machine.Close(), t.eval.Close()))
	t.print("%s", text)
	n := len(t.past.Losses)
	t.print("loss=%.4f eval=%.4f ranks=%d layout=%v backend=%s params=%s seconds=%.1f",
		mean(t.past.Losses[max(0, n-lastLosses):]), t.past.Eval, t.ranks().Size(), t.layout,
		t.ranks().Capabilities().Backend, params, time.Since(t.began).Seconds())
}

// ranks returns the communicator of all ranks that are there.
func (t *trainer) ranks() backend.Communicator {
	if e := t.machine.Elastic(); e != nil {
		return e.Comm()
	}
	return t.comm
}

// print prints a line on rank 0.
func (t *trainer) print(format string, args ...any) {
	if t.ranks().Rank() == 0 {
		fmt.Printf(format+"\n", args...)
	}
}

func mean(xs []float64) float64 {
	sum := 0.0
	for _, x := range xs {
		sum += x
	}
	return sum / float64(len(xs))
}

// logits builds the model: the scores of the character behind each position, split over the
// Sequence and the Tensor group.
func (cfg config) logits(b *layers.Builder, tokens *layers.Tokens, vocabulary int) layers.Node {
	embedding := b.Learn("words", layers.Normal(deviation), 0, vocabulary, cfg.width)
	x := b.To(b.Embedding(embedding, tokens), layers.Tensor, layers.Replicated)
	x = b.Positions("positions", x)
	how := layers.AttentionOptions{Heads: cfg.heads, Causal: true}
	for i := range cfg.layers {
		name := fmt.Sprint("block", i)
		x = b.Add(x, b.Attention(name+".attention", b.LayerNorm(name+".norm1", x), how))
		x = b.Add(x, b.MLP(name+".mlp", b.LayerNorm(name+".norm2", x), 4*cfg.width))
	}
	return b.Logits(b.LayerNorm("norm", x), embedding)
}

// write returns what a trained model writes: all ranks draw the same. It is collective.
func (t *trainer) write() (string, error) {
	b := layers.NewBuilder(gorgonia.NewGraph(), t.layout, tensor.Float32, seed)
	tokens, vocabulary := b.Tokens("tokens", 1, 1, t.context), len(t.corpus.characters)
	logits := b.To(t.logits(b, tokens, vocabulary), layers.Tensor, layers.Replicated)
	logits = b.To(logits, layers.Sequence, layers.Replicated)
	check(b.Err())
	for i, w := range b.Learnables() {
		check(gorgonia.Let(w, t.learnables[i].Value()))
	}
	only := []vm.Option{vm.Eval(), vm.Keep(logits.Node), vm.WithFrozen(b.Learnables()...)}
	m := must(vm.New(b.Graph(), t.device, only...))
	defer m.Close()
	text := []int{max(0, bytes.IndexByte(t.corpus.characters, '\n'))}
	characters := make([]byte, written)
	r := rand.New(rand.NewPCG(seed, written))
	for i := range characters {
		seen := text[max(0, len(text)-t.context):]
		window := make([]int, t.context) // what is behind the text changes nothing
		copy(window, seen)
		if err := errors.Join(tokens.Set(window), m.RunAll()); err != nil {
			return "", err
		}
		next := draw(r, logits.Value().Data().([]float32)[(len(seen)-1)*vocabulary:][:vocabulary])
		text, characters[i] = append(text, next), t.corpus.characters[next]
	}
	return strings.ToValidUTF8(string(characters), "\uFFFD"), nil
}

// draw returns a token by the scores of all, by Gumbel's trick.
func draw(r *rand.Rand, scores []float32) (token int) {
	best := math.Inf(-1)
	for i, s := range scores {
		if x := float64(s)/temperature - math.Log(r.ExpFloat64()); x > best {
			token, best = i, x
		}
	}
	return token
}
