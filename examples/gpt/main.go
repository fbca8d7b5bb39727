// Command gpt trains a GPT on text, character by character, divided among ranks: over samples (--dp),
// over the positions of a sequence (--sp) and over weights (--tp), in any product of the three.
//
//	euryale run -n 2 ./examples/gpt
//	euryale run -n 4 ./examples/gpt --sp 2 --tp 2
//	euryale run -n 8 ./examples/gpt --tp 2 --device gpu --precision bf16 --layers 12 --width 768 --heads 12 --context 1024
//
// The text is the source of Go's standard library, which is found through go env GOROOT. --data PATH
// takes a file, or the files of a folder; --data synthetic takes tokens of a random process, and needs no
// files. One file in twenty is held out for evaluation; of fewer files, the last tenth of the text.
//
// The model is a GPT-2 of bytes: learned positions, layer norms before each block, a classifier that
// shares the embedding's weights. Each rank has all learned positions; --positions sinusoidal has none, so that
// --sp W fits contexts W times as long. It is trained by AdamW, with warm-up and a cosine schedule, and the
// global norm of its gradients is clipped. Every layout computes the same model on the same batches,
// so losses agree except for rounding.
//
// Rank 0 prints the size of the model and what a bigram model of the same text would lose, then a
// line for each --eval-every steps, at the end a sample of the model's text, and a last line for
// programs. loss is the mean of the last 20 steps, eval that of held-out text, and params the SHA-256
// of all parameters:
//
//	step 250/2000: loss=2.0514 eval=1.9871 tokens/s=9043 GFLOP/s=48
//	loss=1.5125 eval=1.4883 tokens_per_second=9102 ranks=4 layout=dp2xsp2xtp1 device=host params=9e1f… seconds=172.3
//
// A training step of a model of N parameters, positions left out, L layers, H heads of width Q and a
// context of T takes 6N + 12LHQT floating-point operations for each token (Chowdhery et al., "PaLM",
// 2022, appendix B). Where the peak of the device is known, lines say which part of it that is.
//
// With --reduction tree --micro-batches 8, jobs of 1, 2, 4 and 8 ranks that divide the samples end with the same bits.
//
// With --checkpoint DIR the training is saved every --save-every steps, at its end, and on SIGTERM or
// SIGINT, and resumes from there with the same bits, also after the loss of a rank:
//
//	euryale run -n 2 --max-restarts 3 ./examples/gpt --checkpoint /tmp/gpt
//
// DIR/step-.../model.safetensors is a safetensors file. DIR may hold other files, and the training
// may be resumed on another layout, or another number of ranks.
//
// Files: main.go is the command line, corpus.go the text, model.go the model and what it writes, and
// trainer.go the training. The exit code is 2 for a wrong command line and 1 for other failures.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/examples/cli"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/vm"
)

// config is the parsed command line.
type config struct {
	data                          string
	layers, width, heads, context int
	positions                     string // learned or sinusoidal
	batch                         int    // samples in a step, of all ranks together
	microBatches                  int    // of a batch, of all ranks together; 0 for one of each replica
	steps                         int
	lr, dropout                   float64
	warmUp                        int // steps
	seed                          uint64

	sizes     layers.Sizes // DP is 0 for what the others leave
	device    string
	precision vm.Precision
	compress  string // how gradients travel
	reduction string // in which order they are added: rank or tree

	evalEvery  int // steps
	sample     int // characters at the end
	plot       string
	checkpoint string
	saveEvery  int // steps
}

// tree is a value of --reduction, learned one of --positions.
const (
	tree    = "tree"
	learned = "learned"
)

func main() {
	cfg, err := parseFlags(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		cli.Exit("gpt", err)
	}
	cli.Exit("gpt", start(cfg))
}

// parseFlags parses the command line. The defaults are nanoGPT's for a CPU.
func parseFlags(args []string) (config, error) {
	var cfg config
	flags := flag.NewFlagSet("gpt", flag.ContinueOnError)
	flags.StringVar(&cfg.data, "data", "", "a file or folder of text, or synthetic; empty for the source of Go's standard library")
	flags.IntVar(&cfg.layers, "layers", 4, "blocks of attention and MLP")
	flags.IntVar(&cfg.width, "width", 128, "numbers of each position between blocks")
	flags.IntVar(&cfg.heads, "heads", 4, "heads of attention: a divisor of the width")
	flags.IntVar(&cfg.context, "context", 64, "characters that the model sees at most")
	flags.StringVar(&cfg.positions, "positions", learned, "how the model tells positions apart: learned; or sinusoidal, for long contexts")
	flags.IntVar(&cfg.batch, "batch", 12, "samples in a step, of all ranks together")
	flags.IntVar(&cfg.microBatches, "micro-batches", 0, "divide a batch into so many runs, of all ranks together, for less memory; 0 for one run of each replica")
	flags.IntVar(&cfg.steps, "steps", 2000, "steps of the training")
	flags.Float64Var(&cfg.lr, "lr", 1e-3, "highest learning rate, after the warm-up; it falls to a tenth")
	flags.Float64Var(&cfg.dropout, "dropout", 0, "part of the numbers between layers that a training step sets to 0")
	flags.IntVar(&cfg.warmUp, "warmup", 100, "steps in which the learning rate rises")
	flags.Uint64Var(&cfg.seed, "seed", 1, "of the first weights, the batches, and the sample")
	flags.IntVar(&cfg.sizes.DP, "dp", 0, "ranks that divide the samples; 0 for what --sp and --tp leave")
	flags.IntVar(&cfg.sizes.SP, "sp", 1, "ranks that divide the positions of each sample")
	flags.IntVar(&cfg.sizes.TP, "tp", 1, "ranks that divide the weights")
	flags.StringVar(&cfg.device, "device", "auto", "where to compute: cpu, gpu (that of the backend), or auto (a gpu if the backend has one)")
	flags.Func("precision", "of products: f32 (the default), tf32 or bf16", cfg.setPrecision)
	flags.StringVar(&cfg.compress, "compress", "none", "none, f16, bf16, topk=0.05 (the largest 5 % of the gradients) or threshold=0.001")
	flags.StringVar(&cfg.reduction, "reduction", "rank", "how gradients are added: rank, by rank order; or tree, for the same bits on any number of ranks (--dp), with as many --micro-batches")
	flags.IntVar(&cfg.evalEvery, "eval-every", 250, "print a line, with the loss of held-out text, after so many steps")
	flags.IntVar(&cfg.sample, "sample", 300, "characters to write at the end")
	flags.StringVar(&cfg.plot, "plot", "", "draw the losses to this .svg or .png")
	flags.StringVar(&cfg.checkpoint, "checkpoint", "", "save the training in this directory, and go on with what is there")
	flags.IntVar(&cfg.saveEvery, "save-every", 250, "with --checkpoint: save after so many steps")
	if err := cli.Parse(flags, args); err != nil {
		return cfg, err
	}
	if err := cfg.check(flags.Args()); err != nil {
		return cfg, cli.UsageError{Err: err}
	}
	return cfg, nil
}

