package read

import (
	"fmt"
	"reflect"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// none is what a build function returns for operands that its operation is not implemented
// for: the node becomes opaque.
const none = ir.ID(-1)

// builder adds the value of one node to the program.
type builder struct {
	*Graph
	program.Builder
	node  *gorgonia.Node
	op    reflect.Value // the struct of its operation
	nodes []*gorgonia.Node
	args  []ir.ID
	shape ir.Dims // of the node
	dtype backend.DType
}

func (g *Graph) builder(n *gorgonia.Node, operands []*gorgonia.Node) (*builder, error) {
	shape, dtype, err := form(n)
	if err != nil {
		return nil, err
	}
	b := &builder{Graph: g, node: n, op: stock.Struct(n.Op()), nodes: operands, shape: shape,
		dtype: dtype, Builder: program.Builder{To: &g.Program, Name: stock.Label(n),
			Recurs: g.recurs}}
	b.Checked = func(integers ir.ID) bool {
		_, ok := b.given(integers)
		return ok
	}
	for _, a := range operands {
		id, ok := g.values[a]
		if !ok {
			return nil, fmt.Errorf("its operand %s has no value", stock.Label(a))
		}
		b.args = append(b.args, id)
	}
	return b, nil
}

// typed adds the value by its typed operations, or returns none and leaves the program as it
// was.
func (b *builder) typed(build func(b *builder) ir.ID) ir.ID {
	before, shape := len(b.Program.Values), b.shape
	if build != nil {
		if id := build(b); id >= 0 {
			return b.reshape(id, shape)
		}
	}
	b.shape = shape
	b.Program.Values = b.Program.Values[:before]
	return none
}

// wide returns an error if an operand is of 16-bit floats, with which the Do of an operation would
// compute as with integers.
func (b *builder) wide() error {
	for _, n := range b.nodes {
		if residence.Half(n.Dtype()) {
			return fmt.Errorf("%s: the machine only widens and moves 16-bit floats: apply "+
				"nn.Cast(tensor.Float32, x) to %s before", stock.Operation(b.node), stock.Label(n))
		}
	}
	return nil
}

// opaque adds the value by the Do of its operation.
func (b *builder) opaque() ir.ID {
	id := b.Program.Add(ir.Value{
		Op:   ir.Opaque{Index: len(b.Opaques), Name: b.node.Op().String()},
		Args: slices.Clone(b.args), Shape: b.shape, DType: b.dtype, Name: stock.Label(b.node),
	})
	b.Opaques = append(b.Opaques, Opaque{Op: b.node.Op(), Node: b.node, Args: b.nodes})
	return id
}

func (b *builder) of(id ir.ID) ir.Value { return b.Program.Values[id] }

// float reports whether all operands are floats of the node's dtype.
func (b *builder) float() bool {
	return !slices.ContainsFunc(b.args, func(a ir.ID) bool {
		d := b.of(a).DType
		return d != backend.F32 && d != backend.F64 || d != b.dtype
	})
}

// reshape returns x with another shape of the same size, none if the sizes differ.
func (b *builder) reshape(x ir.ID, shape ir.Dims) ir.ID {
	switch v := b.of(x); {
	case v.Shape == shape:
		return x
	case v.Shape.Size() != shape.Size():
		return none
	default:
		return b.Reshape(x, shape.Slice()...)
	}
}

// expand returns x as an operand of an element-wise operation of the shape: a number is
// repeated, and vectors may differ in axes of length 1.
func (b *builder) expand(x ir.ID, shape ir.Dims) ir.ID {
	if b.of(x).Shape.Size() != 1 {
		return b.reshape(x, shape)
	}
	one := shape
	for i := range shape.Len() {
		one = one.With(i, 1)
	}
	return b.broadcast(b.reshape(x, one), shape)
}

func (b *builder) broadcast(x ir.ID, shape ir.Dims) ir.ID {
	return b.Broadcast(x, shape.Slice()...)
}

// int, number, bool and ints read fields of the operation.
func (b *builder) int(name string) int        { return int(b.op.FieldByName(name).Int()) }
func (b *builder) number(name string) float64 { return b.op.FieldByName(name).Float() }
func (b *builder) bool(name string) bool      { return b.op.FieldByName(name).Bool() }

func (b *builder) ints(name string) []int {
	f := b.op.FieldByName(name)
	list := make([]int, f.Len())
	for i := range list {
		list[i] = int(f.Index(i).Int())
	}
	return list
}

// given returns the variable or constant that integers are, nil for a constant: a run looks at them
// before it begins.
func (b *builder) given(id ir.ID) (variable *gorgonia.Node, ok bool) {
	v := b.of(id)
	for v.Op == (ir.Reshape{}) {
		v = b.of(v.Args[0])
	}
	switch op := v.Op.(type) {
	case ir.Constant:
		return nil, true
	case ir.Input:
		variable = b.Inputs[op.Index]
		return variable, !slices.Contains(b.changed, variable)
	}
	return nil, false
}
