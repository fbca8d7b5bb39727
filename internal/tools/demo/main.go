// Command demo trains a classifier of handwritten digits, data-parallel.
//
//	euryale run -n 4 ./internal/tools/demo --model cnn
//
// Every rank holds the model and trains on its share of each batch. Rank 0 prints a line
// for each epoch: the training loss, the accuracy on images that were held out, the images
// of all ranks per second, and with --machine tape the share of that time in which rank 0 waited
// for the other ranks' gradients. On a terminal there is a progress bar, too. The last line is for
// programs; loss is the mean over all ranks in the last epoch, and params the SHA-256 of all
// parameters:
//
//	epoch 30/30: loss=0.0123 accuracy=0.9805 images/s=70512
//	accuracy=0.9805 loss=0.0123 epochs=30 ranks=4 backend=host params=9e1f… seconds=2.1
//
// Gradients may travel in 16 bits, or only the largest of them, while the others are kept for
// the next step. A line before the last one prints the bytes sent:
//
//	euryale run -n 4 ./internal/tools/demo --compress bf16
//	euryale run -n 4 ./internal/tools/demo --compress topk=0.05
//
// This draws the loss against the bytes sent, for each of these ways, from trainings on four
// ranks in one process:
//
//	demo --plot loss.svg
//
// With --reduction tree the training has the same bits on any number of ranks that divides
// --micro-batches into powers of two: each of these prints the same params= and loss=
//
//	euryale run -n 1 ./internal/tools/demo --batch 64 --reduction tree --steps 200
//	euryale run -n 8 ./internal/tools/demo --batch 64 --reduction tree --steps 200
//
// With --partial ranks average one group of weights in each step instead of gradients.
//
// Each rank computes on the GPU of its backend if that has one, unless --device cpu. With --machine
// tape, Gorgonia's own machine runs the graphs, on the CPU, and gives the same accuracy. Plans have
// the exchange of gradients and the solver in them, except with --partial.
//
// With --checkpoint the training is saved after each epoch, every --save-every steps, and on
// SIGTERM or SIGINT, which then end it. When it is started again it resumes at that step, and ends
// with the same bits as if it had not been stopped. So it also survives the loss of a rank:
//
//	euryale run -n 4 --max-restarts 3 --grace 30s ./internal/tools/demo --checkpoint /tmp/digits
//
// --topology declares several machines on one, so that ranks reduce within each and then between
// them. A line before the last one prints how often they did:
//
//	euryale run -n 4 ./internal/tools/demo --topology 2x2
//
// The exit code is 2 for a wrong command line and 1 for other failures.
//
// The images are embedded: see package examples/handwritten.
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
	"slices"
	"strings"
	"sync"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
)

// config is the parsed command line.
type config struct {
	model    string
	machine  string // that runs the graphs
	device   string // on which it runs them
	epochs   int
	steps    int // in place of epochs, 0 for these
	batch    int // of all ranks together
	solver   string
	lr       float64
	schedule string
	seed     uint64

	reduction    string // in which order gradients are added
	microBatches int    // of a step, where that is a tree

	compress   string // how gradients travel
	noFeedback bool
	partial    bool // average parameters, not gradients

	topology   string // where ranks are, for EURYALE_TOPOLOGY
	checkpoint string // the directory where the training is kept
	saveEvery  int    // steps; 0 for each epoch
	plot       string // the file of a picture, in place of a training
}

func main() {
	cfg, err := parseFlags(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		leave("demo", err)
	}
	begin := start
	if cfg.plot != "" {
		begin = drawLosses
	}
	leave("demo", begin(cfg))
}

