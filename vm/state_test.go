package vm_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/rendezvous"
	"github.com/euryale-ml/euryale/vm"
)

// stateful is a model with all that a model may keep: y = norm(dropout(x) * frozen) * gain + bias.
type stateful struct {
	model
	x, frozen, y node
	norm         *gorgonia.BatchNormOp
	random       *nn.Random
}

// newStateful returns a model for four samples of one number, which begins with the numbers of a
// rank.
func newStateful(t testing.TB, rank int, drop float64) *stateful {
	m := &stateful{model: model{g: gorgonia.NewGraph()}, random: nn.NewRandom(3)}
	own := float64(rank)
	variable := func(name string, values ...float64) node {
		v := tensor.New(tensor.WithShape(len(values), 1), tensor.WithBacking(values))
		return gorgonia.NewMatrix(m.g, tensor.Float64, gorgonia.WithName(name),
			gorgonia.WithValue(v))
	}
	m.x = variable("x", 1+10*own, 2+10*own, 3+10*own, 4+10*own)
	m.frozen = variable("frozen", 1+own, 1+own, 1+own, 1+own)
	gain, bias := variable("gain", 2+own), variable("bias", 1)
	m.params = nodes{gain, bias}
	x := times(must(nn.Dropout(drop, m.random, m.x)), m.frozen)
	y, _, _, norm, err := gorgonia.BatchNorm(x, gain, bias, 0.5, 1e-3)
	m.y, m.norm = must(y, err), norm
	m.grad(t, mean(square(y)))
	return m
}

// averages returns mean and variance.
func (m *stateful) averages(t testing.TB) []float64 {
	mean, variance := m.norm.Stats()
	return append(floats(t, mean), floats(t, variance)...)
}

// stateful builds a model of this rank.
func (r ranked) stateful(drop float64) *stateful {
	r.lock.Lock()
	defer r.lock.Unlock()
	return newStateful(r.t, r.Comm.Rank(), drop)
}

// machine returns a machine that trains with the other ranks.
func (r ranked) machine(m *stateful, s solver.Solver, options ...vm.Option) (*vm.Machine, error) {
	frozen := autograd.WithFrozen(m.frozen)
	options = append(options, vm.WithSolver(s, m.params...), vm.WithDataParallel(r.Comm, frozen))
	return vm.New(m.g, r.device, options...)
}

// runs runs a machine several times, with other masks each time.
func (m *stateful) runs(machine *vm.Machine, n int) error {
	for range n {
		m.random.Next(0)
		if err := machine.RunAll(); err != nil {
			return err
		}
	}
	return nil
}

// evaluate returns the result of a machine for evaluation.
func (r ranked) evaluate(m *stateful) ([]float64, error) {
	data := tensor.New(tensor.WithShape(4, 1), tensor.WithBacking([]float64{1, 2, 3, 4}))
	testranks.NoError(gorgonia.Let(m.x, data))
	e, err := vm.New(m.g, r.device, vm.Eval(), vm.Keep(m.y))
	testranks.NoError(err)
	err = e.RunAll()
	return floats(r.t, m.y.Value()), errors.Join(err, e.Close())
}

// TestAveragesAreThoseOfAllRanks: after each step, of one run or of several, the running statistics
// of all ranks are the mean of what each rank has found, and all ranks evaluate alike.
func TestAveragesAreThoseOfAllRanks(t *testing.T) {
	kinds := []testenv.Kind{testenv.Hosts, testenv.Devices, testenv.Staged}
	testenv.Each(t, kinds, func(t *testing.T, k testenv.Kind) {
		for _, micro := range []int{1, 2} {
			averagesOfAllRanks(t, k, micro)
		}
	})
}

func averagesOfAllRanks(t *testing.T, k testenv.Kind, micro int) {
	t.Helper()
	const P, steps = 2, 4
	var results [P][]float64
	onRanks(t, k, P, func(r ranked) (err error) {
		m := r.stateful(0)
		machine := testranks.Must(r.machine(m, &solver.SGD{Rate: 0.125}, vm.Accumulate(micro)))
		// Of 1 2 3 4 and 11 12 13 14: means 2.5 and 12.5, variances of samples 5/3.
		mean, variance := 0.0, 1.0
		for range steps {
			for range micro {
				err = errors.Join(err, m.runs(machine, 1))
				mean, variance = mean/2+7.5/2, variance/2+5.0/6
			}
			agreeing(r.t, "averages", m.averages(r.t), []float64{mean, variance}, 1e-14)
		}
		err = errors.Join(err, machine.Pull(m.params...), machine.DataParallel().Check())
		y, wrong := r.evaluate(m)
		results[r.Comm.Rank()] = slices.Concat(m.averages(r.t), y)
		return errors.Join(err, wrong, machine.Close())
	})
	require.Check(t, slices.Equal(results[0], results[1]), "averages and evaluation are %v and %v",
		results[0], results[1])
}

