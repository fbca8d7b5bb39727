package autograd_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
)

// regression is a line through samples: its loss is the mean of (w*x + b - y)^2.
type regression struct {
	graph   *gorgonia.ExprGraph
	x, y    *tensor.Dense // the batch of this rank
	params  gorgonia.Nodes
	loss    *gorgonia.Node
	machine gorgonia.VM
}

// newRegression makes the inputs and the parameters.
func newRegression(batch int) *regression {
	m := &regression{graph: gorgonia.NewGraph()}
	m.x = tensor.New(tensor.WithShape(batch, 1), tensor.Of(tensor.Float64))
	m.y = tensor.New(tensor.WithShape(batch, 1), tensor.Of(tensor.Float64))
	for _, name := range []string{"w", "b"} {
		m.params = append(m.params, gorgonia.NewMatrix(m.graph, tensor.Float64,
			gorgonia.WithName(name), gorgonia.WithShape(1, 1), gorgonia.WithInit(
				gorgonia.Zeroes())))
	}
	return m
}

// build adds the loss. The parameters are used through hooks.
func (m *regression) build(dp *autograd.DataParallel) error {
	x := gorgonia.NodeFromAny(m.graph, m.x, gorgonia.WithName("x"))
	y := gorgonia.NodeFromAny(m.graph, m.y, gorgonia.WithName("y"))
	w, err := dp.Hook(m.params[0])
	if err != nil {
		return err
	}
	line := gorgonia.Must(gorgonia.Mul(x, w))
	b, err := dp.Hook(m.params[1])
	if err != nil {
		return err
	}
	line = gorgonia.Must(gorgonia.BroadcastAdd(line, b, nil, []byte{0}))
	m.loss = gorgonia.Must(
		gorgonia.Mean(gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Sub(line, y))))))
	if _, err := gorgonia.Grad(m.loss, m.params...); err != nil {
		return err
	}
	m.machine = gorgonia.NewTapeMachine(m.graph)
	return nil
}

// samples are 32 points of the line 3x - 1.
func samples() (x, y *tensor.Dense) {
	xs, ys := make([]float64, 32), make([]float64, 32)
	for i := range xs {
		xs[i] = float64(i)/16 - 1
		ys[i] = 3*xs[i] - 1
	}
	return tensor.New(tensor.WithShape(32, 1), tensor.WithBacking(xs)),
		tensor.New(tensor.WithShape(32, 1), tensor.WithBacking(ys))
}

// progress is what a checkpoint keeps beside parameters and solver.
type progress struct{ Epoch int }

// train is what each rank runs: until so many epochs have finished, from the checkpoint in dir if
// there is one.
func train(comm backend.Communicator, build sync.Locker, dir string, epochs int) (err error) {
	const batch, seed = 8, 1
	x, y := samples()
	sampler, err := autograd.NewSampler(comm, x.Shape()[0], batch, seed)
	if err != nil {
		return err
	}
	build.Lock() // Gorgonia builds one graph at a time
	m := newRegression(sampler.Local())
	build.Unlock()
	dp, err := autograd.New(comm, m.params)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dp.Close()) }()
	build.Lock()
	err = m.build(dp)
	build.Unlock()
	if err != nil {
		return err
	}
	defer m.machine.Close()

	adam := &solver.Adam{}
	rate := solver.Warmup(10, solver.Cosine(0.2, 0, 40*sampler.Steps()))
	var at progress
	err = dp.Load(dir, adam, &at)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // training begins
		return err
	}
	if err == nil && comm.Rank() == 0 {
		fmt.Println("goes on after epoch", at.Epoch, "on", comm.Size(), "ranks")
	}
	loss := 0.0
	for ; at.Epoch < epochs; at.Epoch++ {
		loss = 0
		for i, which := range sampler.Epoch(at.Epoch) {
			if err := errors.Join(autograd.Rows(m.x, x, which),
				autograd.Rows(m.y, y, which)); err != nil {
				return err
			}
			if err := m.machine.RunAll(); err != nil {
				return errors.Join(dp.Err(), err)
			}
			loss += m.loss.Value().Data().(float64) / float64(sampler.Steps())
			adam.SetRate(rate(at.Epoch*sampler.Steps() + i))
			if err := dp.Step(adam); err != nil {
				return err
			}
			m.machine.Reset()
		}
	}
	if err := errors.Join(autograd.Mean(comm, &loss), dp.Save(dir, adam, at),
		dp.Check()); err != nil {
		return err
	}
	if comm.Rank() == 0 {
		fmt.Printf("epoch %d: loss %.3f, w and b are %.2f and %.2f\n", at.Epoch, loss,
			m.params[0].Value().Data(), m.params[1].Value().Data())
	}
	return nil
}

// A whole training: two ranks begin it, and four go on from their checkpoint.
func Example() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	checkpoint := filepath.Join(dir, "checkpoint")
	for _, stage := range []struct{ ranks, epochs int }{{2, 20}, {4, 40}} {
		err := euryale.Run(context.Background(), stage.ranks, func(comm backend.Communicator,
			build sync.Locker) error {
			return train(comm, build, checkpoint, stage.epochs)
		})
		if err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// epoch 20: loss 0.001, w and b are [2.96] and [-1.00]
	// goes on after epoch 20 on 4 ranks
	// epoch 40: loss 0.000, w and b are [3.00] and [-1.00]
}
