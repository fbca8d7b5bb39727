package autograd

import (
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Fusion is a solver whose steps somebody else computes, in loops of package kernels/fuse: a
// machine of package vm, which has parameters and gradients on a device. Rate, number of steps
// and state remain the solver's, and the bits are those of its Step.
type Fusion struct {
	parts []*fused // one, or the solvers of Groups
	of    []member // of each parameter; nil for one part, which has all
	// What Next and Vectors returned last: a step allocates nothing.
	settings []float64
	vectors  [][]backend.Buffer
	params   [][]backend.Buffer // of each part
}

// member is where a parameter is: its number within a part.
type member struct{ part, param int }

// fused is one solver of a Fusion.
type fused struct {
	solver ruled
	rule   rule
	kept   *kept
	pull   func() error
	// A step notes its settings here: operands are numbered, and nothing is computed.
	notes    trace
	settings []float64
	values   []fuse.Value
	passes   int // of the rule when Fuse was called
	params   []operands
}

// ruled is a solver of this package.
type ruled interface {
	Solver
	check() error
	rule() rule
	memory() *kept
}

// Fuse prepares a solver for somebody who computes its steps. pull brings what it keeps back to
// where Vectors says: the solver calls it before it reads its state, nil if it need not. There may
// be several Fusions of a solver, such as those of machines for several shapes of a batch: before
// another one begins a step, what the last one has is pulled.
//
// Errors: ErrUnsupported for solvers of other packages; ErrArgument for settings that Step
// refuses.
func Fuse(s Solver, pull func() error) (*Fusion, error) {
	if err := backend.Given("autograd.Fuse", "s", s); err != nil {
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
		return nil, fmt.Errorf("autograd: %w: a %T is not a solver of package autograd", backend.ErrUnsupported, s)
	}
	if err := r.check(); err != nil {
		return nil, err
	}
	f := &fused{solver: r, rule: r.rule(), kept: r.memory(), pull: pull}
	f.notes.program, f.values = &fuse.Program{}, make([]fuse.Value,
		2+len(f.rule.keep)+f.rule.scratch)
	f.notes.setting = func(x float64) fuse.Value {
		f.settings = append(f.settings, x)
		return 0
	}
	if err := f.note(); err != nil {
		return nil, err
	}
	f.passes = len(f.settings)
	return f, nil
}

// Release ends what Fuse began. Bring everything back before.
func (f *Fusion) Release() {
	for _, p := range f.parts {
		if p.kept.last == p {
			p.kept.last = nil
		}
	}
}

// has reports whether this is a Fusion of a solver, and no other one has made the last step.
func (f *Fusion) has(solver gorgonia.Solver) bool {
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
		if !ok || s.memory() != p.kept || p.kept.last != nil && p.kept.last != p {
			return false
		}
	}
	return true
}

// part returns the number of the solver that updates a parameter.
func (f *Fusion) part(param int) int {
	if f.of == nil {
		return 0
	}
	return f.of[param].part
}

// Kept returns how many vectors the solver keeps for a parameter.
func (f *Fusion) Kept(param int) int { return len(f.parts[f.part(param)].rule.keep) }

// Update adds the update of one element to a program: w is an element of a parameter, dw of its
// gradient, and kept of each vector, all of one type. setting returns the value of a number that
// Next returns. Update returns what becomes of w and of kept.
type Update func(p *fuse.Program, w, dw fuse.Value, kept []fuse.Value,
	setting func(i int) fuse.Value) (fuse.Value, []fuse.Value, error)

// Update returns the update of a parameter.
func (f *Fusion) Update(param int) Update {
	part, first := f.parts[f.part(param)], 0
	for _, before := range f.parts[:f.part(param)] {
		first += before.passes
	}
	return func(p *fuse.Program, w, dw fuse.Value, kept []fuse.Value,
		setting func(i int) fuse.Value) (fuse.Value, []fuse.Value, error) {
		settings := first
		t := &trace{program: p, setting: func(float64) fuse.Value {
			settings++
			return setting(settings - 1)
		}}
		values := append([]fuse.Value{w, dw}, kept...)
		err := t.follow(part.rule, append(values, make([]fuse.Value, part.rule.scratch)...))
		return t.values[0], t.values[2:len(values)], err
	}
}

// prefix begins the names of a part's state.
func (f *Fusion) prefix(part int) string {
	if f.of == nil {
		return ""
	}
	return prefixOf(part)
}

// counts adds the numbers of steps to what a checkpoint has.
func (f *Fusion) counts(model map[string]stored) {
	for k, p := range f.parts {
		for name, b := range p.kept.counted(p.rule) {
			model[f.prefix(k)+name] = vector(b)
		}
	}
}

// vectorsTo adds the host memory of what is kept for parameters.
func (f *Fusion) vectorsTo(model map[string]stored) {
	for k, p := range f.parts {
		for i, vectors := range p.kept.vectors {
			for j, v := range vectors {
				model[fmt.Sprint(f.prefix(k), p.rule.keep[j], i)] = vector(v)
			}
		}
	}
}

