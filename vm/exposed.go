package vm

import (
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// BucketTime is how long a rank waited for the exchange of a bucket of [WithDataParallel].
type BucketTime struct {
	Bucket   int // its number in the plan, from 0
	Bytes    int // of its gradients
	Products int // products and attentions that the plan runs beside the exchange
	// Exposed is the time from the end of the steps before the bucket's first update to the end of
	// the exchange: 0 if the exchange was done by then.
	Exposed time.Duration
	// Gather is true for the all-gather of learnables that ranks update in shards, and false for
	// the exchange of gradients before it: see [WithShards].
	Gather bool
}

// Exposed is a RunAll whose steps run one by one, as in [Machine.Profile]. It returns the exposed
// time of each bucket's exchange, in the order of the plan. Only the waits are timed, by the
// device's clock if it has one: on a GPU a hidden exchange still shows the few microseconds between
// two events. A rank also waits for stragglers.
//
// Steps that RunAll records as a graph may expose less or more: the host does not launch them one
// by one, and copy engines, which run only recorded exchanges, leave the multiprocessors to the
// products. Take the median of several calls, after a few runs. All ranks call it. Without other
// ranks the list is empty, and in a run that does not end a step ([Accumulate]) the times are 0.
// Rows of embedding tables have no bucket, so they are not in the list.
//
// Errors: those of RunAll.
func (m *Machine) Exposed() (buckets []BucketTime, err error) {
	elapsed, err := m.profile(func(op ir.Op) bool { _, wait := op.(plan.Receive); return wait })
	products := map[plan.Receive]int{}
	for i, t := range elapsed {
		switch op := m.plan.Steps[i].Op.(type) {
		case plan.Send:
			products[plan.Receive{Bucket: op.Bucket, Kind: op.Kind}] = op.Products
		case plan.Receive:
			buckets = append(buckets, BucketTime{op.Bucket - 1, m.plan.ExchangedBytes(i),
				products[op], t, op.Kind == backend.AllGather})
		}
	}
	return buckets, err
}
