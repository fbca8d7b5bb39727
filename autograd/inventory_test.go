package autograd

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/ops/nn"
)

// normed is a model with all that a model may have: y = norm(dropout(x) * frozen) * scale + bias.
type normed struct {
	g           *gorgonia.ExprGraph
	x, y        *gorgonia.Node
	frozen      *gorgonia.Node
	scale, bias *gorgonia.Node
	norm        *gorgonia.BatchNormOp
	random      *nn.Random
	out         gorgonia.Value
}

// newNormed returns a model for four samples of one number, which begins with numbers of a rank.
func newNormed(r rank, drop float64) (*normed, error) {
	r.build.Lock()
	defer r.build.Unlock()
	m := &normed{g: gorgonia.NewGraph(), random: nn.NewRandom(3)}
	own := float64(r.comm.Rank())
	variable := func(name string, values ...float64) *gorgonia.Node {
		v := tensor.New(tensor.WithShape(len(values), 1), tensor.WithBacking(values))
		return gorgonia.NewMatrix(m.g, gorgonia.Float64, gorgonia.WithName(name),
			gorgonia.WithValue(v))
	}
	m.x = variable("x", 1+own, 2+own, 4+own, 5+own)
	m.frozen = variable("frozen", 1+own, 1, 1, 1)
	m.scale, m.bias = variable("scale", 2+own), variable("bias", 1)
	dropped, err := nn.Dropout(drop, m.random, m.x)
	if err != nil {
		return nil, err
	}
	x := gorgonia.Must(gorgonia.HadamardProd(dropped, m.frozen))
	y, _, _, op, err := gorgonia.BatchNorm(x, m.scale, m.bias, 0.5, 1e-3)
	if err != nil {
		return nil, err
	}
	m.y, m.norm = y, op
	gorgonia.Read(y, &m.out)
	loss := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(y))))
	_, err = gorgonia.Grad(loss, m.scale, m.bias)
	return m, err
}

func (m *normed) params() gorgonia.Nodes { return gorgonia.Nodes{m.scale, m.bias} }

// averages returns mean and variance.
func (m *normed) averages() []float64 {
	mean, variance := m.norm.Stats()
	return slices.Concat(numbers(mean), numbers(variance))
}

func (m *normed) setAverages(mean, variance float64) error {
	one := func(x float64) tensor.Tensor {
		return tensor.New(tensor.WithShape(1), tensor.WithBacking([]float64{x}))
	}
	return m.norm.SetStats(one(mean), one(variance))
}

func numbers(v gorgonia.Value) []float64 { return slices.Clone(v.Data().([]float64)) }

// train runs steps on the tape machine.
func (m *normed) train(machine gorgonia.VM, d *DataParallel, by solver.Solver,
	steps int) error {
	for range steps {
		m.random.Next(0)
		if err := errors.Join(machine.RunAll(), d.Step(by)); err != nil {
			return err
		}
		machine.Reset()
	}
	return nil
}

// evaluate returns the model's result in evaluation.
func (m *normed) evaluate() ([]float64, error) {
	machine := gorgonia.NewTapeMachine(m.g, gorgonia.EvalMode())
	err := machine.RunAll()
	return numbers(m.out), errors.Join(err, machine.Close())
}

// TestNewGivesAllRanksTheModelOfRankZero: parameters, frozen variables, averages and the step of
// random numbers become those of rank 0, and data of each rank stay.
func TestNewGivesAllRanksTheModelOfRankZero(t *testing.T) {
	all(t, 3, func(r rank) error {
		m, err := newNormed(r, 0.5)
		if err != nil {
			return err
		}
		own := r.comm.Rank()
		m.random.Seek(uint64(5+own), 4*own)
		err = m.setAverages(float64(7+own), float64(9+own))
		d, wrong := New(r.comm, m.params(), WithFrozen(m.frozen))
		testranks.NoError(errors.Join(err, wrong))
		got := fmt.Sprint(numbers(m.scale.Value()), numbers(m.frozen.Value()), m.averages(),
			m.random.Step(), m.random.First(), numbers(m.x.Value())[0])
		if want := fmt.Sprint("[2] [1 1 1 1] [7 9] 5 ", 4*own, " ", 1+own); got != want {
			err = fmt.Errorf("the model is %s, want %s", got, want)
		}
		return errors.Join(err, d.Check(), d.Close())
	})
}

