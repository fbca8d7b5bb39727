package exec

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// Executor runs a plan. It is not safe for concurrent use.
type Executor struct {
	plan    *plan.Plan
	device  Device
	graph   Graph
	memory  []backend.Buffer // from the device, to be freed
	hosted  []backend.Buffer // from AllocHost, to be freed
	buffers []backend.Buffer // by plan.Buffer
	steps   []*step          // of the plan
	runs    [][]*segment     // by the kind of run, of its steps
	checks  []func() error   // of what is bound, before a run starts
	moved   bool             // a buffer has other memory since the operands were found
	needs   int              // bytes of scratch, of the steps that are compiled
	scratch backend.Buffer   // for loops and convolutions
	results results

	// On a device, what comes from outside: see outside.go.
	bound     []backend.Buffer  // by plan.Buffer, on the host
	resident  []*residence.Copy // by plan.Buffer, nil where nothing was bound
	varies    []bool            // by plan.Buffer: it was given other memory
	once      []*residence.Once // by plan.Buffer, nil for what is not computed once
	changes   []backend.Buffer  // room for written
	uploads   uploads
	unused    []backend.Buffer // to be freed
	misplaced bool             // a buffer is not where it belongs
	compared  int              // bytes that were compared and had not changed
	exchanges exchanges
	snapshots snapshots
	side      backend.Queue // of operations of the graph that run beside others, nil for none
}

// step is one step of the plan and where its operands are now.
type step struct {
	plan.Step
	number     int    // in the plan
	layer      string // see [plan.Plan.Layers]
	dsts, args []backend.Buffer
	run        func() error
	waits      bool             // for the device, so that it cannot be recorded in a graph
	beside     bool             // the step behind Until is in the segment that runs
	away       bool             // it runs on the queue beside, and nothing has waited for it
	whole      bool             // a product that is one call of the device
	epilogue   kernels.Epilogue // of a product: the loop of the next step, if the device takes it
	parts      []alsoStored     // of a loop: what it stores for steps behind it
	storedBy   *step            // the loop that stores a concatenation
}

// New makes a plan ready to run on a device. It allocates the arena; g has the operations that only
// the graph knows, nil if there are none, and exchange is how ranks exchange gradients, nil if the
// plan does not. After an error nothing is left of it.
func New(p *plan.Plan, d Device, g Graph, exchange Buckets) (*Executor, error) {
	n := len(p.Buffers)
	e := &Executor{
		plan: p.Bare(), device: d, graph: g, buffers: make([]backend.Buffer, n), moved: true,
		exchanges: exchanges{Buckets: exchange},
		bound:     make([]backend.Buffer, n), resident: make([]*residence.Copy, n), varies: make(
			[]bool,
			n), once: make([]*residence.Once, n), misplaced: !d.Host(),
	}
	layers := make([]string, len(p.Steps))
	if exchange != nil {
		layers = p.Layers()
	}
	if err := e.prepare(layers); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	e.graph = nil // which may refer to the executor's owner: see CloseBehind
	return e, nil
}

// CloseBehind has the executor closed once owner is garbage, to which nothing of it may refer: on
// the host by the garbage collector, on a device by whoever makes the next executor there or closes
// the device. Another goroutine may be recording a graph of the device, in which it must not free
// memory. Stop of the result calls it off.
func CloseBehind[T any](owner *T, e *Executor) runtime.Cleanup {
	return runtime.AddCleanup(owner, (*Executor).abandoned, e)
}

// abandoned is for an executor whose owner is garbage.
func (e *Executor) abandoned() {
	if e.device.Host() {
		_ = e.Close() // which frees nothing that could fail
		return
	}
	e.device.Copies().Abandon(func() error {
		all := make([]int, len(e.resident))
		for i := range all {
			all[i] = i
		}
		return errors.Join(e.Pull(all...), e.Close()) // as the owner's Close
	})
}

