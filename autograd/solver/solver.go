package solver

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
)

// Solver is the interface of the solvers of this package: [SGD], [Momentum], [Nesterov], [RMSProp],
// [Adam] and [AdamW], [Custom] with your own [Update], and [Groups] of them. They update parameters
// of float32 and float64, tensors and scalars, on the host. A machine of package vm computes their
// steps where its parameters are, bitwise identically. They set gradients to zero, as Gorgonia's
// solvers do.
//
// Give Step the same parameters in the same order each time. A Step that returns an error for its
// arguments has changed nothing.
//
// Step and [Fuse] return ErrArgument for a Rate of 0 that SetRate has not set.
//
// A solver never divides the gradient by the batch: the loss is a mean already, and so are the
// gradients of several ranks. So nothing about a solver depends on the number of ranks.
type Solver interface {
	gorgonia.Solver
	Checker
	// SetRate sets the learning rate of the steps that follow, which may be 0. See [Schedule].
	SetRate(rate float64)
	// Close forgets the state.
	Close() error
}

// Stateful has state that a checkpoint must hold. A [gorgonia.Solver] may be Stateful,
// and so may the communicator that sends gradients.
type Stateful interface {
	// State returns a copy of the state in host memory, by names that it chooses.
	// Names, dtypes and lengths are the same on every rank.
	State() (map[string]backend.Buffer, error)
	// SetState restores what State has returned. It ignores names that are not its
	// own.
	SetState(map[string]backend.Buffer) error
}

// Checker is a [Stateful] that says beforehand whether it would accept a state, so that a
// Load that fails changes nothing.
type Checker interface {
	Stateful
	// CheckState returns why SetState of this state, or calls after it, would fail. of
	// resembles what the state belongs to: for a solver the parameters in the order of
	// New, for a communicator the operands of slots 1, 2 and so on; only lengths and
	// dtypes matter.
	CheckState(state map[string]backend.Buffer, of []backend.Buffer) error
}

// ruled is a solver of this package, one for all parameters.
type ruled interface {
	Solver
	check() error // of the settings
	rule() rule
	memory() *solverState
}

// rule is how a solver updates parameters.
type rule struct {
	name string // of the solver, in errors
	rate *float64
	keep []string // the vectors kept for each parameter, by their names in the state
	// without are vectors that the rule would keep with other settings: a state that has them is
	// from a solver with those settings.
	without []string
	// counter is the name of the number of steps in the state, empty if none is kept.
	counter string
	// constant is a setting without which the vectors say nothing, by its name in the state, empty
	// for none.
	constant string
	value    float64
	update   func(u *Update)
}

// solverState is the state of a solver, and what a step needs. Solvers embed it.
type solverState struct {
	rated   bool // by SetRate
	steps   int64
	vectors [][]backend.Buffer // for each parameter those of the rule, all zeros at first
	of      []string           // the parameters of the last machine, nil for unknown
	// last is the machine that computed the last step, nil if there is none: it has the vectors.
	last *fused

	script  script
	loops   map[size]*loop
	numbers map[backend.DType]backend.Buffer // of the step, by the dtype of parameters
}

// memory returns the state of a solver.
func (s *solverState) memory() *solverState { return s }

// Close implements [Solver].
func (s *solverState) Close() error {
	s.reset(0)
	return nil
}

// reset forgets the state.
func (s *solverState) reset(steps int64) {
	*s = solverState{rated: s.rated, steps: steps, last: s.last, of: s.of}
}

// applyStep is Step of a solver.
func applyStep(s ruled, params []gorgonia.ValueGrad) error {
	if err := s.check(); err != nil {
		return err
	}
	r, k := s.rule(), s.memory()
	all, err := operandsOfAll(r.name, params)
	if err == nil {
		err = k.prepare(r, all)
	}
	if err != nil {
		return err
	}
	return k.update(r, all)
}

// setRate is SetRate of a solver.
func setRate(s ruled, rate float64) { *s.rule().rate, s.memory().rated = rate, true }

// savedState is State of a solver.
func savedState(s ruled) (map[string]backend.Buffer, error) { return s.memory().state(s.rule()) }

// setState is SetState of a solver.
func setState(s ruled, state map[string]backend.Buffer) error {
	return s.memory().set(s.rule(), state)
}

// checkState is CheckState of a solver.
func checkState(s ruled, state map[string]backend.Buffer, params []backend.Buffer) error {
	return s.memory().takes(s.rule(), state, params)
}

// present brings back vectors that a machine has.
func (s *solverState) present() error {
	if s.last == nil {
		return nil
	}
	return s.last.pull()
}

