package layers_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// Images of a step of the whole, and the classes that they have.
const pictures, channels, side, classes = 8, 2, 6, 3

// classifier has a convolution, blocks of several and a classifier, of this rank's images.
type classifier struct {
	b       *layers.Builder
	x       *gorgonia.Node
	classes *layers.Tokens
	logits  layers.Node
	loss    layers.Node
}

// newClassifier builds a classifier of all images of a replica, of which the rank computes a part.
func newClassifier(l *layers.Layout) *classifier {
	n := pictures / l.DP
	c := &classifier{b: layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)}
	b := c.b
	c.x = variable(b, "x", tensor.Float64, n, channels, side, side)
	c.classes = b.Tokens("classes", 0, n)
	h := b.To(layers.Whole(c.x), layers.Sequence, layers.Split(0))
	h = b.Conv2D("first", h, 4, [2]int{3, 3}, nn.ConvOptions{Pad: []int{1, 1}, Groups: 2})
	h = b.ConvBlock("block", h, 4, [2]int{3, 3}, nn.ConvOptions{Pad: []int{1, 1}})
	h = b.Residual("same", h, 4, 1)
	h = b.Residual("half", h, 6, 2)
	if b.Err() != nil {
		return c
	}
	mean := gorgonia.Must(nn.GlobalAvgPool2D(h.Node))
	h = layers.Place(gorgonia.Must(gorgonia.Reshape(mean, tensor.Shape{h.Shape()[0], 6})), h)
	c.logits = b.Columns("class", b.To(h, layers.Tensor, layers.Copied), 0, classes)
	c.loss = b.CrossEntropy(c.logits, c.classes)
	return c
}

// feed gives the classifier the images of a step of a replica.
func (c *classifier) feed(l *layers.Layout, step int) error {
	n := pictures / l.DP
	data := c.x.Value().Data().([]float64)
	ids := make([]int, n)
	for i := range data {
		k := l.Replica*len(data) + i + 31*step
		data[i] = float64(k*k%17)/4 - 2
	}
	for i := range ids {
		k := l.Replica*n + i
		ids[i] = k * k % classes
	}
	return c.classes.Set(ids)
}

// after is what a training leaves.
type after struct {
	losses, weights, averages, evaluated []float64
}

// training trains for some steps, saves, and evaluates the model that another machine loads.
func training(t *testing.T, k testenv.Kind, s layers.Sizes) after {
	t.Helper()
	const steps = 3
	dir := t.TempDir() + "/saved"
	all := after{losses: make([]float64, steps)}
	within(t, k, s, func(l *layers.Layout, device backend.Device, build sync.Locker) error {
		build.Lock()
		c := newClassifier(l)
		learnables, err := c.b.Grad(c.loss)
		build.Unlock()
		testranks.NoError(err)
		momentum := &solver.Momentum{Rate: 0.1, Momentum: 0.9}
		machine := testranks.Must(vm.New(c.b.Graph(), device, vm.Keep(c.loss.Node),
			vm.WithSolver(momentum, learnables...), vm.SyncBatchNorm(), c.b.Training()))
		for step := range steps {
			if err := errors.Join(c.feed(l, step), machine.RunAll()); err != nil {
				return errors.Join(ops.Cause(err), machine.Close())
			}
			value := c.loss.Value().Data().(float64)
			if err := autograd.Sum(l.Data, &value); err != nil {
				return errors.Join(err, machine.Close())
			}
			if l.Data.Rank() == 0 {
				all.losses[step] = value
			}
		}
		err = errors.Join(machine.Pull(learnables...),
			machine.DataParallel().Save(dir, machine.Solver(), nil))
		if l.Data.Rank() == 0 {
			for _, n := range learnables {
				all.weights = append(all.weights, numbers(n.Value())...)
			}
			all.averages = averages(c.b.Graph())
		}
		testranks.NoError(errors.Join(err, machine.Close()))
		evaluated, err := evaluation(l, device, build, dir)
		if l.Data.Rank() == 0 {
			all.evaluated = evaluated
		}
		return err
	})
	return all
}

