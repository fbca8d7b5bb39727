// Command moe trains a transformer of mixtures of experts. Ranks shard samples, experts, or both:
//
//	euryale run -n 2 ./examples/moe
//	euryale run -n 4 ./examples/moe --ep 2
//
// The text is drawn: see sentence. The training loss is one of unseen text, since each sample
// is drawn once, and the least possible loss is known. Rank 0 prints a line for each epoch, and a
// last line for programs. dropped is the share of choices beyond the capacity of an expert, balance
// the load-balancing loss, 1 where experts have equal work, and params the SHA-256 of the model:
//
//	epoch 20/20: loss=1.7087 balance=1.0979 dropped=0.0399
//	loss=1.7087 best=1.6416 ranks=2 layout=dp1xsp1xtp2 backend=host params=aa03… seconds=165.4
//
// With --checkpoint DIR the training is saved after each epoch, and on SIGTERM or SIGINT, which end
// it. Started again it goes on bitwise identically, or on another layout.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/examples/usage"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/curves"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/vm"
)

const (
	seed     = 1    // of the first weights and the text
	clipNorm = 1    // of the gradients
	rate     = 5e-3 // of learning, at first
	balanced = 0.01 // the weight of the load-balancing loss
)

// config is the command line.
type config struct {
	mix                                              layers.MoEOptions
	layers, width, context, batch, epochs, steps, ep int
	dtype, device, checkpoint, curve                 string
}

func main() {
	c := config{mix: layers.MoEOptions{Balance: balanced}}
	flag.IntVar(&c.mix.Experts, "experts", 8, "of each block; 1 makes it a usual transformer")
	flag.IntVar(&c.mix.Choices, "choices", 2, "experts that compute a token")
	flag.IntVar(&c.mix.Hidden, "hidden", 16, "units of an expert")
	flag.Float64Var(&c.mix.Capacity, "capacity", 1.25, "tokens of an expert, by the mean; 0: any")
	flag.IntVar(&c.layers, "layers", 2, "blocks of attention and experts")
	flag.IntVar(&c.width, "width", 32, "numbers of each position between blocks")
	flag.IntVar(&c.context, "context", 8, "sentences of a sample")
	flag.IntVar(&c.batch, "batch", 32, "samples in a step, of all ranks together")
	flag.IntVar(&c.epochs, "epochs", 20, "of the training")
	flag.IntVar(&c.steps, "steps", 100, "of an epoch")
	flag.IntVar(&c.ep, "ep", 1, "ranks that shard the experts")
	flag.StringVar(&c.dtype, "dtype", "f32", "f32 or f64")
	flag.StringVar(&c.device, "device", "auto", "cpu, or auto for a GPU if there is one")
	flag.StringVar(&c.checkpoint, "checkpoint", "", "save here, and go on with what is there")
	flag.StringVar(&c.curve, "curve", "", "draw losses here after each epoch, as an SVG")
	flag.Parse()
	c.check(0)
	comm := must(euryale.Init(context.Background()))
	c.check(comm.Size())
	ctx, _ := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	t := newTrainer(comm, c)
	err := t.train(ctx)
	check(errors.Join(err, t.machine.Close(), t.layout.Close(), comm.Close()))
}

// check ends the program for a wrong command line. ranks is 0 until it is known.
func (c config) check(ranks int) {
	usage.Check("moe", usage.OneOf("dtype", "f32", "f64"), usage.OneOf("device", "cpu", "auto"),
		usage.AtLeast(1, "experts", "choices", "hidden", "layers", "width", "context", "batch",
			"epochs", "steps", "ep"), usage.AtLeast(0, "capacity"), usage.NoArguments())
	data := max(1, ranks/c.ep)
	usage.Check("moe", usage.Unless(ranks%c.ep == 0, "ep", "a divisor of %d ranks", ranks),
		usage.Unless(c.batch%data == 0, "batch", "a multiple of %d, the ranks by --ep", data))
}

// trainer is a model that all ranks train.
type trainer struct {
	config
	comm            backend.Communicator
	layout          *layers.Layout
	tokens, targets *layers.Tokens
	read            gorgonia.Nodes // the losses of text and of balance, and choices dropped
	machine         *vm.Machine
	solver          *solver.AdamW
	began           time.Time
	past            past
}

