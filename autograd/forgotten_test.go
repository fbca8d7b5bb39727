package autograd

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// TestAForgottenResetIsAnError: of Sync, with and without dual values, and with gradients of the
// program. Gradients that are zero are none.
func TestAForgottenResetIsAnError(t *testing.T) {
	for _, how := range []string{"", "dual values", "UseGradients"} {
		for _, forgotten := range []string{"", "Reset", "RunAll"} {
			allOn(t, testenv.Hosts, 2, func(r rank) error {
				err := r.forget(how, forgotten)
				if forgotten == "" {
					return err
				}
				if !errors.Is(err, backend.ErrArgument) ||
					!strings.Contains(err.Error(), "no run has computed gradients") {
					return fmt.Errorf("%s, without %s: %v", how, forgotten, err)
				}
				return nil
			})
		}
	}
}

func (r rank) forget(how, what string) error {
	r.build.Lock()
	g := gorgonia.NewGraph()
	vector := func(name string, values ...float32) *gorgonia.Node {
		return gorgonia.NewVector(g, gorgonia.Float32, gorgonia.WithShape(2),
			gorgonia.WithName(name), gorgonia.WithValue(tensor.New(tensor.WithBacking(values))))
	}
	x, w := vector("x", 1, 2), vector("w", 1, 1)
	loss := gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Mul(x, w))))
	grads, err := gorgonia.Grad(loss, w)
	r.build.Unlock()
	if err != nil {
		return err
	}
	d, err := New(r.comm, gorgonia.Nodes{w})
	if err != nil {
		return err
	}
	defer d.Close()
	if how == "UseGradients" {
		r.build.Lock()
		grads[0], err = gorgonia.HadamardProd(grads[0], grads[0])
		r.build.Unlock()
		if err = errors.Join(err, d.UseGradients(grads)); err != nil {
			return err
		}
	}
	var options []gorgonia.VMOpt
	if how == "dual values" {
		options = append(options, gorgonia.BindDualValues(w))
	}
	vm := gorgonia.NewTapeMachine(g, options...)
	defer vm.Close()
	for i := range 4 {
		if i == 2 { // gradients of zeros are gradients
			clear(x.Value().Data().([]float32))
		}
		if what != "RunAll" || i == 0 {
			if err := vm.RunAll(); err != nil {
				return err
			}
		}
		if err := d.Step(&solver.SGD{Rate: 0.01}); err != nil {
			return err
		}
		if what != "Reset" {
			vm.Reset()
		}
	}
	return nil
}

func TestFoundParameterWithoutAGradientIsAnError(t *testing.T) {
	for _, hooks := range []string{"none", "all"} {
		all(t, 2, func(r rank) error {
			r.build.Lock()
			m := newMLP(1, 1)
			m.params = append(m.params, newParam(m.g, rand.New(rand.NewPCG(1, 1)), "unused", 2, 3))
			r.build.Unlock()
			d := testranks.Must(New(r.comm, m.params))
			r.build.Lock()
			m.params = m.params[:4]
			vm, err := setting{hooks: hooks}.machine(m, d)
			r.build.Unlock()
			if err != nil {
				return err
			}
			defer vm.Close()
			m.feed(0, 2, r.comm.Rank())
			testranks.NoError(vm.RunAll())
			_, err = d.Sync()
			if !errors.Is(err, backend.ErrArgument) ||
				!strings.Contains(err.Error(), "no gradient has reached unused f32(2, 3)") ||
				!strings.Contains(err.Error(), "pass WithUnused") {
				return fmt.Errorf("hooks %s: the error is %v", hooks, err)
			}
			return d.Close()
		})
	}
}

