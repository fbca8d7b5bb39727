package exec

import (
	"context"
	"errors"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm/internal/plan"
)

// Buckets is how ranks exchange gradients: [autograd.Buckets], say. Buckets have numbers from 0.
type Buckets interface {
	// Slot returns the memory in which the gradient of an update is exchanged, or one of its sums.
	Slot(update, branch int) backend.Buffer
	// Whole returns the memory of a bucket that ranks divide.
	Whole(bucket int) backend.Buffer
	// Start starts an exchange of a bucket behind what was started on a queue, nil for the host.
	// It may be recorded with the queue, or be ErrUnsupported then. beside is whether the devices
	// of all ranks compute meanwhile, and the same on every rank.
	// A reduce-scatter or an all-gather takes a whole bucket and this rank's chunk: both are empty
	// where the bucket has memory of its own.
	Start(bucket int, kind backend.Kind, whole, chunk backend.Buffer, behind backend.Queue,
		beside bool) (backend.Work, error)
	// Finish waits for what Start has started.
	Finish(bucket int, w backend.Work) error
	// All reports whether a condition holds on all ranks, which call it together.
	All(condition bool) (bool, error)
}

// exchanges are the exchanges of a run.
type exchanges struct {
	Buckets
	started
	beside map[plan.Send]bool // of those that are recorded
}

// started is what steps have started and nobody has waited for.
type started struct {
	// nil where a bucket is not under way. It is once at a time: the all-gather of shards begins
	// when the reduce-scatter has ended.
	buckets []backend.Work
	// operations that run where their operands are, and graphs in which there are exchanges
	others []backend.Work
}

// send starts the exchange of a bucket; the first one has number 1.
func (e *Executor) send(s *step, op plan.Send) error {
	x, bucket := &e.exchanges, op.Bucket
	for len(x.buckets) < bucket {
		x.buckets = append(x.buckets, nil)
	}
	var whole, chunk backend.Buffer
	if op.Kind != backend.AllReduce && len(s.dsts) > 1 {
		whole, chunk = s.dsts[0], s.dsts[1]
	}
	w, err := x.Start(bucket-1, op.Kind, whole, chunk, e.device.Main(), x.beside[op])
	x.buckets[bucket-1] = w
	return err
}

// besides finds out which exchanges of a segment run beside products on all ranks. The plans of two
// ranks may differ in all but their exchanges, and an exchange takes one algorithm on all of them.
// It is collective.
func (x *exchanges) besides(s *segment) (err error) {
	if x.beside == nil {
		x.beside = map[plan.Send]bool{}
	}
	for _, step := range s.steps {
		if op, ok := step.Op.(plan.Send); ok && err == nil {
			x.beside[op], err = x.All(op.Products > 0)
		}
	}
	return err
}

// receive orders what follows behind the exchange of a bucket. The host waits for it, and has its
// error.
func (e *Executor) receive(bucket int) error {
	w := e.exchanges.buckets[bucket-1]
	if q := e.device.Main(); q != nil {
		return w.Wait(q)
	}
	e.exchanges.buckets[bucket-1] = nil
	return e.exchanges.Finish(bucket-1, w)
}

// finish waits for all exchanges of a run, also for those that nobody has received after an
// error, and returns their errors.
func (x *exchanges) finish() error {
	var errs []error
	for bucket, w := range x.buckets {
		if w != nil {
			errs = append(errs, x.Finish(bucket, w))
		}
	}
	for _, w := range x.others {
		// communicators end their waits by themselves
		errs = append(errs, w.Join(context.Background()))
	}
	clear(x.buckets)
	clear(x.others)
	x.others = x.others[:0]
	return errors.Join(errs...)
}