// operands are a parameter and its gradient.
type operands struct{ w, dw backend.Buffer }

// operandsIn returns the operands of a parameter, once both are there.
func operandsIn(p gorgonia.ValueGrad) (o operands, err error) {
	if isNil(p) {
		return o, fmt.Errorf("is nil: %w", backend.ErrArgument)
	}
	w := p.Value()
	if isNil(w) {
		return o, fmt.Errorf("has no value: give it one with gorgonia.Let: %w", backend.ErrArgument)
	}
	dw, err := p.Grad()
	switch {
	case err != nil:
		return o, err
	case isNil(dw):
		return o, fmt.Errorf("has no gradient: a machine of package vm with WithSolver ends each "+
			"RunAll with the step, so leave this Step out; else call gorgonia.Grad, and RunAll "+
			"before Step: %w",
			backend.ErrArgument)
	}
	return operandsOf(w, dw)
}

// isNil reports whether an interface holds nothing, or a nil pointer.
func isNil(x any) bool {
	v := reflect.ValueOf(x)
	return x == nil || v.Kind() == reflect.Pointer && v.IsNil()
}

// named returns the name of a parameter that is a node, for messages.
func named(p gorgonia.ValueGrad) string {
	if n, ok := p.(*gorgonia.Node); ok && n != nil {
		return " (" + stock.Label(n) + ")"
	}
	return ""
}

// operandsOfAll returns the memory of parameters and gradients, or why a solver refuses them.
func operandsOfAll(solver string, params []gorgonia.ValueGrad) ([]operands, error) {
	all, values := make([]operands, len(params)), make([]backend.Buffer, len(params))
	for i, p := range params {
		var err error
		if all[i], err = operandsIn(p); err != nil {
			return nil, wrapped("%s: parameter %d%s %w", solver, i, named(p), err)
		}
		values[i] = all[i].w
	}
	if i, k, shared := residence.Overlap(values); shared {
		return nil, fmt.Errorf("solver: %s: %w: parameters %d and %d are one tensor, which "+
			"each step would update twice: use one node in both places", solver,
			backend.ErrArgument, i, k)
	}
	return all, nil
}

// prepare makes the state fit and compiles the update, or refuses the parameters. It changes none
// of them.
func (s *solverState) prepare(r rule, all []operands) error {
	if err := errors.Join(s.present(), s.fit(r, all)); err != nil {
		return wrapped("%s: %w", r.name, err)
	}
	if err := s.script.rewrite(r, s.steps+1); err != nil {
		return err
	}
	if s.script.changed() {
		if err := s.script.accept(r); err != nil {
			return err
		}
		s.loops, s.numbers = map[size]*loop{}, map[backend.DType]backend.Buffer{}
	}
	for _, o := range all {
		if err := s.compile(r, size{o.w.DType(), o.w.Len()}); err != nil {
			return wrapped("%s: %w", r.name, err)
		}
	}
	return nil
}

// compile makes the loop for parameters of a size, and memory for numbers, unless they are there.
func (s *solverState) compile(r rule, of size) (err error) {
	if of.length == 0 || s.loops[of] != nil {
		return nil
	}
	if _, ok := s.numbers[of.dtype]; !ok {
		s.numbers[of.dtype] = residence.Zeros(of.dtype, len(s.script.numbers))
	}
	s.loops[of], err = newLoop(r, s.steps+1, of)
	return err
}

// update updates all parameters, once prepare has taken them.
func (s *solverState) update(r rule, all []operands) error {
	s.steps++
	for _, b := range s.numbers {
		setNumbers(b, s.script.numbers)
	}
	for i, o := range all {
		if o.w.Len() == 0 {
			continue
		}
		l := s.loops[size{o.w.DType(), o.w.Len()}]
		if err := l.run(o, s.vectors[i], s.numbers[o.w.DType()]); err != nil {
			return wrapped("%s: parameter %d: %w", r.name, i, err)
		}
	}
	return nil
}

// setNumbers rounds numbers to the dtype of a buffer.
func setNumbers(b backend.Buffer, numbers []float64) {
	if b.DType() == backend.F64 {
		copy(backend.View[float64](b), numbers)
		return
	}
	for i, x := range numbers {
		backend.View[float32](b)[i] = float32(x)
	}
}

// checkRate returns an error for a rate that nobody has set. In a step of a schedule it may be 0.
func checkRate(solver string, rate float64, set bool) error {
	if rate == 0 && !set {
		return fmt.Errorf("solver: %s: %w: Rate is 0, so no parameter would change: set it, or "+
			"call SetRate", solver, backend.ErrArgument)
	}
	return nil
}

