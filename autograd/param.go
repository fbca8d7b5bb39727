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
	engine engine         // of the device that it is on, nil on the host
	slot   backend.Buffer // its place in the bucket
	grad   backend.Buffer // where its gradient is packed: slot, or rounded in its own place
	view   gorgonia.Value // the slot, as a gradient of the type that solvers expect
	hooked *gorgonia.Node // what Hook returned, or nil
	source *gorgonia.Node // what UseGradients was given, or nil
	full   bool           // its gradient of this step, or of this micro-batch, is there
	held   bool           // its slot has the gradients of micro-batches before this one
	tree   *tree          // that of its DataParallel
	sums   sums           // of micro-batches in the tree

	// On a device, where the gradient of this step is until its bucket is packed, and where it is to go.
	src, to backend.Buffer
}

// examine returns the parameter of a node, or why it cannot be one.
func examine(i int, n *gorgonia.Node) (*param, error) {
	if n == nil {
		return nil, fmt.Errorf("parameter %d is nil", i)
	}
	p := &param{node: n, index: i, name: stock.Label(n), shape: n.Shape()}
	if n.Op() != nil {
		return nil, fmt.Errorf("parameter %d, %s, is the result of an operation: parameters are input nodes", i, p.name)
	}
	if n.Value() == nil {
		return nil, fmt.Errorf("parameter %d, %s, has no value: bind one with WithInit, WithValue or Let first", i, p.name)
	}
	p.engine = residence.Engine[engine](n.Value())
	value, err := p.memory()
	if err != nil {
		return nil, fmt.Errorf("parameter %d, %s, %w", i, p.name, err)
	}
	p.dtype, p.size = value.DType(), value.Len()
	return p, nil
}

// String describes p: name, dtype, shape and whether it is on a device. Ranks
// compare it, so it does not say which.
func (p *param) String() string {
	s := fmt.Sprintf("%s %v%v", p.name, p.dtype, p.shape)
	if p.engine != nil {
		s += " on a device"
	}
	return s
}

// reachable returns an error if a communicator on device cannot reach p.
func (p *param) reachable(device backend.Device) error {
	if p.engine == nil || p.engine.Device().Name() == device.Name() {
		return nil
	}
	return fmt.Errorf("is on the device %s, and the communicator is on %s: connect with a backend for %s", p.engine.Device().Name(), device.Name(), p.engine.Device().Name())
}

// memory returns the memory of p's value.
func (p *param) memory() (backend.Buffer, error) {
	if p.engine != nil {
		return onDevice(p.engine, p.node.Value().(*tensor.Dense))
	}
	value, dense, err := elements(p.node.Value())
	if err == nil && !dense {
		err = fmt.Errorf("is a view or transposed: its value must be contiguous, in row order")
	}
	return value, err
}

// place gives p its slot, and the place of its gradient.
func (p *param) place(b *bucket, slot, grad backend.Buffer) (err error) {
	p.bucket, p.slot, p.grad = b, slot, grad
	if p.engine != nil {
		p.view, err = p.engine.Adopt(slot, p.node.Dtype(), p.shape...)
		return err
	}
	p.view = p.viewOf(slot)
	return nil
}

// viewOf returns host memory as a value of the same type as that of the node:
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

