// Command finetune trains a language model of a Hugging Face folder on a text: GPT-2, Llama 2 and
// 3, Mistral, Qwen 2 and 3. Ranks divide the samples of a batch, the positions of each sample
// (--sp), the weights (--tp), or any product of the three.
//
//	euryale run -n 2 ./examples/finetune Llama-3.2-1B --data book.txt --out tuned
//	euryale run -n 4 ./examples/finetune gpt2 --data book.txt --lora 8 --tp 2 --out adapter
//
// It trains all weights, and writes a folder that transformers and examples/generate read; with
// --lora R it trains an adapter of rank R alone, and writes it in PEFT's format. Samples are
// windows of --context tokens; the last tenth of the text is held out. Every layout draws the same
// samples, so losses agree except for rounding. The last line is for programs: loss is a running
// mean over about 20 steps, eval of held-out text, and params the SHA-256 of what was trained.
//
//	loss=2.7125 eval=2.8883 ranks=2 layout=dp2xsp1xtp1 backend=host params=9e1f... seconds=172.3
//
// With --checkpoint DIR the training is saved every --every steps, and on SIGTERM or SIGINT, which
// end it. Started again it goes on bitwise identically, or on another layout. All ranks reach DIR,
// or else that of --out, where a checkpoint puts together what ranks shard.
package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/models/tokenizer"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// seed determines an adapter's first weights, the batches and the masks of dropout.
const evalBatches, seed = 8, 1

// trainer is a model that all ranks train, as the command line says.
type trainer struct {
	folder, data, out, checkpoint, device, precision string
	lora, context, batch, steps, every, sp, tp       int
	lr                                               float64
	dropout                                          bool
	comm                                             backend.Communicator
	layout                                           *layers.Layout
	model                                            *models.Model
	training, heldOut                                []int          // tokens of the text
	tokens, targets                                  *layers.Tokens // of a batch
	loss                                             layers.Node
	machine, eval                                    *vm.Machine
	solver                                           solver.AdamW
	past                                             past
}

// past is what a checkpoint has besides weights and solver.
type past struct {
	Training   string // what must be the same on resuming
	Steps      int
	Loss, Eval float64 // the running mean, and of held-out text
}

func main() {
	var t trainer
	flag.StringVar(&t.data, "data", "", "a text file")
	flag.StringVar(&t.out, "out", "", "write the model here, or the adapter")
	flag.IntVar(&t.lora, "lora", 0, "rank of an adapter, the weights fixed; 0: all weights")
	flag.IntVar(&t.context, "context", 128, "tokens of a sample")
	flag.IntVar(&t.batch, "batch", 8, "samples in a step, of all ranks together")
	flag.IntVar(&t.steps, "steps", 200, "steps of the training")
	flag.IntVar(&t.every, "every", 50, "steps between two evaluations, and two checkpoints")
	flag.Float64Var(&t.lr, "lr", 1e-4, "highest learning rate, after the warm-up")
	flag.IntVar(&t.sp, "sp", 1, "ranks that divide the positions of each sample")
	flag.IntVar(&t.tp, "tp", 1, "ranks that shard the weights")
	flag.StringVar(&t.device, "device", "auto", "cpu, or auto for a GPU if there is one")
	flag.StringVar(&t.precision, "precision", "f32", "of products: f32, tf32 or bf16")
	flag.BoolVar(&t.dropout, "dropout", true, "in training, as config.json asks for it")
	flag.StringVar(&t.checkpoint, "checkpoint", "", "save here, and go on with what is there")
	flag.Parse()
	t.folder = filepath.Join(flag.Arg(0))                         // without a / at its end
	_ = flag.CommandLine.Parse(flag.Args()[min(1, flag.NArg()):]) // which exits
	t.check(0)
	ctx, began := context.Background(), time.Now()
	t.comm = must(euryale.Init(ctx))
	t.check(t.comm.Size())
	if t.checkpoint != "" { // otherwise a signal ends the program at once
		ctx, _ = signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
	}
	t.model = must(models.Load(t.folder))
	t.build()
	err := t.train(ctx)
	if err == nil {
		t.print("loss=%.4f eval=%.4f ranks=%d layout=%v backend=%s params=%s seconds=%.1f",
			t.past.Loss, t.past.Eval, t.comm.Size(), t.layout, t.comm.Capabilities().Backend,
			t.write(), time.Since(began).Seconds())
	}
	check(errors.Join(err, t.layout.Close(), t.model.Close(), t.comm.Close()))
}

