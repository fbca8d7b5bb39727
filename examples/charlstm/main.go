// Command charlstm trains a recurrent network to predict the next character of a text. Ranks divide
// the pieces of text of a batch.
//
//	euryale run -n 2 ./examples/charlstm
//	euryale run -n 2 ./examples/charlstm --cell gru --data book.txt --hidden 256 --epochs 5
//
// --data takes a text file. Without it the program writes sentences of a small grammar, whose verbs
// agree with a noun some words before. No model has a lower perplexity than grammar=, as printed.
//
// The model is an embedding, two layers of LSTM or GRU, and a classifier. The text is cut into
// pieces, and gradients go back to the beginning of a piece, where the state is zero (truncated
// backpropagation through time). Any number of ranks trains the same model, except for rounding.
//
// At the end rank 0 prints a text by the model, and a line for programs, where perplexity is of the
// characters held out:
//
//	perplexity=1.4678 loss=0.3788 ranks=2 backend=host params=256096b1... seconds=60.6
//
// With --checkpoint DIR the training is saved after each epoch, and on SIGTERM or SIGINT, which end
// it. Started again, it goes on bitwise identically.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/examples/usage"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/curves"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/fit/progress"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

const (
	finalRate   = 0.05 // of the highest
	seed        = 1    // of the first weights, and of what the program and the model write
	written     = 300  // characters
	temperature = 0.8  // less than 1, so that likely characters become more likely
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
	flag.IntVar(&cfg.epochs, "epochs", 8, "number of epochs")
	flag.IntVar(&cfg.batch, "batch", 16, "pieces in a step, of all ranks together")
	flag.Float64Var(&cfg.rate, "lr", 0.01, "highest learning rate of Adam")
	flag.StringVar(&cfg.checkpoint, "checkpoint", "", "save here, and go on with what is there")
	flag.StringVar(&cfg.curve, "curve", "", "draw losses and perplexities to this SVG file")
	flag.StringVar(&cfg.device, "device", "auto", "cpu, or auto for a GPU if there is one")
	flag.Parse()
	cfg.check(0)
	comm := must(euryale.Init(context.Background()))
	cfg.check(comm.Size())
	err := cfg.train(comm)
	check(errors.Join(err, comm.Close()))
}

// check ends the program for a wrong command line. ranks is 0 until it is known.
func (cfg config) check(ranks int) {
	usage.Check("charlstm", usage.OneOf("cell", "lstm", "gru"), usage.NoArguments(),
		usage.OneOf("device", "cpu", "auto"), usage.AtLeast(0, "lr"),
		usage.AtLeast(1, "characters", "hidden", "steps", "epochs", "batch"),
		usage.Unless(cfg.batch%max(1, ranks) == 0, "batch", "a multiple of %d ranks", ranks))
}

// text returns pieces of the text, its characters, and the perplexity of the grammar, 0 for a file.
func (cfg config) text() (pieces fit.Set, characters []rune, least float64) {
	if cfg.data == "" {
		dir := must(os.MkdirTemp("", "charlstm"))
		defer os.RemoveAll(dir)
		text, information := sentences(cfg.characters)
		least = math.Exp(information / float64(len(text)))
		cfg.data = filepath.Join(dir, "text")
		check(os.WriteFile(cfg.data, []byte(text), 0o600))
	}
	pieces, characters, err := data.Text(cfg.data, cfg.steps)
	check(err)
	return pieces, characters, least
}

// train trains a model, and prints how well it does.
func (cfg config) train(comm backend.Communicator) error {
	began := time.Now()
	device := map[string]backend.Device{"auto": comm.Device(), "cpu": nil}[cfg.device]
	pieces, characters, least := cfg.text()
	training, heldOut := data.Split(pieces, 0.1, seed)
	layout := must(layers.NewLayout(comm, 0, 1, 1))
	defer layout.Close()
	m := cfg.build(layout, cfg.batch/comm.Size(), len(characters))
	learnables := must(m.b.Grad(layers.Whole(m.loss)))
	machine := must(vm.New(m.b.Graph(), device, vm.ClipNorm(1),
		vm.WithSolver(&solver.Adam{Rate: cfg.rate}, learnables...), vm.WithDataParallel(comm)))
	defer machine.Close()
	eval := must(vm.New(m.b.Graph(), device, vm.Eval(), vm.Keep(m.loss)))
	defer eval.Close()
	if comm.Rank() == 0 {
		fmt.Printf("%d parameters; %d pieces, and %d held out, of %d characters\n",
			m.b.Parameters(), training.Len(), heldOut.Len(), len(characters))
	}
	steps := cfg.epochs * ((training.Len() + cfg.batch - 1) / cfg.batch)
	options := []fit.Option{fit.Epochs(cfg.epochs), fit.Checkpoint(cfg.checkpoint, 0),
		fit.Progress(os.Stdout), fit.OnStep(progress.Bar()),
		fit.Schedule(solver.Cosine(cfg.rate, finalRate*cfg.rate, steps)),
		fit.Validate(eval, m.data(heldOut), fit.Perplexity())}
	if cfg.curve != "" {
		options = append(options, fit.Log(cfg.curve, curves.SVG))
	}
	result, err := fit.Run(context.Background(), machine, m.data(training), options...)
	if err != nil {
		return err
	}
	check(machine.Pull(learnables...))
	if comm.Rank() > 0 {
		return nil
	}
	fmt.Println(cfg.write(layout, device, learnables, characters))
	if least > 0 {
		fmt.Printf("grammar=%.4f\n", least)
	}
	last := result.Epochs[len(result.Epochs)-1]
	fmt.Printf("perplexity=%.4f loss=%.4f ranks=%d backend=%s params=%s seconds=%.1f\n",
		last.Metrics["perplexity"], last.Loss, comm.Size(), comm.Capabilities().Backend,
		result.Params, time.Since(began).Seconds())
	return nil
}

