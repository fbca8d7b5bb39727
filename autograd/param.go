package autograd

import (
	"fmt"
	"unsafe"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
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
	slot   backend.Buffer // its place in the bucket
	view   gorgonia.Value // the slot, as a gradient of the type that solvers expect
	hooked *gorgonia.Node // what Hook returned, or nil
	source *gorgonia.Node // what UseGradients was given, or nil
	full   bool           // its gradient of this step is in the slot
}

// examine returns the parameter of a node, or why it cannot be one.
func examine(i int, n *gorgonia.Node) (*param, error) {
	if n == nil {
		return nil, fmt.Errorf("parameter %d is nil", i)
	}
	p := &param{node: n, index: i, name: n.Name(), shape: n.Shape()}
	if n.Op() != nil {
		return nil, fmt.Errorf("parameter %d, %s, is the result of an operation: parameters are input nodes", i, p.name)
	}
	if n.Value() == nil {
		return nil, fmt.Errorf("parameter %d, %s, has no value: bind one with WithInit, WithValue or Let first", i, p.name)
	}
	value, dense, err := elements(n.Value())
	if err != nil {
		return nil, fmt.Errorf("parameter %d, %s: %w", i, p.name, err)
	}
	if !dense {
		return nil, fmt.Errorf("parameter %d, %s, is a view or transposed: its value must be contiguous, in row order", i, p.name)
	}
	p.dtype, p.size = value.DType(), n.Value().Shape().TotalSize()
	return p, nil
}

func (p *param) String() string { return fmt.Sprintf("%s %v%v", p.name, p.dtype, p.shape) }

// place gives p its slot.
func (p *param) place(b *bucket, slot backend.Buffer) {
	p.bucket, p.slot = b, slot
	p.view = p.viewOf(slot)
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

// value returns the memory of the parameter itself.
func (p *param) value() (backend.Buffer, error) {
	v, dense, err := elements(p.node.Value())
	if err == nil && (!dense || v.DType() != p.dtype || v.Len() != p.size) {
		err = fmt.Errorf("it was bound to another kind of value since New: it was %v", p)
	}
	if err != nil {
		return backend.Buffer{}, fmt.Errorf("parameter %s: %w", p.name, err)
	}
	return v, nil
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

// load copies a gradient into the slot.
func (p *param) load(g gorgonia.Value) error {
	src, dense, err := elements(g)
	switch {
	case err != nil:
		return fmt.Errorf("gradient of %v: %w", p, err)
	case src.DType() != p.dtype || g.Shape().TotalSize() != p.size:
		return fmt.Errorf("gradient of %v is a %v%v", p, src.DType(), g.Shape())
	case dense:
		copy(p.slot.Bytes(), src.Bytes())
		return nil
	}
	if err := inRowOrder(p.slot, src, g.(*tensor.Dense)); err != nil {
		return fmt.Errorf("gradient of %v: %w", p, err)
	}
	return nil
}

// elements returns the memory of a value. dense says that its elements lie in
// it in row order, one after the other.
func elements(v gorgonia.Value) (memory backend.Buffer, dense bool, err error) {
	switch v := v.(type) {
	case *gorgonia.F32:
		return backend.Host(backend.F32, unsafe.Pointer(v), 1), true, nil
	case *gorgonia.F64:
		return backend.Host(backend.F64, unsafe.Pointer(v), 1), true, nil
	case *tensor.Dense:
		if !v.IsNativelyAccessible() {
			return memory, false, fmt.Errorf("its memory is not the host's")
		}
		switch v.Dtype() {
		case tensor.Float32:
			memory = backend.Of(v.Float32s())
		case tensor.Float64:
			memory = backend.Of(v.Float64s())
		default:
			return memory, false, fmt.Errorf("it is a tensor of %v: float32 and float64 are supported", v.Dtype())
		}
		n := v.Shape().TotalSize()
		dense = memory.Len() == n && !v.RequiresIterator() && v.DataOrder().IsRowMajor()
		return memory, dense, nil
	}
	return memory, false, fmt.Errorf("it is a %T: tensor.Dense, F32 and F64 are supported", v)
}

// inRowOrder copies the elements of a tensor that is not dense.
func inRowOrder(dst, src backend.Buffer, t *tensor.Dense) error {
	at := 0
	for it := t.Iterator(); ; at++ {
		i, err := it.Next()
		if _, over := err.(tensor.NoOpError); over {
			return nil
		}
		if err != nil {
			return err
		}
		copy(dst.Slice(at, at+1).Bytes(), src.Slice(i, i+1).Bytes())
	}
}
