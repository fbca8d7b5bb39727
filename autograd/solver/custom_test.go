package solver

import (
	"bytes"
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
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// lion returns the solver of Chen et al., "Symbolic Discovery of Optimization Algorithms"
// (arXiv:2302.06675), Algorithm 2.
func lion() *Custom {
	const beta1, beta2, decay = 0.9, 0.99, 0.25
	mix := func(u *Update, beta float64) fuse.Value {
		return u.Do(fuse.Add, u.With(fuse.Mul, u.Kept(0), beta),
			u.With(fuse.Mul, u.Gradient(), 1-beta))
	}
	return &Custom{Name: "lion", Rate: 0.01, Keep: []string{"m"}, Update: func(u *Update) {
		w := u.With(fuse.Mul, u.Param(), 1-u.Rate()*decay)
		u.SetParam(u.Do(fuse.Sub, w, u.With(fuse.Mul, u.Do(fuse.Sign, mix(u, beta1)), u.Rate())))
		u.SetKept(0, mix(u, beta2))
	}}
}

// writtenAs returns one's own solver whose update is written as a built-in one's.
func writtenAs(s Solver) *Custom {
	r := s.(ruled).rule()
	c := &Custom{Name: "own", Rate: *r.rate, Update: func(u *Update) {
		*r.rate = u.Rate()
		r.update(u)
	}}
	for i := range r.keep {
		c.Keep = append(c.Keep, fmt.Sprint("v", i))
	}
	return c
}

// element is an element of a parameter.
type element interface{ float32 | float64 }

// lionStep is Lion in a loop, each operation rounded to T.
func lionStep[T element](rate float64, w, m, dw []T) {
	beta1, beta2 := 0.9, 0.99
	for i, g := range dw {
		c := T(T(beta1)*m[i]) + T(T(1-beta1)*g)
		w[i] = T(T(1-rate*0.25) * w[i])
		switch {
		case c > 0:
			w[i] -= T(rate)
		case c < 0:
			w[i] += T(rate)
		}
		m[i] = T(T(beta2)*m[i]) + T(T(1-beta2)*g)
	}
}

func TestLionIsItsPublishedLoop(t *testing.T) {
	lionOf(t, []float32{}, tensor.Float32)
	lionOf(t, []float64{}, tensor.Float64)
}

func lionOf[T element](t *testing.T, _ []T, dt tensor.Dtype) {
	t.Helper()
	const n = 2500
	s, m, want := lion(), make([]T, n), make([]T, n)
	room := func() *tensor.Dense { return tensor.New(tensor.WithShape(n), tensor.Of(dt)) }
	o := operand{room(), room()}
	w, dw := o.w.Data().([]T), o.dw.Data().([]T)
	for i := range w {
		w[i] = T(i%17) / 16
	}
	copy(want, w)
	for step := range 10 {
		rate := 0.01 * float64(1+step%3)
		for i := range dw {
			dw[i] = T(math.Ldexp(float64((7*i+3*step)%9-4), -(i % 20)))
		}
		lionStep(rate, want, m, dw)
		s.SetRate(rate)
		require.NoError(t, s.Step([]gorgonia.ValueGrad{o}))
		require.That(t, slices.Equal(w, want), "%v, step %d: other bits than a loop's", dt, step)
	}
	state := require.Value(s.State())(t)
	require.Check(t, bytes.Equal(state["lion.m.0"].Bytes(), backend.Of(m).Bytes()) &&
		len(state) == 2, "%v: another state than a loop's: %v", dt, state)
}

// A solver of one's own steps, and goes on from a state, with the bits of the built-in one, alone
// and in groups.
func TestACustomSolverHasTheBitsOfTheBuiltInOne(t *testing.T) {
	for name, newSolver := range solvers {
		for _, groups := range []bool{false, true} {
			built := resumed(t, groups, newSolver)
			own := resumed(t, groups, func() Solver { return writtenAs(newSolver()) })
			for i := range built {
				if !slices.Equal(built[i], own[i]) {
					t.Errorf("%s, groups %v: other bits of parameter %d", name, groups, i)
				}
			}
		}
	}
}

// resumed returns parameters after three steps of a solver, or of two for groups of the parameters,
// and four steps of another one with its state.
func resumed(t *testing.T, groups bool, newSolver func() Solver) (values [][]float64) {
	t.Helper()
	params, state := vectors(3), map[string]backend.Buffer{}
	for _, steps := range [][]int{{0, 1, 2}, {3, 4, 5, 6}} {
		s, err := newSolver(), error(nil)
		if groups {
			s, err = NewGroups(params, Group{s, params[:1]}, Group{newSolver(), params[1:]})
		}
		if err == nil {
			err = s.SetState(state)
		}
		for _, step := range steps {
			if err == nil {
				err = s.Step(pairsOf(t, params, step))
			}
		}
		if err == nil {
			state, err = s.State()
		}
		require.NoError(t, err)
	}
	for _, n := range params {
		values = append(values, n.Value().Data().([]float64))
	}
	return values
}

// A solver that keeps no vectors keeps the number of steps.
func TestACustomSolverWithoutVectorsCountsSteps(t *testing.T) {
	inverse := func() *Custom {
		return &Custom{Name: "inverse", Rate: 1, Update: func(u *Update) {
			dw := u.With(fuse.Mul, u.Gradient(), u.Rate()/float64(u.Step()))
			u.SetParam(u.Do(fuse.Sub, u.Param(), dw))
		}}
	}
	w, s := []float32{0}, inverse()
	for range 2 { // -1, -1/2
		require.NoError(t, s.Step([]gorgonia.ValueGrad{pair{w, []float32{1}}}))
	}
	state, err := s.State()
	require.NoError(t, err)
	again := inverse()
	err = errors.Join(again.CheckState(state, []backend.Buffer{backend.Of(w)}),
		again.SetState(state))
	for range 2 { // -1/3, -1/4
		err = errors.Join(err, again.Step([]gorgonia.ValueGrad{pair{w, []float32{1}}}))
	}
	if want := -1 - 1./2 - 1./3 - 1./4; err != nil || math.Abs(float64(w[0])-want) > 1e-6 {
		t.Errorf("%v, want %v: %v", w[0], want, err)
	}
}

// The element after the update may be any value, also one that was there before.
func TestAnUpdateMayExchangeWhatItIsGiven(t *testing.T) {
	s := &Custom{Name: "swap", Rate: 1, Keep: []string{"a", "b"}, Update: func(u *Update) {
		u.SetParam(u.Kept(1))
		u.SetKept(0, u.Param())
		u.SetKept(1, u.Gradient())
	}}
	w := []float32{1, 2}
	for step, want := range [][]float32{{0, 0}, {10, 20}, {11, 21}} {
		dw := []float32{float32(10 + step), float32(20 + step)}
		if err := s.Step([]gorgonia.ValueGrad{pair{w, dw}}); err != nil || !slices.Equal(w, want) {
			t.Errorf("step %d: %v, want %v: %v", step, w, want, err)
		}
		require.Check(t, dw[0] == 0 && dw[1] == 0, "step %d: a gradient of %v after it", step, dw)
	}
}

func TestACustomSolverThatIsNoneIsRefused(t *testing.T) {
	with := func(change func(s *Custom)) *Custom {
		s := lion()
		change(s)
		return s
	}
	does := func(update func(u *Update)) *Custom {
		return with(func(s *Custom) { s.Update = update })
	}
	for want, s := range map[string]*Custom{
		`the name ""`:               with(func(s *Custom) { s.Name = "" }),
		`the name "a.b"`:            with(func(s *Custom) { s.Name = "a.b" }),
		`the name "m/v"`:            with(func(s *Custom) { s.Keep[0] = "m/v" }),
		`lion: bad argument: Keep`:  with(func(s *Custom) { s.Keep = []string{"m", "m"} }),
		"Update is nil":             does(nil),
		"Rate is 0":                 with(func(s *Custom) { s.Rate = 0 }),
		"asks for vector 1, and 1":  does(func(u *Update) { u.SetParam(u.Kept(1)) }),
		"asks for vector -1, and 1": does(func(u *Update) { u.SetKept(-1, u.Param()) }),
		"sum-row does not compute": does(func(u *Update) {
			u.SetParam(u.Do(fuse.SumRow, u.Param()))
		}),
		"wrong number of operands": does(func(u *Update) { u.SetParam(u.Do(fuse.Add, u.Param())) }),
		"value 99 is":              does(func(u *Update) { u.SetParam(99) }),
	} {
		w := []float32{1}
		err := s.Step([]gorgonia.ValueGrad{pair{w, []float32{1}}})
		if !errors.Is(err, backend.ErrArgument) || !strings.Contains(err.Error(), want) ||
			w[0] != 1 {
			t.Errorf("the error is %v, want %q; the parameter is %v", err, want, w[0])
		}
		if _, fused := Fuse(s, nil); fused == nil || fused.Error() != err.Error() {
			t.Errorf("Step returns %v, Fuse %v", err, fused)
		}
	}
}

// An update with other operations in a later step works on the host, and is refused where it has
// been compiled into a plan.
func TestAnUpdateMayHaveOtherOperationsOnTheHostAlone(t *testing.T) {
	s := &Custom{Name: "odd", Rate: 1, Update: func(u *Update) {
		if u.Step()%2 == 1 {
			u.SetParam(u.Do(fuse.Sub, u.Param(), u.Gradient()))
		}
	}}
	f, err := Fuse(s, nil)
	if err == nil {
		_, err = f.Next()
	}
	require.NoError(t, err)
	f.Stepped()
	if _, err = f.Next(); !errors.Is(err, backend.ErrArgument) ||
		!strings.Contains(err.Error(), "odd: bad argument: its update has other operations") {
		t.Errorf("the error is %v", err)
	}
	f.Release()
	w := []float32{8}
	for range 4 { // steps 2 to 5
		err = errors.Join(err, s.Step([]gorgonia.ValueGrad{pair{w, []float32{1}}}))
	}
	require.Equal(t, "the parameter", w[0], 6)
}
