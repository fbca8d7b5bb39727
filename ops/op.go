package ops

import (
	"fmt"
	"hash"
	"hash/fnv"
	"slices"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// collectiveOp is the op of every collective: one transform forward, one backward. Its gradient is
// the same op with the two exchanged, so gradients have gradients.
type collectiveOp struct {
	comm     backend.Communicator
	fwd, bwd transform
	dtype    tensor.Dtype
	in, out  tensor.Shape // of x and y, on this rank
	at       site
}

var (
	_ gorgonia.SDOp = (*collectiveOp)(nil)
	_ gorgonia.ADOp = (*collectiveOp)(nil)
)

// apply adds the op to the graph of its operand.
func (o *collectiveOp) apply(x *gorgonia.Node) (*gorgonia.Node, error) {
	o.at = next(o.comm, x, o.origin(), o.fwd.kind.Reduces())
	return gorgonia.ApplyOp(o, x)
}

func (o *collectiveOp) place() (backend.Communicator, site) { return o.comm, o.at }

// Comm returns the communicator whose ranks run the operation together.
func (o *collectiveOp) Comm() backend.Communicator { return o.comm }

// origin returns what the op tells the other ranks about its place in the graph, except the
// ordinal.
func (o *collectiveOp) origin() backend.Origin {
	origin := backend.Origin{Purpose: backend.ForGraph, Shape: backend.ShapeOf(
		o.fwd.common(o.in)...)}
	if o.fwd.scatter != none {
		origin.Cut = uint8(1 + o.fwd.scatter)
	}
	if o.fwd.gather != none {
		origin.Join = uint8(1 + o.fwd.gather)
	}
	return origin
}

// inverse returns the op for gradients: backward becomes forward. Max and Min
// are treated as Sum in it.
func (o *collectiveOp) inverse() *collectiveOp {
	bwd := o.fwd
	if !o.linear() {
		bwd.op = backend.Sum
	}
	return &collectiveOp{comm: o.comm, fwd: o.bwd, bwd: bwd, dtype: o.dtype, in: o.out, out: o.in}
}

// Arity returns 1.
func (o *collectiveOp) Arity() int { return 1 }

// Type returns a → a: collectives keep the dtype and the number of axes.
func (o *collectiveOp) Type() hm.Type {
	return hm.NewFnType(hm.TypeVariable('a'), hm.TypeVariable('a'))
}

// InferShape returns the shape of y on this rank.
func (o *collectiveOp) InferShape(inputs ...gorgonia.DimSizer) (tensor.Shape, error) {
	if err := checkShapes(inputs, o.in); err != nil {
		return nil, o.fail(err)
	}
	return o.out.Clone(), nil
}

// checkShapes checks that every input has the shape.
func checkShapes(inputs []gorgonia.DimSizer, want tensor.Shape) error {
	for _, input := range inputs {
		shape, ok := input.(tensor.Shape)
		if !ok || !slices.Equal(shape, want) {
			return fmt.Errorf("%w: operand of shape %v, want %v", ErrShape, input, want)
		}
	}
	return nil
}

// Do runs the forward transform. Operands are checked before a byte moves.
func (o *collectiveOp) Do(inputs ...gorgonia.Value) (gorgonia.Value, error) {
	if len(inputs) != 1 {
		return nil, o.fail(fmt.Errorf("%w: %d operands, want 1", backend.ErrArgument, len(inputs)))
	}
	y, err := o.fwd.run(o.comm, o.at.origin, inputs[0], o.dtype, o.in, o.out)
	if err != nil {
		return nil, o.fail(err)
	}
	return y, nil
}

func (o *collectiveOp) fail(err error) error {
	return &Error{o.fwd.String(), o.at.operand, o.in, o.dtype, o.comm.Name(), o.comm.Rank(), err}
}

// ReturnsPtr returns true: the result is its own value.
func (o *collectiveOp) ReturnsPtr() bool { return true }

// CallsExtern returns false.
func (o *collectiveOp) CallsExtern() bool { return false }

// OverwritesInput returns -1: inputs are never written to.
func (o *collectiveOp) OverwritesInput() int { return -1 }

// identity is everything that makes the op what it is except its place in the graph, the
// same on every rank.
func (o *collectiveOp) identity() string {
	return fmt.Sprintf("euryale %q %+q %+q", o.comm.Name(), o.fwd.identity(), o.bwd.identity())
}

// WriteHash writes the op's identity, the same on every rank.
func (o *collectiveOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "%s #%d", o.identity(), o.at.ordinal())
}

