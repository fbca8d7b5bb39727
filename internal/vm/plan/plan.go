package plan

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
)

// Plan is a program in the order and the memory in which it runs.
type Plan struct {
	Steps   []Step
	Buffers []Buffer
	// Results have the order of Program.Results. If updates are clipped by the norm of gradients,
	// that is the last one, of the run with the updates.
	Results []Ref
	// ArenaBytes is the size of the memory in which all Arena buffers lie.
	ArenaBytes int
	// ResultBytes is how much of the arena, from its start, holds what results are made of.
	ResultBytes int
	// Budget says how the plan fits into [Limits.Memory].
	Budget Budget
	// Doubt says why this is the plain plan, with a step for each value and memory of its own for
	// each: the better one could not be proven, which is a fault of this package. It is nil
	// otherwise.
	Doubt error

	// Once is what runs find as constants, because none of them changes it.
	Once []Once

	// What it computes, for the proof: the program of a step, and what ranks exchange for it.
	Program *ir.Program
	lower.Solver
}

// Once is a value that is computed when its leaves are set.
type Once struct {
	lower.Once
	Plan   *Plan   // of its recipe: see [lower.Once.Recipe]
	Leaves []ir.Op // the inputs of that
	Text   string
}

// HoistedBy returns the plan of a constant that is computed, nil for another one.
func (p *Plan) HoistedBy(constant int) *Once {
	i := slices.IndexFunc(p.Once, func(o Once) bool { return o.Index == constant })
	if i < 0 {
		return nil
	}
	return &p.Once[i]
}

// Computed reports whether the buffer is a constant that is computed once.
func (b Buffer) Computed() bool { return b.Kind == Constant && b.Frozen }

// Bare returns the plan without what a proof needs, which leads to whoever has made the updates.
// What runs the plan keeps no more.
func (p *Plan) Bare() *Plan {
	bare := *p
	bare.Program, bare.Updates, bare.Once = nil, nil, nil
	return &bare
}

// Measures reports whether ranks that have parts of gradients exchange the sums of their squares in
// the step.
func (s Step) Measures() bool {
	o, ok := s.Op.(ir.Opaque)
	return ok && o.Index == lower.Squares
}

// Step is one operation on memory.
type Step struct {
	Op   ir.Op
	Dsts []Ref // one, or the outputs of a Loop
	Args []Ref
	Name string  // of the graph's node
	Runs ir.Runs // in which it runs, of those whose gradients are added up
	// Epilogue is whether the step is an element-wise loop over the result of the step before, a
	// product or a convolution, and may run on elements that are finished while others are not, or
	// a concatenation of results of the loop before, which may store them there itself.
	Epilogue bool
	// Until is the last step beside which an operation of the graph runs that began before, 0 for
	// none: the next one waits for it.
	Until int
	// Rematerialized is whether the step computes what one before it has computed: see
	// [Limits.Memory].
	Rematerialized bool
}

// Ref says where a value lies: elements of a buffer.
type Ref struct {
	Buffer  int
	Offset  int // of the first element, in elements
	Shape   ir.Dims
	Strides ir.Dims // in elements, 0 for an axis that is repeated
	DType   backend.DType
	Step    int // which writes it, -1 for leaves
}

// Dense reports whether the elements lie in row-major order without gaps.
func (r Ref) Dense() bool { return ir.Dense(r.Shape, r.Strides) }

// Span returns the number of elements from the first one that the value reaches over.
func (r Ref) Span() int {
	last := 0
	for i := range r.Shape.Len() {
		size := r.Shape.At(i)
		if size == 0 {
			return 0
		}
		last += (size - 1) * r.Strides.At(i)
	}
	return last + 1
}

// Bytes returns how many bytes the operands and the results have, what is repeated counted once: as
// many as the operation must read and write, unless it reads parts of an operand.
func (s Step) Bytes() (n int) {
	for _, refs := range [...][]Ref{s.Dsts, s.Args} {
		for _, r := range refs {
			size := r.DType.Size()
			for i := range r.Shape.Len() {
				if r.Strides.At(i) != 0 {
					size *= r.Shape.At(i)
				}
			}
			n += size
		}
	}
	return n
}

// Kind says whose memory a buffer is.
type Kind uint8

// The kinds of buffers.
const (
	Arena    Kind = iota // the plan's
	Input                // of the variable Index
	Constant             // of the constant tensor Index
	Scalar               // of the number Bits
	State                // vector Vector that is kept for the variable Index
	Setting              // of number Index of an update
	// of the gradient of update Index, among those that ranks exchange with it; before that is
	// computed, of another value, which is smaller
	Gradient
	PartialSum // number Vector of the sums of some runs of the gradient of update Index
	FullBucket // of gradients, number Index from 1 on, that ranks exchange in shards
	OwnShard   // this rank's [Shard] of update Index: of the gradient, and then of the variable
	Unsharded  // the variable of update Index, once all ranks have given their shards
)