// past is what a checkpoint has besides weights and solver.
type past struct {
	Training string // what must be the same on resuming
	Steps    int
	Sums     [3]float64 // of what is read, over the steps of this epoch
	Epochs   []fit.Epoch
}

func newTrainer(comm backend.Communicator, c config) *trainer {
	t := &trainer{config: c, comm: comm, began: time.Now()}
	dtype := map[string]tensor.Dtype{"f32": tensor.Float32, "f64": tensor.Float64}[c.dtype]
	device := map[string]backend.Device{"auto": comm.Device(), "cpu": nil}[c.device]
	c.device, c.checkpoint, c.curve, c.ep = "", "", "", 0
	t.past.Training = fmt.Sprintf("%+v", c) // what the bits depend on
	t.layout = must(layers.NewLayout(comm, 0, 1, t.ep))
	b := layers.NewBuilder(gorgonia.NewGraph(), t.layout, dtype, seed)
	learnables := t.model(b)
	t.solver = &solver.AdamW{Rate: rate, WeightDecay: 0.01}
	t.machine = must(vm.New(b.Graph(), device, vm.Keep(t.read...), vm.ClipNorm(clipNorm),
		vm.WithSolver(t.solver, learnables...), b.Training()))
	return t
}

// model builds the model. Experts need whole samples on a rank, and attention divides positions: a
// Sequence group of one rank, as here, does both at once.
func (t *trainer) model(b *layers.Builder) gorgonia.Nodes {
	samples, positions := t.batch/t.layout.DP, t.context*sentence
	t.tokens = b.Tokens("tokens", 1, samples, positions)
	t.targets = b.Tokens("targets", 1, samples, positions)
	embedding := b.Learn("words", layers.Normal(0.1), 0, vocabulary, t.width)
	x := b.To(b.Embedding(embedding, t.tokens), layers.Tensor, layers.Replicated)
	x = b.Positions("positions", x)
	var found []layers.Experts // of all blocks
	for i := range t.layers {
		name := fmt.Sprint("block", i)
		x = b.Add(x, b.Attention(name+".attention", b.LayerNorm(name+".norm1", x),
			layers.AttentionOptions{Heads: 4, Causal: true}))
		h := b.To(b.LayerNorm(name+".norm2", x), layers.Sequence, layers.Split(0))
		e := b.MoE(name+".experts", h, t.mix)
		x = b.Add(x, b.To(e.Y, layers.Sequence, layers.Split(1)))
		found = append(found, e)
	}
	loss := b.CrossEntropy(b.Logits(b.LayerNorm("norm", x), embedding), t.targets)
	balance, dropped := found[0].Loss, found[0].Dropped
	for _, e := range found[1:] {
		balance, dropped = b.Add(balance, e.Loss), b.Add(dropped, e.Dropped)
	}
	t.read = gorgonia.Nodes{loss.Node, balance.Node, dropped.Node}
	return must(b.Grad(b.Add(loss, balance)))
}

// train trains until all epochs are over, or until a signal on any rank ends it, which is an error.
func (t *trainer) train(ctx context.Context) error {
	if t.checkpoint != "" {
		t.resume()
	}
	for t.past.Steps < t.epochs*t.steps {
		t.solver.SetRate(solver.Cosine(rate, rate/10, t.epochs*t.steps)(t.past.Steps))
		t.step()
		over := t.past.Steps%t.steps == 0
		if over {
			t.endEpoch()
		}
		stop := must(autograd.Stopped(ctx, t.comm))
		if (over || stop != nil) && t.checkpoint != "" {
			check(t.machine.DataParallel().Save(t.checkpoint, t.solver, t.past))
		}
		if stop != nil && t.past.Steps < t.epochs*t.steps {
			return fmt.Errorf("%w after step %d", stop, t.past.Steps)
		}
	}
	data, last := t.machine.DataParallel(), t.past.Epochs[t.epochs-1]
	check(data.Check()) // that all ranks have the same model
	t.print("loss=%.4f best=%.4f ranks=%d layout=%v backend=%s params=%s seconds=%.1f", last.Loss,
		best(), t.comm.Size(), t.layout, t.comm.Capabilities().Backend, must(data.Hash()),
		time.Since(t.began).Seconds())
	return nil
}

