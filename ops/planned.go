package ops

import (
	"cmp"
	"fmt"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// This file is what package vm runs in its plans: see vm.DeviceOp. The operands and the result lie
// in the plan's memory, in row-major order, and the plan gives memory for intermediate results.

// planned is a queue with the memory that a plan gives to an operation.
type planned struct {
	comm  backend.Communicator
	queue backend.Queue
	rest  backend.Buffer // of the memory
	work  backend.Work   // of the collective, nil before it is started
	loops *loops
}

// loops are the programs of an operation, compiled for the queue that ran them last.
type loops struct {
	mu    sync.Mutex
	queue backend.Queue
	all   map[int]fuse.Loop
}

// get returns a program that is ready to run on a queue. write makes it, once.
func (l *loops) get(q backend.Queue, number int, write func() *fuse.Program) (fuse.Loop, error) {
	if l.queue != q {
		l.queue, l.all = q, map[int]fuse.Loop{}
	}
	if known := l.all[number]; known != nil {
		return known, nil
	}
	fuses, ok := q.(fuse.Queue)
	if !ok {
		return nil, fmt.Errorf("%w: a %T runs no programs", backend.ErrUnsupported, q)
	}
	loop, err := fuses.Fuse(write())
	if err == nil {
		l.all[number] = loop
	}
	return loop, err
}

var _ worker = (*planned)(nil)

// alignment of device memory, which kernels read in vectors.
const alignment = 256

// aligned returns how much memory n bytes take.
func aligned(n int) int { return (n + alignment - 1) / alignment * alignment }

func (p *planned) kernels() backend.Arithmetic { return p.queue }

func (p *planned) scratch(d backend.DType, n int) (backend.Buffer, error) {
	nbytes := n * d.Size()
	if nbytes > p.rest.Len() {
		return backend.Buffer{}, fmt.Errorf("%w: scratch of %d bytes, %d are left",
			backend.ErrArgument, nbytes, p.rest.Len())
	}
	b := p.rest.Slice(0, nbytes).As(d)
	p.rest = p.rest.Slice(min(aligned(nbytes), p.rest.Len()), p.rest.Len())
	return b, nil
}

func (p *planned) here(b backend.Buffer) (backend.Buffer, error) { return b, nil }

// apply compiles a program when the operation runs first on a queue.
func (p *planned) apply(program int, y backend.Buffer, f formula, x ...backend.Buffer) error {
	if y.Len() == 0 {
		return nil
	}
	p.loops.mu.Lock()
	defer p.loops.mu.Unlock()
	write := func() *fuse.Program { return elementwise(y, f, x) }
	loop, err := p.loops.get(p.queue, program, write)
	if err != nil {
		return err
	}
	return loop.Run([]backend.Buffer{y}, x, backend.Buffer{})
}

// run does not wait: an error that is not known at once comes with the work.
func (p *planned) run(c backend.Collective, dst, src backend.Buffer) (err error) {
	if p.work, err = p.comm.Start(p.queue, c, dst, src); err != nil {
		return err
	}
	return p.work.Wait(p.queue)
}

// start runs f, which starts an operation, on a queue.
func start(o communicating, q backend.Queue, scratch backend.Buffer,
	f func(p worker) error) (backend.Work, error) {
	comm, at := o.place()
	p := &planned{comm: comm, queue: q, rest: scratch, loops: cmp.Or(at.loops, new(loops))}
	unbind, err := residence.Bind(comm.Device())
	if err != nil {
		return nil, o.fail(err)
	}
	defer unbind()
	if err := f(p); err != nil {
		return p.work, o.fail(err)
	}
	return p.work, nil
}

// Local tells plans if y is a part of x on this rank, from index start of an axis on: they then
// compute nothing.
func (o *collectiveOp) Local() (axis, start int, ok bool) {
	switch t := o.fwd; {
	case t.kind != 0 || t.scale != 1:
		return 0, 0, false
	case t.scatter == none:
		return 0, 0, true
	default:
		return t.scatter, sum(t.cut[:o.comm.Rank()]), true
	}
}

// RunsOn implements vm.DeviceOp: the communicator's device is the machine's.
func (o *collectiveOp) RunsOn(d backend.Device) bool { return o.comm.Device().Name() == d.Name() }

// Scratch implements vm.DeviceOp: packed pieces of x, and received ones of y, unless the
// communicator takes them as they lie.
func (o *collectiveOp) Scratch() (nbytes int) {
	if o.fwd.kind != 0 && o.fwd.packs(o.in) {
		nbytes += aligned(product(o.in) * int(o.dtype.Size()))
	}
	if o.fwd.kind != 0 && o.fwd.joins(o.out) {
		nbytes += aligned(product(o.out) * int(o.dtype.Size()))
	}
	return nbytes
}

// Carries reports whether the operation also takes operands of another dtype: if it moves elements,
// or adds them, as the communicator adds elements of d. So package vm exchanges 16 bits for each
// element in plans of BF16.
func (o *collectiveOp) Carries(d backend.DType) bool {
	switch o.fwd.kind {
	case backend.AllToAll, backend.AllGather:
	case backend.AllReduce, backend.ReduceScatter:
		if o.fwd.op != backend.Sum && o.fwd.op != backend.Avg {
			return false
		}
	default:
		return false
	}
	return o.fwd.scale == 1 && (o.fwd.rows == nil || o.fwd.layout(o.comm, d, o.in) != nil)
}

// StartOn implements vm.DeviceOp.
func (o *collectiveOp) StartOn(q backend.Queue, y, scratch backend.Buffer,
	x ...backend.Buffer) (backend.Work, error) {
	return start(o, q, scratch, func(p worker) error {
		return o.fwd.fill(p, o.at.origin, operand{y, o.out}, operand{x[0], o.in}, o.comm.Rank(),
			o.comm.Size())
	})
}

// RunsOn implements vm.DeviceOp.
func (o *holderOp) RunsOn(d backend.Device) bool { return o.comm.Device().Name() == d.Name() }

// Scratch implements vm.DeviceOp: owners.
func (o *holderOp) Scratch() int { return aligned(product(o.shape) * int(o.dtype.Size())) }

// StartOn implements vm.DeviceOp.
func (o *holderOp) StartOn(q backend.Queue, y, scratch backend.Buffer,
	x ...backend.Buffer) (backend.Work, error) {
	return start(o, q, scratch, func(p worker) error { return o.fill(p, y, x[0], x[1], x[2]) })
}

// RunsOn implements vm.DeviceOp.
func (c *sparseCall) RunsOn(d backend.Device) bool { return c.comm.Device().Name() == d.Name() }

// Scratch implements vm.DeviceOp.
func (c *sparseCall) Scratch() int { return 0 }

// StartOn implements vm.DeviceOp.
func (o *sparseOp) StartOn(q backend.Queue, y, scratch backend.Buffer,
	x ...backend.Buffer) (backend.Work, error) {
	return start(o, q, scratch, func(p worker) error { return o.reduce(p, y, x[0]) })
}

// StartOn implements vm.DeviceOp.
func (o *sentOp) StartOn(q backend.Queue, y, scratch backend.Buffer,
	x ...backend.Buffer) (backend.Work, error) {
	return start(o, q, scratch, func(p worker) error { return o.reduce(p, y, x[0]) })
}

// Planned returns a collective of x that a plan of package vm runs without a node of the graph, and
// the shape of its result: an AllReduce, or an AllGather along the first axis. Only the dtype and
// shape of x are read. Ranks compare name and number. Errors: see [AllReduce] and [AllGather].
func Planned(comm backend.Communicator, c backend.Collective, name string, number int,
	x *tensor.Dense) (
	gorgonia.Op, tensor.Shape, error,
) {
	if err := backend.Given("ops.Planned", "comm", comm, "x", x); err != nil {
		return nil, nil, err
	}
	fwd := transform{kind: c.Kind, op: c.Op, scatter: none, gather: none}
	if c.Kind == backend.AllGather {
		fwd.gather = 0
	}
	moved, err := bufferDType(x.Dtype())
	if err != nil {
		return nil, nil, fmt.Errorf("ops: %s: %w", name, err)
	}
	b := &builder{comm: comm, dtype: x.Dtype(), moved: moved, shape: x.Shape().Clone()}
	o, err := b.op(fwd, exact)
	if err != nil {
		return nil, nil, fmt.Errorf("ops: %s: %w", name, err)
	}
	origin := o.origin()
	origin.Ordinal, origin.Name = uint32(number), backend.MakeName(name)
	o.at = site{&origin, name, new(loops)}
	return o, o.out, nil
}
