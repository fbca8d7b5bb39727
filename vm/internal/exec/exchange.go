package exec

import (
	"context"
	"errors"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// Exchange is how ranks exchange gradients: that of package autograd. Buckets have numbers from 0.
type Exchange interface {
	// Slot returns the memory in which the gradient of an update is exchanged.
	Slot(update int) backend.Buffer
	// Start starts the exchange of a bucket behind what was started on a queue, nil for the host.
	// It may be recorded with the queue, or be ErrUnsupported then.
	Start(bucket int, behind backend.Queue) (backend.Work, error)
	// Finish waits for what Start has started.
	Finish(bucket int, w backend.Work) error
	// All reports whether a condition holds on all ranks, which call it together.
	All(condition bool) (bool, error)
}

// exchanges are those of a run.
type exchanges struct {
	Exchange
	works   []backend.Work // by bucket, nil if it is not under way
	placed  []backend.Work // of operations that run where their operands are
	replays []backend.Work // of graphs in which there are exchanges
}

// send starts the exchange of a bucket; the first one has number 1.
func (e *Executor) send(bucket int) error {
	x := &e.exchanges
	for len(x.works) < bucket {
		x.works = append(x.works, nil)
	}
	w, err := x.Start(bucket-1, e.device.Main())
	x.works[bucket-1] = w
	return err
}

// receive orders what follows behind the exchange of a bucket. The host waits for it, and has its
// error.
func (e *Executor) receive(bucket int) error {
	w := e.exchanges.works[bucket-1]
	if q := e.device.Main(); q != nil {
		return w.Wait(q)
	}
	e.exchanges.works[bucket-1] = nil
	return e.exchanges.Finish(bucket-1, w)
}

// finish waits for all exchanges of a run, also for those that nobody has received after an
// error, and returns their errors.
func (x *exchanges) finish() error {
	var errs []error
	for bucket, w := range x.works {
		if w != nil {
			errs = append(errs, x.Finish(bucket, w))
		}
	}
	for _, w := range slices.Concat(x.placed, x.replays) {
		errs = append(errs, w.Join(context.Background())) // communicators end their waits by themselves
	}
	x.forget()
	x.replays = x.replays[:0]
	return errors.Join(errs...)
}

// forget forgets what was started, or recorded: nobody can join that.
func (x *exchanges) forget() {
	clear(x.works)
	clear(x.placed)
	x.placed = x.placed[:0]
}
