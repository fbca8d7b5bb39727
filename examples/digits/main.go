// Command digits trains a classifier of handwritten digits, data-parallel.
//
//	euryale run -n 4 ./examples/digits --model cnn
//
// Every rank holds the model and trains on its share of each batch. The last
// line, printed by rank 0, has the accuracy on images that were held out, and
// the mean loss of the last epoch on those that were not:
//
//	accuracy=0.9805 loss=0.0123 epochs=30 ranks=4 backend=host seconds=2.1
//
// Gradients may travel as 16 bits, or only the largest of them with the others
// kept for later; a line before the last one says how many bytes that took:
//
//	euryale run -n 4 ./examples/digits --compress bf16
//	euryale run -n 4 ./examples/digits --compress topk=0.05
//
// How much they learn from how many bytes, in each of these ways, is in a picture that
// this makes of trainings on four ranks of its own process:
//
//	digits --plot loss.svg
//
// With --partial ranks average one group of weights in each step, and no gradients.
//
// A training that is stopped goes on from its last epoch, to the same bits as if it had not
// been, if its state is kept and its solver shows that, as Gorgonia's Adam does not:
//
//	euryale run -n 4 ./examples/digits --solver momentum --checkpoint /tmp/digits
//
// Ranks of one machine can be told that they are on several, so that they reduce
// within each and then between them; a line before the last one says how often they did:
//
//	euryale run -n 4 ./examples/digits --topology 2x2
//
// The images are embedded; see ATTRIBUTION.md.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/hierarchy"
	"github.com/euryale-ml/euryale/rendezvous"
)

// config is what the command line says.
type config struct {
	model  string
	epochs int
	batch  int // of all ranks together
	solver string
	lr     float64
	seed   uint64

	compress   string // how gradients travel
	noFeedback bool
	partial    bool // average parameters, not gradients

	topology   string // where ranks are, for EURYALE_TOPOLOGY
	checkpoint string // the directory where the training is kept
	plot       string // the file of a picture, in place of a training
}

func main() {
	cfg, err := parseFlags(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		os.Exit(2) // parseFlags has said why, as the flag package does
	}
	begin := start
	if cfg.plot != "" {
		begin = drawLosses
	}
	if err := begin(cfg); err != nil {
		fmt.Fprintln(os.Stderr, "digits:", err)
		if bad := (*rendezvous.EnvError)(nil); errors.As(err, &bad) {
			os.Exit(bad.ExitCode())
		}
		os.Exit(1)
	}
}

func parseFlags(args []string) (config, error) {
	var cfg config
	flags := flag.NewFlagSet("digits", flag.ContinueOnError)
	flags.StringVar(&cfg.model, "model", "mlp", "mlp or cnn")
	flags.IntVar(&cfg.epochs, "epochs", 30, "how often to go through the data")
	flags.IntVar(&cfg.batch, "batch", 48, "images in a step, of all ranks together")
	flags.StringVar(&cfg.solver, "solver", "adam", "adam or momentum")
	flags.Float64Var(&cfg.lr, "lr", 0, fmt.Sprintf("learning rate; 0 for that of the solver, %v with adam and %v with momentum", rates["adam"], rates["momentum"]))
	flags.Uint64Var(&cfg.seed, "seed", 1, "of the held-out images, the first weights and the shuffles")
	flags.StringVar(&cfg.compress, "compress", "none", "none, f16, bf16, topk=0.05 (the largest 5 % of the gradients) or threshold=0.001")
	flags.BoolVar(&cfg.noFeedback, "no-feedback", false, "forget the gradients that were not sent; training suffers")
	flags.BoolVar(&cfg.partial, "partial", false, "average a part of the weights in each step, and no gradients")
	flags.StringVar(&cfg.checkpoint, "checkpoint", "", "keep the training in this directory after each epoch, and go on with what is there; takes --solver momentum")
	flags.StringVar(&cfg.topology, "topology", "", "MxD: pretend that the ranks are on M machines with D each, whatever they are on")
	flags.StringVar(&cfg.plot, "plot", "", "draw the loss against the bytes sent, for every way to compress, to this .svg or .png; nothing else is done")
	if err := flags.Parse(args); err != nil {
		return cfg, err
	}
	cfg.lr = cmp.Or(cfg.lr, rates[cfg.solver])
	err := cfg.check(flags.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "digits:", err)
	}
	return cfg, err
}

