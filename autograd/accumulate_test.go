package autograd

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// accumulated trains two steps of three micro-batches, and checks the gradients, which are
// known integers.
func (m *linear) accumulated(hooks bool, opts []Option) error {
	d, err := New(m.comm, m.params, opts...)
	if err != nil {
		return err
	}
	vm, err := m.build(d, hooks)
	if err != nil {
		return err
	}
	defer vm.Close()
	const micro = 3
	for step := range 2 {
		err := d.Accumulate(micro, func(i int) error {
			defer vm.Reset()
			return m.run(vm, step*micro+i)
		})
		if err != nil {
			return err
		}
		grads, err := d.Sync()
		if err != nil {
			return err
		}
		for p, g := range grads {
			v, _ := g.Grad()
			got, err := copied(v)
			if err != nil {
				return err
			}
			for i, x := range backend.View[float32](got) {
				want := 0.0
				for k := range micro {
					for r := range m.comm.Size() {
						if d.partial && r != m.comm.Rank() {
							continue
						}
						want += m.gradient(p, i, step*micro+k, r)
					}
				}
				if float64(x) != want {
					return fmt.Errorf("hooks %v, step %d: gradient %d of parameter %d is %v, "+
						"want %v", hooks, step, i, p, x, want)
				}
			}
		}
	}
	return d.Close()
}

func TestFoundAccumulationDropsNoBatch(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		// Sums of a few small integers are exact in 16 bits, too.
		for _, opts := range [][]Option{{WithSum()}, {WithSum(), WithBuckets(1, 600)},
			{WithSum(), WithCompression(half.Wrap(backend.F16))}, {WithPartial()}} {
			allOn(t, k, 2, func(r rank) error {
				for _, hooks := range []bool{false, true} {
					m, err := newLinear(r)
					if err == nil {
						err = m.accumulated(hooks, opts)
					}
					if err != nil {
						return err
					}
				}
				return nil
			})
		}
	})
}

// With every way to get at gradients, three micro-batches of one sample are one batch of
// three, except for the factor of the mean.
func TestAccumulationIsTheWholeBatch(t *testing.T) {
	gradients := func(r rank, s setting, micro int) (all [][]float32, err error) {
		m := newMLP(3/micro, 1)
		d, err := New(r.comm, m.params)
		if err != nil {
			return nil, err
		}
		defer d.Close()
		vm, err := s.machine(m, d)
		if err != nil {
			return nil, err
		}
		defer func() { vm.Close() }()
		err = d.Accumulate(micro, func(i int) error {
			m.feed(0, 3, i*3/micro)
			if s.lisp { // it can run once: Reset does not rewind it
				vm = gorgonia.NewLispMachine(m.g)
			}
			defer vm.Reset()
			return vm.RunAll()
		})
		if err != nil {
			return nil, err
		}
		grads, err := d.Sync()
		for _, g := range grads {
			v, _ := g.Grad()
			all = append(all, slices.Clone(v.Data().([]float32)))
			for i := range all[len(all)-1] {
				all[len(all)-1][i] /= float32(micro)
			}
		}
		return all, err
	}
	all(t, 1, func(r rank) error {
		want, err := gradients(r, setting{hooks: "none"}, 1)
		if err != nil {
			return err
		}
		for _, s := range []setting{{hooks: "none"}, {hooks: "none", dual: true}, {hooks: "some"},
			{hooks: "all", dual: true}, {hooks: "none", lisp: true}, {hooks: "all", lisp: true}} {
			got, err := gradients(r, s, 3)
			if err != nil {
				return fmt.Errorf("%+v: %w", s, err)
			}
			checkClose(r.T, got, want, 1e-5, 1e-7)
		}
		return nil
	})
}

func TestNothingIsSentBeforeTheLastMicroBatch(t *testing.T) {
	all(t, 2, func(r rank) error {
		c := &recorder{Communicator: r.comm}
		m, err := newLinear(r)
		if err != nil {
			return err
		}
		d, err := New(c, m.params, WithBuckets(1, 600))
		if err != nil {
			return err
		}
		vm, err := m.build(d, true)
		if err != nil {
			return err
		}
		defer vm.Close()
		err = d.Accumulate(3, func(i int) error {
			defer vm.Reset()
			err := m.run(vm, i)
			if sent, want := len(c.reductions()), i/2*len(d.buckets); sent != want {
				r.Errorf("after micro-batch %d %d buckets have left, want %d", i, sent, want)
			}
			return err
		})
		_, syncErr := d.Sync()
		return errors.Join(err, syncErr, d.Close())
	})
}