func parseFlags(args []string) (config, error) {
	var cfg config
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.StringVar(&cfg.model, "model", "mlp", "mlp or cnn")
	flags.StringVar(&cfg.machine, "machine", "plan", "what runs the graphs: plan (package vm), "+
		"or tape (Gorgonia's tape machine)")
	flags.StringVar(&cfg.device, "device", "auto", "where plans run: cpu, gpu (that of the "+
		"backend), or auto (a gpu if the backend has one)")
	flags.IntVar(&cfg.epochs, "epochs", 30, "how often to go through the data")
	flags.IntVar(&cfg.steps, "steps", 0, "how many batches to train on, in place of --epochs; 0 "+
		"for these")
	flags.IntVar(&cfg.batch, "batch", 48, "images in a step, of all ranks together")
	flags.StringVar(&cfg.solver, "solver", "adam", "sgd, momentum, adam or adamw")
	flags.Float64Var(&cfg.lr, "lr", 0, "learning rate; 0 for that of the solver: "+rateList())
	flags.StringVar(&cfg.schedule, "schedule", "constant",
		"how the learning rate changes: constant, or cosine, which falls to 0 at the end")
	flags.Uint64Var(&cfg.seed, "seed", 1, "of the held-out images, the first weights and the "+
		"shuffles")
	flags.StringVar(&cfg.reduction, "reduction", "rank", "how gradients are added: rank (by "+
		"rank), or tree (of micro-batches: the same bits on any number of ranks)")
	flags.IntVar(&cfg.microBatches, "micro-batches", 8, "with --reduction tree: of a batch, on "+
		"all ranks together")
	flags.StringVar(&cfg.compress, "compress", "none", "none, f16, bf16, topk=0.05 (the largest "+
		"5 % of the gradients) or threshold=0.001")
	flags.BoolVar(&cfg.noFeedback, "no-feedback", false, "forget the gradients that were not "+
		"sent; training suffers")
	flags.BoolVar(&cfg.partial, "partial", false, "average a part of the weights in each step, "+
		"and no gradients")
	flags.StringVar(&cfg.checkpoint, "checkpoint", "", "save the training in this directory "+
		"after each epoch and on SIGTERM or SIGINT, and go on with what is there")
	flags.IntVar(&cfg.saveEvery, "save-every", 0, "with --checkpoint: also save after so many "+
		"steps; 0 for epochs only")
	flags.StringVar(&cfg.topology, "topology", "", "MxD: pretend that the ranks are on M "+
		"machines with D each, whatever they are on")
	flags.StringVar(&cfg.plot, "plot", "", "draw the loss against the bytes sent, for every way "+
		"to compress, to this .svg or .png; nothing else is done")
	if err := parseArgs(flags, args); err != nil {
		return cfg, err
	}
	cfg.lr = cmp.Or(cfg.lr, rates[cfg.solver])
	if err := cfg.check(flags.Args()); err != nil {
		return cfg, usageError{Err: err}
	}
	return cfg, nil
}

// maxEpochs keeps the number of steps in range.
const maxEpochs = 1_000_000

