package host

import (
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm/internal/plan"
)

// Executor runs a plan on host memory. It is not safe for concurrent use.
type Executor struct {
	plan    *plan.Plan
	opaque  func(index int) Opaque
	buffers []backend.Buffer // by plan.Buffer
	steps   []*step
	moved   bool // a buffer was bound since the operands were found
	results []backend.Buffer
}

// step is one step of the plan and where its operands are now.
type step struct {
	plan.Step
	dsts, args []backend.Buffer
	run        func() error
}

// Opaque runs an operation that only its Do method knows.
type Opaque interface {
	// Arg returns the memory of operand i, into which the executor copies it, in row-major
	// order.
	Arg(i int) backend.Buffer
	// Call runs the operation and returns the memory of its result, in row-major order.
	Call() (backend.Buffer, error)
}

// New makes a plan ready to run. It allocates the arena; opaque gives the operations that the
// plan runs by their Do.
func New(p *plan.Plan, opaque func(index int) Opaque) (*Executor, error) {
	e := &Executor{plan: p, opaque: opaque, buffers: make([]backend.Buffer, len(p.Buffers)), moved: true}
	arena := backend.Of(make([]float64, (p.ArenaBytes+7)/8)).As(backend.U8)
	for i, b := range p.Buffers {
		switch {
		case b.Kind == plan.Arena && b.Last >= 0:
			e.buffers[i] = arena.Slice(b.Offset, b.Offset+b.Bytes).As(b.DType)
		case b.Kind == plan.Scalar:
			number, err := scalar(b.DType, math.Float64frombits(b.Bits))
			if err != nil {
				return nil, err
			}
			e.buffers[i] = number
		}
	}
	for i, s := range p.Steps {
		c := &step{Step: s, dsts: make([]backend.Buffer, len(s.Dsts)), args: make([]backend.Buffer, len(s.Args))}
		if err := e.compile(c); err != nil {
			return nil, fmt.Errorf("vm: step %d, %v of %s: %w", i, s.Op, s.Name, err)
		}
		e.steps = append(e.steps, c)
	}
	e.results = make([]backend.Buffer, len(p.Results))
	return e, nil
}

// scalar returns memory that holds a number.
func scalar(d backend.DType, x float64) (backend.Buffer, error) {
	switch d {
	case backend.F32:
		return backend.Of([]float32{float32(x)}), nil
	case backend.F64:
		return backend.Of([]float64{x}), nil
	case backend.I32:
		return backend.Of([]int32{int32(x)}), nil
	case backend.I64:
		return backend.Of([]int64{int64(x)}), nil
	case backend.U8:
		return backend.Of([]byte{byte(x)}), nil
	}
	return backend.Buffer{}, fmt.Errorf("vm: a constant of %v", d)
}

// Bind says where the elements of an input or a constant are, in row-major order. They are
// read by Run and never written.
func (e *Executor) Bind(buffer int, memory backend.Buffer) {
	if e.buffers[buffer] != memory {
		e.buffers[buffer], e.moved = memory, true
	}
}

// Run runs all steps in order, and stops at the first error.
func (e *Executor) Run() error {
	if e.moved {
		e.locate()
		e.moved = false
	}
	for i, s := range e.steps {
		if err := s.run(); err != nil {
			return fmt.Errorf("vm: step %d, %v of %s: %w", i, s.Op, s.Name, err)
		}
	}
	return nil
}

// locate finds the operands of all steps.
func (e *Executor) locate() {
	for _, s := range e.steps {
		for i, r := range s.Dsts {
			s.dsts[i] = e.at(r)
		}
		for i, r := range s.Args {
			s.args[i] = e.at(r)
		}
	}
	for i, r := range e.plan.Results {
		e.results[i] = e.at(r)
	}
}

// at returns the elements that a value reaches over.
func (e *Executor) at(r plan.Ref) backend.Buffer {
	return e.buffers[r.Buffer].Slice(r.Offset, r.Offset+r.Span())
}

// Result copies result i of the last Run into dst, in row-major order.
func (e *Executor) Result(i int, dst backend.Buffer) error {
	r := e.plan.Results[i]
	if r.Dense() {
		copy(dst.Bytes(), e.results[i].Bytes())
		return nil
	}
	loop, err := copies(r, r.Shape.Strides())
	if err != nil {
		return err
	}
	return loop.Run([]backend.Buffer{dst}, []backend.Buffer{e.results[i]}, backend.Buffer{})
}