// TestFrozenVariablesAreOfTheModel: New gives all ranks those of rank 0, Check finds a difference,
// and Load brings them back, also to a device.
func TestFrozenVariablesAreOfTheModel(t *testing.T) {
	kinds := []testenv.Kind{testenv.Hosts, testenv.Devices}
	testenv.Each(t, kinds, func(t *testing.T, k testenv.Kind) {
		dir := filepath.Join(t.TempDir(), "checkpoint")
		onRanks(t, k, 2, func(r ranked) error {
			m, sgd := r.stateful(0), &solver.SGD{Rate: 0.125}
			machine, err := r.machine(m, sgd)
			testranks.NoError(err)
			frozen := m.frozen.Value().Data().([]float64)
			if !slices.Equal(frozen, []float64{1, 1, 1, 1}) {
				return fmt.Errorf("New leaves %v frozen", frozen)
			}
			dp := machine.DataParallel()
			err = errors.Join(m.runs(machine, 3), machine.Pull(m.params...), dp.Save(dir, sgd, nil))
			loss := func() float64 {
				err = errors.Join(err, m.runs(machine, 1), machine.Pull(m.params...))
				return floats(r.t, m.loss)[0]
			}
			want := loss()
			for i := range frozen {
				frozen[i] = float64(2*i + r.Comm.Rank())
			}
			wrong := fmt.Sprint(dp.Check())
			if !strings.Contains(wrong, "frozen parameter frozen is not the same") {
				err = errors.Join(err, fmt.Errorf("Check of different frozen parameters: %s",
					wrong))
			}
			if loss() == want {
				err = errors.Join(
					err, errors.New("frozen parameters do not matter: the test shows nothing"))
			}
			err = errors.Join(err, dp.Load(dir, sgd, nil))
			if got := loss(); got != want {
				err = errors.Join(err, fmt.Errorf("after Load the loss is %v, want %v", got, want))
			}
			return errors.Join(err, dp.Check(), machine.Close())
		})
	})
}

// TestUndeclaredVariablesAreNamed: a variable that differs between ranks and that no run changes
// is named once, by rank 0, and others are not.
func TestUndeclaredVariablesAreNamed(t *testing.T) {
	for _, test := range []struct {
		let  bool // x, before each run
		want string
	}{{false, "ranks have different values of x,"}, {true, ""}} {
		var said []string // of both ranks
		onRanks(t, testenv.Hosts, 2, func(r ranked) error {
			m := r.stateful(0)
			machine, err := r.machine(m, &solver.SGD{Rate: 1}, vm.Notice(func(text string) {
				r.lock.Lock()
				defer r.lock.Unlock()
				said = append(said, text)
			}))
			testranks.NoError(err)
			for i := range 4 {
				if test.let {
					m.x.Value().Data().([]float64)[0] = float64(100 + i)
				}
				err = errors.Join(err, m.runs(machine, 1))
			}
			return errors.Join(err, machine.Close())
		})
		text, silent := strings.Join(said, "\n"), test.want == ""
		require.Check(t, len(said) <= 1 && silent == (text == "") && strings.Contains(text,
			test.want), "changed in each run %v: it says %q, want %q", test.let, text, test.want)
	}
}

// checkpointed is a process that trains, saves and evaluates a model, or loads and evaluates it.
func checkpointed(what, dir string) error {
	env, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		return err
	}
	w, err := rendezvous.Join(context.Background(), env)
	if err != nil {
		return err
	}
	own, err := testenv.Host(w)
	if err != nil {
		return err
	}
	t := new(testing.T)
	r, m, adam := ranked{Rank: own, t: t}, newStateful(t, env.Rank, 0.5),
		&solver.Adam{Rate: 0.125}
	machine, err := r.machine(m, adam)
	if err != nil {
		return err
	}
	dp := machine.DataParallel()
	if what == "save" {
		err = errors.Join(m.runs(machine, 20), machine.Pull(m.params...), dp.Save(dir, adam, nil))
	} else {
		err = dp.Load(dir, adam, nil)
	}
	y, wrong := r.evaluate(m)
	hash, unread := dp.Hash()
	fmt.Println("evaluation", y, "averages", m.averages(t), "hash", hash)
	return errors.Join(err, wrong, unread, dp.Check(), machine.Close(), own.Close())
}

// TestEvaluationIsTheSameAfterLoadInAnotherProcess: a model with a batch norm, frozen parameters
// and a dropout evaluates the same before Save and after Load in other processes, on as many ranks
// and on one.
func TestEvaluationIsTheSameAfterLoadInAnotherProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "checkpoint")
	dir := "EURYALE_TEST_CHECKPOINT=" + path
	var want string
	for _, job := range []struct {
		what  string
		ranks int
	}{{"save", 2}, {"load", 2}, {"load", 1}} {
		for r, rank := range proctest.Start(t, "checkpoint "+job.what, job.ranks, dir) {
			said := rank.Next()
			if want == "" {
				want = said
			}
			require.Check(t, strings.HasPrefix(said, "evaluation ") && said == want,
				"rank %d of %d, %s: it says %q, want %q", r, job.ranks, job.what, said, want)
			last := rank.End()
			require.Check(t, last == "", "rank %d of %d, %s: %s", r, job.ranks, job.what, last)
		}
	}
	// as many as there were
	require.Report(t, require.Err(os.Stat(filepath.Join(path, "step-00000020"))))
}
