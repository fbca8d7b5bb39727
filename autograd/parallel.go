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
	planned  *Buckets // of a machine, whose plan takes the place of Sync
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
		d, err = start(comm, params, opts)
		return err
	})
	if err != nil {
		return nil, named(comm, err)
	}
	return d, nil
}

func start(comm backend.Communicator, nodes gorgonia.Nodes, opts []Option) (*DataParallel, error) {
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
		err = d.prepareBuckets()
	}
	if err = d.parts.connect(d.params, err); err != nil {
		return nil, errors.Join(err, d.free())
	}
	d.saver = checkpoint.Saver{Ranks: checkpoint.Ranks{Data: comm}, Say: d.say}
	if d.parts = d.parts.whole(); d.parts != nil {
		d.saver.Parts = d.parts.comm
	}
	if d.saver.First() {
		d.notices = notices{o.notice, map[string]bool{}}
	}
	return d, nil
}

// lay divides the parameters among buckets, and describes what all ranks must have in common. An
// error is this rank's problem, of which all must hear.
func (d *DataParallel) lay(nodes gorgonia.Nodes, o options) (description string, err error) {
	use := o.use(d.comm)
	if d.params, err = examineAll(nodes); err == nil {
		err = o.foreign(d.params)
	}
	err = errors.Join(o.missing, err, o.check(), checkTerms(d.params, use))
	if err != nil {
		return "", err
	}
	if d.tree, err = newTree(d.comm, o, d.params); err != nil {
		return "", err
	}
	if d.model, err = newInventory(d.params, o); err != nil {
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
	d.tape = tape{DataParallel: d, unused: o.unused, use: use}
	_, stateful := d.compression() // whose residuals are of whole gradients
	for _, p := range d.params {
		p.apart = slices.Contains(o.apart, p.node)
		p.early = slices.Contains(o.early, p.node) && !stateful && o.parts == nil
		// beside their own parts ranks would choose other elements of what they all have
		p.parted = stateful && o.parts.divides(p)
	}
	d.buckets = plan(d.params, o.first, o.rest, !o.partial)
	if d.tree != nil && o.op == backend.Avg {
		d.scale = 1 / float64(d.tree.all)
	}
	return describe(d.params, o, d.compressor()) + d.model.String() +
		strings.Join(d.tables.described(), "\n"), nil
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

func examineAll(nodes gorgonia.Nodes) ([]*param, error) {
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
	return params, untied(params)
}

// untied returns an error if two parameters have the same memory.
func untied(params []*param) error {
	values := make([]backend.Buffer, len(params))
	for i, p := range params {
		var err error
		if values[i], err = p.value(); err != nil {
			return err
		}
		if err = residence.Present(values[i]); err != nil {
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

// broadcast gives every rank the parameters of rank 0, through the buckets.
func (d *DataParallel) broadcast() error {
	for _, b := range d.buckets {
		if err := d.exchange(b, backend.Collective{Kind: backend.Broadcast,
			Origin: b.origin(backend.ForNew)}); err != nil {
			return err
		}
	}
	return d.fresh.begin(d.params)
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

// fresh is what New has made the same on all ranks, until they exchange anything.
type fresh struct {
	params []*param
	sums   []uint32 // of the parameters, by New
}

// begin notes the parameters.
func (f *fresh) begin(params []*param) error {
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
		if p.gradient() == nil {
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

func named(comm backend.Communicator, err error) error {
	if errors.As(err, new(*backend.Error)) {
		return err
	}
	return wrapped("rank %d of %s: %w", comm.Rank(), comm.Name(), err)
}

// notices reports what a user should know, each text once: see [WithNotice].
type notices struct {
	notice func(text string) // nil on ranks that leave it to the first
	said   map[string]bool
}

func (n *notices) say(text string) {
	if n.notice != nil && !n.said[text] {
		n.said[text] = true
		n.notice(text)
	}
}
