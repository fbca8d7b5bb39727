// Command digits trains a classifier of handwritten digits on all ranks: the first program to copy.
//
//	euryale run -n 2 ./examples/digits
//	euryale run -n 2 ./examples/digits -checkpoint /tmp/digits     # started again, it goes on
//
// What makes the ranks train together is marked with (*); the rest is a program of Gorgonia.
// An interrupt ends it after the epoch. The images are embedded: see package examples/handwritten.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log"
	"os"
	"os/signal"
	"syscall"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/examples/handwritten"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

func main() {
	epochs := flag.Int("epochs", 20, "how often to go through the images")
	batch := flag.Int("batch", 48, "images in a step, of all ranks together")
	rate := flag.Float64("rate", 0.003, "learning rate of Adam")
	dir := flag.String("checkpoint", "", "save here after each epoch, and go on with what is there")
	device := flag.String("device", "auto", "where to compute: cpu, or auto for a GPU, if any")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	comm := must(euryale.Init(ctx)) // (*)
	defer comm.Close()
	images, heldOut, err := handwritten.Load(1, []int{handwritten.Pixels})
	check(err)
	sampler := must(autograd.NewSampler(comm, images.Count(), *batch, 1)) // (*) shares of batches
	m := newModel(sampler.Local())
	on, known := map[string]backend.Device{"auto": comm.Device(), "cpu": nil}[*device]
	if !known {
		log.Fatalf("digits: -device %s: use auto or cpu", *device)
	}
	adam := &autograd.Adam{Rate: *rate}
	training := must(vm.New(m.x.Graph(), on,
		vm.WithSolver(adam, m.weights...), vm.WithDataParallel(comm))) // (*)
	defer training.Close()
	evaluation := must(vm.New(m.x.Graph(), on, vm.Eval(), vm.Keep(m.logits)))
	defer evaluation.Close()
	done := 0 // epochs
	if *dir != "" {
		err := training.DataParallel().Load(*dir, adam, &done) // (*)
		if !errors.Is(err, fs.ErrNotExist) {
			check(err)
		}
	}
	for stopped := false; done < *epochs && !stopped; {
		loss := 0.0
		for _, which := range sampler.Epoch(done) {
			m.feed(images, which)
			check(training.RunAll())
			loss += float64(m.loss.Value().Data().(float32)) / float64(sampler.Steps())
		}
		done++
		check(autograd.Mean(comm, &loss)) // (*)
		if comm.Rank() == 0 {
			fmt.Printf("epoch %d/%d: loss=%.4f\n", done, *epochs, loss)
		}
		if *dir != "" {
			check(training.DataParallel().Save(*dir, adam, done)) // (*)
		}
		stopped = must(autograd.Any(comm, ctx.Err() != nil)) // (*) all stop after the same epoch
	}
	evaluate(comm, m, evaluation, heldOut)
}

// evaluate classifies the images, each rank a part of them, draws one, and prints the accuracy.
func evaluate(comm backend.Communicator, m *model, run G.VM, of handwritten.Samples) {
	right, last := 0.0, 0
	for _, which := range must(autograd.Evaluation(comm, of.Count(), m.x.Shape()[0])) { // (*)
		m.feed(of, which)
		check(run.RunAll())
		digits := must(tensor.Argmax(m.logits.Value().(*tensor.Dense), 1)).Data().([]int)
		for i, j := range which {
			if digits[i] == of.Classes[j] {
				right++
			}
		}
		last = digits[0]
	}
	check(autograd.Sum(comm, &right)) // (*)
	if comm.Rank() > 0 {
		return
	}
	for i, grey := range m.x.Value().Data().([]float32)[:handwritten.Pixels] {
		fmt.Printf("%[1]c%[1]c", " .:-=+*%@"[int(grey*8)])
		if (i+1)%handwritten.Side == 0 {
			fmt.Println()
		}
	}
	accuracy, where := right/float64(of.Count()), comm.Capabilities().Backend
	fmt.Printf("is a %d\naccuracy=%.4f ranks=%d backend=%s\n", last, accuracy, comm.Size(), where)
}

// model is a graph for batches of one size.
type model struct {
	x, y, logits, loss *G.Node // x is images [batch, 64], and y the digits they show [batch]
	weights            G.Nodes
}

func newModel(batch int) *model {
	g := G.NewGraph()
	matrix := func(name string, init G.InitWFn, shape ...int) *G.Node {
		return G.NewMatrix(g, G.Float32, G.WithShape(shape...), G.WithName(name), G.WithInit(init))
	}
	x := matrix("x", G.Zeroes(), batch, handwritten.Pixels)
	y := G.NewVector(g, tensor.Int, G.WithShape(batch), G.WithName("y"), G.WithInit(G.Zeroes()))
	w1 := matrix("w1", G.GlorotN(1), handwritten.Pixels, 128)
	w2 := matrix("w2", G.GlorotN(1), 128, handwritten.Labels)
	logits := G.Must(G.Mul(G.Must(G.Rectify(G.Must(G.Mul(x, w1)))), w2))
	loss := G.Must(nn.CrossEntropy(nn.NoLabel, logits, y))
	must(G.Grad(loss, w1, w2))
	return &model{x, y, logits, loss, G.Nodes{w1, w2}}
}

// feed copies samples to the inputs. Where they are fewer than the batch, the rest is zeros.
func (m *model) feed(from handwritten.Samples, which []int) {
	check(autograd.Rows(m.x.Value().(*tensor.Dense), from.Images, which))
	for i, j := range which {
		m.y.Value().Data().([]int)[i] = from.Classes[j]
	}
}

func check(err error) {
	if err != nil {
		log.Fatal("digits: ", err)
	}
}

func must[T any](value T, err error) T {
	check(err)
	return value
}
