package autograd

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
)

// DataParallel keeps a model the same on all ranks while each rank trains on its own data:
// it combines their gradients. It is for one goroutine and the Gorgonia machines that this
// goroutine runs.
type DataParallel struct {
	contents
	notices
	solver solver.Solver // of the machine that trains, nil for unknown

	// mu guards what follows and the slots: a machine runs hooks on another goroutine, and
	// the lisp machine still does after it has failed.
	mu sync.Mutex
	// micro-batches of the step in progress that a machine has run; of is 0 between steps
	done, of int
	fresh    fresh
	err      error // the first error of a step, sticky
	closed   bool
	tape     tape
	planned  *trainer // whose plan takes the place of Sync, nil for none
	averaged bool     // learnables have averages as their values: see Averaged
	saver    checkpoint.Saver
	elastic  bool // it exchanges for a generation of an Elastic
}

// New gives all ranks the model of rank 0 and returns a DataParallel that keeps it the same. It is
// collective. The model is the parameters, the variables of [WithFrozen], and the state of
// operations in the parameters' graphs: running statistics of batch norms, and the step of random
// numbers.
//
// params are input nodes that are bound to contiguous tensors or scalars of float32 and float64,
// possibly mixed. Every rank passes the same names, dtypes and shapes in the same order, which is
// the order in which the model uses them, because buckets fill from the end. Only the values may
// differ; on all ranks except 0 New overwrites them in place.
//
// Cost: memory for one copy of the parameters, from the communicator's Alloc; another copy on the
// host if the communicator is on a device; one broadcast for each bucket.
//
// Errors: parameters that do not qualify, including two nodes of one tensor; [backend.ErrMismatch]
// on every rank, naming what differs, if the ranks pass different parameters or options;
// ErrArgument on every rank if ranks that are goroutines of one process have a tensor in common;
// those of the communicator. Ranks that are goroutines must not hold the lock of euryale.Run here:
// New waits for the other ranks.
func New(comm backend.Communicator, params gorgonia.Nodes, opts ...Option) (*DataParallel, error) {
	if err := backend.Given("autograd.New", "comm", comm); err != nil {
		return nil, err
	}
	var d *DataParallel
	err := residence.Bound(comm.Device(), func() (err error) {
		d, err = newDataParallel(comm, params, opts)
		return err
	})
	if err != nil {
		return nil, named(comm, err)
	}
	return d, nil
}

func newDataParallel(comm backend.Communicator, nodes gorgonia.Nodes, opts []Option) (
	*DataParallel, error) {
	o := options{op: backend.Avg, first: firstBucket, rest: restBuckets, notice: toStandardError}
	o.missing = backend.Given("autograd.New", "params", nodes, "opts", opts)
	for _, opt := range opts {
		if opt != nil {
			opt(&o)
		}
	}
	d := &DataParallel{contents: contents{
		reducer: reducer{comm: comm, gradComm: comm, op: o.op, scale: 1}, parts: o.parts,
		reduced: o.reduction(), partial: rotation{on: o.partial},
		tables: tables{o.tables, comm.Rank(), comm.Size()}}}
	description, err := d.lay(nodes, o)
	err = agreeOnParams(backend.Label(comm, backend.ForNew), description, d.params, err)
	if err == nil {
		err = d.mirror(o.mirrors)
	}
	if err == nil {
		err = d.prepareBuckets()
	}
	if err = d.parts.connect(d.params, err); err != nil {
		return nil, errors.Join(err, d.free())
	}
	d.saver = checkpoint.Saver{Ranks: checkpoint.Ranks{Data: comm}, Say: d.say, Store: o.store}
	if d.parts = d.parts.unlessOne(); d.parts != nil {
		d.saver.Parts = d.parts.comm
	}
	if d.saver.First() {
		d.notices = notices{o.notice, map[string]bool{}}
	}
	return d, nil
}

