// Command charlstm trains a recurrent network to predict the next character of a text. Ranks divide
// the pieces of text of a batch.
//
//	euryale run -n 2 ./examples/charlstm
//	euryale run -n 2 ./examples/charlstm --cell gru --data book.txt --hidden 256 --epochs 5
//
// --data takes a text file. Without it the program writes its text: sentences of a small grammar,
// whose verbs agree with a noun some words before. How well they can be predicted is known, and
// printed as grammar=: no model has a lower perplexity. A tenth of the text is held out.
//
// The model is an embedding, two layers of LSTM or GRU, and a classifier. The text is cut into
// pieces, and gradients go back to the beginning of a piece, where the state is zero (truncated
// backpropagation through time). Any number of ranks trains the same model, except for rounding.
//
// Rank 0 prints a line for each epoch, at the end a text by the model, and a last line for
// programs. perplexity is the exponential of the mean loss of a character that was held out, and
// params the SHA-256 of all parameters:
//
//	epoch 8/8: loss=0.5211 perplexity=1.6601 val_loss=0.5069
//	perplexity=1.6601 loss=0.5211 ranks=2 backend=host params=9e1f... seconds=31.5
//
// With --checkpoint DIR the training is saved after each epoch, and on SIGTERM or SIGINT, which end
// it. Started again, it goes on with the same bits.
//
// Files: main.go is the command line and the training, model.go the model and what it writes, and
// grammar.go the text.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/curves"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/fit/progress"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/vm"
)

const (
	clipNorm  = 1.0  // of the gradients
	finalRate = 0.05 // of the highest
	held      = 0.1  // part of the text
	seed      = 1    // of the first weights, and of what the program and the model write
)

// config is the command line.
type config struct {
	data, cell, checkpoint, curve, device    string
	characters, hidden, steps, epochs, batch int
	rate                                     float64
}

func main() {
	var cfg config
	flag.StringVar(&cfg.data, "data", "", "a text file; empty: sentences of a small grammar")
	flag.IntVar(&cfg.characters, "characters", 100000, "of the text that the program writes")
	flag.StringVar(&cfg.cell, "cell", "lstm", "of the layers: lstm or gru")
	flag.IntVar(&cfg.hidden, "hidden", 96, "units of a layer")
	flag.IntVar(&cfg.steps, "steps", 64, "characters of a piece")
	flag.IntVar(&cfg.epochs, "epochs", 8, "how often to go through the text")
	flag.IntVar(&cfg.batch, "batch", 16, "pieces in a step, of all ranks together")
	flag.Float64Var(&cfg.rate, "lr", 0.01, "highest learning rate of Adam")
	flag.StringVar(&cfg.checkpoint, "checkpoint", "", "save here, and go on with what is there")
	flag.StringVar(&cfg.curve, "curve", "", "draw losses and perplexities to this SVG file")
	flag.StringVar(&cfg.device, "device", "auto", "cpu, or auto for a GPU if there is one")
	flag.Parse()
	comm := must(euryale.Init(context.Background()))
	defer comm.Close()
	check(cfg.check(comm.Size()))
	cfg.train(comm)
}

func (cfg config) check(ranks int) error {
	least := min(cfg.characters, cfg.hidden, cfg.steps, cfg.epochs, cfg.batch)
	switch {
	case flag.NArg() > 0:
		return fmt.Errorf("no arguments are taken, only flags: got %q", flag.Args())
	case least < 1:
		return fmt.Errorf("%d is among the flags: sizes and epochs must be at least 1", least)
	case cfg.cell != "lstm" && cfg.cell != "gru":
		return fmt.Errorf("--cell %s: use lstm or gru", cfg.cell)
	case cfg.batch%ranks > 0:
		return fmt.Errorf("--batch %d: use a multiple of %d ranks", cfg.batch, ranks)
	case cfg.device != "cpu" && cfg.device != "auto":
		return fmt.Errorf("--device %s: use cpu or auto", cfg.device)
	}
	return nil
}

// text returns pieces of the text, and its characters. least is the perplexity of the grammar, 0 if
// the text is not the program's.
func (cfg config) text() (pieces fit.Set, characters []rune, least float64) {
	if cfg.data != "" {
		pieces, characters, err := data.Text(cfg.data, cfg.steps)
		check(err)
		return pieces, characters, 0
	}
	dir := must(os.MkdirTemp("", "charlstm"))
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "text")
	text, information := sentences(cfg.characters)
	check(os.WriteFile(file, []byte(text), 0o600))
	pieces, characters, err := data.Text(file, cfg.steps)
	check(err)
	return pieces, characters, math.Exp(information / float64(len(text)))
}

// train trains a model, and prints how well it does.
func (cfg config) train(comm backend.Communicator) {
	began := time.Now()
	device := map[string]backend.Device{"auto": comm.Device(), "cpu": nil}[cfg.device]
	pieces, characters, least := cfg.text()
	training, heldOut := data.Split(pieces, held, seed)
	layout := must(layers.NewLayout(comm, 0, 1, 1))
	defer layout.Close()
	m := cfg.build(layout, cfg.batch/comm.Size(), len(characters))
	learnables := must(m.b.Grad(layers.Whole(m.loss)))
	machine := must(vm.New(m.b.Graph(), device, vm.ClipNorm(clipNorm),
		vm.WithSolver(&autograd.Adam{Rate: cfg.rate}, learnables...), vm.WithDataParallel(comm)))
	defer machine.Close()
	eval := must(vm.New(m.b.Graph(), device, vm.Eval(), vm.Keep(m.loss)))
	defer eval.Close()
	if comm.Rank() == 0 {
		fmt.Printf("%d parameters; %d pieces, and %d held out, of %d characters\n",
			m.b.Parameters(), training.Len(), heldOut.Len(), len(characters))
	}
	steps := cfg.epochs * ((training.Len() + cfg.batch - 1) / cfg.batch)
	options := []fit.Option{
		fit.Epochs(cfg.epochs), fit.Checkpoint(cfg.checkpoint, 0), fit.Progress(os.Stdout),
		fit.OnStep(progress.Bar()),
		fit.Schedule(autograd.Cosine(cfg.rate, finalRate*cfg.rate, steps)),
		fit.Validate(eval, m.data(heldOut), fit.Perplexity()),
	}
	if cfg.curve != "" {
		options = append(options, fit.Log(cfg.curve, curves.SVG))
	}
	result, err := fit.Run(context.Background(), machine, m.data(training), options...)
	if errors.Is(err, fit.ErrStopped) {
		fmt.Fprintln(os.Stderr, "charlstm:", err)
		return
	}
	check(err)
	check(machine.Pull(learnables...))
	if comm.Rank() > 0 {
		return
	}
	fmt.Println(cfg.write(layout, device, learnables, characters))
	if least > 0 {
		fmt.Printf("grammar=%.4f\n", least)
	}
	last := result.Epochs[len(result.Epochs)-1]
	fmt.Printf("perplexity=%.4f loss=%.4f ranks=%d backend=%s params=%s seconds=%.1f\n",
		last.Metrics["perplexity"], last.Loss, comm.Size(), comm.Capabilities().Backend,
		result.Params, time.Since(began).Seconds())
}

func check(err error) {
	if err != nil {
		log.Fatal("charlstm: ", err)
	}
}

func must[T any](value T, err error) T {
	check(err)
	return value
}
