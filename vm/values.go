package vm

import (
	"errors"
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/read"
)

// input is a variable that the plan reads.
type input struct {
	node   *gorgonia.Node
	shape  tensor.Shape // Node.Shape makes a copy
	buffer int          // of the plan
	// written is whether the plan changes the variable, in the memory of its value.
	written bool
	shard   *lower.Shard // that the plan has of it, nil for all
}

// inputs are the variables that a plan reads.
type inputs []input

// bind gives the plan their values, or returns what is wrong with any of them.
func (all inputs) bind(e *exec.Executor) error {
	var errs []error
	for _, in := range all {
		memory, err := in.memory()
		if err == nil {
			err = in.present(e, memory)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		e.Bind(in.buffer, in.own(memory))
	}
	return errors.Join(errs...)
}

// buffers returns those of the plan for the variables that are wanted.
func (all inputs) buffers(wanted func(input) bool) (buffers []int) {
	for _, in := range all {
		if wanted(in) {
			buffers = append(buffers, in.buffer)
		}
	}
	return buffers
}

// leave marks what the host has no longer of the variables that a step changes: what is on a
// device, and what ranks shard, but this rank's part. Integers, of which none can be a mark, are
// pulled.
func (all inputs) leave(e *exec.Executor) error {
	var unmarked []int
	for _, in := range all {
		if in.written && !e.Outdate(in.buffer) {
			unmarked = append(unmarked, in.buffer)
		}
		if in.shard == nil {
			continue
		}
		memory, err := in.memory()
		if err != nil {
			return err
		}
		residence.LeaveToOthers(memory, in.shard.From, in.shard.To)
	}
	return e.Pull(unmarked...)
}

// memory returns the elements of the variable's value.
func (in input) memory() (backend.Buffer, error) {
	v := in.node.Value()
	if v == nil {
		return backend.Buffer{}, fmt.Errorf("vm: the variable %s has no value: give it one "+
			"with gorgonia.Let, or with Set if it is of layers.Tokens", stock.Label(in.node))
	}
	if want := in.shape; !want.Eq(v.Shape()) && (want.TotalSize() != 1 ||
		v.Shape().TotalSize() != 1) {
		return backend.Buffer{},
			fmt.Errorf("vm: the value of %s has shape %v, the graph was built for %v: for "+
				"another shape, such as a smaller last batch, make a second graph and machine "+
				"whose parameters have the same tensors (see the example of vm.New)",
				stock.Label(in.node), v.Shape(), want)
	}
	if v.Dtype() != in.node.Dtype() {
		return backend.Buffer{}, fmt.Errorf("vm: the value of %s is %v, the graph was built for %v",
			stock.Label(in.node), v.Dtype(), in.node.Dtype())
	}
	if t, ok := v.(*tensor.Dense); ok && in.written && !residence.RowMajor(t) {
		return backend.Buffer{}, fmt.Errorf("vm: the value of %s has the strides %v, and a "+
			"solver changes it: it must be contiguous", stock.Label(in.node), t.Strides())
	}
	memory, err := dense(v)
	if err != nil {
		return memory, fmt.Errorf("vm: the value of %s: %w", stock.Label(in.node), err)
	}
	return memory, nil
}

// present returns an error for a variable of which other ranks or another device have newer
// elements.
func (in input) present(e *exec.Executor, memory backend.Buffer) error {
	if in.shard != nil {
		return nil
	}
	absent := residence.Present(memory)
	if absent == nil || absent == residence.OnDevice && e.Newer(memory) {
		return nil
	}
	return fmt.Errorf("vm: %w: the value of %s %w", backend.ErrArgument, stock.Label(in.node),
		absent)
}

// dense returns the elements of a value in row-major order: its memory, or a copy if they lie in
// another order there.
func dense(v gorgonia.Value) (backend.Buffer, error) {
	d, err := read.DType(v.Dtype())
	if err != nil {
		return backend.Buffer{}, err
	}
	return residence.Elements(v, d)
}

// memoryOf returns the host memory of a value.
func memoryOf(v gorgonia.Value) (backend.Buffer, error) {
	d, err := read.DType(v.Dtype())
	if err != nil {
		return backend.Buffer{}, err
	}
	return residence.Memory(v, d)
}

// newValue returns a value for a node, and its memory.
func newValue(n *gorgonia.Node) (gorgonia.Value, backend.Buffer, error) {
	v := scalarFor(n)
	if v == nil {
		v = tensor.New(tensor.Of(n.Dtype()), tensor.WithShape(n.Shape()...))
	}
	memory, err := memoryOf(v)
	return v, memory, err
}

// scalarFor returns a new scalar of Gorgonia for nodes that are one, nil for others.
func scalarFor(n *gorgonia.Node) gorgonia.Value {
	if !n.IsScalar() || len(n.Shape()) > 0 {
		return nil
	}
	return stock.Scalar(n.Dtype())
}

// shown is a computed node that has a value after a run.
type shown struct {
	node   *gorgonia.Node
	result int // of the plan
	value  gorgonia.Value
	memory backend.Buffer
}

// outputs are the values that a run leaves.
type outputs struct {
	shown  []shown
	hidden []*gorgonia.Node // computed nodes that have no value after a run
	reads  []target
}

// show makes a node of a graph have a value after each run.
func (o *outputs) show(g *read.Graph, n *gorgonia.Node) error {
	id, ok := g.Value(n)
	if !ok {
		return fmt.Errorf("vm: %s is not a node of the machine's graph that has a value",
			stock.Label(n))
	}
	if !slices.Contains(g.Computed, n) || slices.ContainsFunc(o.shown, func(s shown) bool {
		return s.node == n
	}) {
		return nil
	}
	v, memory, err := newValue(n)
	if err != nil {
		return fmt.Errorf("vm: node %s: %w", stock.Label(n), err)
	}
	o.shown = append(o.shown, shown{n, resultOf(g, id), v, memory})
	return nil
}

// resultOf returns the number of a result of the program, which is new unless it is one
// already.
func resultOf(g *read.Graph, id ir.ID) int {
	p := &g.Program
	i := slices.Index(p.Results, id)
	if i < 0 {
		i = len(p.Results)
		p.Results = append(p.Results, id)
	}
	return i
}

// target is where gorgonia.Read wants a value.
type target struct {
	read.Read
	result int
	shape  tensor.Shape // Node.Shape makes a copy
}

func (o *outputs) target(g *read.Graph, r read.Read) error {
	id, ok := g.Value(r.Node)
	if !ok {
		return fmt.Errorf("vm: gorgonia.Read of %v, which has no value", r.Node)
	}
	o.reads = append(o.reads, target{r, resultOf(g, id), r.Node.Shape()})
	return nil
}

// publish gives nodes and targets of gorgonia.Read their values after a run.
func (o *outputs) publish(e *exec.Executor) error {
	for _, s := range o.shown {
		err := e.Result(s.result, s.memory)
		if err == nil && s.node.Value() != s.value {
			err = gorgonia.UnsafeLet(s.node, s.value)
		}
		if err != nil {
			return fmt.Errorf("vm: node %v: %w", s.node, err)
		}
	}
	for _, t := range o.reads {
		if err := t.fill(e); err != nil {
			return fmt.Errorf("vm: gorgonia.Read of %v: %w", t.Node, err)
		}
	}
	return o.fillDuals()
}

// fill copies a value to where gorgonia.Read wants it: into the value that is there, as the
// tape machine does, or into a new one.
func (t target) fill(e *exec.Executor) error {
	if v := *t.Into; v != nil && v.Dtype() == t.Node.Dtype() && slices.Equal(v.Shape(), t.shape) {
		if d, ok := v.(*tensor.Dense); !ok || residence.RowMajor(d) {
			memory, err := memoryOf(v)
			if err != nil {
				return err
			}
			return e.Result(t.result, memory)
		}
	}
	v, memory, err := newValue(t.Node)
	if err != nil {
		return err
	}
	*t.Into = v
	return e.Result(t.result, memory)
}

// fillDuals copies gradients to where Node.Grad finds them if another machine has run the
// graph with gorgonia.BindDualValues before.
func (o *outputs) fillDuals() error {
	for _, s := range o.shown {
		for _, of := range s.node.DerivOf() {
			g, err := of.Grad()
			if err != nil || g == nil || g == s.value || of.Op() != nil || of.Deriv() != s.node {
				continue
			}
			memory, err := memoryOf(g)
			if err == nil && (memory.Len() != s.memory.Len() ||
				memory.DType() != s.memory.DType()) {
				err = errors.New("its dual value has another shape or dtype")
			}
			if err != nil {
				return fmt.Errorf("vm: gradient of %v: %w", of, err)
			}
			copy(memory.Bytes(), s.memory.Bytes())
		}
	}
	return nil
}

// nothing is a value without elements. It replaces values that Gorgonia would put back into its
// pool when it unbinds them, although somebody still has them.
type nothing struct {
	gorgonia.Value // nil
	shape          tensor.Shape
	dtype          tensor.Dtype
}

func (n nothing) Shape() tensor.Shape { return n.shape }
func (n nothing) Dtype() tensor.Dtype { return n.dtype }

// clearValues takes the values from all computed nodes if one of those that must have none has
// one, left by another machine or by an earlier run.
func clearValues(g *gorgonia.ExprGraph, computed, none []*gorgonia.Node) {
	bound := func(n *gorgonia.Node) bool { return n.Value() != nil }
	if !slices.ContainsFunc(none, bound) {
		return
	}
	for _, n := range computed {
		if bound(n) {
			// Gorgonia can only unbind all nodes of a graph. So the error is the one for another
			// shape.
			_ = gorgonia.UnsafeLet(n, nothing{shape: n.Shape(), dtype: n.Dtype()})
		}
	}
	g.UnbindAllNonInputs()
}

// constants of the plan are bound in each run if their tensors may change between runs.
type constants []constant

type constant struct {
	buffer int // of the plan
	memory backend.Buffer
}

// bind binds constant number index of a graph to a buffer of the plan.
func (c *constants) bind(e *exec.Executor, g *read.Graph, index, buffer int) error {
	memory, err := dense(g.Constants[index])
	if err != nil {
		return fmt.Errorf("vm: a constant: %w", err)
	}
	e.Bind(buffer, memory)
	if slices.Contains(g.Changing, index) {
		*c = append(*c, constant{buffer, memory})
	}
	return nil
}

// rebind gives a run what the tensors have now, such as the averages of batch norms.
func (c constants) rebind(e *exec.Executor) {
	for _, of := range c {
		e.Bind(of.buffer, of.memory)
	}
}

// draw gives the dropouts of a run their step. It returns an error if one already ran at the step.
func draw(g *read.Graph) error {
	for _, mask := range g.Masks {
		if err := mask.Draw(); err != nil {
			return fmt.Errorf("vm: Dropout #%d: %w", mask.Op, err)
		}
	}
	for _, r := range g.Randoms {
		r.State[0], r.State[1] = int64(r.Step()), int64(r.First())
	}
	return nil
}