func (e *Executor) prepare(layers []string) error {
	arena, err := e.alloc(backend.U8, e.plan.ArenaBytes)
	if err != nil {
		peak := e.plan.Peak()
		s := e.plan.Steps[peak]
		return e.lacking(err, e.plan.ArenaBytes,
			fmt.Sprintf("the values of a run, which needs most in step %d, %v of %s", peak, s.Op,
				s.Name))
	}
	for i, b := range e.plan.Buffers {
		switch {
		case b.Kind == plan.Arena && b.Last >= 0:
			e.buffers[i] = arena.Slice(b.Offset, b.Offset+b.Bytes).As(b.DType)
		case b.Within > 0: // of one that comes before it
			e.buffers[i] = e.buffers[b.Within-1].Slice(b.At/b.DType.Size(),
				(b.At+b.Bytes)/b.DType.Size())
		case b.Kind == plan.Gradient || b.Kind == plan.PartialSum || b.Kind == plan.FullBucket:
			if e.buffers[i], err = e.slot(b); err != nil {
				return err
			}
		}
	}
	if err := e.numbers(); err != nil {
		return err
	}
	for i, s := range e.plan.Steps {
		c := &step{Step: s, number: i, layer: layers[i], dsts: make([]backend.Buffer, len(s.Dsts)),
			args: make([]backend.Buffer, len(s.Args))}
		if err := e.compile(c); err != nil {
			return fmt.Errorf("vm: step %d, %v of %s: %w", i, s.Op, s.Name, err)
		}
		e.steps = append(e.steps, c)
	}
	if err := e.overlap(); err != nil {
		return err
	}
	if e.scratch, err = e.alloc(backend.U8, e.needs); err != nil {
		return e.lacking(err, e.needs, "intermediate results of loops and convolutions")
	}
	for _, kind := range e.plan.Accumulation.Every() {
		e.runs = append(e.runs, make([][]*segment, kind+1-len(e.runs))...)
		steps := slices.DeleteFunc(slices.Clone(e.steps), func(s *step) bool {
			return !s.Runs.Has(kind)
		})
		idles := e.plan.Accumulation.Idles && kind != e.plan.Accumulation.Kinds()-1
		if kind == ir.Apply {
			n := 1 + slices.IndexFunc(steps, func(s *step) bool { return s.Measures() })
			e.runs = append(e.runs, segmented(steps[:n], idles))
			steps = steps[n:]
		}
		e.runs[kind] = segmented(steps, idles)
	}
	return e.prepareResults(arena)
}

// slot returns memory for a gradient that stays from run to run, or is exchanged.
func (e *Executor) slot(b plan.Buffer) (backend.Buffer, error) {
	switch {
	case b.Kind == plan.FullBucket:
		return e.exchanges.Whole(b.Index - 1), nil
	case e.exchanges.Buckets != nil && b.Kind == plan.Gradient:
		memory := e.exchanges.Slot(b.Index, b.Vector)
		if memory.NBytes() > b.Bytes { // another value's, until the gradient is computed
			memory = memory.As(backend.U8)
			skip := -int(memory.Addr()) & (plan.Alignment - 1)
			memory = memory.Slice(skip, skip+b.Bytes).As(b.DType)
		}
		return memory, nil
	}
	memory, err := e.alloc(b.DType, b.Bytes/b.DType.Size())
	if err != nil {
		return memory, e.lacking(err, b.Bytes, b.Name)
	}
	return memory, nil
}

// alloc returns n elements of the device's memory, until Close.
func (e *Executor) alloc(d backend.DType, n int) (backend.Buffer, error) {
	if n == 0 {
		return backend.Buffer{}, nil
	}
	b, err := e.device.Alloc(n * d.Size())
	if err != nil {
		return b, err
	}
	e.memory = append(e.memory, b)
	return b.As(d), nil
}

