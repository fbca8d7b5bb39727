// Command convnet trains Gorgonia's convnet example on all ranks: three convolutions, each with a
// rectifier, pooling and dropout, and two layers behind them, on images of handwritten digits.
//
//	euryale run -n 2 ./examples/convnet
//	euryale run -n 2 ./examples/convnet --device gpu
//
// It is the program to copy for a model of one's own: what makes the ranks train together is
// marked with (*). The last line is for programs:
//
//	accuracy=0.9889 loss=0.1522 epochs=12 ranks=1 backend=host seconds=11.1
//
// The images are embedded: see package examples/handwritten.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/examples/handwritten"
	"github.com/euryale-ml/euryale/examples/usage"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

func main() {
	epochs := flag.Int("epochs", 12, "number of epochs")
	batch := flag.Int("batch", 48, "images in a step, of all ranks together")
	rate := flag.Float64("lr", 0.003, "learning rate of Adam")
	device := flag.String("device", "auto", "where to compute: cpu, gpu (that of the backend), "+
		"or auto (a gpu if the backend has one)")
	flag.Parse()
	usage.Check("convnet", usage.OneOf("device", "cpu", "gpu", "auto"), usage.AtLeast(0, "lr"),
		usage.AtLeast(1, "epochs", "batch"), usage.NoArguments())
	comm, err := euryale.Init(context.Background()) // (*)
	if err == nil {
		err = errors.Join(train(comm, new(sync.Mutex), *device, *epochs, *batch, *rate, os.Stdout),
			comm.Close())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "convnet:", err)
		os.Exit(euryale.ExitStatus(err))
	}
}

// train trains a model and prints how well it does. Ranks of one process build graphs under their
// lock.
func train(comm backend.Communicator, build sync.Locker, device string, epochs, batch int,
	rate float64, out io.Writer) (err error) {
	defer func() {
		if err != nil {
			comm.Abort(err) // (*) so that the others learn of it at once
		}
	}()
	on, err := computeOn(comm, device)
	if err != nil {
		return err
	}
	images, heldOut, err := handwritten.Load(1, []int{1, handwritten.Side, handwritten.Side})
	if err != nil {
		return err
	}
	// (*) this rank's share of each batch
	sampler, err := autograd.NewSampler(comm, images.Count(), batch, 1)
	if err != nil {
		return err
	}
	build.Lock()
	m, err := newModel(sampler.Local())
	build.Unlock()
	if err != nil {
		return err
	}
	// (*)
	training, err := vm.New(m.g, on, vm.WithSolver(&solver.Adam{Rate: rate}, m.learnables...),
		vm.WithDataParallel(comm))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, training.Close()) }()
	evaluation, err := vm.New(m.g, on, vm.Eval(), vm.Keep(m.logits))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, evaluation.Close()) }()

	began := time.Now()
	var loss, accuracy float64
	for epoch := range epochs {
		loss = 0
		for step, which := range sampler.Epoch(epoch) {
			if err := m.feed(images, which); err != nil {
				return err
			}
			// other masks in each step, whatever the number of ranks
			m.random.Next((step*comm.Size() + comm.Rank()) * sampler.Local())
			if err := training.RunAll(); err != nil {
				return fmt.Errorf("epoch %d, step %d: %w", epoch+1, step+1, err)
			}
			loss += float64(m.loss.Value().Data().(float32)) / float64(sampler.Steps())
		}
		if err := autograd.Mean(comm, &loss); err != nil { // (*)
			return err
		}
		if accuracy, err = evaluate(comm, m, evaluation, heldOut, sampler.Local()); err != nil {
			return err
		}
		if comm.Rank() == 0 {
			fmt.Fprintf(out, "epoch %d/%d: loss=%.4f accuracy=%.4f\n", epoch+1, epochs, loss,
				accuracy)
		}
	}
	if comm.Rank() == 0 {
		fmt.Fprintf(out, "accuracy=%.4f loss=%.4f epochs=%d ranks=%d backend=%s seconds=%.1f\n",
			accuracy, loss, epochs, comm.Size(), comm.Capabilities().Backend, time.Since(
				began).Seconds())
	}
	return nil
}

// computeOn returns the device of the flag, nil for the host.
func computeOn(comm backend.Communicator, flag string) (backend.Device, error) {
	switch d := comm.Device(); {
	case flag == "cpu":
		return nil, nil
	case flag == "gpu" && d.Name() == "host":
		return nil, fmt.Errorf("--device gpu: backend %s has no GPU: see euryale doctor",
			comm.Capabilities().Backend)
	default:
		return d, nil
	}
}