// Hashcode returns the hash of the op's identity.
func (o *collectiveOp) Hashcode() uint32 { return hashcode(o) }

func hashcode(op interface{ WriteHash(hash.Hash) }) uint32 {
	h := fnv.New32a()
	op.WriteHash(h)
	return h.Sum32()
}

// String returns the operation and the communicator: "AllToAll{2→1}@world".
func (o *collectiveOp) String() string { return fmt.Sprintf("%v@%s", o.fwd, o.comm.Name()) }

// DiffWRT says that there is a gradient; where there is none, asking for it
// gives an error that says why.
func (o *collectiveOp) DiffWRT(int) []bool { return []bool{true} }

// SymDiff returns the node of the gradient.
func (o *collectiveOp) SymDiff(inputs gorgonia.Nodes, output, grad *gorgonia.Node) (gorgonia.Nodes,
	error) {
	if err := o.differentiable(); err != nil {
		return nil, o.fail(err)
	}
	dx, err := o.inverse().apply(grad)
	if err != nil || o.linear() {
		return gorgonia.Nodes{dx}, err
	}
	y := output
	if o.fwd.kind != backend.AllReduce { // whose y every rank has
		if y, err = o.inverse().apply(output); err != nil {
			return nil, err
		}
	}
	dx, err = o.holder().apply(inputs[0], y, dx)
	return gorgonia.Nodes{dx}, err
}

// DoDiff adds the gradient to that of the input.
func (o *collectiveOp) DoDiff(_ gorgonia.ExecutionContext, inputs gorgonia.Nodes,
	output *gorgonia.Node) error {
	dy, err := output.Grad()
	if err != nil {
		return o.fail(err)
	}
	dx, err := o.pullback(inputs[0].Value(), output.Value(), dy)
	if err != nil {
		return o.fail(err)
	}
	return accumulateInto(inputs[0], dx)
}

// pullback is SymDiff on values.
func (o *collectiveOp) pullback(x, y, dy gorgonia.Value) (gorgonia.Value, error) {
	if err := o.differentiable(); err != nil {
		return nil, err
	}
	back := o.inverse()
	back.at = o.at.gradient(back.origin())
	dx, err := back.Do(dy)
	if err != nil || o.linear() {
		return dx, err
	}
	if o.fwd.kind != backend.AllReduce {
		if y, err = back.Do(y); err != nil {
			return nil, err
		}
	}
	holder := o.holder()
	holder.at = o.at.gradient(holder.origin())
	return holder.Do(x, y, dx)
}

// accumulateInto adds dx to the gradient of a node.
func accumulateInto(n *gorgonia.Node, dx gorgonia.Value) error {
	sum, err := n.Grad()
	if err != nil {
		return err
	}
	return accumulate(sum, dx)
}

// linear reports whether the op is a linear map, whose gradient is the backward
// transform and nothing else.
func (o *collectiveOp) linear() bool {
	return !o.fwd.kind.Reduces() || o.fwd.op == backend.Sum || o.fwd.op == backend.Avg
}

// differentiable returns an error that says why there is no gradient.
func (o *collectiveOp) differentiable() error {
	if o.fwd.kind.Reduces() && o.fwd.op == backend.Prod {
		return fmt.Errorf("%w: a product over the ranks is not linear and needs every other "+
			"rank's factor: reduce the sum of logarithms instead", ErrGradient)
	}
	return nil
}

// holder returns the op that gives the gradient of a maximum or minimum to the
// rank that holds it.
func (o *collectiveOp) holder() *holderOp {
	return &holderOp{comm: o.comm, dtype: o.dtype, shape: o.in}
}