// lay distributes the parameters among buckets, and describes what all ranks must have in common.
// An error is this rank's problem, of which all must hear.
func (d *DataParallel) lay(nodes gorgonia.Nodes, o options) (description string, err error) {
	use := o.use(d.comm)
	part := o.mirrors != nil && o.mirrors.held.Of > 0 // ranks have others
	if d.params, err = examineAll(nodes, part); err == nil {
		err = o.foreign(d.params)
	}
	err = errors.Join(o.missing, err, o.check(), checkTerms(d.params, use))
	if err != nil {
		return "", err
	}
	if o.inTree {
		if d.tree, err = newTree(d.comm, o.tree, d.params); err != nil {
			return "", err
		}
	}
	if d.model, err = newInventory(d.params, o.frozen, o.random); err != nil {
		return "", err
	}
	if o.compress != nil {
		compressed, err := o.compress(borrowed{backend.Wrap(d.comm)})
		if err != nil {
			return "", err
		}
		d.gradComm = compressed
	}
	use.Option, use.Runs = "Sync", 1
	d.tape = tape{contents: &d.contents, notices: &d.notices, fresh: &d.fresh, unused: o.unused,
		use: use}
	_, stateful := d.compression() // whose residuals are of whole gradients
	for _, p := range d.params {
		p.apart = slices.Contains(o.apart, p.node)
		p.early = slices.Contains(o.early, p.node) && !stateful && o.parts == nil
		// beside their own parts ranks would choose other elements of what they all have
		p.parted = stateful && o.parts.hasPart(p)
	}
	d.buckets = plan(d.params, o.first, o.rest, !o.partial)
	if d.tree != nil && o.op == backend.Avg {
		d.scale = 1 / float64(d.tree.all)
	}
	return o.describe(d.params, d.compressor()) + d.model.String() +
		strings.Join(d.tables.described(), "\n"), nil
}

// mirror finds out which parts ranks have, and gives them theirs. It is collective.
func (d *DataParallel) mirror(m *holding) error {
	if m == nil {
		return nil
	}
	type note struct {
		Has   fraction
		Stale bool
		Node  int
	}
	own := note{Has: m.held, Stale: m.stale}
	if c, ok := backend.As[interface{ Nodes() []int }](d.comm); ok {
		if nodes := c.Nodes(); nodes != nil {
			own.Node = nodes[d.comm.Rank()]
		}
	}
	notes, err := group.Exchange(group.FramedOver(backend.Label(d.comm, backend.ForNew)),
		d.comm.Capabilities().Members, own)
	if err != nil {
		return err
	}
	s, stale, all, nodes := &mirrors{own: m, begins: true}, false, fraction{0, 1}, []int(nil)
	for _, n := range notes {
		nodes = append(nodes, n.Node)
		s.before = append(s.before, n.Has)
		s.begins, stale = s.begins && n.Has == (fraction{}), stale || n.Stale
	}
	if s.now = partsOf(nodes); s.begins {
		s.before[0] = all
	}
	for _, b := range d.buckets {
		if _, err := sourcesOf(s.before, b.count()); err != nil {
			s.lost = err
		}
	}
	if s.lost != nil && stale {
		return s.lost
	}
	d.mirrors, d.sharded = s, s.now[0].Of > 1
	return nil
}

// hold notes that this rank has its part, and whether of the parameters it has no more, though
// steps need all of them.
func (d *DataParallel) hold(stale bool) {
	if s := d.mirrors; s != nil && s.lost == nil {
		*s.own = holding{s.now[d.comm.Rank()], stale && d.sharded && !d.alone}
	}
}

// prepareBuckets allocates the buckets and broadcasts the parameters through them.
func (d *DataParallel) prepareBuckets() error {
	var err error
	own, most := 1, 1 // sums that are sent of each gradient, by this rank and by one at most
	if d.tree != nil {
		own, most = len(d.tree.branches), d.tree.most
	}
	if d.memory, err = d.alloc(bytesFor(d.buckets, most, d.comm.Size())); err != nil {
		return fmt.Errorf("memory for buckets: %w", err)
	}
	assignSlots(d.buckets, d.memory, own, most, d.comm.Rank(), d.comm.Size())
	for _, p := range d.params {
		d.tape.grads = append(d.tape.grads, gradient{p.node, p.view})
	}
	d.tape.empty()
	if d.comm.Size() == 1 {
		return nil
	}
	if err := d.openQueues(); err != nil {
		return err
	}
	if err := d.broadcast(); err != nil {
		return err
	}
	return d.model.share(d.comm)
}

