package autograd

import (
	"fmt"
	"hash"
	"hash/fnv"
	"slices"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
)

// Hook returns a node that the model uses in place of the parameter w, so that w's
// gradient is caught during the backward pass. When a bucket is full its all-reduce starts
// and overlaps the rest of the backward pass. Sync waits for the all-reduces.
//
//	in   w  a parameter given to New, any shape
//	out  y  the same shape; y = w
//
// Call Hook where the model uses w, layer by layer: Gorgonia runs nodes in the order in
// which they were made, and a hook that is made early catches late. Use the result wherever
// the model uses w, and never w itself. Calling Hook again returns the same node. A bucket
// leaves once all its gradients are caught and the buckets before it have left, so a parameter
// without a hook delays those before it in the model.
//
// Gradient: dy, unchanged, before it is combined. Until Sync the gradient of this
// rank is in w.Grad(); in the lisp machine it is nowhere. Take gradients from
// Sync.
//
// Each RunAll of a graph with hooks is a step: every rank runs it and calls Sync before the
// next. Evaluate on another graph.
//
// Cost: one copy of w in the forward pass, because Gorgonia may overwrite y in place, and one of
// its gradient in the backward pass. On a device one launch copies the gradients of a bucket.
//
// Errors: ErrArgument if w was not given to New. RunAll fails with the errors
// of the communicator; see [DataParallel.Err].
func (d *DataParallel) Hook(w *gorgonia.Node) (*gorgonia.Node, error) {
	i := slices.IndexFunc(d.params, func(p *param) bool { return p.node == w })
	if i < 0 {
		return nil, d.named(fmt.Errorf("%w: hook of %s, which was not given to New",
			backend.ErrArgument, stock.Label(w)))
	}
	p := d.params[i]
	if p.hooked != nil {
		return p.hooked, nil
	}
	y, err := gorgonia.ApplyOp(&hook{identity{d, p, "hook"}}, w)
	if err != nil {
		return nil, onRank(d.comm, fmt.Sprintf("hook of %v", p), err)
	}
	p.hooked = y
	return y, nil
}

// Hooked reports whether a graph uses a parameter through [DataParallel.Hook], so that its gradient
// is exchanged between ranks in a run and must be taken from Sync.
func Hooked(w *gorgonia.Node) bool {
	if w == nil || w.Graph() == nil {
		return false
	}
	for users := w.Graph().To(w.ID()); users.Next(); {
		if _, ok := users.Node().(*gorgonia.Node).Op().(*hook); ok {
			return true
		}
	}
	return false
}

// UseGradients makes Sync take the gradients from these nodes, one for each parameter in the order
// of New, instead of from the parameters' Grad: for example, gradients that the graph has clipped.
// Parameters with a hook still use the hook.
//
// Errors: ErrArgument if there is not one node for each parameter.
func (d *DataParallel) UseGradients(grads gorgonia.Nodes) error {
	if len(grads) != len(d.params) || slices.Contains(grads, nil) {
		return d.named(fmt.Errorf("%w: %d gradients for %d parameters, or one is nil",
			backend.ErrArgument, len(grads), len(d.params)))
	}
	for i, p := range d.params {
		p.source = grads[i]
	}
	return nil
}

// catch takes a gradient out of the backward pass, and starts the buckets that are full.
func (d *DataParallel) catch(p *param, g gorgonia.Value) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return err
	}
	if p.full {
		return d.fail(fmt.Errorf("%w: %v has a second gradient in one step: call Sync after each "+
			"RunAll; for steps of several runs use vm.Accumulate, with vm.WithSolver and "+
			"vm.WithDataParallel", backend.ErrArgument, p))
	}
	err := residence.Bound(d.comm.Device(), func() error {
		if err := d.tape.takeGradient(p, g); err != nil {
			return err
		}
		return d.tape.depart()
	})
	if err != nil {
		return d.fail(err)
	}
	return nil
}

// identity is what both ops of a hook have in common.
type identity struct {
	d    *DataParallel
	p    *param
	name string
}

func (o *identity) Arity() int { return 1 }

func (o *identity) Type() hm.Type {
	return hm.NewFnType(hm.TypeVariable('a'), hm.TypeVariable('a'))
}

func (o *identity) InferShape(in ...gorgonia.DimSizer) (tensor.Shape, error) {
	s, ok := in[0].(tensor.Shape)
	if !ok {
		return nil, fmt.Errorf("autograd: %v: cannot infer a shape from a %T", o, in[0])
	}
	return s.Clone(), nil
}

func (o *identity) ReturnsPtr() bool     { return false }
func (o *identity) CallsExtern() bool    { return false }
func (o *identity) OverwritesInput() int { return -1 }
func (o *identity) String() string       { return fmt.Sprintf("%s of %s", o.name, o.p.name) }

// WriteHash distinguishes the hooks of similar parameters. It is the same on all ranks.
func (o *identity) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "euryale/autograd %s %d of %s", o.name, o.p.index, o.d.comm.Name())
}

func (o *identity) Hashcode() uint32 {
	h := fnv.New32a()
	o.WriteHash(h)
	return h.Sum32()
}

// hook is the op whose result a model uses in place of a parameter.
type hook struct{ identity }

var (
	_ gorgonia.SDOp = (*hook)(nil)
	_ gorgonia.ADOp = (*hook)(nil)
)

// Do returns a copy: Gorgonia lets ops overwrite operands that are not needed later, and
// would overwrite the parameter.
func (o *hook) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	return gorgonia.CloneValue(in[0])
}

func (o *hook) UsePreallocDo(to gorgonia.Value, in ...gorgonia.Value) (gorgonia.Value, error) {
	return gorgonia.Copy(to, in[0])
}

func (o *hook) DiffWRT(int) []bool { return []bool{true} }

// SymDiff puts the catch into the backward pass.
func (o *hook) SymDiff(in gorgonia.Nodes, y, dy *gorgonia.Node) (gorgonia.Nodes, error) {
	dw, err := gorgonia.ApplyOp(&catch{identity: identity{o.d, o.p, "catch"}, dy: dy}, dy)
	if err != nil {
		return nil, err
	}
	return gorgonia.Nodes{dw}, nil
}

// DoDiff catches the gradient in the lisp machine.
func (o *hook) DoDiff(_ gorgonia.ExecutionContext, _ gorgonia.Nodes, y *gorgonia.Node) error {
	dy, err := y.Grad()
	if err != nil {
		return err
	}
	return o.d.catch(o.p, dy)
}

// catch takes the gradient of a parameter out of the backward pass.
type catch struct {
	identity
	dy    *gorgonia.Node
	known bool // alone is
	alone bool // no other op reads dy
}

// Do returns its input if no other op can overwrite it, else a copy.
func (o *catch) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	if err := o.d.catch(o.p, in[0]); err != nil {
		return nil, err
	}
	if !o.known { // only now the graph is complete
		o.known, o.alone = true, o.dy.Graph().To(o.dy.ID()).Len() == 1
	}
	if o.alone {
		return in[0], nil
	}
	return gorgonia.CloneValue(in[0])
}