func (cfg *config) setPrecision(name string) error {
	for _, p := range []vm.Precision{vm.F32, vm.TF32, vm.BF16} {
		if p.String() == name {
			cfg.precision = p
			return nil
		}
	}
	return errors.New("use f32, tf32 or bf16")
}

func (cfg config) check(args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("no arguments are taken, only flags: got %q", args)
	}
	for _, n := range []struct {
		flag         string
		value, least int
	}{
		{"layers", cfg.layers, 1}, {"width", cfg.width, 1}, {"heads", cfg.heads, 1}, {"context", cfg.context, 1},
		{"batch", cfg.batch, 1}, {"steps", cfg.steps, 1}, {"warmup", cfg.warmUp, 0}, {"dp", cfg.sizes.DP, 0}, {"sp", cfg.sizes.SP, 1},
		{"tp", cfg.sizes.TP, 1}, {"eval-every", cfg.evalEvery, 1}, {"save-every", cfg.saveEvery, 1}, {"sample", cfg.sample, 0},
		{"micro-batches", cfg.microBatches, 0},
	} {
		if n.value < n.least {
			return fmt.Errorf("--%s is %d: at least %d is needed", n.flag, n.value, n.least)
		}
	}
	if ext := strings.ToLower(filepath.Ext(cfg.plot)); cfg.plot != "" && ext != ".svg" && ext != ".png" {
		return fmt.Errorf("--plot %s: the name must end in .svg or .png", cfg.plot)
	}
	switch {
	case !(cfg.lr > 0):
		return fmt.Errorf("--lr is %v: a positive number is needed", cfg.lr)
	case !(cfg.dropout >= 0 && cfg.dropout < 1):
		return fmt.Errorf("--dropout is %v: a number of at least 0 and less than 1 is needed", cfg.dropout)
	case cfg.positions != learned && cfg.positions != "sinusoidal":
		return fmt.Errorf("--positions %s: use learned or sinusoidal", cfg.positions)
	case cfg.reduction != "rank" && cfg.reduction != tree:
		return fmt.Errorf("--reduction %s: use rank or tree", cfg.reduction)
	case cfg.reduction == tree && cfg.microBatches == 0:
		return errors.New("--reduction tree needs a number of --micro-batches, which does not follow from the ranks")
	case cfg.reduction == tree && cfg.sizes.SP > 1:
		return fmt.Errorf("--reduction tree with --sp %d: ranks that divide positions add parts of a sample, and the bits would depend on their number: use --dp, or --reduction rank", cfg.sizes.SP)
	case cfg.reduction == tree && cfg.compress != "none":
		return fmt.Errorf("--reduction tree with --compress %s: each rank would round what it sends, and the bits would depend on their number: use --compress none, or --reduction rank", cfg.compress)
	case cfg.checkpoint != "" && cfg.sizes.TP > 1 && strings.Contains(cfg.compress, "="):
		return fmt.Errorf("--compress %s keeps what it leaves out, which belongs to parts of the weights and cannot be saved whole: use f16 or bf16 with --tp and --checkpoint", cfg.compress)
	}
	_, err := cli.Compression(cfg.compress, true)
	return errors.Join(err, cli.CheckDevice(cfg.device))
}

func start(cfg config) error {
	return cli.Train(cfg.checkpoint != "", func(ctx context.Context, comm backend.Communicator, build sync.Locker) error {
		return run(ctx, comm, build, cfg, os.Stdout)
	})
}

// run is what every rank does. Graphs are built under the lock.
func run(ctx context.Context, comm backend.Communicator, build sync.Locker, cfg config, out io.Writer) (err error) {
	t, err := newTrainer(comm, build, cfg, out)
	if err != nil {
		return err
	}
	err = t.train(ctx)
	if err == nil {
		err = t.report()
	}
	return errors.Join(err, t.close())
}
