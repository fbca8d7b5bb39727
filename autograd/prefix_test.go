package autograd

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
)

// TestErrorsSayTheirPackageOnce: those of public calls, which wrap each other's.
func TestErrorsSayTheirPackageOnce(t *testing.T) {
	bad, dir := &solver.SGD{}, filepath.Join(t.TempDir(), "checkpoint") // a rate of 0
	wrong := bad.Step(nil)
	teach(t, 2, func() gorgonia.Solver { return &solver.Adam{Rate: 0.01} }, func(l *lesson) error {
		own := error(nil)
		if l.comm.Rank() == 1 {
			own = wrong
		}
		_, batch := New(l.comm, l.m.params, WithTree(-1))
		if err := errors.Join(l.step(0), l.d.Save(dir, l.solver, nil)); err != nil {
			return err
		}
		all := map[string]error{
			"Step":        l.d.Step(bad),
			"EMA of EMA":  l.d.Step(&solver.EMA{Solver: &solver.EMA{Solver: bad}}),
			"Agree":       Agree(l.comm, "", own),
			"Load":        l.d.Load(dir, &solver.EMA{Solver: &solver.EMA{}}, nil),
			"Load other":  l.d.Load(dir, heavyBall(), nil),
			"SaveWeights": SaveWeights(dir, nil),
			"WithTree":    batch,
		}
		if err := l.d.Close(); err != nil {
			return err
		}
		all["Save after Close"] = l.d.Save(dir, bad, nil)
		_, all["Sync after Close"] = l.d.Sync()
		l.comm.Abort(wrong)
		one := 1.0
		_, all["Any"] = Any(l.comm, true)
		_, all["TreeMean"] = TreeMean(l.comm, []float64{one})
		all["Mean"] = Mean(l.comm, &one)
		for call, err := range all {
			if err == nil {
				return fmt.Errorf("%s: there is no error", call)
			}
			for line := range strings.Lines(err.Error()) {
				if strings.Count(line, prefix) > 1 || strings.Count(line, "solver: ") > 1 {
					return fmt.Errorf("%s: it is said again: %v", call, err)
				}
			}
			if !strings.HasPrefix(err.Error(), prefix) && !errors.As(err,
				new(*backend.Error)) {
				return fmt.Errorf("%s: it is not said: %v", call, err)
			}
		}
		if !errors.Is(all["Step"], backend.ErrArgument) {
			return fmt.Errorf("it wraps nothing: %v", all["Step"])
		}
		return nil
	})
}
