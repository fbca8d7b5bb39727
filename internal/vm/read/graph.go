package read

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/terms"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/ops/nn"
)

// Graph is a graph as it was read: the program, and what its numbers stand for.
type Graph struct {
	Program   ir.Program
	Inputs    []*gorgonia.Node // by ir.Input.Index: the variables, learnables among them
	Constants []gorgonia.Value // by ir.Constant.Index
	Opaques   []Opaque         // by ir.Opaque.Index
	Reads     []Read
	// Shown are computed nodes whose values programs look at without asking: costs and roots of the
	// graph, except gradients that nobody has asked for, gradients of variables, and random
	// numbers, which Gorgonia treats as variables.
	Shown    []*gorgonia.Node
	Computed []*gorgonia.Node // every node that is neither variable nor constant
	Modes    []gorgonia.TrainModeOp
	// Changing are the numbers of constants whose tensors may change between runs.
	Changing []int
	// Statistics has the running statistics of batch norms, in training.
	Statistics []Statistics
	// Randoms has the random numbers of dropouts, in training, and Masks what they draw.
	Randoms []Random
	Masks   []*nn.Mask
	Labels  []Labels

	training bool
	norms    Norms
	recurs   Recurs
	changed  []*gorgonia.Node  // variables that runs change
	whole    map[ir.ID]moments // of the batches of all ranks, by operand
	casts    map[ir.ID]ir.ID   // what was cast, by the value that it has become
	moves    int               // collectives of batch norms
	problem  error             // why an operation cannot be read, although it has a type here
	// rectifiers are comparisons with 0 that rectify what they compare.
	rectifiers map[*gorgonia.Node]bool
	values     map[*gorgonia.Node]ir.ID
	slices     []sliceState
}

// Opaque is an operation that is run by its Do, for a node.
type Opaque struct {
	Op   gorgonia.Op
	Node *gorgonia.Node
	Args []*gorgonia.Node
	Room []*tensor.Dense // for operands that no nodes stand for, in place of Args
}

// Labels is a variable of labels, or of floats that are cast to labels, which an operation checks
// before each run: its program makes NaN of those that are out of range.
type Labels struct {
	Op       *nn.Op
	Variable *gorgonia.Node
}

// Read is a node of gorgonia.Read: the value of Node is wanted at Into.
type Read struct {
	Into *gorgonia.Value
	Node *gorgonia.Node
}

// Value returns the place of a node's value in the program; false if the graph has no such
// node, or it has no value.
func (g *Graph) Value(n *gorgonia.Node) (ir.ID, bool) {
	id, ok := g.values[n]
	return id, ok
}

// Changed reports whether gorgonia.UnsafeLet has given an operation another slice since the
// graph was read. The program is then wrong.
func (g *Graph) Changed() bool {
	return slices.ContainsFunc(g.slices, sliceState.changed)
}

// Norms says what batch norms in training have to do with other ranks.
type Norms struct {
	Comm backend.Communicator // of the ranks that train together, nil for this one alone
	Sync bool                 // whether the batches of all ranks are normalised together
}

// Recurs reports whether a device has kernels for recurrent layers of F32, of so many samples and
// units. nil is a device that has none.
type Recurs func(batch, size int) bool

// New reads a graph, for training or for evaluation. changed are variables that runs change, so
// that the host does not know what they hold.
//
// Errors: a version of Gorgonia, or an operation of it, that this package does not know; a
// dtype or a number of axes that is not supported; a cycle.
func New(g *gorgonia.ExprGraph, training bool, norms Norms, recurs Recurs,
	changed ...*gorgonia.Node) (*Graph, error) {
	if err := checkVersion(); err != nil {
		return nil, err
	}
	sorted, err := sort(g)
	if err != nil {
		return nil, fmt.Errorf("vm: the graph cannot be sorted: %w", err)
	}
	r := &Graph{training: training, norms: norms, recurs: recurs, changed: changed,
		whole: map[ir.ID]moments{}, values: make(map[*gorgonia.Node]ir.ID, len(sorted)),
	}
	r.rectifiers = rectifiers(sorted)
	known := fields{}
	for _, n := range sorted {
		if err := r.read(n, known); err != nil {
			return nil, fmt.Errorf("vm: node %s: %w", stock.Label(n), err)
		}
	}
	if err := r.averageStatistics(); err != nil {
		return nil, err
	}
	r.findShown(sorted)
	if err := r.Program.Check(); err != nil {
		return nil, fmt.Errorf("vm: %w", err)
	}
	return r, nil
}