// averages returns the running statistics of all batch norms of a graph.
func averages(g *gorgonia.ExprGraph) (all []float64) {
	for _, n := range g.AllNodes() {
		if op, ok := n.Op().(*gorgonia.BatchNormOp); ok {
			mean, variance := op.Stats()
			all = slices.Concat(all, numbers(mean), numbers(variance))
		}
	}
	slices.Sort(all)
	return all
}

// evaluation loads a checkpoint into a new model, and returns the logits of this rank's images.
func evaluation(l *layers.Layout, device backend.Device, build sync.Locker, dir string) (
	[]float64, error) {
	build.Lock()
	c := newClassifier(l)
	learnables, err := c.b.Grad(c.loss)
	build.Unlock()
	if err != nil {
		return nil, err
	}
	momentum := &solver.Momentum{Rate: 0.1, Momentum: 0.9}
	machine, err := vm.New(c.b.Graph(), device, vm.WithSolver(momentum, learnables...),
		vm.SyncBatchNorm(), c.b.Training())
	if err != nil {
		return nil, err
	}
	err = errors.Join(machine.DataParallel().Load(dir, machine.Solver(), nil), machine.Close())
	if err != nil {
		return nil, err
	}
	if machine, err = vm.New(c.b.Graph(), device, vm.Eval(), vm.Keep(c.logits.Node)); err != nil {
		return nil, err
	}
	for i := range 3 {
		if err = errors.Join(err, c.feed(l, i), machine.RunAll()); err != nil {
			break
		}
	}
	logits := numbers(c.logits.Value())
	return logits[:classes], errors.Join(err, machine.Close())
}

// TestConvolutionsTrainAsOneRank: convolutions with batch norms and residual blocks have the
// losses, learnables, running statistics and, from a checkpoint, the evaluation of one rank with
// the whole batch, on ranks that shard samples in either way.
func TestConvolutionsTrainAsOneRank(t *testing.T) {
	want := training(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1})
	require.That(t, want.losses[2] < want.losses[0] && len(want.averages) == 2*(4+4+4+6+6+6),
		"one rank has %+v", want)
	for _, s := range []layers.Sizes{{DP: 2, SP: 1, TP: 1}, {DP: 4, SP: 1, TP: 1},
		{DP: 1, SP: 2, TP: 1}, {DP: 2, SP: 2, TP: 1}} {
		t.Run(s.String(), func(t *testing.T) {
			compareTraining(t, training(t, testenv.Hosts, s), want)
		})
	}
}

// TestConvolutionsTrainAsOneRankOnDevices: so do ranks on devices.
func TestConvolutionsTrainAsOneRankOnDevices(t *testing.T) {
	want := training(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1})
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		compareTraining(t, training(t, k, layers.Sizes{DP: 2, SP: 1, TP: 1}), want)
	})
}

func compareTraining(t *testing.T, got, want after) {
	t.Helper()
	near(t, "losses", got.losses, want.losses, 1e-10)
	near(t, "learnables", got.weights, want.weights, 1e-10)
	near(t, "running statistics", got.averages, want.averages, 1e-10)
	near(t, "evaluation", got.evaluated, want.evaluated, 1e-10)
}

