package layers_test

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
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
	"github.com/euryale-ml/euryale/vm"
)

// course is how a model with a table is trained.
type course struct {
	dt       tensor.Dtype
	solver   func() layers.Solver // of the table
	from, to int                  // steps
	dir      string               // of a checkpoint: loaded first unless from is 0, and saved
	rows     int                  // of the table; 0 stands for 50
}

func descent() layers.Solver { return &solver.SGD{Rate: 0.5} }

// tableTraining trains a model with two lookups in a table. It returns the losses, and
// the table before and after.
func tableTraining(t *testing.T, k testenv.Kind, s layers.Sizes, c course) (losses, before,
	after []float64) {
	t.Helper()
	const vocabulary, batch = 11, 4
	rows := cmp.Or(c.rows, 50)
	losses = make([]float64, c.to)
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
		b := layers.NewBuilder(gorgonia.NewGraph(), l, c.dt, 1)
		own := batch / s.DP
		tokens, targets := b.Tokens("tokens", 1, own, positions), b.Tokens("targets", 1, own,
			positions)
		table := b.Table("items", layers.Normal(0.5), rows, width)
		x := b.Add(table.Lookup(tokens), table.Lookup(targets))
		embedding := b.Learn("words", layers.Normal(0.1), 0, vocabulary, width)
		loss := b.CrossEntropy(b.Logits(b.LayerNorm("n", x), embedding), targets)
		learnables, err := b.Grad(loss)
		build.Unlock()
		testranks.NoError(err)
		machine := testranks.Must(vm.New(b.Graph(), device, vm.Keep(loss.Node),
			vm.WithSolver(&solver.Momentum{Rate: 0.1, Momentum: 0.9}, learnables...), b.Training()))
		dp, by := machine.DataParallel(), c.solver()
		if c.from > 0 {
			testranks.NoError(dp.Load(c.dir, machine.Solver(), nil))
		}
		collect(l, table, before)
		for step := c.from; step < c.to; step++ {
			all := slices.Clone(ids)
			for i := range all {
				all[i] = (i*i + step*3) % min(vocabulary, rows) // some more than once
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
				err = errors.Join(autograd.Sum(l.Data, &value), table.Step(by))
			}
			if err != nil {
				return errors.Join(err, machine.Close())
			}
			if l.Comm(layers.Tensor).Rank() == 0 && l.Data.Rank() == 0 {
				losses[step] = value
			}
		}
		collect(l, table, after)
		if c.dir != "" {
			err = errors.Join(dp.SaveAsync(c.dir, machine.Solver(), nil), table.Step(by))
		}
		return errors.Join(err, machine.Close())
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
		want, first, last := tableTraining(t, testenv.Hosts, one,
			course{dt: dt, solver: descent, to: 20})
		require.That(t, want[19] < want[0]/2, "the losses of one rank are %v", want)
		for row := range 50 {
			at := row * width
			same := slices.Equal(first[at:at+width], last[at:at+width])
			require.Check(t, same == (row >= 11), "row %d has changed: %v", row, !same)
		}
		for _, s := range []layers.Sizes{{DP: 2, SP: 1, TP: 1}, {DP: 4, SP: 1, TP: 1}, {DP: 1,
			SP: 3, TP: 1}, {DP: 1, SP: 1, TP: 2}, {DP: 2, SP: 2, TP: 1}, {DP: 2, SP: 1, TP: 2}} {
			t.Run(fmt.Sprint(s, dt), func(t *testing.T) {
				losses, before, after := tableTraining(t, testenv.Hosts, s,
					course{dt: dt, solver: descent, to: 20})
				near(t, "losses", losses, want, tolerance)
				near(t, "the table before", before, first, 0)
				near(t, "the table after", after, last, tolerance)
			})
		}
	}
}

// solvers that keep vectors, and one that keeps none.
var solvers = map[string]func() layers.Solver{
	"SGD":      descent,
	"Momentum": func() layers.Solver { return &solver.Momentum{Rate: 0.1, Momentum: 0.9} },
	"AdamW": func() layers.Solver {
		return &solver.AdamW{Rate: 0.05, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8, WeightDecay: 0.01}
	},
}

