package vm_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm"
)

// graphOf is the loss sum(x w - y)^2 / 2 of a batch of rows, with parameters w that other graphs
// have, too.
func graphOf(rows int, w *tensor.Dense) (x, y, weights node, loss *gorgonia.Value) {
	g := gorgonia.NewGraph()
	x = gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(rows, 2), gorgonia.WithName("x"))
	y = gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(rows), gorgonia.WithName("y"))
	weights = gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(2), gorgonia.WithName("w"),
		gorgonia.WithValue(w))
	wrong := gorgonia.Must(gorgonia.Sub(gorgonia.Must(gorgonia.Mul(x, weights)), y))
	cost := gorgonia.Must(gorgonia.Mul(gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(
		wrong)))), gorgonia.NewConstant(0.5)))
	loss = new(gorgonia.Value)
	gorgonia.Read(cost, loss)
	if _, err := gorgonia.Grad(cost, weights); err != nil {
		log.Fatal(err)
	}
	return x, y, weights, loss
}

// Graphs of Gorgonia have static shapes. A last batch that is smaller gets a graph and a machine of
// its own, once, whose variables have the same tensors: the solver of either trains both.
func ExampleNew_lastBatch() {
	w := tensor.New(tensor.WithBacking([]float64{0, 0}))
	inputs, targets := []float64{1, 0, 0, 1, 1, 0}, []float64{4, 8, 4}
	solver := gorgonia.NewVanillaSolver(gorgonia.WithLearnRate(0.5))
	for at, rows := 0, 2; at < len(targets); at += rows {
		rows = min(rows, len(targets)-at)
		x, y, weights, loss := graphOf(rows, w) // keep graph and machine by rows to use them again
		m, err := vm.New(x.Graph(), nil)
		if err != nil {
			log.Fatal(err)
		}
		defer m.Close()
		gorgonia.Let(x, tensor.New(tensor.WithShape(rows, 2),
			tensor.WithBacking(inputs[2*at:2*(at+rows)])))
		gorgonia.Let(y, tensor.New(tensor.WithShape(rows), tensor.WithBacking(targets[at:at+rows])))
		if err := m.RunAll(); err != nil {
			log.Fatal(err)
		}
		if err := solver.Step([]gorgonia.ValueGrad{weights}); err != nil {
			log.Fatal(err)
		}
		fmt.Println(rows, "rows: loss", (*loss).Data(), "parameters", w.Data())
	}
	// Output:
	// 2 rows: loss 40 parameters [2 4]
	// 1 rows: loss 2 parameters [3 4]
}

// A machine trains by itself: each RunAll ends with an all-reduce of the gradients and the solver's
// step. Here each rank has its own sample, and all have the same parameters after each step.
func ExampleWithDataParallel() {
	samples := [][]float64{{1, 0, 4}, {0, 1, 8}} // x and y of each rank
	rank := func(comm backend.Communicator, build sync.Locker) error {
		own := samples[comm.Rank()]
		build.Lock() // Gorgonia builds one graph at a time
		w := tensor.New(tensor.WithBacking([]float64{0, 0}))
		x, y, weights, loss := graphOf(1, w)
		build.Unlock()
		m, err := vm.New(x.Graph(), nil, vm.WithDataParallel(comm), // gradients are averaged
			vm.WithSolver(&solver.SGD{Rate: 1}, weights))
		if err != nil {
			return err
		}
		gorgonia.Let(x, tensor.New(tensor.WithShape(1, 2), tensor.WithBacking(own[:2])))
		gorgonia.Let(y, tensor.New(tensor.WithShape(1), tensor.WithBacking(own[2:])))
		for step := range 3 {
			if err := m.RunAll(); err != nil {
				return errors.Join(err, m.Close())
			}
			mean := (*loss).Data().(float64)
			if err := autograd.Mean(comm, &mean); err != nil {
				return errors.Join(err, m.Close())
			}
			if comm.Rank() == 0 {
				fmt.Println("step", step, "loss", mean, "parameters", weights.Value().Data())
			}
		}
		return errors.Join(m.DataParallel().Check(), m.Close()) // the ranks have the same model
	}
	if err := euryale.Run(context.Background(), 2, rank); err != nil {
		log.Fatal(err)
	}
	// Output:
	// step 0 loss 20 parameters [2 4]
	// step 1 loss 5 parameters [3 6]
	// step 2 loss 1.25 parameters [3.5 7]
}
