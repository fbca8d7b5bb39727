package hierarchy

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// seat is a communicator that is no more than a place in a group.
type seat struct {
	backend.Communicator
	rank int
}

func (s seat) Name() string { return "seats" }
func (s seat) Rank() int    { return s.rank }

// lives returns the lives of P ranks that listen, and how often each was stopped.
func lives(t *testing.T, P int) ([]*life, []*atomic.Int32) {
	worlds, err := rendezvous.Local(P, 0)
	if err != nil {
		t.Fatal(err)
	}
	all, stops := make([]*life, P), make([]*atomic.Int32, P)
	for r, w := range worlds {
		stops[r] = new(atomic.Int32)
		all[r] = newLife(w, "test", seat{rank: r}, func(error) { stops[r].Add(1) })
		for p := range P {
			all[r].members = append(all[r].members, p)
		}
		all[r].background.Go(all[r].listen)
	}
	t.Cleanup(func() {
		for r, l := range all {
			if err := errors.Join(l.close(func() error { return nil }), worlds[r].Close()); err != nil {
				t.Error(err)
			}
		}
	})
	return all, stops
}

// ending returns the errors of all ranks once the group has ended.
func ending(t *testing.T, all []*life) (errs []error) {
	for r, l := range all {
		select {
		case <-l.ctx.Done():
		case <-time.After(soon):
			t.Fatalf("rank %d goes on", r)
		}
		l.ending.Lock() // until all communicators have ended
		errs = append(errs, l.failure("a call"))
		l.ending.Unlock()
	}
	return errs
}

// Ranks that fail at once name one cause, on all ranks, also on those that were idle.
func TestTheFirstReportIsTheCauseOnAllRanks(t *testing.T) {
	all, stops := lives(t, 4)
	var failing sync.WaitGroup
	for _, r := range []int{1, 2} {
		failing.Go(func() {
			text := fmt.Sprintf("a cable of rank %d", r)
			report := group.Report{Reason: group.Aborted, Rank: r, Peer: r, Lost: r, Text: text}
			for _, cause := range []error{fmt.Errorf("%w: %s", backend.ErrAborted, text), errors.New("a second one")} {
				all[r].fail(func() finding { return finding{report: report, cause: cause} })
			}
		})
	}
	failing.Wait()
	var blamed []string
	for r, err := range ending(t, all) {
		var e *backend.Error
		if !errors.As(err, &e) || !errors.Is(err, backend.ErrAborted) || e.Rank != r || e.Call != "a call" || e.Peer != 1 && e.Peer != 2 || stops[r].Load() != 1 {
			t.Fatalf("rank %d was stopped %d times, the error is %v", r, stops[r].Load(), err)
		}
		blamed = append(blamed, e.Cause.Error())
	}
	for r, cause := range blamed {
		if cause != blamed[0] || !strings.Contains(cause, "a cable of rank") {
			t.Errorf("rank %d says %q, rank 0 %q", r, cause, blamed[0])
		}
	}
}

// A rank that was only woken by the end of another one waits for its report.
func TestABetterReportIsWaitedFor(t *testing.T) {
	all, _ := lives(t, 2)
	done := make(chan struct{})
	go func() {
		defer close(done)
		r := group.Report{Reason: group.Aborted, Rank: 1, Peer: 1, Lost: 1, Text: "the end of a phase"}
		all[1].fail(func() finding { return finding{report: r, cause: backend.ErrAborted, grace: soon} })
	}()
	all[0].abort(errors.New("the weather"))
	<-done
	for r, err := range ending(t, all) {
		if !strings.Contains(err.Error(), "the weather") {
			t.Errorf("rank %d: the error is %v", r, err)
		}
	}
}

// What a mismatch says is completed before the others hear of it.
func TestAMismatchIsRefined(t *testing.T) {
	all, _ := lives(t, 2)
	called := backend.Header{Kind: backend.AllReduce, Op: backend.Sum, DType: backend.F32, Count: 77, Seq: 9}
	r := group.Report{Reason: group.Mismatch, Rank: 0, Peer: 1}
	all[0].fail(func() finding { return finding{report: r, refine: func(r *group.Report) { r.Mine = encoded(called) }} })
	for r, err := range ending(t, all) {
		if !errors.Is(err, backend.ErrMismatch) || !strings.Contains(err.Error(), "of 77 f32 (call 9)") {
			t.Errorf("rank %d: the error is %v", r, err)
		}
	}
}
