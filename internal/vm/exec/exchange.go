package exec

import (
	"context"
	"errors"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// Buckets is how ranks exchange gradients: [autograd.Buckets], say. Buckets have numbers from 0.
type Buckets interface {
	// Slot returns the memory in which the gradient of an update is exchanged, or one of its sums.
	Slot(update, branch int) backend.Buffer
	// Whole returns the memory of a bucket that ranks shard.
	Whole(bucket int) backend.Buffer
	// Start starts an exchange of a bucket behind what was started on a queue, nil for the host.
	// It may be recorded with the queue, or be ErrUnsupported then. beside is whether the devices
	// of all ranks compute meanwhile, and the same on every rank.
	// A reduce-scatter or an all-gather takes a whole bucket and this rank's chunk: both are empty
	// where the bucket has separate memory.
	Start(bucket int, kind backend.Kind, whole, chunk backend.Buffer, behind backend.Queue,
		beside bool) (backend.Work, error)
	// Finish waits for what Start has started.
	Finish(bucket int, w backend.Work) error
	// Layer says that a queue which is being recorded goes on with a layer, "" for its end.
	Layer(q backend.Queue, name string)
	// All reports whether a condition holds on all ranks, which call it together.
	All(condition bool) (bool, error)
}

// exchanges are the exchanges of a run.
type exchanges struct {
	Buckets
	started
	beside map[*step]bool // by Send, of those that are recorded
}

// started is what steps have started and nobody has waited for.
type started struct {
	buckets []underWay
	// operations that run where their operands are, and graphs in which there are exchanges
	others []backend.Work
}

// underWay is an exchange of a bucket, and the step that ends it.
type underWay struct {
	plan.Receive
	work backend.Work
}

// send starts the exchange of a bucket; the first one has number 1.
func (e *Executor) send(s *step, op plan.Send) error {
	x := &e.exchanges
	var whole, chunk backend.Buffer
	if op.Kind != backend.AllReduce && len(s.dsts) > 1 {
		whole, chunk = s.dsts[0], s.dsts[1]
	}
	w, err := x.Start(op.Bucket-1, op.Kind, whole, chunk, e.device.Main(), x.beside[s])
	if w != nil {
		x.buckets = append(x.buckets, underWay{op.End(), w})
	}
	return err
}

// besides finds out which exchanges of a segment run beside products on all ranks. The plans of two
// ranks may differ in all but their exchanges, and an exchange takes one algorithm on all of them.
// It is collective.
func (x *exchanges) besides(s *segment) (err error) {
	if x.beside == nil {
		x.beside = map[*step]bool{}
	}
	for _, step := range s.steps {
		if op, ok := step.Op.(plan.Send); ok && err == nil {
			x.beside[step], err = x.All(op.Products > 0)
		}
	}
	return err
}

// receive orders what follows behind the exchange of a bucket. The host waits for it, and has its
// error.
func (e *Executor) receive(op plan.Receive) error {
	all := e.exchanges.buckets
	at := len(all) - 1
	for all[at].Receive != op { // the last one, since a device may do a bucket several times
		at--
	}
	w := all[at].work
	if q := e.device.Main(); q != nil {
		return w.Wait(q)
	}
	e.exchanges.buckets = slices.Delete(all, at, at+1)
	return e.exchanges.Finish(op.Bucket-1, w)
}

// layer returns what notes where a layer begins in the graph that a device records.
func (x *exchanges) layer(d Device) func(name string) {
	if x.Buckets == nil {
		return func(string) {}
	}
	return func(name string) { x.Layer(d.Main(), name) }
}

// finish waits for all exchanges of a run, also for those that nobody has received after an
// error, and returns their errors.
func (x *exchanges) finish() error {
	var errs []error
	for _, of := range x.buckets {
		errs = append(errs, x.Finish(of.Bucket-1, of.work))
	}
	for _, w := range x.others {
		// communicators end their waits by themselves
		errs = append(errs, w.Join(context.Background()))
	}
	clear(x.buckets)
	clear(x.others)
	x.buckets, x.others = x.buckets[:0], x.others[:0]
	return errors.Join(errs...)
}
