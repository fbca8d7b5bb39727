package autograd

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
)

// param is one parameter of the model.
type param struct {
	node   *gorgonia.Node
	index  int
	name   string
	dtype  backend.DType
	size   int            // elements
	shape  tensor.Shape   // () for a scalar
	bucket *bucket        // where its gradient goes
	apart  bool           // in a bucket of others that are: see WithApart
	early  bool           // in a bucket of others that are: see WithEarly
	parted bool           // in a bucket of others of which ranks have parts
	slot   backend.Buffer // its place in the bucket
	view   gorgonia.Value // the slot, as a gradient of the type that solvers expect
	hooked *gorgonia.Node // what Hook returned, or nil
	source *gorgonia.Node // what UseGradients was given, or nil
	// the gradient that clear zeroed last, nil for none
	cleared gorgonia.Value
	full    bool // its gradient of this step is there
}

// examine returns the parameter of a node, or why it cannot be one.
func examine(i int, n *gorgonia.Node) (*param, error) {
	if n == nil {
		return nil, fmt.Errorf("parameter %d is nil", i)
	}
	p := &param{node: n, index: i, name: stock.Label(n), shape: n.Shape()}
	if n.Op() != nil {
		return nil, fmt.Errorf("parameter %d, %s, is the result of an operation: parameters are "+
			"input nodes", i, p.name)
	}
	if n.Value() == nil {
		return nil, fmt.Errorf("parameter %d, %s, has no value: bind one with WithInit, "+
			"WithValue or Let first", i, p.name)
	}
	value, err := p.memory()
	if err != nil {
		return nil, fmt.Errorf("parameter %d, %s, %w", i, p.name, err)
	}
	p.dtype, p.size = value.DType(), value.Len()
	return p, nil
}

// String describes p by name, dtype and shape, which ranks compare.
func (p *param) String() string { return fmt.Sprintf("%s %v%v", p.name, p.dtype, p.shape) }

// memory returns the memory of p's value.
func (p *param) memory() (backend.Buffer, error) {
	value, dense, err := residence.Floats(p.node.Value())
	if err == nil && !dense {
		err = fmt.Errorf("is a view or transposed: its value must be contiguous, in row order")
	}
	return value, err
}

// viewOf returns memory as a value of the same type as that of the node:
// solvers assert that a gradient and its parameter have the same one.
func (p *param) viewOf(memory backend.Buffer) gorgonia.Value {
	_, scalar := p.node.Value().(gorgonia.Scalar)
	if p.dtype == backend.F32 {
		data := backend.View[float32](memory)
		if scalar {
			return (*gorgonia.F32)(&data[0])
		}
		return tensor.New(tensor.WithShape(p.shape...), tensor.WithBacking(data))
	}
	data := backend.View[float64](memory)
	if scalar {
		return (*gorgonia.F64)(&data[0])
	}
	return tensor.New(tensor.WithShape(p.shape...), tensor.WithBacking(data))
}

// value returns the memory of the parameter itself, which must still have its dtype and size.
func (p *param) value() (backend.Buffer, error) {
	v, err := p.memory()
	if err != nil || v.DType() != p.dtype || v.Len() != p.size {
		return backend.Buffer{}, fmt.Errorf("parameter %s was bound to another kind of value "+
			"since New: it was %v", p.name, p)
	}
	return v, nil
}

// present is value where no device may have a newer one.
func (p *param) present() (backend.Buffer, error) {
	v, err := p.value()
	if err == nil && residence.Present(v) == residence.OnDevice {
		err = fmt.Errorf("%w: the value of %v %w", backend.ErrArgument, p, residence.OnDevice)
	}
	return v, err
}

// gradient returns what the last run has left for this parameter, nil if it
// left nothing.
func (p *param) gradient() gorgonia.Value {
	if p.source != nil {
		return p.source.Value()
	}
	g, err := p.node.Grad()
	if err != nil {
		return nil // the only error: there is none
	}
	return g
}

// load copies a gradient to the slot.
func (p *param) load(g gorgonia.Value) error {
	src, dense, err := residence.Floats(g)
	switch {
	case err != nil:
	case src.DType() != p.dtype || g.Shape().TotalSize() != p.size:
		err = fmt.Errorf("is a %v%v", src.DType(), g.Shape())
	case dense:
		copy(p.slot.Bytes(), src.Bytes()) // nothing if they are the same memory
	default:
		err = residence.InRowOrder(p.slot, src, g.(*tensor.Dense))
	}
	if err != nil {
		return fmt.Errorf("gradient of %v %w", p, err)
	}
	return nil
}

// bytes returns the parameter, to be read.
func (p *param) bytes() ([]byte, error) {
	value, err := p.present()
	return value.Bytes(), err
}

// checksum returns the checksum of the parameter's bytes.
func (p *param) checksum() (uint32, error) {
	value, err := p.present()
	h := checkpoint.NewChecksum()
	h.Write(value.Bytes())
	return h.Sum32(), err
}