// TestCheckpointsOfTablesAreLoadedByAnyRanks: with what the solver keeps for the rows, so losses go
// on as if nothing had happened, and rows are the same.
func TestCheckpointsOfTablesAreLoadedByAnyRanks(t *testing.T) {
	one := layers.Sizes{DP: 1, SP: 1, TP: 1}
	for name, solver := range solvers {
		want, _, last := tableTraining(t, testenv.Hosts, one, course{dt: tensor.Float64,
			solver: solver, to: 8})
		for i, s := range [][2]layers.Sizes{{{DP: 1, SP: 3, TP: 1}, {DP: 2, SP: 1, TP: 2}},
			{one, {DP: 2, SP: 2, TP: 1}}, {{DP: 4, SP: 1, TP: 1}, {DP: 2, SP: 1, TP: 1}},
			{{DP: 2, SP: 1, TP: 2}, {DP: 1, SP: 3, TP: 1}}} {
			if i > 0 && name != "AdamW" {
				continue
			}
			t.Run(fmt.Sprint(name, s), func(t *testing.T) {
				c := course{dt: tensor.Float64, solver: solver, to: 4, dir: t.TempDir()}
				_, _, saved := tableTraining(t, testenv.Hosts, s[0], c)
				c.from, c.to = 4, 8
				losses, loaded, after := tableTraining(t, testenv.Hosts, s[1], c)
				near(t, "the table that is loaded", loaded, saved, 0)
				near(t, "losses", losses[4:], want[4:], 1e-10)
				near(t, "the table after", after, last, 1e-10)
			})
		}
	}
}

// TestTablesOfFewerRowsThanRanksTrainAsOneRank, with every solver that keeps something for the
// rows, and go on from a checkpoint.
func TestTablesOfFewerRowsThanRanksTrainAsOneRank(t *testing.T) {
	one, four := layers.Sizes{DP: 1, SP: 1, TP: 1}, layers.Sizes{DP: 4, SP: 1, TP: 1}
	for name, newSolver := range map[string]func() layers.Solver{
		"Momentum": solvers["Momentum"], "AdamW": solvers["AdamW"],
		"Nesterov": func() layers.Solver { return &solver.Nesterov{Rate: 0.1, Momentum: 0.9} },
		"RMSProp":  func() layers.Solver { return &solver.RMSProp{Rate: 0.05, Momentum: 0.5} },
		"EMA": func() layers.Solver {
			return &solver.EMA{Solver: &solver.Adam{Rate: 0.05}, Decay: 0.5}
		},
	} {
		for _, rows := range []int{1, 3} {
			t.Run(fmt.Sprint(name, rows), func(t *testing.T) {
				c := course{dt: tensor.Float64, solver: newSolver, to: 6, rows: rows}
				want, _, last := tableTraining(t, testenv.Hosts, one, c)
				losses, _, after := tableTraining(t, testenv.Hosts, four, c)
				near(t, "losses", losses, want, 1e-10)
				near(t, "the table after", after, last, 1e-10)
				c.to, c.dir = 3, t.TempDir()
				tableTraining(t, testenv.Hosts, four, c)
				c.from, c.to = 3, 6
				for _, s := range []layers.Sizes{four, {DP: 2, SP: 1, TP: 1}} {
					c, saved := c, os.DirFS(c.dir)
					if c.dir = t.TempDir(); os.CopyFS(c.dir, saved) != nil { // it is saved again
						t.Fatal("the checkpoint cannot be copied")
					}
					losses, _, after := tableTraining(t, testenv.Hosts, s, c)
					near(t, "losses after Load", losses[3:], want[3:], 1e-10)
					near(t, "the table after Load", after, last, 1e-10)
				}
			})
		}
	}
}

