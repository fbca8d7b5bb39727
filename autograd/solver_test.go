package autograd

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// solvers are the solvers of this package, with settings under which every term counts.
var solvers = map[string]func() Solver{
	"sgd":      func() Solver { return &SGD{Rate: 0.1, WeightDecay: 0.25} },
	"momentum": func() Solver { return &Momentum{Rate: 0.1, Momentum: 0.9, WeightDecay: 0.25} },
	"nesterov": func() Solver { return &Nesterov{Rate: 0.1, Momentum: 0.9, WeightDecay: 0.25} },
	"rmsprop": func() Solver {
		return &RMSProp{Rate: 0.01, Alpha: 0.9, Epsilon: 1e-3, WeightDecay: 0.25, Momentum: 0.5}
	},
	"rmsprop without momentum": func() Solver { return &RMSProp{Rate: 0.01, Epsilon: 1e-3} },
	"adam":                     func() Solver { return &Adam{Rate: 0.01} },
	"adamw": func() Solver {
		return &AdamW{Rate: 0.01, Beta1: 0.8, Beta2: 0.99, Epsilon: 1e-3, WeightDecay: 0.25}
	},
}

// formula is one parameter in the solver's published formula, in float64.
type formula struct {
	w, m, v float64
	t       int
}

func (f *formula) step(s Solver, g float64) {
	f.t++
	adam := func(rate, beta1, beta2, epsilon float64) {
		f.m = beta1*f.m + (1-beta1)*g
		f.v = beta2*f.v + (1-beta2)*g*g
		mean := f.m / (1 - math.Pow(beta1, float64(f.t)))
		square := f.v / (1 - math.Pow(beta2, float64(f.t)))
		f.w -= rate * mean / (math.Sqrt(square) + epsilon)
	}
	switch s := s.(type) {
	case *SGD:
		f.w -= s.Rate * (g + s.WeightDecay*f.w)
	case *Momentum:
		f.v = s.Momentum*f.v - s.Rate*(g+s.WeightDecay*f.w)
		f.w += f.v
	case *Nesterov:
		g += s.WeightDecay * f.w
		f.m = s.Momentum*f.m + g
		f.w -= s.Rate * (g + s.Momentum*f.m)
	case *RMSProp:
		alpha := cmp.Or(s.Alpha, 0.99)
		g += s.WeightDecay * f.w
		f.v = alpha*f.v + (1-alpha)*g*g
		f.m = s.Momentum*f.m + g/(math.Sqrt(f.v)+s.Epsilon)
		f.w -= s.Rate * f.m
	case *Adam:
		adam(s.Rate, 0.9, 0.999, 1e-8)
	case *AdamW:
		f.w *= 1 - s.Rate*s.WeightDecay
		adam(s.Rate, s.Beta1, s.Beta2, s.Epsilon)
	}
}

// operand is a parameter with its gradient, of either float.
type operand struct{ w, dw *tensor.Dense }

func (o operand) Value() gorgonia.Value         { return o.w }
func (o operand) Grad() (gorgonia.Value, error) { return o.dw, nil }

// set and get access an element.
func (o operand) set(t *tensor.Dense, i int, x float64) {
	if t.Dtype() == tensor.Float32 {
		t.Float32s()[i] = float32(x)
		return
	}
	t.Float64s()[i] = x
}

func (o operand) get(t *tensor.Dense, i int) float64 {
	if t.Dtype() == tensor.Float32 {
		return float64(t.Float32s()[i])
	}
	return t.Float64s()[i]
}

func TestSolversComputeTheirFormulas(t *testing.T) {
	const n = 4099 // several blocks of the host, the last one short
	for name, newSolver := range solvers {
		for dt, tolerance := range map[tensor.Dtype]float64{tensor.Float32: 2e-5,
			tensor.Float64: 1e-13} {
			s, want := newSolver(), make([]formula, n)
			o := operand{tensor.New(tensor.WithShape(n), tensor.Of(dt)),
				tensor.New(tensor.WithShape(n), tensor.Of(dt))}
			for i := range want {
				want[i].w = float64(i%17) / 16
				o.set(o.w, i, want[i].w)
			}
			for step := range 20 {
				s.SetRate(0.01 * float64(1+step%3))
				for i := range want {
					g := math.Ldexp(float64((7*i+3*step)%9-4), -(i % 20)) // also tiny ones
					o.set(o.dw, i, g)
					want[i].step(s, g)
				}
				if err := s.Step([]gorgonia.ValueGrad{o}); err != nil {
					t.Fatal(err)
				}
			}
			for i := range want {
				if got := o.get(o.w, i); math.Abs(got-want[i].w) > tolerance {
					t.Fatalf("%s of %v: element %d is %v, want %v", name, dt, i, got, want[i].w)
				}
				if o.get(o.dw, i) != 0 {
					t.Fatalf("%s of %v: gradient %d is not zero after Step", name, dt, i)
				}
			}
		}
	}
}

