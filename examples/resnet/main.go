// Command resnet trains a residual network (He et al., Deep Residual Learning for Image
// Recognition, 2016) to classify pictures of 32 x 32 pixels. Ranks shard the pictures of a batch.
//
//	euryale run -n 2 ./examples/resnet
//	euryale run -n 8 ./examples/resnet --model 18 --data cifar-10-batches-bin --epochs 60 \
//		--batch 1024 --lr 0.4 --ema 0.999
//
// --data takes the folder of CIFAR-10's binary files. Without it the program draws its pictures:
// circles, rings, squares, triangles and crosses, of any colour, size, angle and place, with noise.
// Those of the evaluation are others than those of the training.
//
// Model 18 is ResNet-18 without the pooling of its stem, as is usual for small pictures. Models 8
// and 20 are the paper's for CIFAR-10, with convolutions of 1x1 where a block has more filters than
// its input. Batch norms are over the pictures of all ranks, so any number of ranks trains what one
// does, except for rounding. Training is gradient descent with momentum, a warm-up and a cosine;
// pictures are mirrored and shifted at random. With --ema D the averages of weights are evaluated.
//
// Rank 0 prints a line for each epoch, and a last line for programs; params is the SHA-256 of all
// parameters:
//
//	epoch 10/10: loss=0.0826 accuracy=0.9961
//	accuracy=0.9961 loss=0.0826 ranks=2 backend=host params=ac7cb774... seconds=198.0
//
// With --checkpoint DIR the training is saved after each epoch, and on SIGTERM or SIGINT, which end
// it. Started again, it goes on bitwise identically.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
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
	side        = 32 // of a picture, in pixels
	momentum    = 0.9
	weightDecay = 5e-4
	finalRate   = 0.01 // of the highest
	longestWarm = 200  // steps until the rate is highest
	mostShift   = 4    // of a picture, in pixels
	seed        = 1    // of the first weights
)

// models are the values of --model: the filters of the first blocks, which each stage doubles, and
// the blocks of each stage.
var models = map[int]struct {
	filters int
	stages  []int
}{
	8:  {16, []int{1, 1, 1}},
	20: {16, []int{3, 3, 3}},
	18: {64, []int{2, 2, 2, 2}},
}

// config is the command line.
type config struct {
	model, filters, images, epochs, batch int
	rate, ema                             float64
	data, checkpoint, curve, device       string
}

func main() {
	var cfg config
	flag.IntVar(&cfg.model, "model", 8, "layers of the network: 8, 20 or 18")
	flag.IntVar(&cfg.filters, "filters", 0, "of the first blocks; 0: as in the paper")
	flag.StringVar(&cfg.data, "data", "", "folder of CIFAR-10's binary files; empty: draw shapes")
	flag.IntVar(&cfg.images, "images", 2560, "pictures that are drawn, and half as many held out")
	flag.IntVar(&cfg.epochs, "epochs", 10, "number of epochs")
	flag.IntVar(&cfg.batch, "batch", 64, "pictures in a step, of all ranks together")
	flag.Float64Var(&cfg.rate, "lr", 0.1, "highest learning rate")
	flag.Float64Var(&cfg.ema, "ema", 0, "decay of averages of the weights, such as 0.99; 0: none")
	flag.StringVar(&cfg.checkpoint, "checkpoint", "", "save here, and go on with what is there")
	flag.StringVar(&cfg.curve, "curve", "", "draw losses and accuracies to this SVG file")
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
	usage.Check("resnet", usage.OneOf("model", "8", "18", "20"), usage.NoArguments(),
		usage.OneOf("device", "cpu", "auto"), usage.AtLeast(1, "images", "epochs", "batch"),
		usage.AtLeast(0, "filters", "lr", "ema"),
		usage.Unless(cfg.ema < 1, "ema", "a decay below 1"),
		usage.Unless(cfg.batch%max(1, ranks) == 0, "batch", "a multiple of %d ranks", ranks))
}

// pictures returns samples, [3, 32, 32] and a class, and how many classes there are.
func (cfg config) pictures() (training, heldOut fit.Set, classes int) {
	if cfg.data == "" {
		return shapes(cfg.images, 1), shapes(cfg.images/2, 2), len(kinds)
	}
	files := must(filepath.Glob(filepath.Join(cfg.data, "data_batch_*.bin")))
	test := must(data.CIFAR(10, filepath.Join(cfg.data, "test_batch.bin")))
	return must(data.CIFAR(10, files...)), test, 10
}

