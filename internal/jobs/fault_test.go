//go:build linux

package jobs_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/fault"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestInjectedKillIsNamedByEveryOtherRank(t *testing.T) {
	const plan = "EURYALE_FAULT=kill,rank=1,call=40"
	ps := proctest.Start(t, "works", 3, plan)
	underWay(t, ps)
	for _, r := range []int{0, 2} {
		// The call's own number counts those that Init makes, so it is no part of this.
		ps[r].Says(t, "rank 1 is down", "allreduce(sum) of 65536 f32")
	}
}

func TestRestartedJobHasNoFault(t *testing.T) {
	const plan = "EURYALE_FAULT=kill,rank=1,call=40"
	for r, p := range proctest.Start(t, "ends well", 2, plan, "TORCHELASTIC_RESTART_COUNT=1") {
		said := p.End()
		require.Check(t, p.ProcessState.Success(), "rank %d said %q", r, said)
	}
	for r, p := range proctest.Start(t, "ends well", 2, plan, "TORCHELASTIC_RESTART_COUNT=0") {
		if p.End(); p.ProcessState.Success() {
			t.Errorf("rank %d: no fault on the first attempt", r)
		}
	}
}

func TestBadFaultIsFoundByInitOnEveryRank(t *testing.T) {
	for _, bad := range []struct{ plan, want string }{
		{"explode", "write kill, stop, panic, exit or abort"},
		{"kill,rank=2,call=1", "no rank 2 among 2 ranks"},
	} {
		for _, restarts := range []string{"", "1"} {
			began := time.Now()
			for _, p := range proctest.Start(t, "ends well", 2, "EURYALE_FAULT="+bad.plan,
				"TORCHELASTIC_RESTART_COUNT="+restarts) {
				p.Says(t, "EURYALE_FAULT", bad.want)
			}
			took := time.Since(began)
			require.Check(t, took <= 10*time.Second, "it took %v", took)
		}
	}
}

func TestFaultCostsNothingWhereThereIsNone(t *testing.T) {
	err := euryale.Run(context.Background(), 1, func(comm backend.Communicator,
		_ sync.Locker) error {
		_, ok := backend.As[*fault.Communicator](comm)
		require.Check(t, !ok, "calls go through package fault")
		return nil
	})
	require.Report(t, err)
	t.Setenv("EURYALE_FAULT", "abort,rank=0,call=2")
	err = euryale.Run(context.Background(), 1, func(comm backend.Communicator,
		_ sync.Locker) error {
		require.Report(t, backend.Barrier(comm))
		return backend.Barrier(comm)
	})
	require.Fails(t, "the second call", err, "abort,rank=0,call=2")
}

// A rank that fails because of another one tells the job when it closes. Those that
// hear it first from there must not take the messenger for the cause.
func TestFoundErrorBlamesTheRankThatItBeganWith(t *testing.T) {
	for name, fail := range map[string]func(comm backend.Communicator) error{
		"closed": func(comm backend.Communicator) error {
			if comm.Rank() == 1 {
				return comm.Close()
			}
			return backend.Barrier(comm)
		},
		"closed in a group": func(comm backend.Communicator) error {
			part, err := comm.Split(comm.Rank()/2, 0)
			if err != nil || comm.Rank() == 2 {
				return err
			}
			if comm.Rank() == 1 {
				return errors.Join(part.Close(), comm.Close())
			}
			defer part.Close()
			return backend.Barrier(part)
		},
		"aborted in a group": func(comm backend.Communicator) error {
			part, err := comm.Split(comm.Rank()/2, 0)
			if err != nil || comm.Rank() == 2 {
				return err
			}
			if comm.Rank() == 1 {
				part.Abort(errors.New("no more data"))
				return nil
			}
			return backend.Barrier(part)
		},
	} {
		t.Run(name, func(t *testing.T) {
			told := make(chan struct{})
			var heard error
			euryale.Run(t.Context(), 3, func(comm backend.Communicator, _ sync.Locker) error {
				switch comm.Rank() {
				case 0:
					defer close(told)
					err := fail(comm)
					comm.Close()
					return err
				case 1:
					err := fail(comm)
					<-told // or it would tell first
					return err
				}
				if name != "closed" {
					if err := fail(comm); err != nil {
						return err
					}
				}
				<-told
				heard = backend.Barrier(comm)
				return heard
			})
			require.Check(t, heard != nil && strings.Contains(heard.Error(),
				"because of rank 1: ") &&
				!strings.Contains(heard.Error(), "because of rank 0"), "rank 2 heard %v", heard)
		})
	}
}