// broadcast gives every rank the parameters of rank 0, or of the ranks that have parts of them,
// through the buckets.
func (d *DataParallel) broadcast() error {
	for _, b := range d.buckets {
		if d.mirrors.gone() != nil {
			break // each rank goes on with what it has, until it needs the rest
		}
		if d.mirrors != nil {
			if err := d.share(b, d.mirrors.before, backend.ForNew); err != nil {
				return err
			}
			continue
		}
		if err := d.exchange(b, backend.Collective{Kind: backend.Broadcast,
			Origin: b.origin(backend.ForNew)}); err != nil {
			return err
		}
	}
	return d.fresh.noteParams(d.params)
}

// Sync ends a step: it combines the gradients of all ranks and returns them,
// one for each parameter in the order of New, for any solver's Step:
//
//	vm.RunAll()
//	grads, err := dp.Sync()
//	solver.Step(grads)
//	vm.Reset()
//
// Gradients that hooks have not caught come from the nodes given to UseGradients, or else from
// the parameters' Grad. Grad is set after gorgonia.Grad, with or without BindDualValues, and in
// the lisp machine. A parameter without a gradient is an error that names it, or counts as
// zeros with [WithUnused]. Sync zeroes the parameters' own gradients, as a solver's Step does.
//
// Every rank calls Sync once for each RunAll: several runs make one step in a machine of package vm
// (vm.Accumulate, vm.WithTree). Sync waits until all buckets are reduced. The returned gradients
// are views of the buckets: a solver may change them in place, and they are valid until the next
// RunAll or the Close of d or of the communicator.
//
// Cost: one all-reduce for each bucket, which overlaps the backward pass if hooks have started it;
// one copy of every gradient; one zeroing of each parameter without a gradient. If the communicator
// is on a device, buckets are copied there and back.
//
// Errors: ErrArgument if no parameter has a gradient, if no run has computed any since the last
// Sync (the machine was not Reset), and if a gradient does not fit its parameter; ErrUnsupported
// with [WithTree]; those of the communicator, with rank, bucket and parameters. Errors are sticky,
// with one exception: if package sparse is strict and a gradient is NaN or infinite, the error
// names rank, parameter and element on all ranks, and all ranks skip the step. Residuals are
// unchanged, and the next RunAll begins another step.
func (d *DataParallel) Sync() ([]gorgonia.ValueGrad, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return nil, err
	}
	if d.planned != nil {
		return nil, d.named(fmt.Errorf("%w: a vm.Machine exchanges and applies the gradients: "+
			"leave Sync out", backend.ErrArgument))
	}
	err := residence.Bound(d.comm.Device(), d.tape.finishStep)
	if errors.As(err, new(skippedStep)) {
		d.tape.empty()
		return nil, d.named(err)
	} else if err != nil {
		return nil, d.fail(err)
	}
	d.tape.empty()
	d.saver.Steps++
	return slices.Clone(d.tape.grads), nil
}

// Step ends a step: it calls [DataParallel.Sync], and the solver's Step with the gradients. Use
// Sync itself to change the gradients in between.
//
//	vm.RunAll()
//	err := dp.Step(solver)
//	vm.Reset()
//
// Errors: those of Sync and of the solver; ErrUnsupported for the AdamW of Gorgonia v0.9.18,
// which takes only gradients of its nodes and would leave the parameters unchanged: use
// [solver.AdamW].
func (d *DataParallel) Step(solver gorgonia.Solver) error {
	if err := backend.Given("DataParallel.Step", "solver", solver); err != nil {
		return err
	}
	if err := supported(solver); err != nil {
		return onRank(d.comm, "step", err)
	}
	grads, err := d.Sync()
	if err != nil {
		return err
	}
	err = solver.Step(grads)
	for _, p := range d.params {
		if w, other := p.value(); other == nil {
			residence.Written(w)
		}
	}
	return onRank(d.comm, "step", err)
}

// Err returns the error that ended d, or nil. RunAll returns the errors of hooks wrapped in
// Gorgonia's own errors, which hide them from errors.Is and errors.As; Err returns them
// unwrapped.
func (d *DataParallel) Err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

