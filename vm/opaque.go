package vm

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/read"
)

// DeviceOp is an operation of a graph that runs in the memory of a device, as one of the steps of a
// plan: its operands are not copied to the host, and a step that does not wait is part of a CUDA
// graph. The collectives of package ops are DeviceOps, and a program's own operations can be. On
// the host, and where RunsOn says no, a machine runs Do on host tensors.
//
// An operation that only moves the elements of its operand, or adds those of ranks, may have a
// method Carries(d backend.DType) bool, which reports whether StartOn also takes an operand and a
// result of d. In a plan of [BF16] it then moves half the bytes, between products.
type DeviceOp interface {
	gorgonia.Op
	// RunsOn reports whether the operation can run on a device.
	RunsOn(d backend.Device) bool
	// Scratch returns how many bytes of the device's memory StartOn also needs.
	Scratch() int
	// StartOn starts y = op(x...) on q, in the order of q, and does not wait for it. It must write
	// all of y, and none of the operands; all lie in row-major order. scratch has at least Scratch
	// bytes, with arbitrary content. An operation that may fail later returns the Work that RunAll
	// joins; others return nil.
	//
	// Operations run one after the other. But an operation without Scratch runs beside products
	// that do not need y, if the plan has some: q is then not the queue of the products.
	//
	// q may be recording a CUDA graph (backend.GraphQueue): StartOn is then not called again when
	// that graph is launched. An operation that cannot be recorded then returns ErrUnsupported: it
	// is called in each run instead, between the graphs of the steps before and after it.
	StartOn(q backend.Queue, y, scratch backend.Buffer, x ...backend.Buffer) (backend.Work, error)
}

// carrier is a DeviceOp of one operand that may move elements of other dtypes.
type carrier interface {
	// Carries reports whether it does, so that StartOn also takes an operand and a result of d.
	Carries(d backend.DType) bool
}

// deviceOp returns the operation number i of a graph as one that runs on a device, nil if it does
// not.
func deviceOp(g *read.Graph, i int, device backend.Device) DeviceOp {
	op, ok := g.Opaques[i].Op.(DeviceOp)
	if !ok || device == nil || !op.RunsOn(device) {
		return nil
	}
	return op
}

// placeOps marks in the program which operations run on a device.
func placeOps(g *read.Graph, device backend.Device) {
	for i, v := range g.Program.Values {
		if op, ok := v.Op.(ir.Opaque); ok && deviceOp(g, op.Index, device) != nil {
			c, ok := deviceOp(g, op.Index, device).(carrier)
			op.Placed, op.Carries = true, ok && c.Carries(backend.BF16)
			g.Program.Values[i].Op = op
		}
	}
}

// calls are the operations that only the graph knows.
type calls struct {
	graph   *read.Graph
	device  backend.Device
	byDo    []*opaque // by their numbers, nil for those that run on the device
	over    *parallel // the ranks that exchange rows and squares, nil for none
	sharded bool      // these shard gradients
}

var _ exec.Graph = calls{}

// newCalls returns those of a graph. spent is the time in Do.
func newCalls(g *read.Graph, device backend.Device, spent *time.Duration) (calls, error) {
	c := calls{graph: g, device: device, byDo: make([]*opaque, len(g.Opaques))}
	for i, o := range g.Opaques {
		if deviceOp(g, i, device) != nil {
			continue
		}
		var err error
		if c.byDo[i], err = newCall(o, spent); err != nil {
			return c, err
		}
	}
	return c, nil
}

// Placed implements [exec.Graph].
func (c calls) Placed(i int) exec.Placed {
	switch i {
	case lower.Squares:
		return c.over.squares(c.sharded)
	case lower.Rows:
		return rows{c.over.exchange}
	}
	return deviceOp(c.graph, i, c.device)
}

// Opaque implements [exec.Graph].
func (c calls) Opaque(i int) exec.Opaque { return c.byDo[i] }

// opaque is an operation that runs by its Do. Its operands lie in host memory of its own, so that
// an operation may keep them until its next run, as with other machines.
type opaque struct {
	read.Opaque
	spent  *time.Duration   // in its Do
	values []gorgonia.Value // never given to Do, which may change their shapes
	memory []backend.Buffer
}

var _ exec.Opaque = (*opaque)(nil)

func newCall(o read.Opaque, spent *time.Duration) (*opaque, error) {
	c := &opaque{Opaque: o, spent: spent}
	if _, ok := o.Op.(DeviceOp); ok { // a collective, which waits for other ranks
		c.spent = new(time.Duration)
	}
	for _, t := range o.Room {
		memory, err := memoryOf(t)
		if err != nil {
			return nil, fmt.Errorf("vm: an operand of %v: %w", o.Op, err)
		}
		c.values, c.memory = append(c.values, t), append(c.memory, memory)
	}
	for _, n := range o.Args {
		v, memory, err := newValue(n)
		if err != nil {
			return nil, fmt.Errorf("vm: operand %s of %s: %w", stock.Label(n),
				stock.Label(o.Node), err)
		}
		c.values, c.memory = append(c.values, v), append(c.memory, memory)
	}
	return c, nil
}

// Arg implements [exec.Opaque].
func (c *opaque) Arg(i int) backend.Buffer { return c.memory[i] }

// headers returns the operands with headers of their own: an operation that reshapes or transposes
// an operand finds it as it was in the next run.
func (c *opaque) headers() []gorgonia.Value {
	fresh := slices.Clone(c.values)
	for i, v := range fresh {
		if t, ok := v.(*tensor.Dense); ok {
			fresh[i] = t.ShallowClone()
		}
	}
	return fresh
}

// explained adds what an error of a Gorgonia operation leaves out: the operands, and what to do.
func (c *opaque) explained(err error) error {
	if stock.Name(c.Op) == "" {
		return err
	}
	advice := "docs/ops.md lists what to use in place of Gorgonia's operations"
	for _, n := range c.Args {
		if dt := n.Dtype(); dt != tensor.Float32 && dt != tensor.Float64 {
			advice = "convert the operands to floats by gorgonia.ConvType"
		}
	}
	return fmt.Errorf("%s, by Gorgonia: %w: %s", stock.Operation(c.Node), err, advice)
}

// Call implements [exec.Opaque].
func (c *opaque) Call() (backend.Buffer, error) {
	began := time.Now()
	v, err := c.Op.Do(c.headers()...)
	*c.spent += time.Since(began)
	if err != nil {
		return backend.Buffer{}, c.explained(err)
	}
	if v == nil {
		return backend.Buffer{}, errors.New("its Do gives no value")
	}
	return dense(v)
}