// Who gives a solver the gradients of this rank alone is told by Close and by Save.
func TestFoundTrainingWithoutSyncIsAnError(t *testing.T) {
	const told = "Sync was never called"
	dir := filepath.Join(t.TempDir(), "checkpoint")
	all(t, 2, func(r rank) error {
		err := r.teachHooked("none", heavyBall(), func(l *lesson) error {
			if err := l.run(0); err != nil {
				return err
			}
			if err := l.solver.Step(gorgonia.NodesToValueGrads(l.m.params)); err != nil {
				return err
			}
			require.Fails(r, "the error of Save", l.d.Save(dir, l.solver, nil), told)
			return nil
		})
		require.Fails(r, "the error of Close", err, backend.ErrMismatch, told)
		// Nothing is wrong where parameters have not changed, nothing has run, or there was a
		// Sync; and nobody can tell once the memory of the slots is taken back.
		return errors.Join(
			r.teachHooked("none", heavyBall(), func(l *lesson) error {
				for _, p := range l.d.params {
					clear(p.slot.Bytes())
				}
				return l.run(0)
			}),
			r.teachHooked("none", heavyBall(), func(l *lesson) error { return l.run(0) }),
			r.teachHooked("none", heavyBall(), func(l *lesson) error {
				l.m.params[0].Value().Data().([]float32)[0] = math.Pi
				return nil
			}),
			r.teachHooked("all", heavyBall(), func(l *lesson) error { return l.steps(0, 2) }),
		)
	})
}

// Who forgets Sync reads it on standard error, once for all ranks, since a deferred Close drops its
// error: also where parameters begin as zeros, and where the communicator was closed before.
func TestAForgottenSyncIsReportedOnce(t *testing.T) {
	for _, begin := range []float32{0, 1} {
		for _, forgets := range []bool{false, true} {
			var said heard
			all(t, 2, func(r rank) error {
				vm, params, err := square(r)
				if err != nil {
					return err
				}
				defer vm.Close()
				w := params[0].Value().Data().([]float32)
				for i := range w {
					w[i] = begin
				}
				d := testranks.Must(New(r.comm, params, WithNotice(said.say)))
				defer d.Close()
				for range 3 {
					testranks.NoError(vm.RunAll())
					if !forgets {
						if _, err := d.Sync(); err != nil {
							return err
						}
					}
					w[0]++ // what a solver would do
					vm.Reset()
				}
				return r.comm.Close()
			})
			switch {
			case !forgets && len(said.all) > 0:
				t.Errorf("with Sync, from %v: said %q", begin, said.all)
			case forgets && (len(said.all) != 1 ||
				!strings.Contains(said.all[0], "Sync was never called")):
				t.Errorf("without Sync, from %v: said %q", begin, said.all)
			}
		}
	}
}

// A variable with a gradient that New was not given is reported by name, once, by one rank.
func TestAForgottenParameterIsReported(t *testing.T) {
	for _, forgotten := range []bool{false, true} {
		var said heard
		all(t, 2, func(r rank) error {
			r.build.Lock()
			m := newMLP(2, 1)
			r.build.Unlock()
			params := m.params
			if forgotten {
				params = params[1:]
			}
			d := testranks.Must(New(r.comm, params, WithNotice(said.say)))
			r.build.Lock()
			vm, err := setting{hooks: "none"}.machine(m, d)
			r.build.Unlock()
			if err != nil {
				return err
			}
			defer vm.Close()
			m.feed(0, 4, 2*r.comm.Rank())
			for range 3 {
				testranks.NoError(vm.RunAll())
				testranks.NoError(d.Step(&solver.SGD{Rate: 0.1}))
				vm.Reset()
			}
			return d.Close()
		})
		const want = "gradients of w1, which autograd.New was not given"
		require.Check(t, forgotten == (len(said.all) == 1) &&
			(!forgotten || strings.Contains(said.all[0],
				want)), "forgotten %v: said %q", forgotten, said.all)
	}
}

// heard are what all ranks have said.
type heard struct {
	mu  sync.Mutex
	all []string
}

func (n *heard) say(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = append(n.all, text)
}

func TestFoundAdamWOfGorgoniaIsRefusedInWords(t *testing.T) {
	teach(t, 2, func() gorgonia.Solver { return gorgonia.NewAdamW() }, func(l *lesson) error {
		if err := l.run(0); err != nil {
			return err
		}
		err := l.d.Step(l.solver)
		if !errors.Is(err, backend.ErrUnsupported) ||
			!strings.Contains(err.Error(), "use solver.AdamW") {
			return fmt.Errorf("the error is %v", err)
		}
		if err := l.d.Step(&solver.AdamW{Rate: 0.1}); err != nil { // nothing was lost
			return err
		}
		err = l.d.Save(filepath.Join(l.TempDir(), "checkpoint"), l.solver, nil)
		if !errors.Is(err, backend.ErrUnsupported) ||
			!strings.Contains(err.Error(), "use solver.AdamW") {
			return fmt.Errorf("the error of Save is %v", err)
		}
		return l.d.Check()
	})
}
