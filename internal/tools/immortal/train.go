//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"hash/crc64"
	"os"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/examples/handwritten"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// roleTrain is the first argument of a process of a job.
const roleTrain = "train"

const (
	micros = 8  // micro-batches of a step
	batch  = 4  // samples of a micro-batch
	window = 24 // tokens of a sample
	// toldSteps is after how many steps all ranks tell of their parameters, beside rank 0, which
	// does in each step, and beside the first one of a rank and the last one.
	toldSteps = 16
)

// trainee is a model that a process trains.
type trainee struct {
	b       *layers.Builder
	loss    *gorgonia.Node
	weights gorgonia.Nodes
	feed    func(samples []int) error
}

// train is a process of a job. It tells when it has started and how it goes on.
func train(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet(roleTrain, flag.ContinueOnError)
	name := flags.String("model", "digits", "")
	steps := flags.Int("steps", 100, "")
	pause := flags.Duration("pause", 0, "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	fmt.Printf("pid=%d starts\n", os.Getpid())
	job, err := euryale.JoinElastic(ctx)
	if err != nil {
		return err
	}
	images, _, err := handwritten.Load(1, []int{1, handwritten.Side, handwritten.Side})
	if err != nil {
		return err
	}
	t, err := newTrainee(*name, images)
	if err != nil {
		return err
	}
	adam := &solver.AdamW{Rate: 0.003}
	machine, err := vm.New(t.b.Graph(), nil, vm.WithSolver(adam, t.weights...),
		vm.WithElastic(ctx, job, micros))
	if errors.Is(err, autograd.ErrFinished) {
		return nil // a standby that nobody has needed
	}
	if err != nil {
		return err
	}
	defer machine.Close()
	e := machine.Elastic()
	order, err := autograd.NewSampler(autograd.Solo(), images.Count(), micros*batch, 1)
	for first := true; err == nil && e.Next() < *steps; first = false {
		step := e.Next()
		samples := order.Epoch(step / order.Steps())[step%order.Steps()]
		time.Sleep(*pause)
		_, err = e.Step(func(micro int) (float64, error) {
			err := t.feed(samples[micro*batch:][:batch])
			if err == nil {
				err = machine.RunAll()
			}
			if err != nil {
				return 0, err
			}
			return float64(t.loss.Value().Data().(float32)), nil
		})
		told := first || e.Rank() == 0 || e.Next()%toldSteps == 0 || e.Next() == *steps
		if err == nil && told {
			if err = machine.Pull(); err == nil {
				fmt.Printf("step %d: pid=%d rank %d of %d params=%016x\n", e.Next(), os.Getpid(),
					e.Rank(), e.Size(), t.hash())
			}
		}
	}
	return errors.Join(err, e.Close())
}

// hash returns a hash of the weights, and of the averages of batch norms.
func (t *trainee) hash() uint64 {
	h := crc64.New(crc64.MakeTable(crc64.ECMA))
	for _, w := range t.weights {
		binary.Write(h, binary.LittleEndian, w.Value().Data()) // a hash takes all
	}
	for _, n := range t.b.Graph().AllNodes() {
		if norm, ok := n.Op().(*gorgonia.BatchNormOp); ok {
			mean, variance := norm.Stats()
			binary.Write(h, binary.LittleEndian, mean.Data())
			binary.Write(h, binary.LittleEndian, variance.Data())
		}
	}
	return h.Sum64()
}

// newTrainee returns a model for micro-batches.
func newTrainee(name string, of handwritten.Samples) (*trainee, error) {
	layout, err := layers.NewLayout(autograd.Solo(), 0, 1, 1)
	if err != nil {
		return nil, err
	}
	t := &trainee{b: layers.NewBuilder(gorgonia.NewGraph(), layout, tensor.Float32, 1)}
	var loss layers.Node
	switch name {
	case "gpt":
		loss = t.gpt(of)
	case "digits", "convnet":
		loss, err = t.classifier(name == "convnet", of)
	default:
		err = fmt.Errorf("-model %s: use digits, convnet or gpt", name)
	}
	if err != nil {
		return nil, err
	}
	t.loss = loss.Node
	t.weights, err = t.b.Grad(loss)
	return t, err
}

// classifier builds a perceptron, or a network of convolutions with batch norms.
func (t *trainee) classifier(convolves bool, of handwritten.Samples) (loss layers.Node, err error) {
	b := t.b
	x := gorgonia.NewTensor(b.Graph(), tensor.Float32, 4, gorgonia.WithName("x"),
		gorgonia.WithShape(batch, 1, handwritten.Side, handwritten.Side),
		gorgonia.WithInit(gorgonia.Zeroes()))
	y := gorgonia.NewVector(b.Graph(), tensor.Int, gorgonia.WithName("y"),
		gorgonia.WithShape(batch), gorgonia.WithInit(gorgonia.Zeroes()))
	t.feed = func(samples []int) error {
		for i, s := range samples {
			y.Value().Data().([]int)[i] = of.Classes[s]
		}
		return autograd.Rows(x.Value().(*tensor.Dense), of.Images, samples)
	}
	h := b.To(layers.Whole(x), layers.Sequence, layers.Split(0))
	if convolves {
		h = b.ConvBlock("stem", h, 8, [2]int{3, 3}, nn.ConvOptions{Pad: []int{1, 1}})
		h = b.Residual("block", h, 16, 2)
	}
	h = b.Apply("flat", func() (layers.Node, error) {
		n, err := gorgonia.Reshape(h.Node, tensor.Shape{batch, h.Shape().TotalSize() / batch})
		return layers.Place(n, h), err
	})
	if !convolves {
		h = b.ReLU(b.Dense("hidden", h, 128))
	}
	h = b.Bias("classes", b.Dense("scores", h, handwritten.Labels))
	if err := b.Err(); err != nil {
		return layers.Node{}, err
	}
	n, err := nn.CrossEntropy(nn.NoLabel, h.Node, y)
	return layers.Whole(n), err
}

// gpt builds a small transformer that writes images, whose tokens are the greys of pixels.
func (t *trainee) gpt(of handwritten.Samples) layers.Node {
	const greys, width = 17, 32
	b := t.b
	tokens, targets := b.Tokens("tokens", 1, batch, window), b.Tokens("targets", 1, batch, window)
	embedding := b.Learn("words", layers.Normal(0.02), 0, greys, width)
	x := b.To(b.Embedding(embedding, tokens), layers.Tensor, layers.Replicated)
	x = b.Positions("positions", x)
	h := b.LayerNorm("norm1", x)
	x = b.Add(x, b.Attention("attention", h, layers.AttentionOptions{Heads: 4, Causal: true}))
	x = b.Add(x, b.MLP("mlp", b.LayerNorm("norm2", x), 4*width))
	t.feed = func(samples []int) error {
		var ids, next []int
		for _, s := range samples {
			pixels := of.Images.Data().([]float32)[s*handwritten.Pixels:]
			for i := range window {
				ids = append(ids, int(pixels[i]*(greys-1)))
				next = append(next, int(pixels[i+1]*(greys-1)))
			}
		}
		return errors.Join(tokens.Set(ids), targets.Set(next))
	}
	return b.CrossEntropy(b.Logits(b.LayerNorm("norm", x), embedding), targets)
}