// model is a graph for some pieces of text.
type model struct {
	b            *layers.Builder
	x, y         *G.Node // characters [pieces, steps], and what follows each of them
	weight       *G.Node // of the loss: see fit.Data
	scores, loss *G.Node // scores of all characters, [pieces, steps, characters]
}

func (cfg config) build(layout *layers.Layout, pieces, characters int) model {
	b := layers.NewBuilder(G.NewGraph(), layout, tensor.Float32, seed)
	input := func(name string) *G.Node {
		return G.NewMatrix(b.Graph(), tensor.Int, G.WithShape(pieces, cfg.steps), G.WithName(name),
			G.WithInit(G.Zeroes()))
	}
	weight := G.NewScalar(b.Graph(), G.Float32, G.WithName("weight"), G.WithValue(float32(0)))
	m := model{b: b, x: input("x"), y: input("y"), weight: weight}
	embedding := b.Learn("characters", layers.Normal(1), layers.Undivided, characters, cfg.hidden)
	h := b.Apply("embedding", func() (layers.Node, error) {
		n, err := nn.Embedding(embedding.Node, m.x)
		return layers.Place(n, embedding), err
	})
	layer := map[string]func(string, layers.Node, int, nn.RecurrentOptions) layers.Node{
		"lstm": b.LSTM, "gru": b.GRU}[cfg.cell]
	for i := range 2 {
		h = layer(fmt.Sprint("layer", i+1), h, cfg.hidden, nn.RecurrentOptions{BatchFirst: true})
	}
	scores := b.Bias("scores", b.Dense("scores", h, characters))
	check(b.Err())
	m.scores = scores.Node
	m.loss = must(G.Mul(m.weight, must(nn.CrossEntropy(nn.NoLabel, m.scores, m.y))))
	return m
}

// data says where pieces of text go in the graph. The last batch of an epoch may have fewer.
func (m model) data(pieces fit.Set) fit.Data {
	none := slices.Repeat([]int{nn.NoLabel}, m.y.Shape()[1])
	return fit.Data{Set: pieces, Inputs: G.Nodes{m.x, m.y}, Loss: m.loss, Weights: m.weight,
		Pad: func(row []any) { copy(row[1].([]int), none) }}
}

// write returns a text by a model with these learnables.
func (cfg config) write(layout *layers.Layout, device backend.Device, learnables G.Nodes,
	characters []rune) string {
	m := cfg.build(layout, 1, len(characters))
	for i, w := range m.b.Learnables() {
		check(G.Let(w, learnables[i].Value()))
	}
	machine := must(vm.New(m.b.Graph(), device, vm.Eval(), vm.Keep(m.scores)))
	defer machine.Close()
	r := rand.New(rand.NewPCG(seed, written))
	text, line := []int{max(0, slices.Index(characters, '\n'))}, ""
	for range written {
		seen := text[max(0, len(text)-cfg.steps):]
		copy(m.x.Value().Data().([]int), seen) // what is behind the text changes nothing
		check(machine.RunAll())
		next, best := 0, math.Inf(-1)
		scores := m.scores.Value().Data().([]float32)[(len(seen)-1)*len(characters):]
		for i, s := range scores[:len(characters)] { // Gumbel's trick: a draw by the scores
			if x := float64(s)/temperature - math.Log(r.ExpFloat64()); x > best {
				next, best = i, x
			}
		}
		text, line = append(text, next), line+string(characters[next])
	}
	return line
}

func check(err error) { usage.End("charlstm", err) }

func must[T any](value T, err error) T {
	check(err)
	return value
}