// TestAveragesAreThoseOfAllRanks: after each step of the tape machine, the running statistics of
// all ranks are the mean of what each rank finds.
func TestAveragesAreThoseOfAllRanks(t *testing.T) {
	const ranks, steps = 2, 4
	all(t, ranks, func(r rank) error {
		m, err := newNormed(r, 0)
		if err != nil {
			return err
		}
		d, err := New(r.comm, m.params(), WithFrozen(m.frozen))
		if err != nil {
			return err
		}
		machine := gorgonia.NewTapeMachine(m.g, gorgonia.BindDualValues(m.params()...))
		// Of 1 2 4 5 and 2 3 5 6: means 3 and 4, variances of samples 10/3.
		mean, variance := 0.0, 1.0
		for range steps {
			err = errors.Join(err, m.train(machine, d, &solver.SGD{Rate: 0.125}, 1), d.Check())
			mean, variance = mean/2+3.5/2, variance/2+10.0/6
			if got := m.averages(); err == nil && (got[0] != mean || abs(got[1]-variance) > 1e-14) {
				err = fmt.Errorf("the averages are %v, want %v %v", got, mean, variance)
			}
		}
		return errors.Join(err, machine.Close(), d.Close())
	})
}

func abs(x float64) float64 { return max(x, -x) }

// TestCheckpointKeepsTheModel: a model evaluates the same before Save and after Load, on as many
// ranks and on one, and data of each rank stay.
func TestCheckpointKeepsTheModel(t *testing.T) {
	for _, drop := range []float64{0, 0.5} {
		dir := filepath.Join(t.TempDir(), "checkpoint")
		var lock sync.Mutex
		var want []float64
		all(t, 2, func(r rank) error { return saveNormed(r, drop, dir, &lock, &want) })
		for _, ranks := range []int{2, 1} {
			all(t, ranks, func(r rank) error { return loadNormed(r, drop, dir, want) })
		}
	}
}

func saveNormed(r rank, drop float64, dir string, lock sync.Locker, want *[]float64) error {
	m, err := newNormed(r, drop)
	if err != nil {
		return err
	}
	d, err := New(r.comm, m.params(), WithFrozen(m.frozen))
	if err != nil {
		return err
	}
	momentum := &solver.Momentum{Rate: 0.125, Momentum: 0.5}
	machine := gorgonia.NewTapeMachine(m.g, gorgonia.BindDualValues(m.params()...))
	err = errors.Join(m.train(machine, d, momentum, 3), d.Save(dir, momentum, nil), feedRank0(m))
	y, wrong := m.evaluate()
	if r.comm.Rank() == 0 {
		lock.Lock()
		*want = slices.Concat(y, m.averages(), []float64{float64(m.random.Step())})
		lock.Unlock()
	}
	return errors.Join(err, wrong, machine.Close(), momentum.Close(), d.Close())
}

// feedRank0 gives the model the same data on every rank.
func feedRank0(m *normed) error {
	data := []float64{1, 2, 4, 5}
	return gorgonia.Let(m.x, tensor.New(tensor.WithShape(4, 1), tensor.WithBacking(data)))
}

func loadNormed(r rank, drop float64, dir string, want []float64) error {
	m, err := newNormed(r, drop)
	if err != nil {
		return err
	}
	copy(m.frozen.Value().Data().([]float64), []float64{9, 8, 7, 6}) // which Load must replace
	d, err := New(r.comm, m.params(), WithFrozen(m.frozen))
	if err != nil {
		return err
	}
	momentum := &solver.Momentum{Rate: 0.125, Momentum: 0.5}
	err = d.Load(dir, momentum, nil)
	if got := numbers(m.x.Value())[0]; got != float64(1+r.comm.Rank()) {
		err = errors.Join(err, fmt.Errorf("Load has changed the data of rank %d: %v", r.comm.Rank(),
			got))
	}
	err = errors.Join(err, feedRank0(m))
	y, wrong := m.evaluate()
	got := slices.Concat(y, m.averages(), []float64{float64(m.random.Step())})
	if err == nil && !slices.Equal(got, want) {
		err = fmt.Errorf("after Load evaluation, averages and step are %v, before Save %v", got,
			want)
	}
	return errors.Join(err, wrong, d.Check(), momentum.Close(), d.Close())
}

