package autograd

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// While a step is under way nothing is saved, loaded or averaged, and training goes on with
// the bits of a run where nobody has tried, wherever parameters are.
func TestAStepUnderWayIsNotDisturbedRaced(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for i, name := range slices.Sorted(maps.Keys(compressions)) {
			// A bucket for each parameter, and one for all.
			for j, size := range []int{1, 1 << 20} {
				if k.Sampled() && (i+j)%2 > 0 {
					continue
				}
				opts := append([]Option{WithBuckets(size, size)}, compressions[name]...)
				var want [2][][]byte
				for _, disturbed := range []bool{false, true} {
					dir := filepath.Join(t.TempDir(), "checkpoint")
					allOn(t, k, len(want), func(r rank) error {
						return r.trainQuadratic(func(t *training) error {
							if err := errors.Join(t.steps(2), t.save(dir), t.steps(2),
								t.run()); err != nil {
								return err
							}
							if disturbed {
								if err := unchanged(t.d, t.solver, func() error {
									return t.disturb(dir)
								}); err != nil {
									return fmt.Errorf("%s: %w", name, err)
								}
							}
							if err := errors.Join(t.finish(), t.steps(2)); err != nil {
								return err
							}
							got, err := t.values()
							if !disturbed {
								want[r.comm.Rank()] = got
							} else if err == nil &&
								!slices.EqualFunc(got, want[r.comm.Rank()], bytes.Equal) {
								err = fmt.Errorf("%s: other bits", name)
							}
							return err
						}, opts...)
					})
				}
			}
		}
	})
}

// disturb tries what has to wait for the end of a step.
func (t *training) disturb(dir string) error {
	tries := map[string]func() error{
		"save": func() error { return t.d.Save(dir+"2", t.solver, nil) },
		"load": func() error { return t.d.Load(dir, t.solver, nil) },
	}
	if t.d.partial.on { // else these do nothing
		tries["average"], tries["average all"] = t.d.Average, t.d.AverageAll
	}
	for _, what := range slices.Sorted(maps.Keys(tries)) { // the same order on all ranks
		err := tries[what]()
		if !errors.Is(err, backend.ErrArgument) ||
			!strings.Contains(err.Error(), "a step is in progress") ||
			!strings.Contains(err.Error(), "call Sync first") {
			return fmt.Errorf("%s: the error is %v", what, err)
		}
	}
	if _, err := os.Stat(dir + "2"); err == nil {
		return errors.New("a refused Save has written something")
	}
	return t.d.Err()
}

// All ranks are told by Save of a step that is under way on one of them.
func TestAStepUnderWayOnOneRankConcernsAllRaced(t *testing.T) {
	for _, opts := range [][]Option{nil, {WithPartial()}} {
		lateStep(t, opts, func(l *lesson, late bool) error {
			err := l.d.Save(filepath.Join(l.TempDir(), "checkpoint"), l.solver, nil)
			if err == nil || strings.Count(err.Error(), "a step is in progress") != 1 ||
				!strings.Contains(err.Error(), "rank 1 cannot go on") {
				return fmt.Errorf("the error is %v", err)
			}
			if errors.Is(err, backend.ErrArgument) == late {
				return fmt.Errorf("on rank %d the error is %v: only the rank in a step is to blame",
					l.comm.Rank(), err)
			}
			if late {
				if err := l.run(0); err != nil {
					return err
				}
			}
			return l.finish()
		})
	}
}

// Average does not ask the others: they wait in it until this rank is there, too.
func TestAverageWaitsForAStepUnderWayRaced(t *testing.T) {
	lateStep(t, []Option{WithPartial()}, func(l *lesson, late bool) error {
		if late {
			return errors.Join(l.d.Average(), l.run(0), l.sync())
		}
		if err := l.d.Average(); !errors.Is(err, backend.ErrArgument) ||
			strings.Count(err.Error(), "a step is in progress") != 1 {
			return fmt.Errorf("the error is %v", err)
		}
		return l.finish()
	})
}

// lateStep runs f between two ranks, of which rank 1 has a step under way and rank 0 is late.
// Without all hooks the only bucket stays until Sync, and ranks have sent the same.
func lateStep(t *testing.T, opts []Option, f func(l *lesson, late bool) error) {
	all(t, 2, func(r rank) error {
		return r.teachHooked("some", heavyBall(), func(l *lesson) error {
			late := l.comm.Rank() == 0
			if !late {
				if err := l.run(0); err != nil {
					return err
				}
			}
			return errors.Join(f(l, late), l.step(1), l.d.AverageAll(), l.d.Check())
		}, append([]Option{WithBuckets(1<<20, 1<<20)}, opts...)...)
	})
}

// Without hooks nothing is under way before Sync: who saves there resumes there.
func TestSaveBeforeSyncWithoutHooks(t *testing.T) {
	const saved, whole = 3, 6
	for _, name := range []string{"plain", "topk", "partial"} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "checkpoint")
			var want [2][][]float32
			all(t, len(want), func(r rank) error {
				return r.teachHooked("none", heavyBall(), func(l *lesson) error {
					if err := errors.Join(l.steps(0, saved), l.run(saved),
						l.d.Save(dir, l.solver, nil), l.finish(), l.steps(saved+1,
							whole)); err != nil {
						return err
					}
					want[l.comm.Rank()] = l.values()
					return nil
				}, compressions[name]...)
			})
			all(t, len(want), func(r rank) error {
				return r.teachHooked("none", heavyBall(), func(l *lesson) error {
					if err := errors.Join(l.d.Load(dir, l.solver, nil),
						l.steps(saved, whole)); err != nil {
						return err
					}
					return sameBits(l.values(), want[l.comm.Rank()])
				}, compressions[name]...)
			})
		})
	}
}

// Gradients that hooks have caught are lost with Close, which says so.
func TestCloseInTheMiddleOfAStepIsAnErrorRaced(t *testing.T) {
	for i, err := range each(t, 2, func(r rank) error {
		return r.teachHooked("all", heavyBall(), func(l *lesson) error { return l.run(0) })
	}) {
		require.Fails(t, fmt.Sprint("rank ", i), err, backend.ErrArgument,
			"in progress, with gradients caught: call Sync first")
	}
}