// checkNumbers returns an error for a setting that would spoil every parameter.
func checkNumbers(solver string, numbers ...number) error {
	for _, n := range numbers {
		if !(n.value >= 0 && n.value < n.limit) {
			return fmt.Errorf("solver: %s: %w: %s is %v: it must be at least 0 and less than %v",
				solver, backend.ErrArgument, n.name, n.value, n.limit)
		}
	}
	return nil
}

// checkPositive returns an error for a setting of 0 that would make the solver another one.
func checkPositive(solver, name string, value float64, instead string) error {
	if value > 0 {
		return nil
	}
	return fmt.Errorf("solver: %s: %w: %s is %v: it must be positive, or %s", solver,
		backend.ErrArgument, name, value, instead)
}

// number is a setting, from 0 up to a limit, which may be infinite.
type number struct {
	name         string
	value, limit float64
}

// fit makes the vectors, or checks that they fit the parameters.
func (s *solverState) fit(r rule, all []operands) error {
	if s.vectors == nil || len(r.keep) == 0 {
		s.vectors = make([][]backend.Buffer, len(all))
		for i, o := range all {
			for range r.keep {
				s.vectors[i] = append(s.vectors[i], residence.Zeros(o.w.DType(), o.w.Len()))
			}
		}
	}
	if len(all) != len(s.vectors) {
		return fmt.Errorf("%d parameters, its state is of %d", len(all), len(s.vectors))
	}
	for i, o := range all {
		if len(s.vectors[i]) != len(r.keep) {
			return r.keepsOthers(len(s.vectors[i]))
		}
		for _, v := range s.vectors[i] {
			if !alike(v, o.w) {
				return fmt.Errorf("parameter %d is %d %v, its state is of %d %v", i, o.w.Len(),
					o.w.DType(), v.Len(), v.DType())
			}
		}
	}
	return nil
}

// keepsOthers is the error of settings that need a different number of vectors than there are.
func (r rule) keepsOthers(has int) error {
	return fmt.Errorf("%w: %d vectors are kept for each parameter, and with these settings %d: "+
		"momentum is on or off from the beginning", backend.ErrArgument, has, len(r.keep))
}

// state implements [Stateful].
func (s *solverState) state(r rule) (map[string]backend.Buffer, error) {
	if err := s.present(); err != nil {
		return nil, wrapped("%s: %w", r.name, err)
	}
	state := s.counted(r)
	for i, vectors := range s.vectors {
		for k, v := range vectors {
			state[fmt.Sprint(r.keep[k], i)] = residence.Clone(v)
		}
	}
	return state, nil
}

// counted returns a state with the number of steps and the constant alone, if there are such.
func (s *solverState) counted(r rule) map[string]backend.Buffer {
	state := map[string]backend.Buffer{}
	if r.counter != "" && (s.steps > 0 || len(s.vectors) > 0) {
		state[r.counter] = backend.Of([]int64{s.steps})
		if r.constant != "" {
			// its bits, since floats of a state are vectors of parameters
			state[r.constant] = backend.Of([]int64{int64(math.Float64bits(r.value))})
		}
	}
	return state
}

// set implements [Stateful]. Where it returns an error for the state, nothing has
// changed.
func (s *solverState) set(r rule, state map[string]backend.Buffer) error {
	steps, stored, err := r.parse(state)
	if err != nil {
		return err
	}
	s.reset(steps)
	for _, buffers := range stored {
		var vectors []backend.Buffer
		for _, b := range buffers {
			vectors = append(vectors, residence.Clone(b))
		}
		s.vectors = append(s.vectors, vectors)
	}
	return nil
}

// takes implements [Checker]: the state has vectors for each parameter, in their order, but
// for those that Step is not given; and none before the first Step.
func (s *solverState) takes(
	r rule, state map[string]backend.Buffer, params []backend.Buffer,
) error {
	_, stored, err := r.parse(state)
	if err != nil {
		return err
	}
	left := params
	for i, vectors := range stored {
		v := vectors[0]
		at := slices.IndexFunc(left, func(w backend.Buffer) bool { return alike(v, w) })
		if at < 0 {
			return r.refuse("%s%d of the state is %d %v: none of the last %d of %d parameters is "+
				"like it",
				r.keep[0], i, v.Len(), v.DType(), len(left), len(params))
		}
		left = left[at+1:]
	}
	if n := len(s.vectors); n > 0 && len(stored) > 0 && n != len(stored) {
		return r.refuse("a state of %d parameters for a solver of %d", len(stored), n)
	}
	return nil
}

