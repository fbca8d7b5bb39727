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
// The loss of that connection is then no news: before the program has the error, the rank leaves
// a will with the failure detector, which says who is to blame if the rank ends without goodbye.
const (
	// willPrefix begins the keys of wills, which the rank that serves the detector keeps.
	willPrefix = "euryale/will/"
	// willTime is how long a will counts: a program that goes on for longer has found a way on.
	willTime = 10 * time.Second
)

func willKey(rank int) string { return fmt.Sprint(willPrefix, rank) }

// detects reports whether a key is the failure detector's, which outlives the server of the rest.
func detects(key string) bool { return key == downKey || strings.HasPrefix(key, willPrefix) }

// Will leaves word of whom this rank's failure is to be put down to, should it end soon and
// without Close: of cause, if that blames another rank. It returns once the failure detector
// has the word, or after most.
func (w *World) Will(cause error, most time.Duration) error {
	f := w.failureOf(cause)
	if f.Rank == w.Rank || w.Failure() != nil {
		return nil
	}
	ctx, cancel := spinwait.WithPatience(context.Background(), min(most, w.NewsTime(f.Rank)))
	defer cancel()
	return w.inner.Set(ctx, willKey(w.Rank), f.encode())
}

// will is the last one of a rank, and when it came.
type will struct {
	failure *Failure
	at      time.Time
}

// wills has the wills of ranks that live, by rank.
type wills struct{ last atomic.Pointer[will] }

func (w *wills) take(value []byte) { w.last.Store(&will{decodeFailure(value), time.Now()}) }

// instead returns what the loss of the rank is put down to: to its will, if it has left one
// within willTime, else to itself.
func (w *wills) instead(loss *Failure) *Failure {
	last := w.last.Load()
	if last == nil || time.Since(last.at) > willTime {
		return loss
	}
	return last.failure
}

// loss is the failure that the end of a rank's connection is, without a will.
func (id identity) loss(err error) *Failure {
	return &Failure{id.rank, fmt.Errorf("its process %d on %s ended or was killed (connection "+
		"lost: %w)",
		id.pid, id.host, err)}
}

// bequeath tells all members the will of the rank that serves them, whose end none of them could
// tell from a loss. It returns when it was sent to all, after spreadTime at the latest.
func (s *server) bequeath(value []byte) {
	ctx, cancel := spinwait.WithPatience(s.over, spreadTime)
	defer cancel()
	var sent []chan struct{}
	var to []*member
	for _, m := range s.connected() {
		f := frame{kind: kindWill, body: value, sent: make(chan struct{})}
		if m.link.send(ctx, f) == nil {
			sent, to = append(sent, f.sent), append(to, m)
		}
	}
	for i, m := range to {
		select {
		case <-sent[i]:
		case <-m.link.over.Done():
		case <-ctx.Done():
		}
	}
}

// Set has the members know the will of this rank.
func (h *hostStore) Set(ctx context.Context, key string, value []byte) error {
	err := h.memStore.Set(ctx, key, value)
	if err == nil && key == willKey(h.server.me.rank) {
		h.server.bequeath(value)
	}
	return err
}
