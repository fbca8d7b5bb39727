package autograd

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// solvers are those that ranks train by in tests.
var solvers = map[string]func() solver.Solver{
	"sgd": func() solver.Solver { return &solver.SGD{Rate: 0.1} },
	"momentum": func() solver.Solver {
		return &solver.Momentum{Rate: 0.1, Momentum: 0.9, WeightDecay: 0.25}
	},
	"nesterov": func() solver.Solver {
		return &solver.Nesterov{Rate: 0.1, Momentum: 0.9, WeightDecay: 0.25}
	},
	"rmsprop": func() solver.Solver { return &solver.RMSProp{Rate: 0.01, Momentum: 0.5} },
	"rmsprop without momentum": func() solver.Solver {
		return &solver.RMSProp{Rate: 0.01, Epsilon: 1e-3, WeightDecay: 0.25}
	},
	"adam":   func() solver.Solver { return &solver.Adam{Rate: 0.01} },
	"adamw":  func() solver.Solver { return &solver.AdamW{Rate: 0.01, WeightDecay: 0.25} },
	"custom": func() solver.Solver { return summing("sums") },
	"ema":    func() solver.Solver { return &solver.EMA{Solver: summing("sums"), Decay: 0.5} },
}

// summing is a solver whose steps are along the sum of all gradients.
func summing(name string) *solver.Custom {
	update := func(u *solver.Update) {
		sum := u.Do(fuse.Add, u.Kept(0), u.Gradient())
		u.SetKept(0, sum)
		u.SetParam(u.Do(fuse.Sub, u.Param(), u.With(fuse.Mul, sum, u.Rate())))
	}
	return &solver.Custom{Name: name, Rate: 0.01, Keep: []string{"sum"}, Update: update}
}

func TestSolversHaveTheBitsOfTheHostEverywhere(t *testing.T) {
	for name, newSolver := range solvers {
		want := make([][][]byte, 2)
		train := func(r rank) ([][]byte, error) {
			s := newSolver()
			values, err := fit(r, true, s)
			return values, errors.Join(err, s.Close())
		}
		all(t, len(want), func(r rank) (err error) {
			want[r.comm.Rank()], err = train(r)
			return err
		})
		testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
			allOn(t, k, len(want), func(r rank) error {
				got, err := train(r)
				if err == nil && !slices.EqualFunc(got, want[r.comm.Rank()], bytes.Equal) {
					err = fmt.Errorf("%s: other bits than on the host", name)
				}
				return err
			})
		})
	}
}

// A solver that goes on from a checkpoint gives the bits of one that has not stopped, and
// takes nothing from what it did before.
func TestSolversResumeEverywhere(t *testing.T) {
	for name, newSolver := range solvers {
		testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
			dir := filepath.Join(t.TempDir(), "checkpoint")
			want := make([][][]byte, 2)
			resume := func(f func(t *training) error) {
				allOn(t, k, len(want), func(r rank) error {
					return r.trainQuadratic(func(t *training) error {
						t.solver = newSolver()
						return f(t)
					})
				})
			}
			resume(func(t *training) (err error) {
				if err := errors.Join(t.steps(3), t.save(dir), t.steps(4)); err != nil {
					return err
				}
				want[t.comm.Rank()], err = t.values()
				return err
			})
			resume(func(t *training) error {
				if err := errors.Join(t.steps(2), t.d.Load(dir, t.solver, nil),
					t.steps(4)); err != nil {
					return err
				}
				got, err := t.values()
				if err == nil && !slices.EqualFunc(got, want[t.comm.Rank()], bytes.Equal) {
					err = fmt.Errorf("%s: other bits than without a stop", name)
				}
				return err
			})
		})
	}
}

// A checkpoint of a solver with another name is refused.
func TestACheckpointOfAnotherCustomSolverIsRefused(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	all(t, 2, func(r rank) error {
		return r.trainQuadratic(func(t *training) error {
			t.solver = summing("lion")
			err := errors.Join(t.steps(1), t.save(dir))
			other := summing("tiger")
			return errors.Join(err, refused(t.d.Load(dir, other, nil), "*solver.Custom lion",
				"*solver.Custom tiger"))
		})
	})
}

// A checkpoint has the states of all groups, and belongs to these groups.
func TestGroupsResume(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	groupsOf := func(p gorgonia.Nodes, a, b gorgonia.Nodes) *solver.Groups {
		g, err := solver.NewGroups(p, trainedBy(&solver.AdamW{Rate: 0.1, WeightDecay: 0.1}, a),
			trainedBy(&solver.AdamW{Rate: 0.01}, b),
			trainedBy(&solver.SGD{Rate: 1}, p[2:3]))
		require.NoError(t, err)
		return g
	}
	groups := func(p gorgonia.Nodes) *solver.Groups { // which are interleaved
		return groupsOf(p, gorgonia.Nodes{p[4], p[0]}, gorgonia.Nodes{p[1], p[3]})
	}
	all(t, 1, func(r rank) error {
		params, again := vectors(5), vectors(5)
		g, resumed := groups(params), groups(again)
		swapped := groupsOf(again, gorgonia.Nodes{again[1], again[3]},
			gorgonia.Nodes{again[0], again[4]})
		d, err := New(r.comm, params)
		if err != nil {
			return err
		}
		defer d.Close()
		testranks.NoError(errors.Join(stepped(g, params, 0, 1, 2), d.Save(dir, g, nil),
			stepped(g, params, 3, 4)))
		other, err := New(r.comm, again)
		if err != nil {
			return err
		}
		defer other.Close()
		err = errors.Join(other.Load(dir, resumed, nil), stepped(resumed, again, 3, 4))
		for i := range params {
			got, want := again[i].Value().Data().([]float64), params[i].Value().Data().([]float64)
			if !slices.Equal(got, want) {
				err = errors.Join(err, fmt.Errorf("parameter %d is %v, want %v", i, got, want))
			}
		}
		return errors.Join(err, refused(other.Load(dir, swapped, nil),
			"group.0.adam.m/w0, which is of none of these groups"))
	})
}