// parse returns what a state has of the rule: the number of steps, and for each parameter
// its vectors, which are alike.
func (r rule) parse(state map[string]backend.Buffer) (steps int64, stored [][]backend.Buffer,
	err error) {
	count := func(prefix string) (found int) {
		for name := range state {
			if strings.HasPrefix(name, prefix) {
				found++
			}
		}
		return found
	}
	if was, ok := state[r.constant]; ok { // else an older version has saved it
		if was.DType() != backend.I64 || was.Len() != 1 {
			return 0, nil, r.refuse("the state's %s is %d %v", r.constant, was.Len(), was.DType())
		}
		if x := math.Float64frombits(uint64(backend.View[int64](was)[0])); x != r.value {
			return 0, nil, r.refuse("the state was made with %s %v, and this solver has %v: use "+
				"the same", r.constant, x, r.value)
		}
	}
	for _, prefix := range r.without {
		if found := count(prefix); found > 0 {
			return 0, nil, r.refuse("the state has %s for %d parameters, which these settings "+
				"do not use", prefix, found)
		}
	}
	for k, prefix := range r.keep {
		found := count(prefix)
		if k == 0 {
			stored = make([][]backend.Buffer, found)
		}
		if found != len(stored) {
			return 0, nil, r.refuse("the state has %s for %d parameters, and %s for %d", r.keep[0],
				len(stored), prefix, found)
		}
		for i := range stored {
			v, ok := state[fmt.Sprint(prefix, i)]
			if !ok {
				return 0, nil, r.refuse("the state has no %s%d, and others after it", prefix, i)
			}
			if d := v.DType(); d != backend.F32 && d != backend.F64 {
				return 0, nil, r.refuse("%s%d is a tensor of %v: f32 and f64 are supported", prefix,
					i, d)
			}
			if k > 0 && !alike(v, stored[i][0]) {
				return 0, nil, r.refuse("%s%d is %d %v, and %s%d is not like it", prefix, i,
					v.Len(), v.DType(), r.keep[0], i)
			}
			stored[i] = append(stored[i], v)
		}
	}
	n, ok := state[r.counter]
	if r.counter == "" || len(stored) == 0 && (!ok || len(r.keep) > 0) {
		return 0, stored, nil
	}
	if !ok || n.DType() != backend.I64 || n.Len() != 1 || backend.View[int64](n)[0] < 0 {
		return 0, nil, r.refuse("the state has no %s, the number of steps", r.counter)
	}
	return backend.View[int64](n)[0], stored, nil
}

// owner returns the number of the parameter that a vector of the state is of.
func (r rule) owner(name string) (param int, ok bool) {
	for _, prefix := range r.keep {
		if number, of := strings.CutPrefix(name, prefix); of {
			i, err := strconv.Atoi(number)
			return i, err == nil && i >= 0
		}
	}
	return 0, false
}

// refuse is an error about a state.
func (r rule) refuse(format string, args ...any) error {
	return fmt.Errorf("%w: solver: %s: %w", backend.ErrArgument, r.name,
		fmt.Errorf(format, args...))
}

// alike reports whether two buffers have the same dtype and length.
func alike(a, b backend.Buffer) bool { return a.DType() == b.DType() && a.Len() == b.Len() }

// operandsOf returns the memory of a parameter and of its gradient.
func operandsOf(w, dw gorgonia.Value) (o operands, err error) {
	if o.w, err = memoryOf(w); err != nil {
		return o, err
	}
	if o.dw, err = memoryOf(dw); err != nil {
		return o, fmt.Errorf("has a gradient that %w", err)
	}
	if !alike(o.w, o.dw) {
		return o, fmt.Errorf("is %d %v with a gradient of %d %v: they must be alike", o.w.Len(),
			o.w.DType(), o.dw.Len(), o.dw.DType())
	}
	return o, nil
}

// memoryOf returns the memory of a contiguous value.
func memoryOf(v gorgonia.Value) (backend.Buffer, error) {
	memory, dense, err := residence.Floats(v)
	if err == nil && !dense {
		err = errors.New("is not contiguous")
	}
	return memory, err
}

// prefix is what errors of the package begin with.
const prefix = "solver: "

// wrapped is fmt.Errorf for an error that may come from this package: its prefix appears only once.
func wrapped(format string, args ...any) error { return once{fmt.Errorf(format, args...)} }

type once struct{ error }

func (e once) Error() string { return prefix + strings.ReplaceAll(e.error.Error(), prefix, "") }
func (e once) Unwrap() error { return e.error }
