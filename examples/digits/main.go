// Command digits trains a classifier of handwritten digits on all ranks: the first program to copy.
//
//	euryale run -n 2 ./examples/digits
//	euryale run -n 2 ./examples/digits -checkpoint /tmp/digits     # started again, it goes on
//	euryale run --elastic -n 2 --standby 1 ./examples/digits -elastic   # kill ranks
//
// What makes the ranks train together is marked with (*); the loop is in package fit. A signal to a
// rank ends it after the step that runs, with exit status 143 after SIGTERM: it is not finished.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/examples/handwritten"
	"github.com/euryale-ml/euryale/examples/usage"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// micros is how many micro-batches a step has in an elastic job.
const micros = 8

func main() {
	epochs := flag.Int("epochs", 20, "number of epochs")
	batch := flag.Int("batch", 48, "images in a step, of all ranks together")
	rate := flag.Float64("rate", 0.003, "learning rate of Adam")
	dir := flag.String("checkpoint", "", "save here after each epoch, and go on with what is there")
	device := flag.String("device", "auto", "where to compute: cpu, or auto for a GPU, if any")
	elastic := flag.Bool("elastic", false, "ranks may be lost: for euryale run --elastic")
	flag.Parse()
	usage.Check("digits", usage.OneOf("device", "auto", "cpu"), usage.AtLeast(0, "rate"),
		usage.AtLeast(1, "batch", "epochs"), usage.NoArguments())
	ctx := context.Background()
	comm, parts, together := autograd.Solo(), micros, vm.Option(nil)
	var on backend.Device // nil for the host, or where elastic ranks are
	if *elastic {
		together = vm.WithElastic(ctx, must(euryale.JoinElastic(ctx)), micros)
	} else {
		comm = must(euryale.Init(ctx))                           // (*)
		together, parts = vm.WithDataParallel(comm), comm.Size() // (*)
		on = map[string]backend.Device{"auto": comm.Device(), "cpu": nil}[*device]
	}
	defer comm.Close()
	usage.Check("digits", usage.Unless(*batch%parts == 0, "batch", "a multiple of %d", parts))
	images, heldOut, err := handwritten.Load(1, []int{handwritten.Pixels})
	check(err)
	m := newModel(*batch / parts) // (*) this rank's share of a batch
	training, err := vm.New(m.x.Graph(), on,
		vm.WithSolver(&solver.Adam{Rate: *rate}, m.weights...), together) // (*)
	if errors.Is(err, autograd.ErrFinished) {
		return // an elastic standby that nobody has needed
	}
	check(err)
	defer training.Close()
	end, err := fit.Run(ctx, training, m.data(images, m.loss), fit.Epochs(*epochs),
		fit.Checkpoint(*dir, 0), fit.Progress(os.Stdout))
	last := training.DataParallel().Comm() // of the ranks that are left
	if err = errors.Join(err, training.Close()); err != nil {
		comm.Close() // (*) so that the others do not lose this rank
	}
	check(err)
	evaluation := must(vm.New(m.x.Graph(), on, vm.Eval(), vm.Keep(m.logits)))
	defer evaluation.Close()
	found := must(fit.Evaluate(comm, evaluation, m.data(heldOut, nil),
		fit.Accuracy(m.logits, m.y)))
	if last.Rank() == 0 {
		m.draw()
		fmt.Printf("accuracy=%.4f ranks=%d backend=%s params=%s\n", found["accuracy"],
			last.Size(), last.Capabilities().Backend, end.Params)
	}
}

// model is a graph for batches of one size.
type model struct {
	x, y, logits, loss *G.Node // x is images [batch, 64], and y the digits they show [batch]
	weights            G.Nodes
}

func newModel(batch int) *model {
	g := G.NewGraph()
	matrix := func(name string, n, m int) *G.Node {
		return G.NewMatrix(g, G.Float32, G.WithShape(n, m), G.WithName(name))
	}
	x := matrix("x", batch, handwritten.Pixels)
	y := G.NewVector(g, tensor.Int, G.WithShape(batch), G.WithName("y"), G.WithInit(G.Zeroes()))
	w1, w2 := matrix("w1", handwritten.Pixels, 128), matrix("w2", 128, handwritten.Labels)
	check(layers.Initialize(1, layers.Glorot, w1, w2)) // the same in each run
	logits := G.Must(G.Mul(G.Must(G.Rectify(G.Must(G.Mul(x, w1)))), w2))
	loss := G.Must(nn.CrossEntropy(nn.NoLabel, logits, y))
	must(G.Grad(loss, w1, w2))
	return &model{x, y, logits, loss, G.Nodes{w1, w2}}
}

// data says where samples go in the graph.
func (m *model) data(of handwritten.Samples, loss *G.Node) fit.Data {
	set := must(data.Tensors(of.Images, tensor.New(tensor.WithBacking(of.Classes))))
	return fit.Data{Set: set, Inputs: G.Nodes{m.x, m.y}, Loss: loss}
}

// draw draws the first image of the batch that was classified last.
func (m *model) draw() {
	for i, grey := range m.x.Value().Data().([]float32)[:handwritten.Pixels] {
		fmt.Printf("%[1]c%[1]c", " .:-=+*%@"[int(grey*8)])
		if (i+1)%handwritten.Side == 0 {
			fmt.Println()
		}
	}
	digits := must(tensor.Argmax(m.logits.Value().(*tensor.Dense), 1)).Data().([]int)
	fmt.Printf("is a %d\n", digits[0])
}

func check(err error) { usage.End("digits", err) }

func must[T any](value T, err error) T {
	check(err)
	return value
}