// Vectors returns the host memory of what is kept for each parameter, given the parameters'
// elements, of which only number and dtype count. It is zeros at first. It is other memory after
// SetState and Close, whose content then counts. The slices are overwritten by another Vectors.
//
// Errors: parameters that are not like those of the last step.
func (f *Fusion) Vectors(params []backend.Buffer) ([][]backend.Buffer, error) {
	if f.of != nil && len(params) != len(f.of) {
		return nil, fmt.Errorf("autograd: Groups: %w: %d parameters, the groups have %d",
			backend.ErrArgument, len(params), len(f.of))
	}
	for k := range f.params {
		f.params[k] = f.params[k][:0]
	}
	for i, w := range params {
		f.params[f.part(i)] = append(f.params[f.part(i)], w)
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
		f.vectors[i] = append(f.vectors[i], f.parts[at.part].kept.vectors[at.param]...)
	}
	return f.vectors, nil
}

// fit makes what is kept for parameters, or checks that it is theirs.
func (f *fused) fit(params []backend.Buffer) error {
	f.params = f.params[:0]
	for _, w := range params {
		f.params = append(f.params, operands{w: w})
	}
	if err := f.kept.fit(f.rule, f.params); err != nil {
		return fmt.Errorf("autograd: %s: %w", f.rule.name, err)
	}
	return nil
}

// Next returns the numbers that the updates of the next step are computed with. They depend on
// the rate and on the number of steps, and are overwritten by another Next.
//
// Errors: settings that the solver's Step would refuse, or that need other passes than those
// when Fuse was called, such as a first WeightDecay; those of another Fusion's pull.
func (f *Fusion) Next() ([]float64, error) {
	f.settings = f.settings[:0]
	for _, p := range f.parts {
		if err := p.next(); err != nil {
			return nil, err
		}
		f.settings = append(f.settings, p.settings...)
	}
	return f.settings, nil
}

func (f *fused) next() error {
	if err := f.solver.check(); err != nil {
		return err
	}
	if err := f.note(); err != nil {
		return err
	}
	if f.kept.last != f {
		if err := f.kept.present(); err != nil {
			return err
		}
		f.kept.last = f
	}
	if len(f.settings) != f.passes {
		return fmt.Errorf("autograd: %s: %w: WeightDecay is on or off from the beginning: make "+
			"another machine", f.rule.name, backend.ErrArgument)
	}
	return nil
}

// Stepped counts a step, once all updates of it are computed.
func (f *Fusion) Stepped() {
	for _, p := range f.parts {
		p.kept.steps++
	}
}

// note finds the settings of the next step.
func (f *fused) note() error {
	f.kept.steps++ // which rules go by
	defer func() { f.kept.steps-- }()
	f.settings, f.notes.program.Code = f.settings[:0], f.notes.program.Code[:0]
	clear(f.values)
	return f.notes.follow(f.rule, f.values)
}

// trace is an arithmetic that adds the passes of a rule to a program in place of computing them.
// Operands are buffers of one element, which stand for values by their addresses.
type trace struct {
	backend.Arithmetic // nil: rules use nothing but the methods below

	program  *fuse.Program
	setting  func(x float64) fuse.Value // a factor or a summand of the rule
	operands []backend.Buffer
	values   []fuse.Value // what the operands are now
	err      error
}

// follow runs a rule on w, dw, what is kept, and scratch.
func (t *trace) follow(r rule, values []fuse.Value) error {
	t.values = values
	for len(t.operands) < len(values) {
		t.operands = append(t.operands, backend.Of(make([]float64, 1)))
	}
	t.err = nil
	return errors.Join(r.update(t, t.operands[0], t.operands[1], t.operands[2:len(values)]), t.err)
}

// at returns the number of an operand.
func (t *trace) at(b backend.Buffer) int {
	for i, o := range t.operands {
		if o.Addr() == b.Addr() {
			return i
		}
	}
	t.err = fmt.Errorf("autograd: %w: a rule with operands besides those of a step", backend.ErrUnsupported)
	return 0
}

// do adds an instruction whose result takes the place of dst.
func (t *trace) do(dst backend.Buffer, op fuse.Op, args ...fuse.Value) error {
	t.values[t.at(dst)] = t.program.Do(op, args...)
	return nil
}

// Scale implements [backend.Arithmetic].
func (t *trace) Scale(dst, src backend.Buffer, factor float64) error {
	return t.do(dst, fuse.Mul, t.values[t.at(src)], t.setting(factor))
}

// Unary implements [backend.Arithmetic].
func (t *trace) Unary(op backend.UnaryOp, dst, x backend.Buffer) error {
	return t.do(dst, fuse.OfUnary(op), t.values[t.at(x)])
}

// Binary implements [backend.Arithmetic].
func (t *trace) Binary(op backend.BinaryOp, dst, x, y backend.Buffer) error {
	return t.do(dst, fuse.OfBinary(op), t.values[t.at(x)], t.values[t.at(y)])
}

// BinaryScalar implements [backend.Arithmetic].
func (t *trace) BinaryScalar(op backend.BinaryOp, dst, x backend.Buffer, s float64, reverse bool) error {
	args := []fuse.Value{t.values[t.at(x)], t.setting(s)}
	if reverse {
		args[0], args[1] = args[1], args[0]
	}
	return t.do(dst, fuse.OfBinary(op), args...)
}
