package ops

import (
	"fmt"
	"hash"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// sparser is a communicator with sparse all-reduces, from package backend/compress/sparse. For each
// state it keeps a residual and what was sent.
type sparser interface {
	// NewState returns a state key that it has not returned before.
	NewState() int
	// Sent returns what this rank has sent in the last call with a state and an operand like x,
	// empty if there was none.
	Sent(state int, x backend.Buffer) backend.Buffer
}

// SparseAllReduce sends the large elements of x, adds them over the ranks, and keeps
// the others for the next run. comm must be a communicator of package
// backend/compress/sparse, which has the details.
//
//	in   x  [d...]   the same shape on every rank, at least one element; Float32 or Float64
//	out  y  [d...]   op over s of what rank s has sent, bitwise identical on every rank
//
// Every node has its own residual, so each call of this constructor makes another operation, even
// on the same x. Graphs must be built in the same order on every rank, and in that order again by a
// program that resumes from a checkpoint.
//
// Every run changes the residual, even one that only evaluates: it sends what training has left,
// and leaves a residual that the next step sends. To evaluate, build another graph with [AllReduce]
// instead, or save the State of comm before and restore it with SetState after, on every rank.
//
// Gradient: straight through to the elements that were sent. For elements of which this rank has
// sent a number other than zero in the same run, dx is the AllReduce of dy by the same op, like the
// gradient of [AllReduce]. Elsewhere dx is 0, because the residual does not contribute to y. The
// selection and earlier residuals count as constants. The gradient itself has no gradient:
// ErrGradient.
// Cost: forward that of package backend/compress/sparse and a vector like x, which comm keeps
// until its Close; backward an AllReduce.
// Errors: backend.ErrArgument if comm is not sparse or op is neither Sum nor Avg;
// ErrDType; ErrShape; at run time those of [backend.Communicator].
func SparseAllReduce(comm backend.Communicator, op backend.ReduceOp,
	x *gorgonia.Node) (*gorgonia.Node, error) {
	y, err := sparseNode(comm, op, x)
	if err != nil {
		return nil, fmt.Errorf("ops: SparseAllReduce: %w", err)
	}
	return y, nil
}

func sparseNode(comm backend.Communicator, op backend.ReduceOp, x *gorgonia.Node) (*gorgonia.Node,
	error) {
	b, err := newBuilder(comm, x, nil)
	if err != nil {
		return nil, err
	}
	states, ok := comm.(sparser)
	switch {
	case !ok:
		return nil, fmt.Errorf("%w: %s has no sparse all-reduce: make it with package "+
			"backend/compress/sparse", backend.ErrArgument, comm.Name())
	case op != backend.Sum && op != backend.Avg:
		return nil, fmt.Errorf("%w: a sparse %v: use sum or avg", backend.ErrArgument, op)
	case b.dtype != tensor.Float32 && b.dtype != tensor.Float64:
		return nil, fmt.Errorf("%w: %v: a sparse all-reduce is for Float32 and Float64", ErrDType,
			b.dtype)
	case product(b.shape) == 0:
		return nil, fmt.Errorf("%w: x of shape %v has no elements", ErrShape, b.shape)
	case comm.Size() == 1:
		return x, nil
	}
	s := &sparseCall{comm: comm, states: states, op: op, state: states.NewState(), dtype: b.dtype,
		shape: b.shape}
	return gorgonia.ApplyOp(&sparseOp{s, next(comm, x, s.origin(), true)}, x)
}

// sparseCall is what a sparse all-reduce and its gradient know of each other.
type sparseCall struct {
	comm   backend.Communicator
	states sparser
	op     backend.ReduceOp
	state  int
	dtype  tensor.Dtype
	shape  tensor.Shape
}

func (c *sparseCall) origin() backend.Origin {
	return backend.Origin{Purpose: backend.ForGraph, Shape: backend.ShapeOf(c.shape...)}
}

func (c *sparseCall) fail(op string, at site, err error) error {
	return &Error{fmt.Sprintf("%s{%v, state %d}", op, c.op, c.state), at.operand, c.shape, c.dtype,
		c.comm.Name(), c.comm.Rank(), err}
}

// sparseOp is the sparse all-reduce.
type sparseOp struct {
	*sparseCall
	at site
}

var (
	_ gorgonia.SDOp = (*sparseOp)(nil)
	_ gorgonia.ADOp = (*sparseOp)(nil)
)

// Do runs the reduction. The communicator keeps what was sent for the gradient.
func (o *sparseOp) Do(inputs ...gorgonia.Value) (gorgonia.Value, error) {
	y, err := o.apply(inputs, o.Arity(), o.reduce)
	if err != nil {
		return nil, o.fail(err)
	}
	return y, nil
}

// apply computes y of the first of n operands, in its place.
func (c *sparseCall) apply(inputs []gorgonia.Value, n int,
	f func(p worker, y, x backend.Buffer) error) (gorgonia.Value, error) {
	if len(inputs) != n {
		return nil, fmt.Errorf("%w: %d operands, want %d", backend.ErrArgument, len(inputs), n)
	}
	if err := check(inputs[0], c.shape, c.dtype); err != nil {
		return nil, err
	}
	return at(c.comm, func(p onHost) (gorgonia.Value, error) {
		x, err := read(inputs[0])
		if err != nil {
			return nil, err
		}
		y, memory, err := fresh(c.dtype, c.shape)
		if err != nil {
			return nil, err
		}
		return y, f(p, memory, x.Buffer)
	})
}

func (o *sparseOp) reduce(p worker, y, x backend.Buffer) error {
	return p.run(backend.Collective{Kind: backend.AllReduce, Op: o.op, State: o.state,
		Origin: o.at.origin}, y, x)
}

// SymDiff returns the node of the gradient.
func (o *sparseOp) SymDiff(_ gorgonia.Nodes, output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	dx, err := gorgonia.ApplyOp(&sentOp{o.sparseCall, next(o.comm, grad, o.origin(), true)}, grad,
		output)
	return gorgonia.Nodes{dx}, err
}

// DoDiff adds the gradient to that of the input.
func (o *sparseOp) DoDiff(_ gorgonia.ExecutionContext, inputs gorgonia.Nodes,
	output *gorgonia.Node) error {
	dy, err := output.Grad()
	if err != nil {
		return o.fail(err)
	}
	dx, err := (&sentOp{o.sparseCall, o.at.gradient(o.origin())}).Do(dy, output.Value())
	if err != nil {
		return err
	}
	return accumulateInto(inputs[0], dx)
}

func (o *sparseOp) place() (backend.Communicator, site) { return o.comm, o.at }

// Comm returns the communicator whose ranks run the operation together.
func (o *sparseOp) Comm() backend.Communicator { return o.comm }

func (o *sparseOp) fail(err error) error { return o.sparseCall.fail("SparseAllReduce", o.at, err) }

// String returns the operation, its state and the communicator:
// "SparseAllReduce{avg, state 1048576}@world".
func (o *sparseOp) String() string {
	return fmt.Sprintf("SparseAllReduce{%v, state %d}@%s", o.op, o.state, o.comm.Name())
}

// WriteHash writes the op's identity, the same on every rank.
func (o *sparseOp) WriteHash(h hash.Hash) { fmt.Fprintf(h, "euryale %s #%d", o, o.at.ordinal()) }

// Hashcode returns the hash of the op's identity.
func (o *sparseOp) Hashcode() uint32 { return hashcode(o) }

// sentOp is the gradient of the sparse all-reduce: it reduces dy, and keeps the elements that the
// last run has sent. Its operands are dy and y, so machines run it after y.
type sentOp struct {
	*sparseCall
	at site
}

var _ gorgonia.SDOp = (*sentOp)(nil)

// Do runs the reduction.
func (o *sentOp) Do(inputs ...gorgonia.Value) (gorgonia.Value, error) {
	dx, err := o.apply(inputs, o.Arity(), o.reduce)
	if err != nil {
		return nil, o.fail(err)
	}
	return dx, nil
}

// reduce keeps the elements whose sent bits are not all 0.
func (o *sentOp) reduce(p worker, dx, dy backend.Buffer) error {
	sent, err := p.here(o.states.Sent(o.state, dx))
	if err != nil {
		return err
	}
	if sent.Len() == 0 {
		return fmt.Errorf(
			"%w: the reduction of state %d has not run yet: only a run has a gradient",
			backend.ErrArgument, o.state)
	}
	bits := bitsOf(dx.DType())
	// The sparse communicator passes it on unchanged.
	exact := backend.Collective{Kind: backend.AllReduce, Op: o.op, Exact: true, Origin: o.at.origin}
	return inOrder(
		func() error { return p.run(exact, dx, dy) },
		func() error {
			return p.apply(0, dx.As(bits), func(p *fuse.Program, x []fuse.Value) fuse.Value {
				return p.Do(fuse.Where, x[0], x[1], p.Const(bits, 0))
			}, sent.As(bits), dx.As(bits))
		},
	)
}

// Arity returns 2.
func (o *sentOp) Arity() int { return 2 }

// Type returns a → a → a.
func (o *sentOp) Type() hm.Type {
	a := hm.TypeVariable('a')
	return hm.NewFnType(a, a, a)
}

// DiffWRT says that there is a gradient of dy; asking for it gives an error that says why there is
// none.
func (o *sentOp) DiffWRT(int) []bool { return []bool{true, false} }

// SymDiff returns an error: there is none.
func (o *sentOp) SymDiff(gorgonia.Nodes, *gorgonia.Node, *gorgonia.Node) (gorgonia.Nodes, error) {
	return nil, o.fail(fmt.Errorf("%w: the gradient of a sparse reduction depends on what was "+
		"sent, and is not differentiated", ErrGradient))
}

func (o *sentOp) place() (backend.Communicator, site) { return o.comm, o.at }

// Comm returns the communicator whose ranks run the operation together.
func (o *sentOp) Comm() backend.Communicator { return o.comm }

func (o *sentOp) fail(err error) error { return o.sparseCall.fail("SparseGradient", o.at, err) }

// String returns the operation, its state and the communicator.
func (o *sentOp) String() string {
	return fmt.Sprintf("SparseGradient{%v, state %d}@%s", o.op, o.state, o.comm.Name())
}

// WriteHash writes the op's identity, the same on every rank.
func (o *sentOp) WriteHash(h hash.Hash) { fmt.Fprintf(h, "euryale %s #%d", o, o.at.ordinal()) }

// Hashcode returns the hash of the op's identity.
func (o *sentOp) Hashcode() uint32 { return hashcode(o) }

// What both have in common: the gradient has an Arity, a Type and its own DiffWRT.

// Arity returns 1.
func (c *sparseCall) Arity() int { return 1 }

// Type returns a → a.
func (c *sparseCall) Type() hm.Type {
	return hm.NewFnType(hm.TypeVariable('a'), hm.TypeVariable('a'))
}

// InferShape returns the shape of x.
func (c *sparseCall) InferShape(inputs ...gorgonia.DimSizer) (tensor.Shape, error) {
	if err := checkShapes(inputs, c.shape); err != nil {
		return nil, err
	}
	return c.shape.Clone(), nil
}

// ReturnsPtr returns true: the result is its own value.
func (c *sparseCall) ReturnsPtr() bool { return true }

// CallsExtern returns false.
func (c *sparseCall) CallsExtern() bool { return false }

// OverwritesInput returns -1: inputs are never written to.
func (c *sparseCall) OverwritesInput() int { return -1 }

// DiffWRT says that there is a gradient.
func (c *sparseCall) DiffWRT(int) []bool { return []bool{true} }
