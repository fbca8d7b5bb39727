//go:build linux

package main

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
)

// rate is a power of two, and data are small integers: training is exact.
const rate = 1. / 8

// training is a model whose gradients are its data:
//
//	loss = sum over i of sum(w[i] * x[i])
//
// so that what training must lead to can be told.
type training struct {
	comm         backend.Communicator
	steps        int
	hooks        bool
	who          int // added to ranks: another training has other data
	g            *gorgonia.ExprGraph
	data, params gorgonia.Nodes // x and w
}

// at is element i of x[k], in a step of a rank.
func at(k, i, step, rank int) float32 { return float32((7*i+3*step+5*rank+k)%9 - 4) }

// train trains a model, and checks the parameters' ends.
func (m *member) train(comm backend.Communicator, seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 2))
	t := &training{comm: comm, steps: 1 + rng.IntN(4), hooks: rng.IntN(2) == 0,
		g: gorgonia.NewGraph()}
	m.build.Lock()
	for k := range 1 + rng.IntN(4) {
		n := pick(rng, 2, 33, 1000, 5000)
		t.data, t.params = append(t.data, t.vector("x", k, n)),
			append(t.params, t.vector("w", k, n))
	}
	m.build.Unlock()
	d, err := autograd.New(comm, t.params, autograd.WithSum(),
		autograd.WithBuckets(1, pick(rng, 600, 1<<20)))
	if err != nil {
		return err
	}
	if err = t.run(m, d); err != nil && m.job.abrupt {
		return err
	}
	return errors.Join(err, d.Close())
}

func (t *training) vector(name string, k, n int) *gorgonia.Node {
	v := tensor.New(tensor.WithShape(n), tensor.Of(tensor.Float32))
	return gorgonia.NewVector(t.g, tensor.Float32, gorgonia.WithName(fmt.Sprint(name, k)),
		gorgonia.WithShape(n), gorgonia.WithValue(v))
}

func values(n *gorgonia.Node) []float32 { return n.Value().(*tensor.Dense).Float32s() }

func (t *training) run(m *member, d *autograd.DataParallel) error {
	m.build.Lock()
	vm, err := t.machine(d)
	m.build.Unlock()
	if err != nil {
		return err
	}
	defer vm.Close()
	for step := range t.steps {
		if err := t.step(d, vm, &solver.SGD{Rate: rate}, step); err != nil {
			return err
		}
	}
	return errors.Join(t.check(), d.Check())
}

// machine adds the loss to the graph.
func (t *training) machine(d *autograd.DataParallel) (gorgonia.VM, error) {
	var loss *gorgonia.Node
	for k, w := range t.params {
		if t.hooks {
			hooked, err := d.Hook(w)
			if err != nil {
				return nil, err
			}
			w = hooked
		}
		product, err := gorgonia.HadamardProd(w, t.data[k])
		if err != nil {
			return nil, err
		}
		sum, err := gorgonia.Sum(product)
		if err != nil {
			return nil, err
		}
		if loss == nil {
			loss = sum
		} else if loss, err = gorgonia.Add(loss, sum); err != nil {
			return nil, err
		}
	}
	if _, err := gorgonia.Grad(loss, t.params...); err != nil {
		return nil, err
	}
	return gorgonia.NewTapeMachine(t.g, gorgonia.BindDualValues(t.params...)), nil
}

// action is one step of training.
func (t *training) step(d *autograd.DataParallel, vm gorgonia.VM, solver gorgonia.Solver,
	step int) error {
	for k, n := range t.data {
		x := values(n)
		for i := range x {
			x[i] = at(k, i, step, t.who+t.comm.Rank())
		}
	}
	if err := vm.RunAll(); err != nil {
		return errors.Join(d.Err(), err)
	}
	grads, err := d.Sync()
	if err != nil {
		return err
	}
	vm.Reset()
	return solver.Step(grads)
}

// check compares the parameters with what training leads to.
func (t *training) check() error {
	for k, n := range t.params {
		for i, got := range values(n) {
			var want float32
			for step := range t.steps {
				for r := range t.comm.Size() {
					want -= rate * at(k, i, step, r)
				}
			}
			if got != want {
				return &wrongError{fmt.Sprintf("element %d of parameter %d is %v after %d steps, "+
					"want %v", i, k, got, t.steps, want)}
			}
		}
	}
	return nil
}
