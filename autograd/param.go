package autograd

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/rendezvous"
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

// examineAll examines all nodes. Of their elements this rank may have only a part if that is said.
func examineAll(nodes gorgonia.Nodes, part bool) ([]*param, error) {
	if len(nodes) == 0 {
		return nil, errors.New("there are no parameters")
	}
	params := make([]*param, len(nodes))
	for i, n := range nodes {
		p, err := examine(i, n)
		if err != nil {
			return nil, err
		}
		if first := slices.Index(nodes, n); first != i {
			return nil, fmt.Errorf("%w: parameters %d and %d are the same node, %s: Gorgonia "+
				"merges input nodes of the same name and shape", backend.ErrArgument, first, i,
				p.name)
		}
		params[i] = p
	}
	return params, untied(params, part)
}

// untied returns an error if two parameters have the same memory.
func untied(params []*param, part bool) error {
	values := make([]backend.Buffer, len(params))
	for i, p := range params {
		var err error
		if values[i], err = p.value(); err != nil {
			return err
		}
		err = residence.Present(values[i])
		if err != nil && !(part && err == residence.OfOthers) {
			return fmt.Errorf("%w: the value of %v %w", backend.ErrArgument, p, err)
		}
	}
	if i, k, tied := residence.Overlap(values); tied {
		return fmt.Errorf("%w: parameters %d, %s, and %d, %s, are one tensor, which each step "+
			"would update twice: use one node in both places",
			backend.ErrArgument, i, params[i].name, k, params[k].name)
	}
	return nil
}

// String describes p by name, dtype and shape, which ranks compare.
func (p *param) String() string { return fmt.Sprintf("%s %v%v", p.name, p.dtype, p.shape) }

// parameterPrefix begins the keys of parameters.
const parameterPrefix = "parameter."

// key names a parameter in memory, and in files of format 1.
func (p *param) key() string {
	return parameterPrefix + strconv.Itoa(p.index) + "." + p.node.Name()
}

// dims returns the shape as a list, empty for a scalar.
func (p *param) dims() []int { return append([]int{}, p.shape...) }

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

// left returns the gradient that the last run has left for this parameter, nil if it left none.
func (p *param) left() gorgonia.Value {
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

// agreeOnParams is [group.Alike], and then returns the same error on all ranks if some of them are
// goroutines of one process and have a parameter in the same memory: they would write over each
// other's values and gradients. Goroutines exchange addresses, processes nothing more than in
// Alike.
func agreeOnParams(comm backend.Communicator, description string, params []*param,
	wrong error) error {
	process := sha256.Sum256([]byte(rendezvous.ThisProcess()))
	processes, err := group.Alike(comm, description, process[:8], wrong)
	if err != nil {
		return err
	}
	count := map[string]int{}
	for _, p := range processes {
		count[string(p)]++
	}
	if len(count) == len(processes) {
		return nil
	}
	var note []byte
	for _, p := range params {
		value, err := p.value()
		if err != nil { // examine has seen it
			return err
		}
		note = binary.LittleEndian.AppendUint64(note, uint64(value.Addr()))
	}
	notes, err := group.OverComm(comm)(note)
	if err != nil {
		return err
	}
	owners := map[string]int{} // by process and address
	for r, note := range notes {
		for i := range params {
			key := string(processes[r]) + string(note[8*i:8*i+8])
			if owner, taken := owners[key]; taken && owner != r {
				return fmt.Errorf("%w: ranks %d and %d, which are goroutines of one process, "+
					"share the tensor of parameter %d, %s: build a graph and tensors for each rank",
					backend.ErrArgument, owner, r, i, params[i].name)
			}
			owners[key] = r
		}
	}
	return nil
}

// items returns parameters as items.
func items(params []*param) (all []item) {
	for _, p := range params {
		all = append(all, item{fmt.Sprintf("parameter %v", p), p.bytes})
	}
	return all
}

// fresh is what New has made the same on all ranks, until they exchange anything.
type fresh struct {
	params []*param
	sums   []uint32 // of the parameters, by New
}

// noteParams notes the parameters.
func (f *fresh) noteParams(params []*param) error {
	f.params = params
	for _, p := range params {
		sum, err := p.checksum()
		if err != nil {
			return err
		}
		f.sums = append(f.sums, sum)
	}
	return nil
}

// over notes that the ranks exchange gradients or parameters.
func (f *fresh) over() { *f = fresh{} }

// apart returns an error if there are gradients, parameters have changed since New, and nothing was
// exchanged.
func (f *fresh) apart() error {
	for i, p := range f.params {
		if p.left() == nil {
			continue // no graph has run
		}
		is, err := p.checksum()
		if err != nil {
			return err
		}
		if is != f.sums[i] {
			return fmt.Errorf("%w: parameter %s has changed since New, and Sync was never "+
				"called: each rank has trained alone; give solvers the gradients that Sync returns",
				backend.ErrMismatch, p.name)
		}
	}
	return nil
}

// arrived records that p has its gradient.
func (p *param) arrived() {
	p.full = true
	p.bucket.missing--
}