func (cfg config) check(args []string) error {
	if _, err := architectureOf(cfg.model); err != nil {
		return fmt.Errorf("--model: %w", err)
	}
	if err := checkDevice(cfg.device); err != nil {
		return err
	}
	switch {
	case len(args) > 0:
		return fmt.Errorf("no arguments are taken, only flags: got %q", args)
	case machines[cfg.machine] == nil:
		return fmt.Errorf("--machine %s: use plan or tape", cfg.machine)
	case cfg.machine == "tape" && cfg.device == "gpu":
		return errors.New("--machine tape runs on the cpu: leave out --device gpu")
	case cfg.epochs < 1 || cfg.epochs > maxEpochs:
		return fmt.Errorf("--epochs is %d: it must be 1 to %d", cfg.epochs, maxEpochs)
	case cfg.steps < 0 || cfg.steps > maxEpochs:
		return fmt.Errorf("--steps is %d: it must be 1 to %d, or 0 for epochs", cfg.steps,
			maxEpochs)
	case cfg.batch < 1:
		return fmt.Errorf("--batch is %d: at least 1 is needed", cfg.batch)
	case rates[cfg.solver] == 0:
		return fmt.Errorf("--solver %s: use sgd, momentum, adam or adamw", cfg.solver)
	case !(cfg.lr > 0 && cfg.lr <= math.MaxFloat64):
		return fmt.Errorf("--lr is %v: a positive number is needed", cfg.lr)
	case cfg.schedule != "constant" && cfg.schedule != "cosine":
		return fmt.Errorf("--schedule %s: use constant or cosine", cfg.schedule)
	case cfg.saveEvery < 0 || cfg.saveEvery > 0 && cfg.checkpoint == "":
		return fmt.Errorf(
			"--save-every is %d: it must be a number of steps, and needs --checkpoint",
			cfg.saveEvery)
	case cfg.reduction != "rank" && cfg.reduction != "tree":
		return fmt.Errorf("--reduction %s: use rank or tree", cfg.reduction)
	case cfg.inTree() && (cfg.microBatches < 1 || cfg.batch%cfg.microBatches != 0):
		return fmt.Errorf("--micro-batches is %d: a batch of %d does not divide into as many: "+
			"use a divisor", cfg.microBatches, cfg.batch)
	case cfg.inTree() && cfg.machine != "plan":
		return fmt.Errorf("--reduction tree is for plans: leave out --machine %s", cfg.machine)
	case cfg.inTree() && (cfg.partial || cfg.compress != "none"):
		return errors.New("--reduction tree sends whole gradients: leave out --compress and " +
			"--partial")
	case cfg.partial && cfg.compress != "none":
		return fmt.Errorf("--partial sends weights and no gradients, so --compress %s has no "+
			"meaning: leave out one of them", cfg.compress)
	case cfg.plot != "":
		return cfg.checkPlot()
	}
	_, err := cfg.exchange()
	return err
}

// inTree reports whether gradients are added in a tree.
func (cfg config) inTree() bool { return cfg.reduction == "tree" }

// rates are the learning rates that the solvers have unless --lr says another one.
var rates = map[string]float64{"sgd": 0.2, "momentum": 0.05, "adam": 0.003, "adamw": 0.003}

func rateList() string {
	var list []string
	for solver, rate := range rates {
		list = append(list, fmt.Sprintf("%s %v", solver, rate))
	}
	slices.Sort(list)
	return strings.Join(list, ", ")
}

// newSolver returns a solver whose state can be saved.
func (cfg config) newSolver() solver.Solver {
	switch cfg.solver {
	case "sgd":
		return &solver.SGD{Rate: cfg.lr}
	case "momentum":
		return &solver.Momentum{Rate: cfg.lr, Momentum: 0.9}
	case "adamw":
		return &solver.AdamW{Rate: cfg.lr, WeightDecay: 0.01}
	}
	return &solver.Adam{Rate: cfg.lr}
}

// rateAt returns the learning rate of each step of a training.
func (cfg config) rateAt(steps int) solver.Schedule {
	if cfg.schedule == "cosine" {
		return solver.Cosine(cfg.lr, 0, steps)
	}
	return solver.Constant(cfg.lr)
}

func start(cfg config) error {
	if cfg.topology != "" {
		if err := os.Setenv("EURYALE_TOPOLOGY", cfg.topology); err != nil {
			return err
		}
	}
	return inJob(cfg.checkpoint != "", func(ctx context.Context, comm backend.Communicator,
		build sync.Locker) error {
		return run(ctx, comm, build, cfg, os.Stdout)
	})
}

// deviceOf returns where the plans of a rank run; nil is the host.
func (cfg config) deviceOf(comm backend.Communicator) (backend.Device, error) {
	if cfg.machine == "tape" {
		return nil, nil
	}
	return chooseDevice(cfg.device, comm)
}

// run is what every rank does. Graphs are built under the lock.
func run(ctx context.Context, comm backend.Communicator, build sync.Locker, cfg config,
	out io.Writer) error {
	t, err := newTrainer(comm, build, cfg)
	if err != nil {
		return err
	}
	t.out = out
	err = t.train(ctx, cfg.epochs)
	if err == nil {
		err = t.report()
	}
	return errors.Join(err, t.close())
}
