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
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/vm"
)

// tableTraining trains a model with two lookups in a table of 50 rows. It returns the losses, and
// the table before and after.
func tableTraining(t *testing.T, k testenv.Kind, s layers.Sizes, dt tensor.Dtype,
	steps int) (losses, before, after []float64) {
	t.Helper()
	const rows, vocabulary, batch = 50, 11, 4
	losses = make([]float64, steps)
	before, after = make([]float64, rows*width), make([]float64, rows*width)
	var mu sync.Mutex
	collect := func(l *layers.Layout, table *layers.Table, to []float64) {
		if table.Rows() == nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		for k, x := range numbers(table.Rows()) {
			to[(k/width*l.Data.Size()+l.Data.Rank())*width+k%width] = x
		}
	}
	ids := make([]int, batch*positions)
	within(t, k, s, func(l *layers.Layout, device backend.Device, build sync.Locker) error {
		build.Lock()
		b := layers.NewBuilder(gorgonia.NewGraph(), l, dt, 1)
		own := batch / s.DP
		tokens, targets := b.Tokens("tokens", 1, own, positions), b.Tokens("targets", 1, own,
			positions)
		table := b.Table("items", layers.Normal(0.5), rows, width)
		x := b.Add(table.Lookup(tokens), table.Lookup(targets))
		words := b.Learn("words", layers.Normal(0.1), 0, vocabulary, width)
		loss := b.CrossEntropy(b.Logits(b.LayerNorm("n", x), words), targets)
		learnables, err := b.Grad(loss)
		build.Unlock()
		if err != nil {
			return err
		}
		machine, err := vm.New(b.Graph(), device, vm.Keep(append(table.Gradients(), loss.Node)...),
			vm.WithSolver(&autograd.Momentum{Rate: 0.1, Momentum: 0.9}, learnables...),
			vm.WithDataParallel(l.Data, autograd.WithSum()))
		if err != nil {
			return err
		}
		collect(l, table, before)
		for step := range steps {
			all := slices.Clone(ids)
			for i := range all {
				all[i] = (i*i + step*3) % vocabulary // some more than once
			}
			mine := all[l.Replica*own*positions : (l.Replica+1)*own*positions]
			next := append(slices.Clone(mine[1:]), all[(l.Replica+1)*own*positions%len(all)])
			err := errors.Join(tokens.Set(mine), targets.Set(next))
			if err == nil {
				err = ops.Cause(machine.RunAll())
			}
			var value float64
			if err == nil {
				value = scalar(loss.Value())
				err = errors.Join(autograd.Sum(l.Data, &value), table.Step(0.5))
			}
			if err != nil {
				return errors.Join(err, machine.Close())
			}
			if l.Comm(layers.Tensor).Rank() == 0 && l.Data.Rank() == 0 {
				losses[step] = value
			}
		}
		collect(l, table, after)
		return machine.Close()
	})
	return losses, before, after
}

// scalar returns a number.
func scalar(v gorgonia.Value) float64 {
	if x, ok := v.Data().(float32); ok {
		return float64(x)
	}
	return v.Data().(float64)
}

// TestTableEqualsOneRank: losses of 20 steps and all rows equal one rank's. Rows that nobody looks
// up keep their bits.
func TestTableEqualsOneRank(t *testing.T) {
	one := layers.Sizes{DP: 1, SP: 1, TP: 1}
	for dt, tolerance := range map[tensor.Dtype]float64{tensor.Float64: 1e-10,
		tensor.Float32: 1e-4} {
		want, first, last := tableTraining(t, testenv.Hosts, one, dt, 20)
		if !(want[19] < want[0]/2) {
			t.Fatalf("the losses of one rank are %v", want)
		}
		for row := range 50 {
			at := row * width
			same := slices.Equal(first[at:at+width], last[at:at+width])
			if same != (row >= 11) {
				t.Errorf("row %d has changed: %v", row, !same)
			}
		}
		for _, s := range []layers.Sizes{{DP: 2, SP: 1, TP: 1}, {DP: 4, SP: 1, TP: 1},
			{DP: 1, SP: 3, TP: 1}, {DP: 1, SP: 1, TP: 2}, {DP: 2, SP: 2, TP: 1},
			{DP: 2, SP: 1, TP: 2}} {
			t.Run(fmt.Sprint(s, dt), func(t *testing.T) {
				losses, before, after := tableTraining(t, testenv.Hosts, s, dt, 20)
				near(t, "losses", losses, want, tolerance)
				near(t, "the table before", before, first, 0)
				near(t, "the table after", after, last, tolerance)
			})
		}
	}
}

// TestTableEqualsOneRankOnDevices: so it is where models are on devices.
func TestTableEqualsOneRankOnDevices(t *testing.T) {
	want, _, last := tableTraining(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1},
		tensor.Float64, 3)
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		losses, _, after := tableTraining(t, k, layers.Sizes{DP: 2, SP: 1, TP: 1}, tensor.Float64,
			3)
		near(t, "losses", losses, want, 1e-10)
		near(t, "the table after", after, last, 1e-10)
	})
}

// TestTokensOfOneRankThatAreNoRowsAreAnErrorOfAll: nobody waits for the rows, and the next Set is
// right.
func TestTokensOfOneRankThatAreNoRowsAreAnErrorOfAll(t *testing.T) {
	within(t, testenv.Hosts, layers.Sizes{DP: 3, SP: 1, TP: 1},
		func(l *layers.Layout, _ backend.Device, build sync.Locker) error {
			build.Lock()
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
			tokens, table := b.Tokens("t", 0, 3), b.Table("items", layers.Constant(1), 5, 2)
			table.Lookup(tokens)
			table.Lookup(tokens)
			build.Unlock()
			for range 3 {
				for _, wrong := range [][]int{{0, 5, 1}, {0, 1}} {
					if l.Data.Rank() != 1 {
						wrong = []int{0, 4, 1}
					}
					if err := tokens.Set(wrong); !errors.Is(err, backend.ErrArgument) {
						t.Errorf("rank %d: %v", l.Data.Rank(), err)
					}
				}
				if err := tokens.Set([]int{0, 4, 1}); err != nil {
					return err
				}
			}
			return nil
		})
}

// TestTableErrors: a table that cannot be, tokens that are no rows, and a step without a run.
func TestTableErrors(t *testing.T) {
	within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1},
		func(l *layers.Layout, _ backend.Device, build sync.Locker) error {
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
			b.Table("none", layers.Constant(1), 0, 2)
			if err := b.Err(); !errors.Is(err, ops.ErrShape) {
				t.Errorf("no rows: %v", err)
			}
			b = layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
			tokens, table := b.Tokens("t", 0, 3), b.Table("items", layers.Constant(1), 5, 2)
			table.Lookup(tokens)
			if err := tokens.Set([]int{0, 5, 1}); !errors.Is(err, backend.ErrArgument) {
				t.Errorf("no such row: %v", err)
			}
			if err := table.Step(1); !errors.Is(err, backend.ErrArgument) ||
				!strings.Contains(err.Error(), "call Grad before") {
				t.Errorf("no run: %v", err)
			}
			return nil
		})
}