// value returns the memory of the parameter itself, which must be what it was.
func (p *param) value() (backend.Buffer, error) {
	var v backend.Buffer
	err := fmt.Errorf("was bound to another kind of value since New: it was %v", p)
	if residence.Engine[engine](p.node.Value()) == p.engine {
		if memory, wrong := p.memory(); wrong == nil && memory.DType() == p.dtype && memory.Len() == p.size {
			v, err = memory, nil
		}
	}
	if err != nil {
		return v, fmt.Errorf("parameter %s %w", p.name, err)
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

// load takes a gradient, which goes to the slot or where gradients are rounded. On the
// host it is copied there. On a device it is noted where the gradient is, for pack.
func (p *param) load(to backend.Buffer, g gorgonia.Value) error {
	take := p.copy
	if p.engine != nil {
		take = p.note
	}
	if err := take(to, g); err != nil {
		return fmt.Errorf("gradient of %v %w", p, err)
	}
	return nil
}

func (p *param) copy(to backend.Buffer, g gorgonia.Value) error {
	src, err := p.contiguous(g, p.slot)
	if err != nil {
		return err
	}
	return p.store(to, src)
}

// contiguous returns the elements of a gradient in row order: its own memory where that will
// do, or a copy, on the host in room if there is any.
func (p *param) contiguous(g gorgonia.Value, room backend.Buffer) (src backend.Buffer, err error) {
	dense := true
	if p.engine == nil {
		src, dense, err = elements(g)
	} else if t, ok := g.(tensor.Tensor); ok {
		src, err = p.engine.Buffer(t)
	} else {
		err = fmt.Errorf("is a %T, the parameter is a tensor", g)
	}
	if err != nil {
		return src, err
	}
	if src.DType() != p.dtype || g.Shape().TotalSize() != p.size {
		return src, fmt.Errorf("is a %v%v", src.DType(), g.Shape())
	}
	if dense {
		return src, nil
	}
	if room.Len() == 0 {
		room = zeros(p.slot)
	}
	return room, residence.InRowOrder(room, src, g.(*tensor.Dense))
}

// store copies p's elements, or rounds them.
func (p *param) store(to, src backend.Buffer) error {
	k := p.bucket.kernels
	if p.engine != nil {
		k = p.engine.Queue()
	}
	switch {
	case to.Addr() == src.Addr():
		return nil
	case to.DType() != src.DType():
		return k.Cast(to, src)
	case p.engine != nil:
		return k.Copy(to, src)
	}
	copy(to.Bytes(), src.Bytes())
	return nil
}

func (p *param) note(to backend.Buffer, g gorgonia.Value) error {
	src, err := p.contiguous(g, backend.Buffer{})
	if err != nil || src.Addr() == to.Addr() { // what Sync returned, given back
		return err
	}
	p.src, p.to = src, to
	return nil
}

// zero is load of zeros.
func (p *param) zero() error {
	if p.engine != nil {
		return p.engine.Queue().Zero(p.grad)
	}
	clear(p.grad.Bytes())
	return nil
}

// bytes returns the parameter in host memory, to be read.
func (p *param) bytes() ([]byte, error) {
	value, err := p.value()
	if err != nil || p.engine == nil {
		return value.Bytes(), err
	}
	onHost, err := p.engine.ToHost(p.node.Value().(*tensor.Dense))
	if err != nil {
		return nil, fmt.Errorf("parameter %s: %w", p.name, err)
	}
	value, _, err = elements(onHost)
	return value.Bytes(), err
}

// checksum returns the checksum of the parameter's bytes.
func (p *param) checksum() (uint32, error) {
	value, err := p.bytes()
	h := checkpoint.NewChecksum()
	h.Write(value)
	return h.Sum32(), err
}

// elements returns the host memory of a value. dense says that its elements lie
// in it in row order, one after the other.
func elements(v gorgonia.Value) (memory backend.Buffer, dense bool, err error) {
	d, _ := residence.DType(v.Dtype())
	if err := floats(d, v.Dtype()); err != nil {
		return memory, false, err
	}
	if memory, err = residence.Memory(v, d); err != nil {
		return memory, false, fmt.Errorf("cannot be read: %w", err)
	}
	t, ok := v.(*tensor.Dense)
	if !ok {
		return memory, true, nil
	}
	n := t.Shape().TotalSize()
	if dense = residence.RowMajor(t) && n <= memory.Len(); dense {
		memory = memory.Slice(0, n)
	}
	return memory, dense, nil
}

// floats checks the dtype of a parameter, which errors name.
func floats(d backend.DType, name fmt.Stringer) error {
	if d != backend.F32 && d != backend.F64 {
		return fmt.Errorf("is a tensor of %v: float32 and float64 are supported", name)
	}
	return nil
}
