package backend_test

import (
	"context"
	"errors"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// waiter is a Work that counts the queues that were ordered after it.
type waiter struct {
	waits int
	err   error
}

func (w *waiter) Wait(backend.Queue) error { w.waits++; return w.err }
func (*waiter) Done() bool                 { return false }

func (w *waiter) Join(context.Context) error { return w.err }

// line is a queue by its name.
type line struct {
	backend.Queue
	name string
}

func TestSequenceWaitsWhereItMust(t *testing.T) {
	a, b := &line{name: "a"}, &line{name: "b"}
	for _, test := range []struct {
		name        string
		first, next *line
		own, ownToo bool
		want        int
	}{
		{"one queue", a, a, true, true, 0},
		{"two queues, kernels before", a, b, true, false, 1},
		{"two queues, kernels behind", a, b, false, true, 1},
		{"two queues, no kernels", a, b, false, false, 0},
	} {
		var s backend.Sequence
		// which is no reason not to start the next
		w := &waiter{err: errors.New("the call has failed")}
		require.NoError(t, require.Err(s.Start(test.first, test.own, func() (backend.Work, error) {
			return w, nil
		})))
		if _, err := s.Start(test.next, test.ownToo, func() (backend.Work, error) {
			return nil, errors.New("refused")
		}); err == nil || err.Error() != "refused" {
			t.Errorf("%s: the error is %v", test.name, err)
		}
		require.Check(t, w.waits == test.want, "%s: %d waits, want %d", test.name, w.waits,
			test.want)
		// What was refused is not what the next one follows.
		if _, err := s.Start(&line{name: "c"}, true, func() (backend.Work, error) {
			return w, nil
		}); err != nil || w.waits != test.want+1 {
			t.Errorf("%s: after a refusal: %d waits, %v", test.name, w.waits, err)
		}
	}
}

// A call without kernels on the queue of one with kernels is behind those. One that follows
// on another queue need not be behind either, where inner lets collectives overlap.
func TestSequenceRemembersKernels(t *testing.T) {
	var s backend.Sequence
	a, b, c := &line{name: "a"}, &line{name: "b"}, &line{name: "c"}
	own, pass := &waiter{}, &waiter{}
	for _, call := range []struct {
		on   *line
		own  bool
		work *waiter
	}{{a, true, own}, {a, false, pass}, {b, false, pass}, {c, false, pass}} {
		require.NoError(t, require.Err(s.Start(call.on, call.own, func() (backend.Work, error) {
			return call.work, nil
		})))
	}
	require.Check(t, own.waits == 2 && pass.waits == 0,
		"%d queues wait for the call with kernels, want 2; %d for the others", own.waits,
		pass.waits)
}