// Close waits for all-reduces in progress and for a [DataParallel.SaveAsync], whose error it
// returns, and frees the memory of d. The gradients that Sync
// has returned must not be used after it. The communicator reuses the memory of the buckets at
// its next Alloc after all ranks have closed. Close d before the communicator.
// Later calls do nothing.
//
// Close returns an error, but still closes d, in the middle of a step (ErrArgument), whose
// gradients are lost, and if the ranks have trained separately: a solver was given gradients and
// Sync was never called. It also reports the latter ([WithNotice]), since a deferred Close drops
// its error. A machine of package vm leaves no gradients: vm.New reports one that trains without
// its WithDataParallel.
func (d *DataParallel) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	return residence.Bound(d.comm.Device(), func() error {
		return errors.Join(d.unfinished(), d.saver.Close(d.err), d.free())
	})
}

// unfinished returns what is wrong with a Close now, unless an error has ended d before.
func (d *DataParallel) unfinished() error {
	if d.err != nil {
		return nil
	}
	err := d.fresh.apart()
	if err != nil {
		err = d.named(err)
		d.say(err.Error())
	}
	if unfinished := d.betweenSteps(); unfinished != nil {
		err = errors.Join(err, d.named(fmt.Errorf("close: %w", unfinished)))
	}
	return err
}

// usable returns an error if there can be no further step.
func (d *DataParallel) usable() error {
	if d.err != nil {
		return d.err
	}
	if d.closed {
		return d.named(backend.ErrClosed)
	}
	return nil
}

// betweenSteps returns an error while a step is in progress on this rank: the slots are in use, and
// the compression may have seen a part of the step. Without hooks, a step of Sync is in progress
// only during Sync.
func (d *DataParallel) betweenSteps() error {
	if d.of > 0 {
		return StepInProgress(d.done, d.of)
	}
	if d.averaged {
		return fmt.Errorf("%w: inside the machine's Averaged learnables are averages, and not "+
			"what the solver trains: save or load after it, or use SaveWeights in it",
			backend.ErrArgument)
	}
	if slices.ContainsFunc(d.params, func(p *param) bool { return p.full }) {
		return fmt.Errorf("%w: a step is in progress, with gradients caught: call Sync first",
			backend.ErrArgument)
	}
	return nil
}

// StepInProgress returns the error of a call in the middle of a step of several runs: an
// ErrArgument that says what to do first.
func StepInProgress(done, of int) error {
	return fmt.Errorf("%w: a step is in progress, with %d of %d micro-batches accumulated: run "+
		"the other %d first", backend.ErrArgument, done, of, of-done)
}

// fail records the error that ends d.
func (d *DataParallel) fail(err error) error {
	d.err = d.named(err)
	return d.err
}

// named adds the rank to an error that has none.
func (d *DataParallel) named(err error) error { return named(d.comm, err) }

// Average averages the parameters of the next bucket, and the running statistics of batch norms,
// over all ranks, if d was made with [WithPartial]; otherwise it does nothing. Call it after the
// solver's Step, once in each step:
//
//	grads, err := dp.Sync()     // of this rank alone
//	solver.Step(grads)
//	err = dp.Average()
//
// After as many steps as there are buckets, each parameter has been averaged once. The parameters
// of the averaged bucket are bitwise identical on all ranks. Average is collective. The gradients
// that Sync has returned are not valid after it.
//
// Cost: one all-reduce of the bucket and two copies. The all-reduce is exact, also on a
// communicator that compresses gradients. Errors: as from [DataParallel.Sync], and ErrArgument
// while a step is in progress on this rank, from its first hook to Sync. After ErrArgument nothing
// has changed, and the others wait for this rank's next call.
func (d *DataParallel) Average() error { return d.average(1) }

// AverageAll averages all parameters. Call it before a check, a checkpoint or the end of
// training. Errors: as from Average.
func (d *DataParallel) AverageAll() error { return d.average(len(d.buckets)) }

func (d *DataParallel) average(buckets int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return err
	}
	if !d.partial.on {
		return nil
	}
	if err := d.betweenSteps(); err != nil {
		return d.named(err)
	}
	if len(d.queues) == 0 {
		return nil
	}
	d.fresh.over()
	err := residence.Bound(d.comm.Device(), func() error {
		if err := d.partial.average(&d.reducer, buckets); err != nil {
			return err
		}
		return d.model.merge(backend.Label(d.comm, backend.ForAverage))
	})
	if err != nil {
		return d.fail(err)
	}
	return nil
}
