// Command gpt trains a GPT on text, character by character. Ranks shard the samples of a batch,
// the positions of each sample (--sp), the weights (--tp), or any product of the three.
//
//	euryale run -n 2 ./examples/gpt
//	euryale run -n 4 ./examples/gpt --sp 2 --tp 2
//	euryale run -n 8 ./examples/gpt --precision bf16 --layers 12 --width 768 --heads 12
//
// The text is the source of Go's standard library; --data PATH takes a file, or the files of a
// folder. One file in twenty is held out, or of fewer files the last tenth of the text.
//
// The model is a GPT-2 of bytes: learned positions, layer norms before each block, a classifier
// that shares the embedding's weights. It is trained by AdamW with a warm-up and a cosine schedule,
// and the global norm of its gradients is clipped. Every layout computes the same model on the same
// batches, so losses agree except for rounding. With --tree N the bits agree, on any number of
// ranks that shard the samples: gradients are added in a tree of N micro-batches.
//
// Rank 0 prints a line for each --every steps, at the end a text by the model, and a last line for
// programs. loss is the mean of the last 20 steps, eval the loss of held-out text, and params the
// SHA-256 of all parameters:
//
//	step 250/2000: loss=2.0514 eval=1.9871 tokens/s=9043
//	loss=1.5125 eval=1.4883 ranks=4 layout=dp2xsp2xtp1 backend=host params=9e1f… seconds=172.3
//
// With --checkpoint DIR the training is saved every --every steps, and on SIGTERM or SIGINT, which
// end it. It resumes bitwise identically, after the loss of a rank, too, or on another layout:
//
//	euryale run -n 2 --max-restarts 3 ./examples/gpt --checkpoint /tmp/gpt
//
// DIR/step-.../model.safetensors is a safetensors file. DIR may be in an object store, such as
// s3://bucket/gpt (package bucket).
//
// With --elastic ranks may be lost and replaced. The bits are as by --tree without it:
//
//	euryale run --elastic -n 2 --standby 1 ./examples/gpt --elastic --tree 4   # kill ranks
//
// With --shards 1 to 3 the ranks shard the solver's state, gradients and parameters, in an elastic
// job with a copy of each shard.
//
// The exit status is 2 for a wrong command line, 128 + n after signal n, and 1 for other failures.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"os/signal"
	"syscall"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/examples/usage"
	"github.com/euryale-ml/euryale/vm"
)

// config is the command line.
type config struct {
	data, device, precision, checkpoint string
	layers, width, heads, context       int
	batch, tree, steps, every           int
	lr                                  float64
	sp, tp, shards                      int
}

// precisions are the values of --precision.
var precisions = map[string]vm.Precision{"f32": vm.F32, "tf32": vm.TF32, "bf16": vm.BF16}

func main() {
	var cfg config
	flag.StringVar(&cfg.data, "data", "", "a file or folder of text; empty: Go's standard library")
	flag.IntVar(&cfg.layers, "layers", 4, "blocks of attention and MLP")
	flag.IntVar(&cfg.width, "width", 128, "numbers of each position between blocks")
	flag.IntVar(&cfg.heads, "heads", 4, "heads of attention: a divisor of the width")
	flag.IntVar(&cfg.context, "context", 64, "characters that the model sees at most")
	flag.IntVar(&cfg.batch, "batch", 12, "samples in a step, of all ranks together")
	flag.IntVar(&cfg.tree, "tree", 0, "add gradients in a tree of micro-batches; 0: by rank")
	flag.IntVar(&cfg.steps, "steps", 2000, "steps of the training")
	flag.IntVar(&cfg.every, "every", 250, "steps between two evaluations, and two checkpoints")
	flag.Float64Var(&cfg.lr, "lr", 1e-3, "highest learning rate, after the warm-up")
	flag.IntVar(&cfg.sp, "sp", 1, "ranks that shard the positions of each sample")
	flag.IntVar(&cfg.tp, "tp", 1, "ranks that shard the weights")
	flag.IntVar(&cfg.shards, "shards", 0, "shard 1: solver state, 2: gradients, 3: weights, too")
	flag.StringVar(&cfg.device, "device", "auto", "cpu, or auto for a GPU if there is one")
	flag.StringVar(&cfg.precision, "precision", "f32", "of products: f32, tf32 or bf16")
	flag.StringVar(&cfg.checkpoint, "checkpoint", "", "save here, and go on with what is there")
	elastic := flag.Bool("elastic", false, "ranks may be lost: for euryale run --elastic")
	flag.Parse()
	cfg.check(0)
	usage.Check("gpt", usage.Unless(!*elastic || cfg.tree > 0, "tree", "a number of micro-batches "+
		"with --elastic"))
	ctx := context.Background()
	comm, job := autograd.Solo(), autograd.Job(nil)
	if *elastic {
		job = must(euryale.JoinElastic(ctx))
	} else {
		comm = must(euryale.Init(ctx))
		cfg.check(comm.Size())
	}
	if *elastic || cfg.checkpoint != "" { // otherwise a signal ends the program at once
		ctx, _ = signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
	}
	t := newTrainer(comm, job, cfg)
	err := t.train(ctx)
	if err == nil {
		t.report()
	}
	check(errors.Join(err, t.machine.Close(), t.layout.Close(), comm.Close()))
}

// check ends the program for a wrong command line. ranks is 0 until it is known.
func (cfg config) check(ranks int) {
	usage.Check("gpt", usage.OneOf("device", "cpu", "auto"), usage.NoArguments(),
		usage.OneOf("precision", "f32", "tf32", "bf16"), usage.AtLeast(0, "tree", "lr", "shards"),
		usage.AtLeast(1, "layers", "width", "heads", "context", "batch", "steps", "every", "sp",
			"tp"))
	parts := cmp.Or(cfg.tree, ranks/(cfg.sp*cfg.tp), 1)
	usage.Check("gpt", usage.Unless(cfg.tree == 0 || cfg.sp == 1, "sp", "1 with --tree, whose "+
		"bits would depend on it"),
		usage.Unless(cfg.shards <= 3, "shards", "0 to 3"),
		usage.Unless(cfg.width%cfg.heads == 0, "heads", "a divisor of --width %d", cfg.width),
		usage.Unless(ranks%(cfg.sp*cfg.tp) == 0, "sp", "an --sp and a --tp whose product divides "+
			"%d ranks", ranks),
		usage.Unless(cfg.batch%parts == 0, "batch", "a multiple of %d: of --tree, or of the ranks "+
			"by --sp and --tp", parts))
}

func check(err error) { usage.End("gpt", err) }

func must[T any](value T, err error) T {
	check(err)
	return value
}