// sort returns the nodes in an order in which operands come first. It is gorgonia.Sort's except
// where that goes wrong: see [stock.Operands].
func sort(g *gorgonia.ExprGraph) (gorgonia.Nodes, error) {
	nodes, err := gorgonia.Sort(g)
	if err != nil {
		return nil, err
	}
	var order gorgonia.Nodes
	done := make(map[*gorgonia.Node]bool, len(nodes))
	var visit func(n *gorgonia.Node)
	visit = func(n *gorgonia.Node) {
		if done[n] {
			return
		}
		done[n] = true
		for _, a := range stock.Operands(n) {
			visit(a)
		}
		order = append(order, n)
	}
	for _, n := range slices.Backward(nodes) { // Sort puts the roots first
		visit(n)
	}
	return order, nil
}

// read adds the value of one node to the program.
func (g *Graph) read(n *gorgonia.Node, known fields) error {
	op := n.Op()
	if op == nil {
		return g.input(n)
	}
	kind := stock.Name(op)
	switch kind {
	case "letOp":
		return fmt.Errorf("gorgonia.Set is not supported: Gorgonia's tape machine ignores it")
	case "readOp":
		return g.target(n, known)
	case "constantScalar", "constantTensor":
		if terms.Of(n) != nil {
			return nil
		}
		return g.constant(n)
	}
	if mode, ok := op.(gorgonia.TrainModeOp); ok && !slices.Contains(g.Modes, mode) {
		g.Modes = append(g.Modes, mode)
	}
	if err := checkSizes(n); err != nil {
		return err
	}
	b, err := g.builder(n, stock.Operands(n))
	if err != nil {
		return err
	}
	g.Computed = append(g.Computed, n)
	id := none
	if t, ok := Types[kind]; ok {
		if err := known.check(op); err != nil {
			return err
		}
		if t.floats && !b.float() {
			return fmt.Errorf("%s: Gorgonia computes it for Float32 and Float64 only: "+
				"convert the operand by gorgonia.ConvType", stock.Operation(n))
		}
		if id = b.typed(t.build); b.problem != nil {
			return b.problem
		}
	}
	if o, ok := op.(*nn.Op); ok {
		id = b.typed(func(b *builder) ir.ID { return b.ours(o) })
	}
	if o, ok := op.(local); ok {
		id = b.typed(func(b *builder) ir.ID { return b.local(o) })
	}
	if id < 0 {
		if err := b.wide(); err != nil {
			return err
		}
		id = b.opaque()
	}
	g.values[n] = id
	return nil
}

func (g *Graph) input(n *gorgonia.Node) error {
	shape, dtype, err := form(n)
	if err != nil {
		return err
	}
	g.values[n] = g.Program.Add(ir.Value{
		Op: ir.Input{Index: len(g.Inputs)}, Shape: shape, DType: dtype, Name: stock.Label(n),
	})
	g.Inputs = append(g.Inputs, n)
	return nil
}

func (g *Graph) constant(n *gorgonia.Node) error {
	shape, dtype, err := form(n)
	if err != nil {
		return err
	}
	v := ir.Value{Shape: shape, DType: dtype, Name: stock.Label(n)}
	if x, ok := number(n.Value()); ok && shape.Len() == 0 {
		v.Op = ir.ScalarOf(x)
	} else {
		v.Op = ir.Constant{Index: len(g.Constants)}
		g.Constants = append(g.Constants, n.Value())
	}
	g.values[n] = g.Program.Add(v)
	return nil
}