func (cfg config) check(args []string) error {
	switch {
	case len(args) > 0:
		return fmt.Errorf("no arguments are taken, only flags: got %q", args)
	case cfg.epochs < 1:
		return fmt.Errorf("--epochs is %d: at least 1 is needed", cfg.epochs)
	case rates[cfg.solver] == 0:
		return fmt.Errorf("--solver %s: use adam or momentum", cfg.solver)
	case !(cfg.lr > 0 && cfg.lr <= math.MaxFloat64):
		return fmt.Errorf("--lr is %v: a positive number is needed", cfg.lr)
	case cfg.checkpoint != "" && cfg.solver == "adam":
		return errors.New("--checkpoint: the state of Gorgonia's Adam cannot be read, so it could not go on: use --solver momentum")
	case cfg.partial && cfg.compress != "none":
		return fmt.Errorf("--partial sends weights and no gradients, so --compress %s has no meaning: leave out one of them", cfg.compress)
	case cfg.plot != "":
		return cfg.checkPlot()
	}
	_, err := cfg.exchange()
	return err
}

// rates are the learning rates that the solvers have unless --lr says another one.
var rates = map[string]float64{"adam": 0.003, "momentum": 0.05}

func (cfg config) newSolver() gorgonia.Solver {
	if cfg.solver == "momentum" {
		return &autograd.Momentum{Rate: cfg.lr, Momentum: 0.9}
	}
	return gorgonia.NewAdamSolver(gorgonia.WithLearnRate(cfg.lr))
}

func start(cfg config) error {
	if cfg.topology != "" {
		if err := os.Setenv("EURYALE_TOPOLOGY", cfg.topology); err != nil {
			return err
		}
	}
	comm, err := euryale.Init(context.Background())
	if err != nil {
		return err
	}
	// The lock is for ranks that share a process; here each has its own.
	err = run(comm, new(sync.Mutex), cfg, os.Stdout)
	if err != nil {
		comm.Abort(err) // so that the others need not find out by waiting
	}
	return errors.Join(err, comm.Close())
}

// run is what every rank does. Graphs are built under the lock.
func run(comm backend.Communicator, build sync.Locker, cfg config, out io.Writer) error {
	t, err := newTrainer(comm, build, cfg)
	if err != nil {
		return fmt.Errorf("rank %d: %w", comm.Rank(), err)
	}
	begin := time.Now()
	err = t.train(cfg.epochs)
	seconds := time.Since(begin).Seconds()
	if err == nil {
		err = t.report(out, seconds)
	}
	if err = errors.Join(err, t.close()); err != nil {
		return fmt.Errorf("rank %d: %w", comm.Rank(), err)
	}
	return nil
}

// trainer is a model that is trained on all ranks.
type trainer struct {
	comm       backend.Communicator
	training   []image // all ranks have all images
	heldOut    []image
	net, eval  *network // they share their weights
	vm, evalVM gorgonia.VM
	parallel   *autograd.DataParallel
	sampler    *autograd.Sampler
	solver     gorgonia.Solver

	steps      int      // of this process
	averaged   *counted // what weights are averaged through; nil if gradients are
	past       past
	resumed    int    // epochs that were in the checkpoint
	checkpoint string // its directory, if there is to be one
	history    []moment
}

// evalBatch is how many held-out images are classified at a time.
const evalBatch = 60

func newTrainer(comm backend.Communicator, build sync.Locker, cfg config) (*trainer, error) {
	t := &trainer{comm: comm, solver: cfg.newSolver(), checkpoint: cfg.checkpoint, past: past{Flags: cfg.flags()}}
	arch, err := architectureOf(cfg.model)
	if err != nil {
		return nil, err
	}
	exchange, err := cfg.exchange()
	if err != nil {
		return nil, err
	}
	if t.training, t.heldOut, err = load(cfg.seed); err != nil {
		return nil, err
	}
	if t.sampler, err = autograd.NewSampler(len(t.training), cfg.batch, comm.Rank(), comm.Size(), cfg.seed); err != nil {
		return nil, err
	}
	build.Lock()
	values := arch.weights(cfg.seed)
	t.net, t.eval = newNetwork(arch, values, t.sampler.Local()), newNetwork(arch, values, evalBatch)
	build.Unlock()
	if cfg.partial {
		t.averaged = &counted{Communicator: comm}
		comm = t.averaged
	}
	// Not under the lock: New waits for the other ranks.
	if t.parallel, err = autograd.New(comm, t.net.params, exchange...); err != nil {
		return nil, err
	}
	build.Lock()
	defer build.Unlock()
	if err := t.compile(arch); err != nil {
		return nil, errors.Join(err, t.parallel.Close())
	}
	return t, nil
}

// compile builds the graphs and their machines.
func (t *trainer) compile(arch architecture) error {
	if err := t.net.build(arch, t.parallel.Hook); err != nil {
		return err
	}
	if _, err := gorgonia.Grad(t.net.loss, t.net.params...); err != nil {
		return fmt.Errorf("differentiate the model: %w", err)
	}
	if err := t.eval.build(arch, unhooked); err != nil {
		return err
	}
	t.vm, t.evalVM = gorgonia.NewTapeMachine(t.net.g), gorgonia.NewTapeMachine(t.eval.g)
	return nil
}