// TestCheckpointsOfOtherTablesAreRefused: of another size or name, or of none; weights alone come
// without what the solver keeps.
func TestCheckpointsOfOtherTablesAreRefused(t *testing.T) {
	dir := t.TempDir()
	train := func(f func(dp *autograd.DataParallel, w *solver.SGD, table *layers.Table) error,
		tables ...int) {
		t.Helper()
		within(t, testenv.Hosts, layers.Sizes{DP: 3, SP: 1, TP: 1}, func(l *layers.Layout,
			_ backend.Device, build sync.Locker) error {
			build.Lock()
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
			b.Learn("w", layers.Constant(1), layers.Undivided, 2)
			var all []autograd.Table
			var last *layers.Table
			for i, rows := range tables {
				last = b.Table(fmt.Sprint("table", i), layers.Normal(1), rows, 3)
				all = append(all, last)
			}
			build.Unlock()
			dp := testranks.Must(autograd.New(l.Data, b.Learnables(), autograd.WithTables(all...)))
			return errors.Join(f(dp, &solver.SGD{Rate: 1}, last), dp.Close())
		})
	}
	train(func(dp *autograd.DataParallel, w *solver.SGD, _ *layers.Table) error {
		return dp.Save(dir, w, nil)
	}, 2, 7) // rank 2 has no rows of the first
	for _, tables := range [][]int{{}, {2}, {2, 6}, {7, 2}} {
		train(func(dp *autograd.DataParallel, w *solver.SGD, _ *layers.Table) error {
			require.Fails(t, fmt.Sprintf("tables of %v rows", tables), dp.Load(dir, w, nil),
				backend.ErrArgument, "tables are")
			return nil
		}, tables...)
	}
	train(func(dp *autograd.DataParallel, w *solver.SGD, table *layers.Table) error {
		want := slices.Clone(numbers(table.Rows()))
		clear(table.Rows().Data().([]float32))
		err := dp.Load(dir, w, nil, autograd.WeightsOnly())
		near(t, "rows", numbers(table.Rows()), want, 0)
		return err
	}, 2, 7)
}

// TestSolversUpdateTheRowsThatAreLookedUp: moments of others stay, and steps are counted for all
// rows together, as PyTorch's SparseAdam does.
func TestSolversUpdateTheRowsThatAreLookedUp(t *testing.T) {
	within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1},
		func(l *layers.Layout, device backend.Device, build sync.Locker) error {
			build.Lock()
			defer build.Unlock()
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
			tokens, table := b.Tokens("t", 0, 2), b.Table("items", layers.Constant(1), 4, 1)
			first, second := table.Lookup(tokens), table.Lookup(tokens)
			loss := b.Apply("loss", func() (layers.Node, error) { // of a row: 2 w^2
				n, err := gorgonia.HadamardProd(first.Node, second.Node)
				if err == nil {
					n, err = gorgonia.Sum(n)
				}
				return layers.Whole(n), err
			})
			if _, err := gorgonia.Grad(loss.Node, first.Node, second.Node); err != nil {
				return errors.Join(b.Err(), err)
			}
			m := testranks.Must(vm.New(b.Graph(), nil, vm.Keep(table.Gradients()...)))
			adam := &solver.Adam{Rate: 0.1, Beta1: 0.5, Beta2: 0.75, Epsilon: 1e-8}
			w, moment, square := []float64{1, 1, 1, 1}, make([]float64, 4), make([]float64, 4)
			for step, ids := range [][]int{{0, 1}, {1, 1}, {0, 3}, {1, 0}} {
				testranks.NoError(errors.Join(tokens.Set(ids), m.RunAll(), table.Step(adam)))
				t1 := float64(step + 1)
				gradient := map[int]float64{}
				for _, id := range ids {
					gradient[id] += 2 * w[id]
				}
				for id, g := range gradient {
					moment[id] += 0.5 * (g - moment[id])
					square[id] += 0.25 * (g*g - square[id])
					w[id] -= 0.1 * moment[id] / (1 - math.Pow(0.5, t1)) /
						(math.Sqrt(square[id]/(1-math.Pow(0.75, t1))) + 1e-8)
				}
				near(t, fmt.Sprint("rows after step ", step), numbers(table.Rows()), w, 1e-12)
			}
			return m.Close()
		})
}

// TestTableEqualsOneRankOnDevices: so it is where models are on devices.
func TestTableEqualsOneRankOnDevices(t *testing.T) {
	want, _, last := tableTraining(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1},
		course{dt: tensor.Float64, solver: descent, to: 3})
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		losses, _, after := tableTraining(t, k, layers.Sizes{DP: 2, SP: 1, TP: 1},
			course{dt: tensor.Float64, solver: descent, to: 3})
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
					require.Fails(t, fmt.Sprintf("rank %d", l.Data.Rank()), tokens.Set(wrong),
						backend.ErrArgument)
				}
				testranks.NoError(tokens.Set([]int{0, 4, 1}))
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
			require.Fails(t, "no rows", b.Err(), ops.ErrShape)
			b = layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
			tokens, table := b.Tokens("t", 0, 3), b.Table("items", layers.Constant(1), 5, 2)
			table.Lookup(tokens)
			require.Fails(t, "no such row", tokens.Set([]int{0, 5, 1}), backend.ErrArgument)
			require.Fails(t, "no run", table.Step(&solver.SGD{Rate: 1}), backend.ErrArgument,
				"call Grad before")
			return nil
		})
}