// allocHost returns n elements of host memory, until Close.
func (e *Executor) allocHost(d backend.DType, n int) (backend.Buffer, error) {
	b, err := e.device.AllocHost(n * d.Size())
	if err != nil {
		return b, err
	}
	e.hosted = append(e.hosted, b)
	return b.As(d), nil
}

// Workspace returns how many bytes loops and convolutions have for intermediate results.
func (e *Executor) Workspace() int { return e.needs }

// Measure is the first part of a run of kind [ir.Apply], which comes before the rest: up to where
// ranks that have parts of gradients exchange the sum of their squares. The rest exchanges nothing.
const Measure = ir.Apply + 1

// Run starts the steps of a kind of run in order ([lower.Accumulation]), and stops at the first
// error.
func (e *Executor) Run(kind int) error {
	if err := e.beginRun(); err != nil {
		return err
	}
	segments := &e.runs[kind]
	for i := 0; i < len(*segments); i++ { // to record one may divide it
		if err := e.record(segments, i); err != nil {
			return err
		}
		if err := (*segments)[i].run(&e.exchanges); err != nil {
			return err
		}
	}
	return nil
}

// beginRun places, finds and checks what is bound, and starts to upload it.
func (e *Executor) beginRun() error {
	if err := e.Place(); err != nil {
		return err
	}
	for _, check := range e.checks {
		if err := check(); err != nil {
			return err
		}
	}
	if e.moved {
		if err := e.locate(); err != nil {
			return err
		}
		e.moved = false
	}
	residence.Written(e.written()...)
	return errors.Join(e.uploads.send(e.device), e.refresh())
}

// locate finds the operands of all steps. Graphs that were recorded have those of before.
func (e *Executor) locate() error {
	for _, segments := range e.runs {
		for _, segment := range segments {
			if err := segment.freeGraph(); err != nil {
				return err
			}
		}
	}
	for _, s := range e.steps {
		for i, r := range s.Dsts {
			s.dsts[i] = e.at(r)
		}
		for i, r := range s.Args {
			s.args[i] = e.at(r)
		}
	}
	return nil
}

// at returns the elements that a value reaches over.
func (e *Executor) at(r plan.Ref) backend.Buffer {
	return e.buffers[r.Buffer].Slice(r.Offset, r.Offset+r.Span())
}

// lacking makes an error of the device, that of nbytes for something, say what takes the memory.
func (e *Executor) lacking(err error, nbytes int, what string) error {
	var largest []string
	for _, b := range e.plan.Largest(shownHolders) {
		largest = append(largest, fmt.Sprintf("%s (%d bytes)", b.Name, b.Bytes))
	}
	return fmt.Errorf("vm: %d bytes for %s: %w: most of the plan's memory is for %s: take "+
		"smaller batches, bound the memory (vm.WithMemory), keep fewer values (vm.Keep), or "+
		"close other machines",
		nbytes, what, err, strings.Join(largest, ", "))
}

// shownHolders is how many buffers an error names.
const shownHolders = 5

// Close waits and frees the memory of the executor.
func (e *Executor) Close() error { return errors.Join(e.free(), e.device.Close()) }

func (e *Executor) free() error {
	err := e.device.Join()
	if e.side != nil {
		err = errors.Join(err, e.side.Close())
	}
	for _, s := range slices.Concat(e.runs...) {
		err = errors.Join(err, s.freeGraph())
	}
	for i := range e.resident {
		e.releaseCopy(i)
		err = errors.Join(err, e.releaseOnce(i))
	}
	err = errors.Join(err, e.discard(), e.snapshots.free(e.device))
	for _, b := range e.memory {
		err = errors.Join(err, e.device.Free(b))
	}
	for _, b := range e.hosted {
		err = errors.Join(err, e.device.FreeHost(b))
	}
	e.memory, e.hosted, e.steps, e.runs, e.side = nil, nil, nil, nil, nil
	return err
}