func (t *trainer) close() error {
	return errors.Join(t.vm.Close(), t.evalVM.Close(), t.parallel.Close())
}

// train goes on until there were so many epochs.
func (t *trainer) train(epochs int) error {
	if err := t.resume(epochs); err != nil {
		return err
	}
	left := epochs - t.past.Epochs
	if left == 0 {
		return nil
	}
	bar := t.progress(left * t.sampler.Steps())
	for range left {
		err := t.epoch(bar)
		if err == nil {
			err = t.save()
		}
		if err != nil {
			return fmt.Errorf("epoch %d: %w", t.past.Epochs, err)
		}
	}
	return bar.Finish()
}

// epoch trains on every image once.
func (t *trainer) epoch(bar *progressbar.ProgressBar) error {
	batches := t.sampler.Epoch(t.past.Epochs)
	t.past.Epochs++
	loss := 0.0
	for _, which := range batches {
		l, err := t.step(which)
		if err != nil {
			return err
		}
		loss += l / float64(len(batches))
		bar.Add(1) // what cannot be drawn is no reason to stop
	}
	var err error
	if t.past.Loss, err = t.mean(loss); err != nil {
		return err
	}
	t.note()
	return nil
}

// step trains on this rank's share of one batch.
func (t *trainer) step(which []int) (loss float64, err error) {
	t.net.feed(t.training, which)
	if err := t.vm.RunAll(); err != nil {
		return 0, errors.Join(t.parallel.Err(), err)
	}
	loss = float64(t.net.loss.Value().Data().(float32))
	grads, err := t.parallel.Sync()
	if err != nil {
		return 0, err
	}
	if err := t.solver.Step(grads); err != nil {
		return 0, fmt.Errorf("solver: %w", err)
	}
	t.vm.Reset()
	t.steps++
	return loss, t.parallel.Average()
}

// progress returns a bar, which is drawn by rank 0 and on a terminal only.
func (t *trainer) progress(steps int) *progressbar.ProgressBar {
	if t.comm.Rank() != 0 || !term.IsTerminal(int(os.Stderr.Fd())) {
		return progressbar.DefaultSilent(int64(steps))
	}
	return progressbar.NewOptions(steps, progressbar.OptionSetWriter(os.Stderr), progressbar.OptionSetDescription("training"),
		progressbar.OptionSetItsString("steps"), progressbar.OptionShowIts(), progressbar.OptionClearOnFinish())
}

// report verifies that all ranks ended with the same model, and prints how good
// it is.
func (t *trainer) report(out io.Writer, seconds float64) error {
	if err := errors.Join(t.parallel.AverageAll(), t.parallel.Check()); err != nil {
		return err
	}
	accuracy, err := t.accuracy()
	if err != nil {
		return err
	}
	if t.comm.Rank() != 0 {
		return nil
	}
	if err := errors.Join(t.origin(out), t.levels(out), t.traffic(out)); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "accuracy=%.4f loss=%.4f epochs=%d ranks=%d backend=%s seconds=%.1f\n",
		accuracy, t.past.Loss, t.past.Epochs, t.comm.Size(), backend.NameOf(t.comm), seconds)
	return err
}

// levels prints how many collectives went through machines, where ranks are on several.
func (t *trainer) levels(out io.Writer) (err error) {
	if h, ok := backend.As[*hierarchy.Communicator](t.comm); ok {
		s := h.Stats()
		_, err = fmt.Fprintf(out, "%d collectives inside and between machines, %d among all ranks at once\n", s.Calls, s.Flat)
	}
	return err
}

// mean returns the mean of a number over the ranks.
func (t *trainer) mean(x float64) (float64, error) {
	all := []float64{x}
	err := backend.Run(t.comm, backend.Collective{Kind: backend.AllReduce, Op: backend.Avg}, backend.Of(all), backend.Of(all))
	return all[0], err
}

// accuracy classifies the held-out images, each rank a part of them.
func (t *trainer) accuracy() (float64, error) {
	var mine []int
	for i := t.comm.Rank(); i < len(t.heldOut); i += t.comm.Size() {
		mine = append(mine, i)
	}
	correct := []int64{0}
	for len(mine) > 0 {
		n := min(evalBatch, len(mine))
		t.eval.feed(t.heldOut, mine[:n])
		if err := t.evalVM.RunAll(); err != nil {
			return 0, fmt.Errorf("evaluate: %w", err)
		}
		correct[0] += int64(t.eval.correct(t.heldOut, mine[:n]))
		t.evalVM.Reset()
		mine = mine[n:]
	}
	if err := backend.Run(t.comm, backend.Collective{Kind: backend.AllReduce}, backend.Of(correct), backend.Of(correct)); err != nil {
		return 0, err
	}
	return float64(correct[0]) / float64(len(t.heldOut)), nil
}