// evaluate classifies the held-out images, each rank a part of them.
func evaluate(comm backend.Communicator, m *model, machine G.VM, heldOut handwritten.Samples,
	batch int) (accuracy float64, err error) {
	shares, err := autograd.Evaluation(comm, heldOut.Count(), batch) // (*)
	if err != nil {
		return 0, err
	}
	var correct, seen float64
	for _, share := range shares {
		if err := m.feed(heldOut, share); err != nil {
			return 0, err
		}
		if err := machine.RunAll(); err != nil {
			return 0, fmt.Errorf("evaluate: %w", err)
		}
		for i, guess := range m.guesses()[:len(share)] {
			if guess == heldOut.Classes[share[i]] {
				correct++
			}
		}
		seen += float64(len(share))
	}
	err = autograd.Sum(comm, &correct, &seen) // (*)
	return correct / seen, err
}

// model is the graph for a batch of one size.
type model struct {
	g          *G.ExprGraph
	x, y       *G.Node // images [batch, 1, 8, 8], and which digits they show [batch]
	learnables G.Nodes
	logits     *G.Node // [batch, 10]
	loss       *G.Node
	random     *nn.Random // of dropout
	initial    *rand.Rand // of the first values of learnables
}

func newModel(batch int) (*model, error) {
	m := &model{g: G.NewGraph(), random: nn.NewRandom(1), initial: rand.New(rand.NewPCG(1, 1))}
	m.x = G.NewTensor(m.g, tensor.Float32, 4, G.WithShape(batch, 1, handwritten.Side,
		handwritten.Side), G.WithName("x"), G.WithInit(G.Zeroes()))
	m.y = G.NewTensor(m.g, tensor.Int, 1, G.WithShape(batch), G.WithName("y"),
		G.WithInit(G.Zeroes()))
	h := m.x
	var err error
	for i, filters := range []int{32, 64, 128} {
		if h, err = m.convolution(h, i, filters); err != nil {
			return nil, fmt.Errorf("convolution %d: %w", i+1, err)
		}
	}
	if h, err = G.Reshape(h, tensor.Shape{batch, h.Shape().TotalSize() / batch}); err != nil {
		return nil, err
	}
	if h, err = G.Mul(h, m.learnable("w4", h.Shape()[1], 625)); err != nil {
		return nil, err
	}
	if h, err = m.activate(h, 0.55); err != nil {
		return nil, err
	}
	if m.logits, err = G.Mul(h, m.learnable("w5", 625, handwritten.Labels)); err != nil {
		return nil, err
	}
	if m.loss, err = nn.CrossEntropy(nn.NoLabel, m.logits, m.y); err != nil {
		return nil, err
	}
	_, err = G.Grad(m.loss, m.learnables...)
	return m, err
}

// learnable makes a parameter, which begins with random values by its number of inputs (He et al.,
// 2015).
func (m *model) learnable(name string, shape ...int) *G.Node {
	inputs := shape[0]
	if len(shape) == 4 {
		inputs = shape[1] * shape[2] * shape[3]
	}
	values := make([]float32, tensor.Shape(shape).TotalSize())
	for i := range values {
		values[i] = float32(m.initial.NormFloat64() * math.Sqrt(2/float64(inputs)))
	}
	w := G.NewTensor(m.g, tensor.Float32, len(shape), G.WithName(name), G.WithShape(shape...),
		G.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(values))))
	m.learnables = append(m.learnables, w)
	return w
}

// convolution is one of 3x3, and halves the sides of the image.
func (m *model) convolution(x *G.Node, i, filters int) (*G.Node, error) {
	one, two := []int{1, 1}, []int{2, 2}
	w := m.learnable(fmt.Sprint("w", i+1), filters, x.Shape()[1], 3, 3)
	y, err := G.Conv2d(x, w, tensor.Shape{3, 3}, one, one, one)
	if err != nil {
		return nil, err
	}
	if y, err = G.Rectify(y); err != nil {
		return nil, err
	}
	if y, err = G.MaxPool2D(y, tensor.Shape{2, 2}, []int{0, 0}, two); err != nil {
		return nil, err
	}
	return nn.Dropout(0.2, m.random, y)
}

func (m *model) activate(x *G.Node, dropout float64) (*G.Node, error) {
	y, err := G.Rectify(x)
	if err != nil {
		return nil, err
	}
	return nn.Dropout(dropout, m.random, y)
}

// feed puts samples into the inputs. Where there are fewer than the batch, the rest is zeros.
func (m *model) feed(from handwritten.Samples, which []int) error {
	labels := m.y.Value().Data().([]int)
	clear(labels)
	for i, j := range which {
		labels[i] = from.Classes[j]
	}
	return autograd.Rows(m.x.Value().(*tensor.Dense), from.Images, which)
}

// guesses returns the class of the largest logit of each image.
func (m *model) guesses() []int {
	logits := m.logits.Value().Data().([]float32)
	classes := make([]int, m.y.Shape()[0])
	for i := range classes {
		row := logits[i*handwritten.Labels : (i+1)*handwritten.Labels]
		for c, x := range row {
			if x > row[classes[i]] {
				classes[i] = c
			}
		}
	}
	return classes
}