// check ends the program for a wrong command line. ranks is 0 until it is known.
func (t *trainer) check(ranks int) {
	if min(t.lora+1, t.context, t.batch, t.steps, t.every, t.sp, t.tp) < 1 || !(t.lr >= 0) ||
		t.folder == "" || t.data == "" || t.out == "" || filepath.Join(t.out) == t.folder ||
		!slices.Contains([]string{"f32", "tf32", "bf16"}, t.precision) || flag.NArg() > 0 ||
		t.device != "cpu" && t.device != "auto" || ranks%(t.sp*t.tp) > 0 ||
		t.batch%max(1, ranks/(t.sp*t.tp)) > 0 {
		log.Printf("use finetune FOLDER --data FILE --out ANOTHER, sizes from 1, --lr from 0, "+
			"--device cpu or auto, --precision f32, tf32 or bf16, --sp times --tp that divide the "+
			"ranks, and a --batch that the others divide: got %q", os.Args[1:])
		os.Exit(2) // no launcher starts it again then
	}
}

// build reads the text, which is the same on all ranks, and makes the graph and its machines.
func (t *trainer) build() {
	text := must(tokenizer.Load(t.folder)).Encode(string(must(os.ReadFile(t.data))), false)
	t.training, t.heldOut = text[:len(text)-len(text)/10], text[len(text)-len(text)/10:]
	if least := 10 * (t.context + 1); len(text) < least {
		check(fmt.Errorf("--data has %d tokens: at least %d are needed", len(text), least))
	}
	t.past.Training = fmt.Sprintf("context %d, batch %d, steps %d, lora %d, lr %g, %s, model and "+
		"text %x", t.context, t.batch, t.steps, t.lora, t.lr, t.precision,
		sha256.Sum256(fmt.Append([]byte(must(t.model.Fingerprint())), t.model.Config, t.dropout,
			text)))
	check(autograd.Agree(t.comm, t.past.Training, t.writable())) // not at the end
	as := map[string]vm.Precision{"f32": vm.F32, "tf32": vm.TF32, "bf16": vm.BF16}[t.precision]
	device := map[string]backend.Device{"auto": t.comm.Device(), "cpu": nil}[t.device]
	t.layout = must(layers.NewLayout(t.comm, 0, t.sp, t.tp))
	if t.model.Random = nil; t.dropout {
		t.model.Random = nn.NewRandom(seed)
	}
	if t.lora > 0 {
		check(t.model.Adapt(models.LoRA{Rank: t.lora}))
	}
	b := layers.NewBuilder(gorgonia.NewGraph(), t.layout, tensor.Float32, seed)
	t.tokens = b.Tokens("tokens", 1, t.batch/t.layout.DP, t.context)
	t.targets = b.Tokens("targets", 1, t.batch/t.layout.DP, t.context)
	t.loss = b.CrossEntropy(must(t.model.Logits(b, t.tokens)), t.targets)
	check(b.Err())
	options := []vm.Option{vm.Keep(t.loss.Node), vm.WithPrecision(as), vm.WithFrozen(b.Frozen()...)}
	t.eval = must(vm.New(b.Graph(), device, append(options, vm.Eval())...))
	learnables := must(b.Grad(t.loss)) // behind the machine for evaluation, which has no gradients
	t.solver.Rate = t.lr
	t.machine = must(vm.New(b.Graph(), device, append(options, vm.ClipNorm(1),
		vm.WithSolver(&t.solver, learnables...), b.Training())...))
}

// writable makes the folder of --out, and tries it before the training.
func (t *trainer) writable() error {
	if _, err := os.Stat(filepath.Join(t.out, "config.json")); err == nil && t.lora > 0 {
		return fmt.Errorf("--out %s has a model, and an adapter would be applied to it: name "+
			"another folder", t.out)
	}
	err := os.MkdirAll(t.out, 0o777)
	f, failed := os.CreateTemp(t.out, ".training-")
	if failed == nil {
		failed = errors.Join(f.Close(), os.Remove(f.Name()))
	}
	return cmp.Or(err, failed)
}