// TestImagesAreDividedAlongTheBatchAlone: other placements are errors of the build.
func TestImagesAreDividedAlongTheBatchAlone(t *testing.T) {
	const seq, tp = layers.Sequence, layers.Tensor
	kernel := [2]int{3, 3}
	for want, build := range map[string]func(b *layers.Builder, x layers.Node) layers.Node{
		"missing a split: To(x, layers.Sequence, layers.Split(0))": func(b *layers.Builder,
			x layers.Node) layers.Node {
			return b.Conv2D("c", x, 2, kernel, nn.ConvOptions{})
		},
		"missing an all-to-all: To(x, layers.Sequence, layers.Split(0))": func(b *layers.Builder,
			x layers.Node) layers.Node {
			return b.ConvBlock("c", b.To(x, seq, layers.Split(2)), 2, kernel, nn.ConvOptions{})
		},
		"missing an all-to-all: To(x, layers.Tensor, layers.Split(0))": func(b *layers.Builder,
			x layers.Node) layers.Node {
			x = b.To(b.To(x, tp, layers.Split(1)), seq, layers.Split(0))
			return b.Residual("r", x, 2, 1)
		},
		"missing an all-gather: To(x, layers.Tensor, layers.Replicated)": func(b *layers.Builder,
			x layers.Node) layers.Node {
			return b.BatchNorm("n", b.To(b.To(x, tp, layers.Split(0)), seq, layers.Split(0)))
		},
		"missing an all-reduce": func(b *layers.Builder, x layers.Node) layers.Node {
			return b.ReLU(partial(b, x))
		},
	} {
		for ranks := 1; ranks <= 2; ranks++ {
			t.Run(fmt.Sprint(want, " on ", ranks), func(t *testing.T) {
				within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: ranks, TP: 1},
					func(l *layers.Layout, _ backend.Device, lock sync.Locker) error {
						lock.Lock()
						defer lock.Unlock()
						b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
						x := layers.Whole(variable(b, "x", tensor.Float64, 2, 2, 4, 4))
						if strings.Contains(want, "all-reduce") {
							x = layers.Whole(variable(b, "m", tensor.Float64, 2, 4, 4))
						}
						build(b, x)
						require.Fails(t, "b.Err", b.Err(), layers.ErrPlacement, want)
						return nil
					})
			})
		}
	}
}

// TestNilImagesAreErrors: of each layer of images.
func TestNilImagesAreErrors(t *testing.T) {
	within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1},
		func(l *layers.Layout, _ backend.Device, _ sync.Locker) error {
			none := layers.Whole(nil)
			for name, build := range map[string]func(b *layers.Builder) layers.Node{
				"Conv2D": func(b *layers.Builder) layers.Node {
					return b.Conv2D("c", none, 2, [2]int{1, 1}, nn.ConvOptions{})
				},
				"BatchNorm": func(b *layers.Builder) layers.Node { return b.BatchNorm("n", none) },
				"ReLU":      func(b *layers.Builder) layers.Node { return b.ReLU(none) },
				"Residual": func(b *layers.Builder) layers.Node {
					return b.Residual("r", none, 2, 1)
				},
			} {
				b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
				build(b)
				require.Fails(t, name, b.Err(), backend.ErrArgument, "x is nil")
			}
			return nil
		})
}

// convolved is a block of convolutions, for which each position is an image.
func convolved(b *layers.Builder, in ...layers.Node) layers.Node {
	turned := in[0].Placed(layers.Sequence) == layers.Split(1)
	turn := func(x layers.Node) layers.Node {
		if !turned {
			return x
		}
		return layers.Place(gorgonia.Must(gorgonia.Transpose(x.Node, 1, 0, 2)), x, 1, 0, 2)
	}
	x := turn(in[0])
	s := x.Shape()
	h := layers.Place(gorgonia.Must(gorgonia.Reshape(x.Node, tensor.Shape{s[0], 1, s[1], s[2]})), x)
	h = b.Conv2D("in", h, 4, [2]int{3, 3}, nn.ConvOptions{Pad: []int{1, 1}})
	h = b.Conv2D("depth", b.ReLU(h), 4, [2]int{3, 3}, nn.ConvOptions{Pad: []int{1, 1}, Groups: 4})
	h = b.Conv2D("out", h, 1, [2]int{1, 1}, nn.ConvOptions{})
	if b.Err() != nil {
		return h
	}
	return turn(layers.Place(gorgonia.Must(gorgonia.Reshape(h.Node, s.Clone())), h))
}