// resume restores the training from its checkpoint, if there is one.
func (t *trainer) resume() {
	training := t.past.Training
	err := t.machine.DataParallel().Load(t.checkpoint, t.solver, &t.past)
	if errors.Is(err, fs.ErrNotExist) { // training begins
		return
	}
	check(err)
	if t.past.Training != training {
		check(fmt.Errorf("--checkpoint: it is of a training with %s", t.past.Training))
	}
	t.print("going on after step %d, from %s", t.past.Steps, t.checkpoint)
}

// step takes a step, on this rank's samples of a batch.
func (t *trainer) step() {
	own := t.batch / t.layout.DP
	var tokens, targets []int
	for _, s := range text(uint64(t.past.Steps), t.batch, t.context)[t.layout.Replica*own:][:own] {
		tokens, targets = append(tokens, s[:len(s)-1]...), append(targets, s[1:]...)
	}
	check(errors.Join(t.tokens.Set(tokens), t.targets.Set(targets), t.machine.RunAll()))
	for i, n := range t.read {
		x, wide := n.Value().Data().(float64)
		if !wide {
			x = float64(n.Value().Data().(float32))
		}
		check(autograd.Sum(t.layout.Data, &x))
		t.past.Sums[i] += x
	}
	t.past.Steps++
}

// endEpoch prints the means of an epoch, and draws all epochs.
func (t *trainer) endEpoch() {
	n, digits := float64(t.steps), map[string]int{"f32": 4, "f64": 12}[t.dtype]
	e := fit.Epoch{Epoch: t.past.Steps / t.steps, Steps: t.past.Steps, Loss: t.past.Sums[0] / n}
	choices := t.batch * t.context * sentence * t.mix.Choices * t.layers
	e.Metrics = map[string]float64{"dropped": t.past.Sums[2] / n / float64(choices),
		"balance": t.past.Sums[1] / n / balanced / float64(t.layers)}
	t.past.Epochs, t.past.Sums = append(t.past.Epochs, e), [3]float64{}
	t.print("epoch %d/%d: loss=%.*f balance=%.4f dropped=%.4f", e.Epoch, t.epochs, digits, e.Loss,
		e.Metrics["balance"], e.Metrics["dropped"])
	if t.curve != "" && t.comm.Rank() == 0 {
		f := must(os.Create(t.curve))
		check(errors.Join(curves.SVG(f, t.past.Epochs), f.Close()))
	}
}

// print prints a line on rank 0.
func (t *trainer) print(format string, args ...any) {
	if t.comm.Rank() == 0 {
		fmt.Printf(format+"\n", args...)
	}
}

func check(err error) { usage.End("moe", err) }

func must[T any](value T, err error) T {
	check(err)
	return value
}

// Sentences are a mark and five words. The mark says in which of 16 languages a sentence is, and in
// each language another word follows a word, nine times in ten. So a model must know 16 x 64 pairs
// of words, and an expert needs those of its languages alone.
const (
	languages, words = 16, 64
	vocabulary       = words + languages
	sentence         = 6   // tokens
	regular          = 0.9 // how often a word follows by the language; others are drawn
)

// text draws the samples of a step, of whole sentences and the token behind them.
func text(step uint64, samples, sentences int) [][]int {
	r := rand.New(rand.NewPCG(seed, languages))
	var follows [languages][]int
	for i := range follows {
		follows[i] = r.Perm(words)
	}
	r, all := rand.New(rand.NewPCG(seed+1, step)), make([][]int, samples)
	for i := range all {
		for range sentences + 1 {
			language, word := r.IntN(languages), r.IntN(words)
			all[i] = append(all[i], words+language, word)
			for range sentence - 2 {
				if word = follows[language][word]; r.Float64() >= regular {
					word = r.IntN(words)
				}
				all[i] = append(all[i], word)
			}
		}
		all[i] = all[i][:sentences*sentence+1]
	}
	return all
}

// best returns the entropy of a token: no model has a lower loss. A mark and the word behind it may
// be any.
func best() float64 {
	const other, known = (1 - regular) / words, regular + (1-regular)/words
	word := -known*math.Log(known) - (words-1)*other*math.Log(other)
	return (math.Log(languages) + math.Log(words) + (sentence-2)*word) / sentence
}
