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
	"slices"
	"strings"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
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
	comm               backend.Communicator
	layout             *layers.Layout
	device             backend.Device // nil for the host
	corpus             corpus
	micro, first, runs int            // of a step: all, the first here, how many here
	tokens, targets    *layers.Tokens // of a micro-batch
	loss               layers.Node
	learnables         gorgonia.Nodes
	machine, eval      *vm.Machine
	solver             *solver.AdamW
	rate               solver.Schedule
	began              time.Time
	past               past
}

// past is what a checkpoint has besides weights and solver.
type past struct {
	Training string    // what must be the same on resuming
	Losses   []float64 // of each step
	Eval     float64   // of held-out text, after the last evaluation
}

func newTrainer(comm backend.Communicator, cfg config) *trainer {
	t := &trainer{config: cfg, comm: comm, corpus: loadCorpus(cfg.data), began: time.Now(),
		device: map[string]backend.Device{"auto": comm.Device(), "cpu": nil}[cfg.device]}
	t.solver = &solver.AdamW{Rate: cfg.lr, Beta2: beta2, WeightDecay: weightDecay}
	rise := min(longestRise, cfg.steps/10)
	fall := solver.Cosine(cfg.lr, finalRate*cfg.lr, max(1, cfg.steps-rise))
	t.rate = solver.Warmup(rise, fall)
	all := slices.Concat(t.corpus.characters, t.corpus.training, t.corpus.heldOut)
	cfg.data = fmt.Sprintf("%x", sha256.Sum256(all))
	cfg.device, cfg.checkpoint, cfg.every, cfg.sp, cfg.tp = "", "", 0, 0, 0
	t.past.Training = fmt.Sprintf("%+v", cfg) // what the bits depend on
	var err error
	if least := cfg.context + 2; min(len(t.corpus.training), len(t.corpus.heldOut)) < least {
		err = fmt.Errorf("--data has %d characters and %d held out: %d characters are needed, "+
			"and as many held out", len(t.corpus.training), len(t.corpus.heldOut), least)
	}
	check(autograd.Agree(comm, t.past.Training, err)) // machines may have different versions of Go
	t.layout = must(layers.NewLayout(comm, 0, t.sp, t.tp))
	t.micro = cmp.Or(cfg.tree, t.layout.DP)
	t.compile()
	t.first, t.runs, err = autograd.TreeShare(t.micro, t.layout.Replica, t.layout.DP)
	check(err)
	return t
}

// compile makes the graph and its machines.
func (t *trainer) compile() {
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
	if t.tree > 0 {
		options = append(options, vm.WithTree(t.tree))
	}
	options = append(options, vm.WithSolver(t.solver, t.learnables...), vm.ClipNorm(clipNorm),
		b.Training())
	t.machine = must(vm.New(b.Graph(), t.device, options...))
}

// train trains until all steps are done, or until a signal on any rank ends it, which is an error.
func (t *trainer) train(ctx context.Context) (stop error) {
	if t.checkpoint != "" {
		t.resume()
	}
	took, first := time.Duration(0), len(t.past.Losses)
	for step := first; step < t.steps; step++ {
		t.solver.SetRate(t.rate(step))
		began := time.Now()
		t.past.Losses = append(t.past.Losses, t.over(t.corpus.training, t.random(step), t.machine))
		took += time.Since(began)
		due := (step+1)%t.every == 0 || step+1 == t.steps
		if due {
			t.evaluate(float64((step+1-first)*t.batch*t.context) / took.Seconds())
		}
		if t.checkpoint == "" {
			continue
		}
		stop = must(autograd.Stopped(ctx, t.comm))
		if due || stop != nil {
			check(t.machine.DataParallel().Save(t.checkpoint, t.solver, t.past))
		}
		if stop != nil && step+1 < t.steps {
			t.print("saved in %s after step %d: start it again to go on", t.checkpoint, step+1)
			return stop
		}
	}
	return nil
}

// resume restores the training from its checkpoint, if there is one.
func (t *trainer) resume() {
	var kept past
	err := t.machine.DataParallel().Load(t.checkpoint, t.solver, &kept)
	if errors.Is(err, fs.ErrNotExist) { // training begins
		return
	}
	check(err)
	if kept.Training != t.past.Training {
		check(fmt.Errorf("--checkpoint: it is of a training with %s, and this one is with %s",
			kept.Training, t.past.Training))
	}
	t.past = kept
	t.print("going on after step %d, from %s", len(kept.Losses), t.checkpoint)
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

// over runs a machine on this rank's micro-batches of a batch, whose samples begin in a text at
// starts, and returns the loss of the whole batch. It is collective.
func (t *trainer) over(text []byte, starts []int, m *vm.Machine) float64 {
	losses := make([]float64, t.runs)
	for i := range losses {
		samples := t.batch / t.micro
		mine := starts[(t.first+i)*samples:][:samples]
		var tokens, targets []int // which are the tokens behind them
		for _, start := range mine {
			for i := range t.context {
				tokens = append(tokens, int(text[start+i]))
				targets = append(targets, int(text[start+i+1]))
			}
		}
		check(errors.Join(t.tokens.Set(tokens), t.targets.Set(targets), m.RunAll()))
		losses[i] = float64(t.loss.Value().Data().(float32))
	}
	if t.tree > 0 {
		return must(autograd.TreeMean(t.layout.Data, losses))
	}
	check(autograd.Sum(t.layout.Data, &losses[0])) // there is one
	return losses[0]
}

// evaluate prints the losses of the steps since the last line, and of samples that are spread
// evenly over the text that was held out.
func (t *trainer) evaluate(speed float64) {
	starts := make([]int, evalBatches*t.batch)
	for i := range starts {
		starts[i] = i * (len(t.corpus.heldOut) - t.context - 1) / (len(starts) - 1)
	}
	losses := make([]float64, evalBatches)
	for i := range losses {
		losses[i] = t.over(t.corpus.heldOut, starts[i*t.batch:], t.eval)
	}
	t.past.Eval = mean(losses)
	done := len(t.past.Losses)
	since := t.past.Losses[(done-1)/t.every*t.every:]
	t.print("step %d/%d: loss=%.4f eval=%.4f tokens/s=%.0f",
		done, t.steps, mean(since), t.past.Eval, speed)
}

// report verifies that all ranks have the same model, and prints what it has learnt.
func (t *trainer) report() {
	data := t.machine.DataParallel()
	check(errors.Join(t.machine.Pull(t.learnables...), data.Check()))
	params := must(data.Hash())
	check(errors.Join(t.machine.Close(), t.eval.Close())) // another one writes, which needs memory
	t.print("%s", t.write())
	n := len(t.past.Losses)
	t.print("loss=%.4f eval=%.4f ranks=%d layout=%v backend=%s params=%s seconds=%.1f",
		mean(t.past.Losses[max(0, n-lastLosses):]), t.past.Eval, t.comm.Size(), t.layout,
		t.comm.Capabilities().Backend, params, time.Since(t.began).Seconds())
}

// print prints a line on rank 0.
func (t *trainer) print(format string, args ...any) {
	if t.comm.Rank() == 0 {
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
func (t *trainer) write() string {
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
		check(errors.Join(tokens.Set(window), m.RunAll()))
		next := draw(r, logits.Value().Data().([]float32)[(len(seen)-1)*vocabulary:][:vocabulary])
		text, characters[i] = append(text, next), t.corpus.characters[next]
	}
	return strings.ToValidUTF8(string(characters), "\uFFFD")
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
