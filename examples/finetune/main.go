// Command finetune trains a language model of a Hugging Face folder on texts and conversations:
// GPT-2, Llama 2 and 3, Mistral, Qwen 2 and 3. Ranks split the samples of a batch and the
// positions of each sample (--sp), and shard the weights (--tp), in any product of the three.
//
//	euryale run -n 2 ./examples/finetune Llama-3.2-1B --data book.txt --out tuned
//	euryale run -n 4 ./examples/finetune gpt2 --data book.txt --lora 8 --tp 2 --out adapter
//	euryale run -n 8 ./examples/finetune Llama-3.1-8B-Instruct --data chats.jsonl \
//		--data more.jsonl --eval held.jsonl --pack --context 4096 --batch 64 --accumulate 4 \
//		--lora 16 --alpha 32 --targets all-linear --precision bf16 --memory 70 \
//		--checkpoint run1 --best --out adapter
//
// It trains all weights, and writes a folder that transformers and examples/generate read; with
// --lora R it trains an adapter of rank R alone, and writes it in PEFT's format.
//
// A file of --data that ends in .jsonl has a document on each line, {"text": "..."} or {"messages":
// [...]}; any other is one document. Conversations are written by the folder's chat template, and
// only their answers count in the loss (package models/texts). Longer texts than --context are cut
// into samples. With --pack samples share a context, and do not see each other.
//
// A step has --batch samples of all ranks together, in --accumulate runs. Samples are shuffled anew
// for each epoch. Losses are means over the targets that count. A tenth of the samples is held
// out, of whole documents that are drawn from all of --data, and 8 batches of these are evaluated;
// or all of --eval. Every layout draws the same samples, so losses agree except for rounding.
//
// Ranks shard the solver's state (--shards 1), gradients (2) and weights (3), and --memory bounds
// the GiB that training takes on each rank, without evaluations: see docs/shards.md and
// docs/memory.md. A line has the tokens/s of all ranks and the TFLOP/s of each since the last one,
// without evaluations and checkpoints, and the time left. With --peak mfu is the share of the
// TFLOP/s that a rank's device has. The last line is for programs: loss is a running mean over
// about 20 steps, eval of held-out samples, and params the SHA-256 of what was trained.
//
//	step 50/200: loss=2.8011 eval=2.9120 tokens/s=15230 tflops=401.2 mfu=0.41 left=1m20s
//	loss=2.7125 eval=2.8883 ranks=2 layout=dp2xsp1xtp1 backend=host params=9e1f... seconds=172.3
//
// With --checkpoint DIR the training is saved every --every steps, and on SIGTERM or SIGINT, which
// end it. The checkpoint of the best evaluation is kept beside the last ones; --best writes its
// weights to --out, without --checkpoint each time that one is better. Started again it goes on
// bitwise identically, or on another layout. All ranks reach DIR; rank 0 writes --out, in files of
// 5 GB. What a program leaves there that is killed meanwhile, the next one removes. If --out cannot
// be written, the error names a checkpoint with the training.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/examples/usage"
	"github.com/euryale-ml/euryale/models"
)

