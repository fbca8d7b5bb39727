package graphs

import (
	"fmt"
	"hash"
	"hash/fnv"

	"github.com/chewxy/hm"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// turning is an operation that only the graph knows: it transposes a matrix, its operand's header
// with it, as some of Gorgonia's do.
type turning struct{}

func turned(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.ApplyOp(turning{}, x) }

// Arity implements gorgonia.Op.
func (turning) Arity() int { return 1 }

// Type implements gorgonia.Op.
func (turning) Type() hm.Type {
	return hm.NewFnType(hm.TypeVariable('a'), hm.TypeVariable('a'))
}

// InferShape implements gorgonia.Op.
func (turning) InferShape(in ...gorgonia.DimSizer) (tensor.Shape, error) {
	s := in[0].(tensor.Shape)
	return tensor.Shape{s[1], s[0]}, nil
}

// Do implements gorgonia.Op.
func (turning) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	x := in[0].(*tensor.Dense)
	if err := x.T(); err != nil {
		return nil, err
	}
	return x.Materialize().(*tensor.Dense), nil
}

// ReturnsPtr implements gorgonia.Op.
func (turning) ReturnsPtr() bool { return false }

// CallsExtern implements gorgonia.Op.
func (turning) CallsExtern() bool { return false }

// OverwritesInput implements gorgonia.Op.
func (turning) OverwritesInput() int { return -1 }

// WriteHash implements gorgonia.Op.
func (turning) WriteHash(h hash.Hash) { fmt.Fprint(h, "turning") }

// Hashcode implements gorgonia.Op.
func (o turning) Hashcode() uint32 {
	h := fnv.New32a()
	o.WriteHash(h)
	return h.Sum32()
}

// String implements gorgonia.Op.
func (turning) String() string { return "turning" }