// spoils are what makes a model another one, and what Check says then.
var spoils = map[string]func(m *normed) error{
	"frozen parameter frozen": func(m *normed) error {
		m.frozen.Value().Data().([]float64)[3]++
		return nil
	},
	"moving mean of batch norm scale":     func(m *normed) error { return m.setAverages(8, 1) },
	"moving variance of batch norm scale": func(m *normed) error { return m.setAverages(0, 8) },
	"the seed or the step of random numbers": func(m *normed) error {
		m.random.Next(0)
		return nil
	},
}

// TestCheckAndHashCoverTheModel: ranks that differ in anything but their data are found by Check,
// and have other hashes.
func TestCheckAndHashCoverTheModel(t *testing.T) {
	for what, spoil := range spoils {
		var hashes [2]string
		for _, err := range each(t, 2, func(r rank) error {
			m, err := newNormed(r, 0.5)
			if err == nil {
				err = m.setAverages(0, 1)
			}
			if err != nil {
				return err
			}
			d := testranks.Must(New(r.comm, m.params(), WithFrozen(m.frozen)))
			defer d.Close()
			if r.comm.Rank() == 1 {
				err = spoil(m)
			}
			var wrong error
			hashes[r.comm.Rank()], wrong = d.Hash()
			return errors.Join(err, wrong, d.Check())
		}) {
			says := err != nil && strings.Contains(err.Error(), what+" is not the same on rank 1")
			require.Check(t, errors.Is(err, backend.ErrMismatch) && says, "%s: %v", what, err)
		}
		require.Check(t, hashes[0] != hashes[1], "%s: it is not in the hash", what)
	}
}

// TestAProblemOfOneRankEndsCheckOnAll: a rank whose model cannot be read takes part, so that no
// rank waits for it.
func TestAProblemOfOneRankEndsCheckOnAll(t *testing.T) {
	for _, err := range each(t, 2, func(r rank) error {
		m, err := newNormed(r, 0.5)
		if err != nil {
			return err
		}
		d, err := New(r.comm, m.params(), WithFrozen(m.frozen))
		if err != nil {
			return err
		}
		defer d.Close()
		if r.comm.Rank() == 1 {
			wide := tensor.New(tensor.WithShape(4, 2, 1), tensor.Of(tensor.Float64))
			var column tensor.View
			if column, err = wide.Slice(nil, tensor.S(0)); err == nil {
				err = gorgonia.Let(m.frozen, column)
			}
		}
		wrong := d.Check()
		_, after := Any(r.comm, true)
		require.Check(t, after == nil && err == nil, "%v %v", err, after)
		return wrong
	}) {
		const what = "frozen parameter frozen is a view"
		require.Fails(t, "d.Check", err, "rank 1 cannot go on: "+what)
	}
}

// TestOldCheckpointsLoadAndSayWhatTheyLack: averages, frozen parameters and random numbers that a
// checkpoint does not have stay as they are, with a notice.
func TestOldCheckpointsLoadAndSayWhatTheyLack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	var lock sync.Mutex
	all(t, 1, func(r rank) error { return saveNormed(r, 0.5, dir, &lock, new([]float64)) })
	path := filepath.Join(newest(t, dir), checkpoint.RecordName)
	text, err := os.ReadFile(path)
	var fields map[string]any
	if err == nil {
		err = json.Unmarshal(text, &fields)
	}
	require.NoError(t, err)
	for _, later := range []string{"frozen", "averages", "random", "crc32c"} {
		require.Check(t, fields[later] != nil, "the checkpoint has no %s", later)
		delete(fields, later)
	}
	if text, err = json.Marshal(fields); err == nil {
		err = os.WriteFile(path, text, 0o666)
	}
	require.NoError(t, err)
	var said []string
	all(t, 1, func(r rank) error {
		m, err := newNormed(r, 0.5)
		if err != nil {
			return err
		}
		momentum := &solver.Momentum{Rate: 0.125, Momentum: 0.5}
		notice := WithNotice(func(s string) { said = append(said, s) })
		d, err := New(r.comm, m.params(), WithFrozen(m.frozen), notice)
		if err != nil {
			return err
		}
		err = errors.Join(m.setAverages(3, 4), d.Load(dir, momentum, nil))
		if got := m.averages(); got[0] != 3 || got[1] != 4 {
			err = errors.Join(err, fmt.Errorf("averages become %v", got))
		}
		return errors.Join(err, momentum.Close(), d.Close())
	})
	checkNotices(t, said, "no running statistics", "no frozen parameters",
		"no step of random numbers")
}