func TestAccumulationMisused(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	oops := errors.New("oops")
	teach(t, 1, heavyBall, func(l *lesson) error {
		runTwice := func(int) error {
			err := l.run(0)
			l.vm.Reset() // else the next RunAll does nothing
			return errors.Join(err, l.run(1))
		}
		run := func(i int) error { return l.run(i) }
		for want, misuse := range map[string]func() error{
			"0 micro-batches: there must be at least 1": func() error {
				return l.d.Accumulate(0, run)
			},
			// without Reset
			"micro-batch 1: bad argument: the hooks have caught no gradient": func() error {
				return l.d.Accumulate(3, run)
			},
			"micro-batch 0: oops": func() error {
				return l.d.Accumulate(3, func(i int) error { return errors.Join(l.run(i), oops) })
			},
		} {
			if err := misuse(); err == nil || !strings.Contains(err.Error(), want) {
				return fmt.Errorf("the error is %v, want %q", err, want)
			}
			l.vm.Reset()
		}
		if err := l.step(0); err != nil { // nothing of that is left
			return err
		}
		if err := l.run(1); err != nil {
			return err
		}
		if err := l.d.Accumulate(1, run); !errors.Is(err, backend.ErrArgument) ||
			!strings.Contains(err.Error(), "a step is in progress") {
			return fmt.Errorf("the error is %v", err)
		}
		if err := l.finish(); err != nil {
			return err
		}
		err := l.d.Accumulate(2, func(i int) error {
			defer l.vm.Reset()
			if i == 1 {
				if err := l.d.Save(dir, l.solver, nil); !errors.Is(err, backend.ErrArgument) ||
					!strings.Contains(err.Error(), "a step is in progress") {
					return fmt.Errorf("the error of Save is %v", err)
				}
			}
			return l.run(i)
		})
		if err = errors.Join(err, l.finish()); err != nil {
			return err
		}
		if err := l.d.Accumulate(2, runTwice); err == nil ||
			!strings.Contains(err.Error(), "has a second gradient in one step") {
			return fmt.Errorf("the error is %v", err)
		}
		return nil
	})
}

func TestFoundParameterWithoutAGradientIsAnError(t *testing.T) {
	for _, hooks := range []string{"none", "all"} {
		all(t, 2, func(r rank) error {
			r.build.Lock()
			m := newMLP(1, 1)
			m.params = append(m.params, newParam(m.g, rand.New(rand.NewPCG(1, 1)), "unused", 2, 3))
			r.build.Unlock()
			d, err := New(r.comm, m.params)
			if err != nil {
				return err
			}
			r.build.Lock()
			m.params = m.params[:4]
			vm, err := setting{hooks: hooks}.machine(m, d)
			r.build.Unlock()
			if err != nil {
				return err
			}
			defer vm.Close()
			m.feed(0, 2, r.comm.Rank())
			if err := vm.RunAll(); err != nil {
				return err
			}
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
			if err := l.d.Save(dir, l.solver, nil); err == nil ||
				!strings.Contains(err.Error(), told) {
				r.Errorf("the error of Save is %v", err)
			}
			return nil
		})
		if !errors.Is(err, backend.ErrMismatch) || !strings.Contains(err.Error(), told) {
			r.Errorf("the error of Close is %v", err)
		}
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
			var said notices
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
				d, err := New(r.comm, params, WithNotice(said.say))
				if err != nil {
					return err
				}
				defer d.Close()
				for range 3 {
					if err := vm.RunAll(); err != nil {
						return err
					}
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
		var said notices
		all(t, 2, func(r rank) error {
			r.build.Lock()
			m := newMLP(2, 1)
			r.build.Unlock()
			params := m.params
			if forgotten {
				params = params[1:]
			}
			d, err := New(r.comm, params, WithNotice(said.say))
			if err != nil {
				return err
			}
			r.build.Lock()
			vm, err := setting{hooks: "none"}.machine(m, d)
			r.build.Unlock()
			if err != nil {
				return err
			}
			defer vm.Close()
			m.feed(0, 4, 2*r.comm.Rank())
			for range 3 {
				if err := vm.RunAll(); err != nil {
					return err
				}
				if err := d.Step(&solver.SGD{Rate: 0.1}); err != nil {
					return err
				}
				vm.Reset()
			}
			return d.Close()
		})
		const want = "gradients of w1, which autograd.New was not given"
		if forgotten != (len(said.all) == 1) ||
			forgotten && !strings.Contains(said.all[0], want) {
			t.Errorf("forgotten %v: said %q", forgotten, said.all)
		}
	}
}

// Sync before the last micro-batch would exchange a part of the step.
func TestSyncBeforeTheLastMicroBatchIsAnError(t *testing.T) {
	for _, hooks := range []string{"none", "all"} {
		for i, err := range each(t, 2, func(r rank) error {
			return r.teachHooked(hooks, heavyBall(), func(l *lesson) error {
				return l.d.Accumulate(3, func(i int) error {
					defer l.vm.Reset()
					if i < 2 {
						return l.run(i)
					}
					return l.finish()
				})
			})
		}) {
			want := "2 of 3 micro-batches accumulated: run the other 1 and call Sync first"
			if !errors.Is(err, backend.ErrArgument) || !strings.Contains(err.Error(), want) {
				t.Errorf("hooks %s, rank %d: %v", hooks, i, err)
			}
		}
	}
}

// notices are what all ranks have said.
type notices struct {
	mu  sync.Mutex
	all []string
}

func (n *notices) say(text string) {
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