// Buffer is memory for values.
type Buffer struct {
	Kind  Kind
	Index int    // of an Input, a Constant, a State, a Setting, a Gradient, ...
	Bits  uint64 // of a Scalar: a float64
	Name  string // of the variable or the first step's node
	// Vector is the number of a State, a PartialSum, or a Gradient among those of its update.
	Vector int
	// Within is 1 + the buffer of which this one is a part, from byte At on, and 0 for none.
	Within, At int
	// Written is whether updates write the buffer: an Input or a State. It has the values of the
	// run before.
	Written bool
	Frozen  bool // of an Input that nothing changes, or a Constant that is computed
	DType   backend.DType
	Bytes   int
	// For an Arena buffer and its parts: the place in the arena, and the steps during which it is
	// in use. A FullBucket and its parts have places behind the arena, so that overlaps are known.
	Offset      int
	First, Last int
}

// placed reports whether a buffer has a place, so that what overlaps it is known.
func (b *Buffer) placed() bool { return b.Kind == Arena || b.Kind == FullBucket || b.Within > 0 }

// memory is what a run finds that is not the arena's: a variable, a vector of a solver, a sum of
// runs.
type memory struct {
	kind          Kind
	index, vector int
}

// memory says which memory a buffer is, if it is not the arena's.
func (b *Buffer) memory() memory { return memory{b.Kind, b.Index, b.Vector} }

// Outside reports whether the buffer has elements that the host gives it.
func (b Buffer) Outside() bool {
	switch b.Kind {
	case Arena, Gradient, PartialSum, FullBucket, OwnShard, Unsharded:
		return false
	}
	return true
}

// Prove returns an error if it cannot prove that a plan computes its program. It is package proof's
// Verify, which must not be of this package: a plan is not proven by what has made it.
type Prove func(p *Plan) error

// New plans a program, with updates of its variables at the end, and proves the plan. If that
// cannot be proven, it returns the plain one: see [Plan.Doubt]. Steps are a function of the
// program: ranks that run one program exchange their gradients in one order.
func (l Limits) New(prove Prove, p *ir.Program, s lower.Solver) (*Plan, error) {
	frozen := p.Frozen
	p, err := lower.Run(p, l.Tiles, s.Updates...)
	if err != nil {
		return nil, err
	}
	rest, all := lower.Hoist(p, frozen, s.Updates)
	once, err := plannedOnce(prove, all)
	if err != nil {
		return nil, err
	}
	return proven(prove, func(plain bool) (*Plan, error) {
		if plain {
			return l.planned(p, p, nil, s, plain)
		}
		return l.planned(p, rest, once, s, plain)
	})
}

// plannedOnce plans what is computed once, each recipe once.
func plannedOnce(prove Prove, all []lower.Once) ([]Once, error) {
	once, planned := make([]Once, len(all)), map[string]*Plan{}
	for i, o := range all {
		p, leaves, text := o.Recipe()
		if planned[text] == nil {
			var err error
			planned[text], err = proven(prove, func(plain bool) (*Plan, error) { // it is lowered
				return Standard().planned(p, p, nil, lower.Solver{}, plain)
			})
			if err != nil {
				return nil, err
			}
		}
		once[i] = Once{o, planned[text], leaves, text}
	}
	return once, nil
}

// proven returns the plan if it can be proven, else the plain one.
func proven(prove Prove, planned func(plain bool) (*Plan, error)) (*Plan, error) {
	var doubt error
	for _, plain := range []bool{false, true} {
		plan, err := planned(plain)
		if err == nil {
			err = prove(plan)
		}
		if err == nil {
			plan.Doubt = doubt
			return plan, nil
		}
		if doubt = cmp.Or(doubt, err); errors.Is(err, ErrTooSmall) {
			break
		}
	}
	return nil, doubt
}

// planned returns the plan of a program of which some values are computed once: p is the rest.
func (l Limits) planned(all, p *ir.Program, once []Once, s lower.Solver, plain bool) (*Plan,
	error) {
	t, err := lower.Train(all, s)
	if err != nil {
		return nil, err
	}
	step, copies := t.Program, map[ir.ID]bool(nil)
	if !plain {
		p, copies = l.rematerialized(lower.InShape(p)) // which moves the values of the run
		if t, err = lower.Train(p, s); err != nil {
			return nil, err
		}
	}
	plan, err := l.layout(p, copies, t, plain)
	if err != nil {
		return nil, err
	}
	plan.Program, plan.Solver, plan.Once = step, s, once
	for i := range plan.Buffers {
		if b := &plan.Buffers[i]; b.Kind == Constant && plan.HoistedBy(b.Index) != nil {
			b.Frozen = true
		}
	}
	if !plain {
		return l.fitted(plan)
	}
	countProducts(plan)
	lives(plan)
	keepAll(plan)
	assignOffsets(plan)
	if n := plan.occupied(); l.Memory > 0 && n > l.Memory {
		return nil, fmt.Errorf("%w: with separate memory for each value the plan takes "+
			"%d bytes of %d", ErrTooSmall, n, l.Memory)
	}
	return plan, nil
}
