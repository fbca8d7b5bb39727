package solver

import (
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Fusion is a solver whose steps its caller computes, in loops of package kernels/fuse: a machine
// of package vm, which has parameters and gradients on a device. The rate, the number of steps and
// the state remain the solver's, and the bits equal those of its Step.
type Fusion struct {
	parts []*fused // one, or the solvers of Groups
	of    []member // of each parameter; nil for one part, which has all
	// What Next and Vectors returned last: a step allocates nothing.
	numbers []float64
	vectors [][]backend.Buffer
	params  [][]backend.Buffer // of each part
}

// member is where a parameter is: its number within a part.
type member struct{ part, param int }

// fused is one solver of a Fusion.
type fused struct {
	solver ruled
	rule   rule
	state  *solverState
	pull   func() error
	script script // of the last step
	params []operands
}

// Fuse prepares a solver for a caller that computes its steps. pull brings the solver's vectors
// back to the memory of Vectors: the solver calls it before it reads its state, and nil means that
// it need not. A solver may have several Fusions, such as those of machines for several shapes of a
// batch: before another one begins a step, it pulls what the last one has.
//
// Errors: ErrUnsupported for solvers of other packages; ErrArgument for settings that Step
// refuses.
func Fuse(s Solver, pull func() error) (*Fusion, error) {
	if err := backend.Given("solver.Fuse", "s", s); err != nil {
		return nil, err
	}
	if pull == nil {
		pull = func() error { return nil }
	}
	solvers, f := []Solver{s}, &Fusion{}
	if g, ok := s.(*Groups); ok {
		f.of, solvers = g.of, nil
		for _, group := range g.groups {
			solvers = append(solvers, group)
		}
	}
	for _, s := range solvers {
		part, err := newFused(s, pull)
		if err != nil {
			return nil, err
		}
		f.parts = append(f.parts, part)
	}
	f.params = make([][]backend.Buffer, len(f.parts))
	return f, nil
}

func newFused(s Solver, pull func() error) (*fused, error) {
	r, ok := s.(ruled)
	if !ok {
		return nil, fmt.Errorf("solver: %w: a %T is not a solver of package solver",
			backend.ErrUnsupported, s)
	}
	if err := r.check(); err != nil {
		return nil, err
	}
	f := &fused{solver: r, rule: r.rule(), state: r.memory(), pull: pull}
	if err := f.script.rewrite(f.rule, f.state.steps+1); err != nil {
		return nil, err
	}
	return f, f.script.accept(f.rule)
}

// Of says of which parameters the steps are, by their names. It is an error if the solver has the
// state of others, or of these in another order, which it would take for theirs.
func (f *Fusion) Of(names []string) error {
	of := make([][]string, len(f.parts))
	for i, name := range names {
		of[f.solverOf(i)] = append(of[f.solverOf(i)], name)
	}
	for k, p := range f.parts {
		if s := p.state; s.of != nil && len(s.vectors) > 0 && !slices.Equal(s.of, of[k]) {
			return fmt.Errorf("%w: the %s has the state of %s, and not of %s: make another "+
				"solver, or give its parameters in that order", backend.ErrArgument, p.rule.name,
				strings.Join(s.of, ", "), strings.Join(of[k], ", "))
		}
	}
	for k, p := range f.parts {
		p.state.of = of[k]
	}
	return nil
}

// Release ends what Fuse began. Bring everything back first.
func (f *Fusion) Release() {
	for _, p := range f.parts {
		if p.state.last == p {
			p.state.last = nil
		}
	}
}

// Has reports whether this is a Fusion of a solver, and no other one has made the last step.
func (f *Fusion) Has(solver gorgonia.Solver) bool {
	all := []gorgonia.Solver{solver}
	if g, ok := solver.(*Groups); ok {
		all = nil
		for _, s := range g.groups {
			all = append(all, s)
		}
	}
	if len(all) != len(f.parts) {
		return false
	}
	for i, p := range f.parts {
		s, ok := all[i].(ruled)
		if !ok || s.memory() != p.state || p.state.last != nil && p.state.last != p {
			return false
		}
	}
	return true
}

// solverOf returns the number of the solver that updates a parameter.
func (f *Fusion) solverOf(param int) int {
	if f.of == nil {
		return 0
	}
	return f.of[param].part
}

// Kept returns how many vectors the solver keeps for a parameter.
func (f *Fusion) Kept(param int) int { return len(f.parts[f.solverOf(param)].rule.keep) }

// Update returns a function that adds the update of one element of a parameter to a program. w is
// the element of the parameter, dw that of its gradient, and vectors those of each vector, all of
// one type. number returns the value of a number that Next returns. The function returns the new
// values of w and vectors.
func (f *Fusion) Update(param int) func(p *fuse.Program, w, dw fuse.Value, vectors []fuse.Value,
	number func(i int) fuse.Value) (fuse.Value, []fuse.Value, error) {
	part, first := f.parts[f.solverOf(param)], 0
	for _, before := range f.parts[:f.solverOf(param)] {
		first += len(before.script.numbers)
	}
	return func(p *fuse.Program, w, dw fuse.Value, vectors []fuse.Value,
		number func(i int) fuse.Value) (fuse.Value, []fuse.Value, error) {
		var u Update
		err := u.write(part.rule, part.state.steps+1, p, append([]fuse.Value{w, dw}, vectors...),
			func(i int) fuse.Value { return number(first + i) })
		return u.next[0], u.next[1:], err
	}
}

// prefix begins the names of a part's state.
func (f *Fusion) prefix(part int) string {
	if f.of == nil {
		return ""
	}
	return prefixOf(part)
}

// State is the solver's State without copies: the numbers of steps, and apart from these the host
// memory of the vectors, with what was brought back last.
func (f *Fusion) State() (counts, vectors map[string]backend.Buffer) {
	counts, vectors = map[string]backend.Buffer{}, map[string]backend.Buffer{}
	for k, p := range f.parts {
		for name, b := range p.state.counted(p.rule) {
			counts[f.prefix(k)+name] = b
		}
		for i, kept := range p.state.vectors {
			for j, v := range kept {
				vectors[fmt.Sprint(f.prefix(k), p.rule.keep[j], i)] = v
			}
		}
	}
	return counts, vectors
}

// Vectors returns the host memory of the vectors kept for each parameter, given the parameters'
// elements, of which only number and dtype count. It is zeros at first. After SetState and Close it
// is different memory, whose content then counts. The next call of Vectors overwrites the slices.
//
// Errors: parameters that are not like those of the last step.
func (f *Fusion) Vectors(params []backend.Buffer) ([][]backend.Buffer, error) {
	if f.of != nil && len(params) != len(f.of) {
		return nil, fmt.Errorf("solver: Groups: %w: %d parameters, the groups have %d",
			backend.ErrArgument, len(params), len(f.of))
	}
	for k := range f.params {
		f.params[k] = f.params[k][:0]
	}
	for i, w := range params {
		f.params[f.solverOf(i)] = append(f.params[f.solverOf(i)], w)
	}
	for k, p := range f.parts {
		if err := p.fit(f.params[k]); err != nil {
			return nil, err
		}
	}
	if f.vectors == nil {
		f.vectors = make([][]backend.Buffer, len(params))
	}
	for i := range params {
		at := member{param: i}
		if f.of != nil {
			at = f.of[i]
		}
		f.vectors[i] = f.vectors[i][:0]
		f.vectors[i] = append(f.vectors[i], f.parts[at.part].state.vectors[at.param]...)
	}
	return f.vectors, nil
}

// fit makes what is kept for parameters, or checks that it is theirs.
func (f *fused) fit(params []backend.Buffer) error {
	f.params = f.params[:0]
	for _, w := range params {
		f.params = append(f.params, operands{w: w})
	}
	if err := f.state.fit(f.rule, f.params); err != nil {
		return wrapped("%s: %w", f.rule.name, err)
	}
	return nil
}

// Next returns the numbers for the updates of the next step. They depend on the rate and on the
// number of steps, and the next call of Next overwrites them.
//
// Errors: settings that the solver's Step would refuse; ErrArgument for an update whose operations
// differ from those at Fuse, such as a first WeightDecay; those of another Fusion's pull.
func (f *Fusion) Next() ([]float64, error) {
	f.numbers = f.numbers[:0]
	for _, p := range f.parts {
		if err := p.next(); err != nil {
			return nil, err
		}
		f.numbers = append(f.numbers, p.script.numbers...)
	}
	return f.numbers, nil
}

func (f *fused) next() error {
	if err := f.solver.check(); err != nil {
		return err
	}
	if err := f.script.rewrite(f.rule, f.state.steps+1); err != nil {
		return err
	}
	if f.state.last != f {
		if err := f.state.present(); err != nil {
			return err
		}
		f.state.last = f
	}
	if f.script.changed() {
		return fmt.Errorf(
			"solver: %s: %w: its update has other operations than when the machine "+
				"was made, as with a first WeightDecay: make another machine", f.rule.name,
			backend.ErrArgument)
	}
	return nil
}

// Stepped counts a step, once all its updates are computed.
func (f *Fusion) Stepped() {
	for _, p := range f.parts {
		p.state.steps++
	}
}
