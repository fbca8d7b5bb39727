// Command elastic trains a classifier of handwritten digits on ranks that may die:
//
//	euryale run --elastic -n 3 --standby 1 ./examples/elastic -pause 50ms
//
// Kill one of its processes while it runs: the others train on, a standby takes the place of the
// dead one, and params= at the end is what a training prints in which nobody died, on any number of
// ranks. What makes the training elastic is marked with (*).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"time"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/examples/handwritten"
	"github.com/euryale-ml/euryale/examples/usage"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// A step is a batch of 48 images, in 8 micro-batches.
const micros, size = 8, 6

func main() {
	steps := flag.Int("steps", 300, "how many steps to train")
	every := flag.Int("every", 50, "print the loss after so many steps")
	pause := flag.Duration("pause", 0, "how long to wait in each step, to have time for kill")
	flag.Parse()
	usage.Check("elastic", usage.AtLeast(1, "steps", "every"), usage.NoArguments())
	ctx := context.Background()
	job := must(euryale.JoinElastic(ctx)) // (*)
	images, heldOut, err := handwritten.Load(1, []int{handwritten.Pixels})
	check(err)
	m := newModel(size) // for a micro-batch
	adam := &solver.AdamW{Rate: 0.003}
	machine, err := vm.New(m.x.Graph(), nil, vm.WithSolver(adam, m.weights...),
		vm.WithElastic(ctx, job, micros)) // (*)
	if errors.Is(err, autograd.ErrFinished) {
		return // a standby process that nobody has needed
	}
	check(err)
	defer machine.Close()
	e := machine.Elastic() // (*)
	order := must(autograd.NewSampler(autograd.Solo(), images.Count(), micros*size, 1))
	for e.Next() < *steps {
		batch := batchOf(order, e.Next())
		time.Sleep(*pause)
		loss := must(e.Step(func(micro int) (float64, error) { // (*)
			check(m.feed(images, batch[micro*size:(micro+1)*size]))
			if err := machine.RunAll(); err != nil {
				return 0, err // if a rank was lost, the step is repeated
			}
			return float64(m.loss.Value().Data().(float32)), nil
		}))
		if e.Next()%*every == 0 && e.Rank() == 0 {
			fmt.Printf("step %d: loss %.4f on %d ranks\n", e.Next(), loss, e.Size())
		}
	}
	check(e.Close()) // (*) the others may finish
	fmt.Printf("accuracy=%.4f params=%016x\n", m.accuracy(heldOut), m.hash())
}

// batchOf returns the samples of a step, which depend on nothing else.
func batchOf(order *autograd.Sampler, step int) []int {
	return order.Epoch(step / order.Steps())[step%order.Steps()]
}

// model is a graph for batches of one size.
type model struct {
	x, y, logits, loss *G.Node
	weights            G.Nodes
}

func newModel(batch int) *model {
	g := G.NewGraph()
	matrix := func(name string, init G.InitWFn, shape ...int) *G.Node {
		return G.NewMatrix(g, G.Float32, G.WithShape(shape...), G.WithName(name), G.WithInit(init))
	}
	x := matrix("x", G.Zeroes(), batch, handwritten.Pixels)
	y := G.NewVector(g, tensor.Int, G.WithShape(batch), G.WithName("y"), G.WithInit(G.Zeroes()))
	w1 := matrix("w1", uniform(1), handwritten.Pixels, 128)
	w2 := matrix("w2", uniform(2), 128, handwritten.Labels)
	logits := G.Must(G.Mul(G.Must(G.Rectify(G.Must(G.Mul(x, w1)))), w2))
	loss := G.Must(nn.CrossEntropy(nn.NoLabel, logits, y))
	must(G.Grad(loss, w1, w2))
	return &model{x, y, logits, loss, G.Nodes{w1, w2}}
}

// uniform returns the same weights in each run, so that params= can be compared.
func uniform(seed uint64) G.InitWFn {
	return func(_ tensor.Dtype, shape ...int) any {
		random := rand.New(rand.NewPCG(seed, seed))
		weights := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range weights {
			weights[i] = (random.Float32() - 0.5) / 4
		}
		return weights
	}
}

// feed gives the graph samples.
func (m *model) feed(of handwritten.Samples, samples []int) error {
	for i, s := range samples {
		m.y.Value().Data().([]int)[i] = of.Classes[s]
	}
	return autograd.Rows(m.x.Value().(*tensor.Dense), of.Images, samples)
}

// accuracy returns the share of samples that the trained model classifies rightly.
func (m *model) accuracy(of handwritten.Samples) float64 {
	all := newModel(of.Count())
	for i, w := range m.weights {
		check(G.Let(all.weights[i], w.Value()))
	}
	check(G.Let(all.x, of.Images))
	machine := must(vm.New(all.x.Graph(), nil, vm.Eval(), vm.Keep(all.logits)))
	defer machine.Close()
	check(machine.RunAll())
	right := 0
	found := must(tensor.Argmax(all.logits.Value().(*tensor.Dense), 1)).Data().([]int)
	for i, class := range of.Classes {
		if found[i] == class {
			right++
		}
	}
	return float64(right) / float64(of.Count())
}

// hash returns a hash of the weights.
func (m *model) hash() uint64 {
	h := fnv.New64a()
	for _, w := range m.weights {
		fmt.Fprint(h, w.Value().Data())
	}
	return h.Sum64()
}

func check(err error) { usage.End("elastic", err) }

func must[T any](value T, err error) T {
	check(err)
	return value
}
