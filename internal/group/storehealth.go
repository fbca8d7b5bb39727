package group

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/internal/spinwait"
	"github.com/euryale-ml/euryale/rendezvous"
)

// publishTime bounds how long [StoreHealth.Publish] waits for the store: all ranks must know
// within a second.
const publishTime = 250 * time.Millisecond

// StoreHealth is the Health of a group that is made of others, which end together. It has the
// first report, in the job's store. Who has begun a call, and who has closed, the other groups
// see: here every rank has begun everything, and none is closed.
type StoreHealth struct {
	world  *rendezvous.World
	key    string
	first  atomic.Pointer[Report]
	cancel context.CancelFunc
	heard  sync.WaitGroup
}

var _ Health = (*StoreHealth)(nil)

// NewStoreHealth returns the health of a group whose report is under key, which nobody else
// uses. It listens until Release.
func NewStoreHealth(w *rendezvous.World, key string) *StoreHealth {
	h := &StoreHealth{world: w, key: key}
	ctx, cancel := context.WithCancel(context.Background())
	h.cancel = cancel
	h.heard.Go(func() { h.listen(ctx, w) })
	return h
}

// listen waits for a report. The store's own timeouts do not end it, but the cause of a failure of
// the job may be a timeout as well.
func (h *StoreHealth) listen(ctx context.Context, w *rendezvous.World) {
	for {
		report, err := h.world.Store.Get(ctx, h.key)
		if err == nil {
			h.hear(report)
		}
		if ctx.Err() != nil || w.Failure() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return // there is one, this rank has left, or the job has lost a rank or the store
		}
	}
}

func (h *StoreHealth) hear(report []byte) {
	r := Report{Reason: Aborted, Rank: -1, Peer: -1, Lost: -1,
		Text: "another rank failed, but its report cannot be read"}
	if len(report) >= reportHead {
		r = unpackReport(report)
	}
	h.first.CompareAndSwap(nil, &r)
}

// Begun implements [Health].
func (h *StoreHealth) Begun(int) uint64 { return math.MaxUint64 }

// Closed implements [Health].
func (h *StoreHealth) Closed(int) bool { return false }

// Close implements [Health].
func (h *StoreHealth) Close() {}

// Publish implements [Health]. It waits for the store, at most 250 ms, hardly if that has not
// answered before. If the store is lost,
// the others end because of that.
func (h *StoreHealth) Publish(r Report) {
	ctx, cancel := spinwait.WithPatience(context.Background(),
		min(publishTime, h.world.NewsTime(r.lost())))
	defer cancel()
	if report, _, err := h.world.Store.CompareAndSwap(ctx, h.key, nil, packReport(r)); err == nil {
		h.hear(report)
	}
}

// Reported implements [Health].
func (h *StoreHealth) Reported() (Report, bool) {
	if r := h.first.Load(); r != nil {
		return *r, true
	}
	return Report{}, false
}

// Heard implements [Health].
func (h *StoreHealth) Heard() (Report, bool) { return h.Reported() }

// Release ends this rank's listening.
func (h *StoreHealth) Release() {
	h.cancel()
	h.heard.Wait()
}