// train trains until all steps are done, or until a signal on any rank ends it, which is an error.
func (t *trainer) train(ctx context.Context) (stop error) {
	data, kept := t.machine.DataParallel(), past{}
	if t.checkpoint != "" {
		err := data.Load(t.checkpoint, &t.solver, &kept)
		if err == nil && kept.Training != t.past.Training {
			err = fmt.Errorf("--checkpoint: is of %s; this is %s", kept.Training, t.past.Training)
		}
		if !errors.Is(err, os.ErrNotExist) { // otherwise training begins
			check(err)
			t.past = kept
			t.print("going on after step %d, from %s", kept.Steps, t.checkpoint)
		}
	}
	rise := min(100, t.steps/10)
	rate := solver.Warmup(rise, solver.Cosine(t.lr, t.lr/10, max(1, t.steps-rise)))
	began, first := time.Now(), t.past.Steps // of the next line
	for p := &t.past; p.Steps < t.steps; {
		t.solver.SetRate(rate(p.Steps))
		loss := t.over(t.training, p.Steps, t.machine)
		p.Steps++
		p.Loss += (loss - p.Loss) / float64(min(20, p.Steps))
		due := p.Steps%t.every == 0 || p.Steps == t.steps
		if due {
			speed := float64((p.Steps-first)*t.batch*t.context) / time.Since(began).Seconds()
			p.Eval = 0
			for i := range evalBatches {
				p.Eval += t.over(t.heldOut, i, t.eval) / evalBatches
			}
			t.print("step %d/%d: loss=%.4f eval=%.4f tokens/s=%.0f", p.Steps, t.steps, p.Loss,
				p.Eval, speed)
			began, first = time.Now(), p.Steps
		}
		if t.checkpoint == "" {
			continue
		}
		stop = must(autograd.Stopped(ctx, t.comm))
		if due || stop != nil {
			check(data.Save(t.checkpoint, &t.solver, p))
		}
		if stop != nil && p.Steps < t.steps {
			t.print("saved in %s after step %d: start it again to go on", t.checkpoint, p.Steps)
			return stop
		}
	}
	return nil
}

// over runs a machine on a batch of a text, which depends on step alone, and returns its loss.
func (t *trainer) over(text []int, step int, m *vm.Machine) float64 {
	r := rand.New(rand.NewPCG(seed, uint64(step)))
	var tokens, targets []int // which are the tokens behind them
	for i := range t.batch {
		start := r.IntN(len(text) - t.context) // the same on all ranks
		if i*t.layout.DP/t.batch == t.layout.Replica {
			tokens = append(tokens, text[start:start+t.context]...)
			targets = append(targets, text[start+1:start+1+t.context]...)
		}
	}
	if t.model.Random != nil {
		t.model.Random.Seek(uint64(step), t.layout.Replica*(t.batch/t.layout.DP))
	}
	check(errors.Join(t.tokens.Set(tokens), t.targets.Set(targets), m.RunAll()))
	loss := float64(t.loss.Value().Data().(float32))
	check(autograd.Sum(t.layout.Data, &loss))
	return loss
}

// write verifies that all ranks have the same model, writes it, and returns its hash.
func (t *trainer) write() (params string) {
	data, dir := t.machine.DataParallel(), t.checkpoint
	check(data.Check())
	params = must(data.Hash())
	if dir == "" {
		id := float64(time.Now().UnixMicro()) // all ranks have the mean
		check(autograd.Mean(t.comm, &id))
		dir = filepath.Join(t.out, fmt.Sprintf(".training-%.0f", id))
		signal.Ignore(syscall.SIGTERM, syscall.SIGINT) // the training would be lost
		check(data.Save(dir, &t.solver, &t.past))
	}
	check(errors.Join(t.machine.Close(), t.eval.Close()))
	if t.comm.Rank() > 0 {
		return params
	}
	save := t.model.Save
	if t.lora > 0 {
		save = t.model.SaveAdapter
	}
	if err := save(t.out, must(autograd.ReadWeights(dir))); err != nil {
		check(fmt.Errorf("%w: start again with --checkpoint %s, where the training is", err, dir))
	}
	if t.checkpoint == "" {
		check(os.RemoveAll(dir))
	}
	return params
}

// print prints a line on rank 0.
func (t *trainer) print(format string, args ...any) {
	if t.comm.Rank() == 0 {
		fmt.Printf(format+"\n", args...)
	}
}

func check(err error) {
	if err != nil {
		log.Print("finetune: ", err)
		os.Exit(euryale.ExitStatus(err))
	}
}

func must[T any](value T, err error) T {
	check(err)
	return value
}