// checkNotices checks that there is one notice for each text, which it has.
func checkNotices(t *testing.T, said []string, texts ...string) {
	t.Helper()
	require.Check(t, slices.EqualFunc(said, texts, strings.Contains), "the notices are %q, want %q",
		said, texts)
}

// TestRandomNumbersThatCannotBeKeptAreNamed: Save reports operations whose random numbers a
// checkpoint does not have, once.
func TestRandomNumbersThatCannotBeKeptAreNamed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	var said []string
	all(t, 2, func(r rank) error {
		r.build.Lock()
		m := newMLP(4, 1)
		dropped, err := gorgonia.Dropout(m.x, 0.5)
		if err == nil {
			_, err = nn.Dropout(0.5, nn.NewRandom(1), m.x)
		}
		if err == nil {
			_, err = nn.Dropout(0.25, nn.NewRandom(1), dropped)
		}
		r.build.Unlock()
		if err != nil {
			return err
		}
		d := testranks.Must(New(r.comm, m.params,
			WithNotice(func(s string) { said = append(said, s) })))
		sgd := &solver.SGD{Rate: 1}
		return errors.Join(d.Save(dir, sgd, nil), d.Save(dir, sgd, nil), d.Close())
	})
	checkNotices(t, said, "Dropout{training=true}", "Dropout{0.25, #0}")
}

// TestFrozenVariablesAreChecked: WithFrozen refuses what is no variable with a value, is trained,
// or may be a file that is mapped.
func TestFrozenVariablesAreChecked(t *testing.T) {
	all(t, 1, func(r rank) error {
		m := testranks.Must(newNormed(r, 0))
		shape, name := gorgonia.WithShape(2, 2), gorgonia.WithName("empty")
		empty := gorgonia.NewMatrix(m.g, gorgonia.Float64, shape, name)
		half := gorgonia.NewVector(m.g, tensor.Dtype{Type: reflect.TypeFor[backend.BFloat16]()},
			gorgonia.WithName("half"), gorgonia.WithShape(2),
			gorgonia.WithValue(tensor.New(tensor.WithBacking(make([]backend.BFloat16, 2)))))
		for want, nodes := range map[string]gorgonia.Nodes{
			"is nil": {nil}, "the result of an operation": {m.y},
			"frozen is given twice": {m.frozen, m.frozen}, "scale is a parameter": {m.scale},
			"empty has no value": {empty}, "half is of 16-bit floats": {half},
		} {
			_, err := New(r.comm, m.params(), WithFrozen(nodes...))
			if !errors.Is(err, backend.ErrArgument) || !strings.Contains(err.Error(), want) {
				return fmt.Errorf("%v, want %q", err, want)
			}
		}
		return nil
	})
}

// TestAModelThatNothingHasTrainedIsSavedWithTheVariance1: averages have their first value,
// PyTorch's, when the model is made.
func TestAModelThatNothingHasTrainedIsSavedWithTheVariance1(t *testing.T) {
	dir := t.TempDir()
	all(t, 2, func(r rank) error {
		m := testranks.Must(newNormed(r, 0.5))
		d := testranks.Must(New(r.comm, m.params(), WithFrozen(m.frozen)))
		sgd := &solver.SGD{Rate: 0.1}
		testranks.NoError(d.Save(dir, sgd, nil))
		testranks.NoError(errors.Join(m.setAverages(7, 7), d.Load(dir, sgd, nil)))
		if got := m.averages(); !slices.Equal(got, []float64{0, 1}) {
			return fmt.Errorf("mean and variance are %v, want 0 and 1", got)
		}
		return nil
	})
}