// train trains a model, and prints how well it does.
func (cfg config) train(comm backend.Communicator) error {
	began := time.Now()
	device := map[string]backend.Device{"auto": comm.Device(), "cpu": nil}[cfg.device]
	training, heldOut, classes := cfg.pictures()
	layout := must(layers.NewLayout(comm, 0, 1, 1))
	defer layout.Close()
	m := cfg.build(layout, classes)
	sgd := solver.Solver(&solver.Momentum{Rate: cfg.rate, Momentum: momentum,
		WeightDecay: weightDecay})
	if cfg.ema > 0 {
		sgd = &solver.EMA{Solver: sgd, Decay: cfg.ema}
	}
	machine := must(vm.New(m.x.Graph(), device, vm.WithSolver(sgd, m.learnables...),
		m.training, vm.SyncBatchNorm()))
	defer machine.Close()
	eval := must(vm.New(m.x.Graph(), device, vm.Eval(), vm.Keep(m.scores)))
	defer eval.Close()
	if comm.Rank() == 0 {
		fmt.Printf("ResNet-%d has %d parameters; %d pictures, and %d held out\n", cfg.model,
			m.parameters, training.Len(), heldOut.Len())
	}
	steps := max(1, cfg.epochs*(training.Len()/cfg.batch))
	warm := min(longestWarm, steps/10)
	fall := solver.Cosine(cfg.rate, finalRate*cfg.rate, steps-warm)
	options := []fit.Option{
		fit.Epochs(cfg.epochs), fit.Checkpoint(cfg.checkpoint, 0), fit.Progress(os.Stdout),
		fit.OnStep(progress.Bar()), fit.Schedule(solver.Warmup(warm, fall)),
		fit.Validate(eval, fit.Data{Set: heldOut, Inputs: G.Nodes{m.x, m.y}},
			fit.Accuracy(m.scores, m.y)),
		fit.Watch("accuracy"),
	}
	if cfg.curve != "" {
		options = append(options, fit.Log(cfg.curve, curves.SVG))
	}
	result, err := fit.Run(context.Background(), machine, fit.Data{Set: training,
		Inputs: G.Nodes{m.x, m.y}, Loss: m.loss, Augment: augment}, options...)
	if err != nil {
		return err
	}
	if last := result.Epochs[len(result.Epochs)-1]; comm.Rank() == 0 {
		fmt.Printf("accuracy=%.4f loss=%.4f ranks=%d backend=%s params=%s seconds=%.1f\n",
			last.Metrics["accuracy"], last.Loss, comm.Size(), comm.Capabilities().Backend,
			result.Params, time.Since(began).Seconds())
	}
	return nil
}

// network is a graph for this rank's pictures of a batch.
type network struct {
	x, y, scores, loss *G.Node // x is pictures [b, 3, 32, 32], y their classes [b]
	learnables         G.Nodes
	training           vm.Option
	parameters         int
}

func (cfg config) build(layout *layers.Layout, classes int) network {
	b := layers.NewBuilder(G.NewGraph(), layout, tensor.Float32, seed)
	batch := cfg.batch / layout.DP
	x := G.NewTensor(b.Graph(), tensor.Float32, 4, G.WithShape(batch, 3, side, side),
		G.WithName("x"), G.WithInit(G.Zeroes()))
	y := G.NewVector(b.Graph(), tensor.Int, G.WithShape(batch), G.WithName("y"),
		G.WithInit(G.Zeroes()))
	is := models[cfg.model]
	if cfg.filters > 0 {
		is.filters = cfg.filters
	}
	h := b.To(layers.Whole(x), layers.Sequence, layers.Split(0))
	h = b.ConvBlock("stem", h, is.filters, [2]int{3, 3}, nn.ConvOptions{Pad: []int{1, 1}})
	for stage, blocks := range is.stages {
		for i := range blocks {
			name, stride := fmt.Sprintf("stage%d.block%d", stage+1, i+1), 1
			if stage > 0 && i == 0 {
				stride = 2
			}
			h = b.Residual(name, h, is.filters<<stage, stride)
		}
	}
	h = b.Apply("pool", func() (layers.Node, error) {
		n, err := nn.GlobalAvgPool2D(h.Node)
		if err != nil {
			return layers.Node{}, err
		}
		n, err = G.Reshape(n, tensor.Shape{batch, n.Shape()[1]})
		return layers.Place(n, h), err
	})
	scores := b.Bias("classes", b.Dense("classes", h, classes))
	check(b.Err())
	loss := must(nn.CrossEntropy(nn.NoLabel, scores.Node, y))
	return network{x, y, scores.Node, loss, must(b.Grad(layers.Whole(loss))), b.Training(),
		b.Parameters()}
}

// augment mirrors a picture, or does not, and shifts it; what comes in is black.
func augment(r *rand.Rand, row []any) {
	to := row[0].([]float32)
	from := append([]float32(nil), to...)
	mirrored := r.IntN(2) == 0
	right, down := r.IntN(2*mostShift+1)-mostShift, r.IntN(2*mostShift+1)-mostShift
	for i := range to {
		x, y, channel := i%side-right, i/side%side-down, i/(side*side)
		if mirrored {
			x = side - 1 - x
		}
		to[i] = 0
		if min(x, y) >= 0 && max(x, y) < side {
			to[i] = from[(channel*side+y)*side+x]
		}
	}
}

func check(err error) { usage.End("resnet", err) }

func must[T any](value T, err error) T {
	check(err)
	return value
}