func main() {
	var t trainer
	files := func(to *[]string) func(string) error {
		return func(path string) error { *to = append(*to, path); return nil }
	}
	flag.Func("data", "a file of text, or of documents (.jsonl); give it again for each",
		files(&t.data))
	flag.Func("eval", "a file like those of --data, to evaluate; otherwise a tenth of these",
		files(&t.evalData))
	flag.StringVar(&t.out, "out", "", "write the model here, or the adapter")
	flag.IntVar(&t.lora, "lora", 0, "rank of an adapter, the weights fixed; 0: all weights")
	flag.Float64Var(&t.alpha, "alpha", 0, "scale of the adapter times its rank; 0: the rank")
	flag.StringVar(&t.targets, "targets", "", "layers of the adapter, with commas between, or "+
		"all-linear; empty: as PEFT")
	flag.IntVar(&t.context, "context", 128, "most tokens of a sample")
	flag.BoolVar(&t.pack, "pack", false, "put several documents into a sample")
	flag.IntVar(&t.batch, "batch", 8, "samples in a step, of all ranks together")
	flag.IntVar(&t.accumulate, "accumulate", 1, "runs of a step")
	flag.IntVar(&t.steps, "steps", 200, "steps of the training")
	flag.IntVar(&t.every, "every", 50, "steps between two evaluations, and two checkpoints")
	flag.BoolVar(&t.best, "best", false, "write the weights of the best evaluation")
	flag.Float64Var(&t.lr, "lr", 1e-4, "highest learning rate, after the warm-up")
	flag.IntVar(&t.sp, "sp", 1, "ranks that split the positions of each sample")
	flag.IntVar(&t.tp, "tp", 1, "ranks that shard the weights")
	flag.IntVar(&t.shards, "shards", 0, "shard 1: solver state, 2: gradients, 3: weights, too")
	flag.Float64Var(&t.memory, "memory", 0, "GiB that a rank may take; 0: what it needs")
	flag.StringVar(&t.device, "device", "auto", "cpu, or auto for a GPU if there is one")
	flag.StringVar(&t.precision, "precision", "f32", "of products: f32, tf32 or bf16")
	flag.BoolVar(&t.dropout, "dropout", true, "in training, as config.json asks for it")
	flag.StringVar(&t.checkpoint, "checkpoint", "", "save here, and go on with what is there")
	flag.Float64Var(&t.peak, "peak", 0, "TFLOP/s of a rank's device, for mfu")
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
	t.print("loading %s", t.folder)
	t.model = must(models.Load(t.folder))
	t.read()
	t.build()
	err := t.train(ctx)
	if err == nil {
		t.writeLast()
		t.print("loss=%.4f eval=%.4f ranks=%d layout=%v backend=%s params=%s seconds=%.1f",
			t.past.Loss, t.past.Eval, t.comm.Size(), t.layout, t.comm.Capabilities().Backend,
			t.params, time.Since(began).Seconds())
	}
	check(errors.Join(err, t.eval.Discard(), t.machine.Discard(), t.layout.Close(), t.model.Close(),
		t.comm.Close())) // what they have trained is written
}

// inPlace reports whether --out is the folder of the model, by this or by another path.
func (t *trainer) inPlace() bool {
	from, err := os.Stat(t.folder)
	to, wrong := os.Stat(t.out)
	return filepath.Join(t.out) == t.folder || err == nil && wrong == nil && os.SameFile(from, to)
}

// check ends the program for a wrong command line. ranks is 0 until it is known.
func (t *trainer) check(ranks int) {
	usage.Check("finetune", usage.Given(t.folder != "",
		"finetune FOLDER --data FILE --out ANOTHER"),
		usage.Unless(t.data != nil, "data", "the path of a file"),
		usage.Unless(t.out != "", "out", "a folder to write"),
		usage.Unless(t.out == "" || !t.inPlace(), "out", "another folder"),
		usage.AtLeast(1, "context", "batch", "accumulate", "steps", "every", "sp", "tp"),
		usage.AtLeast(0, "lora", "lr", "alpha", "memory", "peak"), usage.NoArguments(),
		usage.Unless(t.shards >= 0 && t.shards <= 3, "shards", "0 to 3"),
		usage.OneOf("device", "cpu", "auto"), usage.OneOf("precision", "f32", "tf32", "bf16"),
		usage.Unless(t.lora > 0 || t.alpha == 0, "alpha", "it with --lora"),
		usage.Unless(t.lora > 0 || t.targets == "", "targets", "it with --lora"))
	parts := max(1, ranks/(t.sp*t.tp)) * t.accumulate
	usage.Check("finetune", usage.Unless(ranks%(t.sp*t.tp) == 0, "sp", "an --sp and a --tp whose "+
		"product divides %d ranks", ranks), usage.Unless(t.batch%parts == 0, "batch",
		"a multiple of %d: of --accumulate times the ranks that split samples", parts))
}

// layers returns the names of --targets, nil for none.
func (t *trainer) layers() []string {
	if t.targets == "" {
		return nil
	}
	return strings.Split(t.targets, ",")
}

// print prints a line on rank 0.
func (t *trainer) print(format string, args ...any) {
	if t.comm.Rank() == 0 {
		fmt.Printf(format+"\n", args...)
	}
}

func check(err error) { usage.End("finetune", err) }

func must[T any](value T, err error) T {
	check(err)
	return value
}
