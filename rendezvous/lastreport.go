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
// error, the rank leaves a last report with the failure detector, which says who is to blame if the
// rank ends without goodbye.
const (
	// reportPrefix begins the keys of last reports, which the rank that serves the detector keeps.
	reportPrefix = "euryale/last-report/"
	// reportTime is how long a last report counts: a program that runs for longer has recovered.
	reportTime = 10 * time.Second
)

func reportKey(rank int) string { return fmt.Sprint(reportPrefix, rank) }

// detects reports whether a key belongs to the failure detector, which outlives the rest of the
// store.
func detects(key string) bool { return key == downKey || strings.HasPrefix(key, reportPrefix) }

// LeaveReport records who is to blame if this rank ends soon and without Close: the rank that cause
// blames, if it is another one. It returns once the failure detector has the record, or after most.
func (w *World) LeaveReport(cause error, most time.Duration) error {
	f := w.failureOf(cause)
	if f.Rank == w.Rank || w.Failure() != nil {
		return nil
	}
	ctx, cancel := spinwait.WithPatience(context.Background(), min(most, w.NewsTime(f.Rank)))
	defer cancel()
	return w.inner.Set(ctx, reportKey(w.Rank), f.lastReport(0))
}

// Withdraw takes back what LeaveReport has recorded: this rank has found a way on. It takes most,
// like LeaveReport.
func (w *World) Withdraw(most time.Duration) error {
	ctx, cancel := spinwait.WithPatience(context.Background(), most)
	defer cancel()
	return w.inner.Set(ctx, reportKey(w.Rank), nil)
}

// lastReport is the last report of a rank, and when it came.
type lastReport struct {
	failure *Failure
	at      time.Time
}

// lastReport is the value of a last report of an age.
func (f *Failure) lastReport(age time.Duration) []byte {
	return append(packInt(nil, int64(age)), f.encode()...)
}

// lastReports holds the last report of a live rank.
type lastReports struct{ last atomic.Pointer[lastReport] }

// takeReport takes the value of a last report, or an empty one, which withdraws it.
func (w *lastReports) takeReport(value []byte, now time.Time) {
	u := unpacker{rest: value}
	age := time.Duration(u.int())
	if u.bad {
		w.last.Store(nil)
		return
	}
	w.last.Store(&lastReport{decodeFailure(u.rest), now.Add(-age)})
}

// value returns what others have to take, nil if there is no last report that counts.
func (w *lastReports) value(now time.Time) []byte {
	last := w.last.Load()
	if last == nil || now.Sub(last.at) > reportTime {
		return nil
	}
	return last.failure.lastReport(now.Sub(last.at))
}

// instead returns the failure to report for the loss of the rank: its last report, if it left one
// within reportTime, else loss.
func (w *lastReports) instead(loss *Failure, now time.Time) *Failure {
	last := w.last.Load()
	if last == nil || now.Sub(last.at) > reportTime {
		return loss
	}
	return last.failure
}

// loss is the failure for the end of a rank's connection, without a last report.
func (id identity) loss(err error) *Failure {
	return &Failure{Rank: id.rank, Cause: fmt.Errorf("its process %d on %s ended or was killed "+
		"(connection lost: %w)", id.pid, id.host, err)}
}

// Set also tells the members the last report of this rank.
func (h *hostStore) Set(ctx context.Context, key string, value []byte) error {
	err := h.memStore.Set(ctx, key, value)
	if err == nil && key == reportKey(h.server.me.rank) {
		w := &wait{done: make(chan struct{})}
		h.server.table.tell(func() { h.server.table.leaveReport(w, value) })
		<-w.done
	}
	return err
}