// number returns a scalar value as a float64; false if it has none that is exact.
func number(v gorgonia.Value) (float64, bool) {
	switch x := v.Data().(type) {
	case float64:
		return x, true
	case float32:
		return float64(x), true
	case int:
		return float64(x), int(float64(x)) == x
	case int32:
		return float64(x), true
	case int64:
		return float64(x), int64(float64(x)) == x
	case uint8:
		return float64(x), true
	}
	return 0, false
}

// target notes where gorgonia.Read wants a value.
func (g *Graph) target(n *gorgonia.Node, known fields) error {
	if err := known.check(n.Op()); err != nil {
		return err
	}
	into := (*gorgonia.Value)(stock.Struct(n.Op()).FieldByName("into").UnsafePointer())
	for _, of := range stock.Operands(n) {
		g.Reads = append(g.Reads, Read{into, of})
	}
	return nil
}

// findShown finds the nodes of Shown.
func (g *Graph) findShown(sorted gorgonia.Nodes) {
	used := map[*gorgonia.Node]bool{}
	for _, n := range sorted {
		if _, value := g.values[n]; value {
			for _, a := range stock.Operands(n) {
				used[a] = true
			}
		}
	}
	for _, n := range g.Computed {
		ofVariable := func(of *gorgonia.Node) bool { return of.Op() == nil && of.Deriv() == n }
		if !used[n] && !leftover(n) || IsCost(n) || slices.ContainsFunc(n.DerivOf(), ofVariable) ||
			stock.Name(n.Op()) == "randomOp" {
			g.Shown = append(g.Shown, n)
		}
	}
}

// IsCost reports whether gorgonia.Grad was called on a node, or the node is a term of the sum that
// it was called on: Grad begins with the constant 1, which is then the gradient of both.
func IsCost(n *gorgonia.Node) bool {
	d := n.Deriv()
	if d == nil || !n.IsScalar() || stock.Name(d.Op()) != "constantScalar" {
		return false
	}
	one, ok := number(d.Value())
	return ok && one == 1
}

// leftover reports whether a root is a gradient that Gorgonia has made because it
// differentiates an operation by all operands, and that is the derivative of nothing.
func leftover(n *gorgonia.Node) bool {
	return len(n.DerivOf()) == 0 &&
		slices.Contains([]string{stock.Gradients, stock.Undifferentiated}, stock.Group(n))
}

// checkSizes returns an error if an operation has operands or a result without elements, unless it
// is a collective of package ops, of which a rank may have no elements.
func checkSizes(n *gorgonia.Node) error {
	if _, ok := n.Op().(local); ok {
		return nil
	}
	for _, of := range slices.Concat(stock.Operands(n), gorgonia.Nodes{n}) {
		if shape := of.Shape(); !shape.IsScalar() && shape.TotalSize() == 0 {
			return fmt.Errorf("%s of shape %v has no elements: only collectives of package ops "+
				"take and give tensors of size 0", stock.Label(of), shape)
		}
	}
	return nil
}

// form returns shape and dtype of a node's value.
func form(n *gorgonia.Node) (ir.Dims, backend.DType, error) {
	shape := n.Shape()
	if len(shape) > ir.MaxDims {
		return ir.Dims{}, 0, fmt.Errorf("shape %v has %d axes, at most %d are supported", shape,
			len(shape), ir.MaxDims)
	}
	dtype, err := DType(n.Dtype())
	if n.IsScalar() {
		return ir.Dims{}, dtype, err
	}
	return ir.Of(shape...), dtype, err
}

// DType returns the backend's name for a dtype of Gorgonia. Booleans are bytes.
func DType(dt tensor.Dtype) (backend.DType, error) {
	if dt == tensor.Bool {
		return backend.U8, nil
	}
	if d, ok := residence.DType(dt); ok {
		return d, nil
	}
	return 0, fmt.Errorf("dtype %v is not supported", dt)
}
