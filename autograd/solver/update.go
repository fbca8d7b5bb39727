package solver

import (
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Update is the update of one element of a parameter, which a solver writes as a program of package
// kernels/fuse. Step runs it on the host, and a machine of package vm in its plan, on the host or
// a GPU, for every element of every parameter. Values have the dtype of the parameter, F32 or F64,
// and each operation is rounded to it.
//
// Momentum without decay, for example, is
//
//	func(u *solver.Update) {
//		v := u.With(fuse.Mul, u.Kept(0), 0.9)
//		v = u.Do(fuse.Sub, v, u.With(fuse.Mul, u.Gradient(), u.Rate()))
//		u.SetKept(0, v)
//		u.SetParam(u.Do(fuse.Add, u.Param(), v))
//	}
//
// A solver writes its update once in each step, since numbers such as the rate may differ then.
// Which operations it does, and with which values, is the same in each step: a machine of package
// vm compiles them once, and refuses a step that differs.
type Update struct {
	program *fuse.Program
	values  []fuse.Value // before the update: the parameter, its gradient, and what is kept
	next    []fuse.Value // after it: the parameter, and what is kept
	number  func(i int) fuse.Value
	numbers []float64
	rate    float64
	step    int64
	err     error
}

// Param returns the element of the parameter, before the update.
func (u *Update) Param() fuse.Value { return u.values[0] }

// Gradient returns the element of the gradient.
func (u *Update) Gradient() fuse.Value { return u.values[1] }

// Kept returns the element of the solver's vector i for the parameter, before the update. It is 0
// in the first step.
func (u *Update) Kept(i int) fuse.Value {
	if !u.keeps(i) {
		return 0
	}
	return u.values[2+i]
}

// Rate returns the learning rate of this step.
func (u *Update) Rate() float64 { return u.rate }

// Step returns the number of this step, 1 for the first one. It continues from a checkpoint.
func (u *Update) Step() int { return int(u.step) }

// Number returns a number, rounded to the dtype of the parameter. It may differ from step to step.
func (u *Update) Number(x float64) fuse.Value {
	u.numbers = append(u.numbers, x)
	return u.number(len(u.numbers) - 1)
}

// Do applies an operation of [fuse.Ops] to values.
func (u *Update) Do(op fuse.Op, x ...fuse.Value) fuse.Value {
	if !op.Valid() || op.Operands() == 0 || op.FoldsRows() {
		u.err = errors.Join(u.err, fmt.Errorf("%w: %v does not compute element by element",
			backend.ErrArgument, op))
	}
	return u.program.Do(op, x...)
}

// With applies an operation to a value and a number: see [Update.Number].
func (u *Update) With(op fuse.Op, x fuse.Value, number float64) fuse.Value {
	return u.Do(op, x, u.Number(number))
}

// SetParam sets the element of the parameter after the update. Without SetParam it does not change.
func (u *Update) SetParam(x fuse.Value) { u.next[0] = x }

// SetKept sets the element of vector i after the update. Without SetKept it does not change.
func (u *Update) SetKept(i int, x fuse.Value) {
	if u.keeps(i) {
		u.next[1+i] = x
	}
}

// keeps notes an error unless there is a vector i.
func (u *Update) keeps(i int) bool {
	if i >= 0 && i < len(u.values)-2 {
		return true
	}
	u.err = errors.Join(u.err, fmt.Errorf("%w: Update asks for vector %d, and %d are kept",
		backend.ErrArgument, i, len(u.values)-2))
	return false
}

// write writes the update of a rule to a program. values are the parameter, its gradient, and what
// is kept; number returns the value of number i.
func (u *Update) write(r rule, step int64, p *fuse.Program, values []fuse.Value,
	number func(i int) fuse.Value) error {
	u.program, u.values, u.number = p, values, number
	u.next = append(append(u.next[:0], values[0]), values[2:]...)
	u.numbers, u.rate, u.step, u.err = u.numbers[:0], *r.rate, step, nil
	r.update(u)
	if u.err != nil {
		return wrapped("%s: %w", r.name, u.err)
	}
	return nil
}

// script is the update of a rule as it was written last, for one element of F32, and as it was
// when it was compiled.
type script struct {
	Update
	text   fuse.Program
	inputs []fuse.Value
	load   func(int) fuse.Value

	code []fuse.Instr
	then []fuse.Value
}

// rewrite writes the update of a step. It allocates nothing after the first time.
func (s *script) rewrite(r rule, step int64) error {
	if s.load == nil {
		s.load = func(int) fuse.Value { return s.text.Load(backend.F32) }
	}
	s.text.Inputs, s.text.Code, s.inputs = s.text.Inputs[:0], s.text.Code[:0], s.inputs[:0]
	for range 2 + len(r.keep) {
		s.inputs = append(s.inputs, s.load(0))
	}
	return s.write(r, step, &s.text, s.inputs, s.load)
}

// changed reports whether the update has other operations than those that were compiled.
func (s *script) changed() bool {
	return !slices.Equal(s.code, s.text.Code) || !slices.Equal(s.then, s.next)
}

// accept makes the update that was written last the one that is compiled, unless it is no program.
func (s *script) accept(r rule) error {
	s.text.Outputs = nil
	for _, x := range s.next {
		s.text.Store(x, backend.F32)
	}
	if err := s.text.Check(); err != nil {
		return wrapped("%s: its Update: %w", r.name, err)
	}
	s.code, s.then = slices.Clone(s.text.Code), slices.Clone(s.next)
	return nil
}

// loop runs an update on the host, for parameters of one length.
type loop struct {
	fuse.Loop
	dst, src []backend.Buffer // the parameter, what is kept, and the gradient; and numbers
}

// size is what loops depend on.
type size struct {
	dtype  backend.DType
	length int
}

// newLoop compiles an update. It sets gradients to 0, as Gorgonia's solvers do.
func newLoop(r rule, step int64, s size) (*loop, error) {
	p := &fuse.Program{Shape: []int{s.length}}
	var values []fuse.Value
	for range 2 + len(r.keep) {
		values = append(values, p.Load(s.dtype, 1))
	}
	var u Update
	err := u.write(r, step, p, values, func(int) fuse.Value { return p.Load(s.dtype, 0) })
	if err != nil {
		return nil, err
	}
	for _, x := range append(u.next, p.Const(s.dtype, 0)) {
		p.Store(x, s.dtype, 1)
	}
	l := &loop{dst: make([]backend.Buffer, len(p.Outputs)), src: make([]backend.Buffer,
		len(p.Inputs))}
	l.Loop, err = fuse.Host(p, nil)
	return l, err
}

// run updates one parameter.
func (l *loop) run(o operands, vectors []backend.Buffer, numbers backend.Buffer) error {
	l.dst[0], l.dst[len(l.dst)-1] = o.w, o.dw
	copy(l.dst[1:], vectors)
	l.src[0], l.src[1] = o.w, o.dw
	first := 2 + copy(l.src[2:], vectors)
	for i := range l.src[first:] {
		l.src[first+i] = numbers.Slice(i, i+1)
	}
	defer clear(l.dst) // the caller's memory
	defer clear(l.src)
	return l.Run(l.dst, l.src, backend.Buffer{})
}