// The first step of Adam is Rate in the direction of the gradient, however large that is:
// the correction of the bias of both moments is right.
func TestFirstStepOfAdamIsItsRate(t *testing.T) {
	for _, s := range []Solver{&Adam{Rate: 0.5}, &AdamW{Rate: 0.5}} {
		w, dw := []float32{1, 1, 1}, []float32{1e-3, -40, 1e6}
		if err := s.Step([]gorgonia.ValueGrad{pair{w, dw}}); err != nil {
			t.Fatal(err)
		}
		for i, want := range []float32{0.5, 1.5, 0.5} {
			if math.Abs(float64(w[i]-want)) > 1e-5 {
				t.Errorf("%T: element %d is %v, want %v", s, i, w[i], want)
			}
		}
	}
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

func TestSolversRefuseWhatDoesNotFit(t *testing.T) {
	w, dw := []float32{1, 2, 3}, []float32{1, 1, 1}
	for want, s := range map[string]Solver{
		"SGD: bad argument: Rate is NaN":               &SGD{Rate: math.NaN()},
		"Momentum: bad argument: WeightDecay is -1":    &Momentum{Rate: 1, WeightDecay: -1},
		"Adam: bad argument: Rate is +Inf":             &Adam{Rate: math.Inf(1)},
		"AdamW: bad argument: Beta2 is 1: it must b":   &AdamW{Rate: 1, Beta2: 1},
		"SGD: bad argument: Rate is 0":                 &SGD{},
		"Momentum: bad argument: Rate is 0":            &Momentum{Momentum: 0.9},
		"Adam: bad argument: Rate is 0":                &Adam{},
		"AdamW: bad argument: Rate is 0":               &AdamW{},
		"Nesterov: bad argument: Rate is 0":            &Nesterov{Momentum: 0.9},
		"Nesterov: bad argument: Momentum is 0: it mu": &Nesterov{Rate: 1},
		"RMSProp: bad argument: Rate is 0":             &RMSProp{},
		"RMSProp: bad argument: Alpha is 1: it must":   &RMSProp{Rate: 1, Alpha: 1},
	} {
		err := s.Step([]gorgonia.ValueGrad{pair{w, dw}})
		if !errors.Is(err, backend.ErrArgument) || !strings.Contains(err.Error(), want) {
			t.Errorf("the error is %v, want %q", err, want)
		}
		if _, fused := Fuse(s, nil); fused == nil || fused.Error() != err.Error() {
			t.Errorf("Step returns %v, Fuse %v", err, fused)
		}
	}
	for _, s := range []Solver{
		&SGD{}, &Momentum{}, &Nesterov{Momentum: 0.9}, &RMSProp{}, &Adam{}, &AdamW{},
	} {
		if s.SetRate(0); s.Step([]gorgonia.ValueGrad{pair{w, dw}}) != nil {
			t.Errorf("%T refuses a rate of 0 that a schedule may have", s)
		}
	}
	stepped := &Adam{Rate: 1}
	if err := stepped.Step([]gorgonia.ValueGrad{pair{slices.Clone(w), slices.Clone(dw)}}); err !=
		nil {
		t.Fatal(err)
	}
	state, err := stepped.State()
	if err != nil {
		t.Fatal(err)
	}
	of := []backend.Buffer{backend.Of(w)}
	for want, damage := range map[string]func(map[string]backend.Buffer){
		"the state has no adam.steps": func(
			s map[string]backend.Buffer) {
			delete(s, "adam.steps")
		},
		"the state has adam.m. for 1 parameters, and adam.v. for 0": func(
			s map[string]backend.Buffer) {
			delete(s, "adam.v.0")
		},
		"the state has no adam.v.0, and others after it": func(
			s map[string]backend.Buffer) {
			s["adam.v.7"] = s["adam.v.0"]
			delete(s, "adam.v.0")
		},
		"adam.v.0 is 2 f32, and adam.m.0 is not like it": func(
			s map[string]backend.Buffer) {
			s["adam.v.0"] = backend.Of(w[:2])
		},
		"adam.m.0 is a tensor of i32": func(
			s map[string]backend.Buffer) {
			s["adam.m.0"] = backend.Of([]int32{1, 2, 3})
		},
		"adam.m.0 of the state is 2 f32: none of the last 1 of 1 para": func(
			s map[string]backend.Buffer) {
			s["adam.m.0"], s["adam.v.0"] = backend.Of(w[:2]), backend.Of(w[:2])
		},
	} {
		damaged := map[string]backend.Buffer{}
		for name, b := range state {
			damaged[name] = b
		}
		damage(damaged)
		if err := new(Adam).CheckState(damaged, of); !errors.Is(err, backend.ErrArgument) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("the error is %v, want %q", err, want)
		}
	}
	if err := stepped.CheckState(state, of); err != nil {
		t.Error(err)
	}
}
