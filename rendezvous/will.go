package rendezvous

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/internal/spinwait"
)

// A rank that has an error because of another one often ends at once, and its connection with it.
// The loss of that connection should then blame the other rank. So before the program gets the
// error, the rank leaves a will with the failure detector, which says who is to blame if the rank
// ends without goodbye.
const (
	// willPrefix begins the keys of wills, which the rank that serves the detector keeps.
	willPrefix = "euryale/will/"
	// willTime is how long a will counts: a program that runs for longer has recovered.
	willTime = 10 * time.Second
)

func willKey(rank int) string { return fmt.Sprint(willPrefix, rank) }

// detects reports whether a key belongs to the failure detector, which outlives the rest of the
// store.
func detects(key string) bool { return key == downKey || strings.HasPrefix(key, willPrefix) }

// Will records who is to blame if this rank ends soon and without Close: the rank that cause
// blames, if it is another one. It returns once the failure detector has the record, or after most.
func (w *World) Will(cause error, most time.Duration) error {
	f := w.failureOf(cause)
	if f.Rank == w.Rank || w.Failure() != nil {
		return nil
	}
	ctx, cancel := spinwait.WithPatience(context.Background(), min(most, w.NewsTime(f.Rank)))
	defer cancel()
	return w.inner.Set(ctx, willKey(w.Rank), f.will(0))
}

// Withdraw takes back what Will has recorded: this rank has found a way on. It takes most, like
// Will.
func (w *World) Withdraw(most time.Duration) error {
	ctx, cancel := spinwait.WithPatience(context.Background(), most)
	defer cancel()
	return w.inner.Set(ctx, willKey(w.Rank), nil)
}

// will is the last will of a rank, and when it came.
type will struct {
	failure *Failure
	at      time.Time
}

// will is the value of a will of an age.
func (f *Failure) will(age time.Duration) []byte {
	return append(packInt(nil, int64(age)), f.encode()...)
}

// wills holds the last will of a live rank.
type wills struct{ last atomic.Pointer[will] }

// take takes the value of a will, or an empty one, which withdraws it.
func (w *wills) take(value []byte, now time.Time) {
	u := unpacker{rest: value}
	age := time.Duration(u.int())
	if u.bad {
		w.last.Store(nil)
		return
	}
	w.last.Store(&will{decodeFailure(u.rest), now.Add(-age)})
}

// value returns what others have to take, nil if there is no will that counts.
func (w *wills) value(now time.Time) []byte {
	last := w.last.Load()
	if last == nil || now.Sub(last.at) > willTime {
		return nil
	}
	return last.failure.will(now.Sub(last.at))
}

// instead returns the failure to report for the loss of the rank: its will, if it left one within
// willTime, else loss.
func (w *wills) instead(loss *Failure, now time.Time) *Failure {
	last := w.last.Load()
	if last == nil || now.Sub(last.at) > willTime {
		return loss
	}
	return last.failure
}

// loss is the failure for the end of a rank's connection, without a will.
func (id identity) loss(err error) *Failure {
	return &Failure{Rank: id.rank, Cause: fmt.Errorf("its process %d on %s ended or was killed "+
		"(connection lost: %w)", id.pid, id.host, err)}
}

// Set also tells the members the will of this rank.
func (h *hostStore) Set(ctx context.Context, key string, value []byte) error {
	err := h.memStore.Set(ctx, key, value)
	if err == nil && key == willKey(h.server.me.rank) {
		w := &wait{done: make(chan struct{})}
		h.server.table.tell(func() { h.server.table.bequeath(w, value) })
		<-w.done
	}
	return err
}
