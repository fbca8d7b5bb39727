package solver

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
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
				require.NoError(t, s.Step([]gorgonia.ValueGrad{o}))
			}
			for i := range want {
				if got := o.get(o.w, i); math.Abs(got-want[i].w) > tolerance {
					t.Fatalf("%s of %v: element %d is %v, want %v", name, dt, i, got, want[i].w)
				}
				require.That(t, o.get(o.dw, i) == 0, "%s of %v: gradient %d is not zero after Step",
					name, dt, i)
			}
		}
	}
}

// The first step of Adam is Rate in the direction of the gradient, however large that is:
// the correction of the bias of both moments is right.
func TestFirstStepOfAdamIsItsRate(t *testing.T) {
	for _, s := range []Solver{&Adam{Rate: 0.5}, &AdamW{Rate: 0.5}} {
		w, dw := []float32{1, 1, 1}, []float32{1e-3, -40, 1e6}
		require.NoError(t, s.Step([]gorgonia.ValueGrad{pair{w, dw}}))
		for i, want := range []float32{0.5, 1.5, 0.5} {
			require.Check(t, !(math.Abs(float64(w[i]-want)) > 1e-5),
				"%T: element %d is %v, want %v", s, i, w[i], want)
		}
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
		require.Fails(t, "s.Step", err, backend.ErrArgument, want)
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
	require.NoError(t, stepped.Step([]gorgonia.ValueGrad{pair{slices.Clone(w), slices.Clone(dw)}}))
	state := require.Value(stepped.State())(t)
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
		require.Fails(t, "new", new(Adam).CheckState(damaged, of), backend.ErrArgument, want)
	}
	require.NoError(t, stepped.CheckState(state, of))
}

func TestMomentumComputesTheBitsOfItsFormula(t *testing.T) {
	w, dw := []float32{1, 2, 3}, []float32{0.5, -0.25, 8}
	s := &Momentum{Rate: 0.1, Momentum: 0.9}
	v, want := make([]float32, 3), slices.Clone(w)
	for range 5 {
		grad := slices.Clone(dw)
		require.NoError(t, s.Step([]gorgonia.ValueGrad{pair{w, grad}}))
		for i, g := range dw {
			v[i] = float32(float32(0.9)*v[i]) - float32(float32(0.1)*g)
			want[i] += v[i]
		}
		require.That(t, slices.Equal(w, want) && slices.Equal(grad, make([]float32, 3)),
			"the parameter is %v, want %v; the gradient is %v", w, want, grad)
	}
	for name, p := range map[string]pair{"parameter 0 is 2 f32, its state is of 3": {w[:2], dw[:2]},
		"with a gradient of 2": {w, dw[:2]}} {
		require.Fails(t, "Step", s.Step([]gorgonia.ValueGrad{p}), name)
	}
}

// Step may leave parameters out, as of layers that do not learn.
func TestVelocitiesAreOfSomeParameters(t *testing.T) {
	of := func(n int) backend.Buffer { return backend.Of(make([]float32, n)) }
	state := func(lengths ...int) map[string]backend.Buffer {
		all := map[string]backend.Buffer{}
		for i, n := range lengths {
			all[fmt.Sprint(velocityOf, i)] = of(n)
		}
		return all
	}
	params := []backend.Buffer{of(3), of(4), of(3), of(5)}
	for _, good := range [][]int{{}, {3, 4, 3, 5}, {4, 3}, {3, 5}, {5}} {
		err := new(Momentum).CheckState(state(good...), params)
		require.Check(t, err == nil, "%v: %v", good, err)
	}
	for _, bad := range [][]int{{6}, {5, 3}, {3, 4, 3, 5, 5}, {4, 4}} {
		require.Fails(t, bad, new(Momentum).CheckState(state(bad...), params), backend.ErrArgument)
	}
}

// pair is a parameter with its gradient.
type pair struct{ w, dw []float32 }

func (p pair) Value() gorgonia.Value {
	return tensor.New(tensor.WithShape(len(p.w)), tensor.WithBacking(p.w))
}

func (p pair) Grad() (gorgonia.Value, error) {
	return tensor.New(tensor.WithShape(len(p.dw)), tensor.WithBacking(p.dw)), nil
}

// Errors of one call wrap those of another, as for solvers in groups.
func TestErrorsSayTheirPackageOnce(t *testing.T) {
	p := vectors(2)
	grads, bad := pairsOf(t, p, 0), &SGD{} // a rate of 0
	groups := require.Value(NewGroups(p, Group{&SGD{Rate: 1}, p[:1]}, Group{bad, p[1:]}))(t)
	_, twice := NewGroups(p, Group{bad, p}, Group{bad, p})
	_, fused := Fuse(groups, nil)
	_, clipped := ClipNorm([]gorgonia.ValueGrad{gorgonia.NewVector(gorgonia.NewGraph(),
		tensor.Float64)}, 1)
	for call, err := range map[string]error{
		"Groups":    groups.Step(grads),
		"EMA":       (&EMA{Solver: bad, Decay: 0.5}).Step(grads),
		"NewGroups": twice,
		"Fuse":      fused,
		"ClipNorm":  clipped,
	} {
		require.Check(t, err != nil && strings.HasPrefix(err.Error(), prefix) &&
			strings.Count(err.Error(), prefix) <= 1, "%s: %v", call, err)
	}
}

// The vectors of a state are found by their parameters, alone and in groups, and other solvers keep
// none that can be.
func TestVectorNamesAreThoseOfStates(t *testing.T) {
	params := vectors(5)
	for _, s := range []Solver{&Adam{Rate: 1}, &RMSProp{Rate: 1}, threeGroups(t, params)} {
		err := s.Step(pairsOf(t, params, 0))
		state, stateErr := s.State()
		require.NoError(t, errors.Join(err, stateErr))
		for i, n := range params {
			names, ok := VectorNames(s, i)
			require.Check(t, ok, "%T is of another package", s)
			for _, name := range names {
				if v, kept := state[name]; kept && v.Len() != n.Shape()[0] {
					t.Errorf("%T: %s of parameter %d has %d elements", s, name, i, v.Len())
				}
				delete(state, name)
			}
		}
		for name := range state {
			require.Check(t, strings.HasSuffix(name, ".steps"), "%T: %s is of no parameter", s,
				name)
		}
		if names, _ := VectorNames(s, 5); Kind(s) == Kind(threeGroups(t, params)) && names != nil {
			t.Errorf("groups of 5 parameters have %v for another one", names)
		}
	}
	_, ok := VectorNames(gorgonia.NewVanillaSolver(), 0)
	require.Check(t, !ok, "a solver of Gorgonia is one of this package")
}
