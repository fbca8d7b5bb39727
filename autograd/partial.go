package autograd

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
)

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

// rotation averages the parameters of buckets in turn: see [WithPartial].
type rotation struct {
	on   bool
	turn int // the bucket that comes next
}

// average averages the next buckets.
func (r *rotation) average(d *reducer, buckets int) error {
	for range buckets {
		b := d.buckets[r.turn]
		c := backend.Collective{Kind: backend.AllReduce, Op: backend.Avg, Exact: true,
			State: b.slot(), Origin: b.origin(backend.ForAverage)}
		if err := d.exchange(b, c); err != nil {
			return err
		}
		r.turn = (r.turn + 1) % len(d.buckets)
	}
	return nil
}
