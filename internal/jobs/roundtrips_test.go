package jobs_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// saysWhenItIsThere prints when Init begins and ends, in nanoseconds. It is the second Init: in the
// first one, machines find out each other's hardware addresses.
func saysWhenItIsThere() error {
	comm, err := euryale.Init(context.Background())
	if err != nil {
		return err
	}
	if err := errors.Join(backend.Barrier(comm), comm.Close()); err != nil {
		return err
	}
	began := time.Now()
	if comm, err = euryale.Init(context.Background()); err != nil {
		return err
	}
	fmt.Println(began.UnixNano(), time.Now().UnixNano())
	return errors.Join(backend.Barrier(comm), comm.Close())
}

// initTime returns how long Init takes from when all ranks have begun it, over a network where
// data takes half of roundTrip to get to another machine.
func initTime(t *testing.T, machines, P int, roundTrip time.Duration, env ...string) time.Duration {
	t.Helper()
	// each way has two wires
	m := proctest.Machines(t, machines, proctest.Wire{Delay: roundTrip / 4})
	var began, ended int64
	for r, p := range proctest.StartOn(t, "says when it is there", m, P/machines, env...) {
		var from, to int64
		if said := p.Next(); said == "" || len(said) > 60 {
			t.Fatalf("rank %d: %s", r, said)
		} else if _, err := fmt.Sscan(said, &from, &to); err != nil {
			t.Fatalf("rank %d: %s", r, said)
		}
		began, ended = max(began, from), max(ended, to)
	}
	return time.Duration(ended - began)
}

// Ranks of one machine, and of several, do without shared memory where there is none.
func TestSocketsNeedNoSharedMemory(t *testing.T) {
	sums := func(t *testing.T, ranks []proctest.Rank) {
		for _, p := range ranks {
			p.Says(t, "sum 6")
		}
	}
	env := []string{"EURYALE_SHM_DIR=/proc", "EURYALE_BACKEND=tcp", "EURYALE_HIERARCHY=always"}
	t.Run("one machine", func(t *testing.T) { sums(t, proctest.Start(t, "sums", 4, env...)) })
	t.Run("machines", func(t *testing.T) {
		sums(t, proctest.StartOn(t, "sums", proctest.Machines(t, 2, proctest.Wire{}), 2, env...))
	})
}

// Rank 0's machine may know itself by another name than the others do.
func TestRank0ThatKnowsNoAddressOfItsOwnIsReached(t *testing.T) {
	m := proctest.Machines(t, 2, proctest.Wire{})
	for _, own := range []string{"localhost", "0.0.0.0", "::"} {
		t.Run(own, func(t *testing.T) {
			for _, p := range proctest.StartOn(t, "sums", m, 2, "OWN_ADDR="+own) {
				p.Says(t, "sum 6")
			}
		})
	}
}

// sums adds the numbers of the ranks.
func sums() error {
	if own := os.Getenv("OWN_ADDR"); own != "" && os.Getenv("RANK") < "2" {
		os.Setenv("MASTER_ADDR", own)
	}
	comm, err := euryale.Init(context.Background())
	if err != nil {
		return err
	}
	x := []float32{float32(comm.Rank())}
	err = backend.Run(comm, backend.Collective{Kind: backend.AllReduce}, backend.Of(x),
		backend.Of(x))
	fmt.Println("sum", x[0])
	return errors.Join(err, comm.Close())
}

// Init takes at most 12 round trips in a row, however many ranks and machines there are. What else
// the host has to do can only make it look slower, so the fastest of some tries counts.
func TestInitTakesFewRoundTripsUnraced(t *testing.T) {
	const roundTrip, tries = 100 * time.Millisecond, 10
	for _, c := range []struct{ machines, P int }{{2, 2}, {3, 6}} {
		t.Run(fmt.Sprintf("%d ranks of %d machines", c.P, c.machines), func(t *testing.T) {
			fastest := time.Duration(math.MaxInt64)
			for range tries {
				fastest = min(fastest, initTime(t, c.machines, c.P, roundTrip))
				if fastest < 13*roundTrip {
					return
				}
			}
			t.Errorf("it takes %v, which is more than 12 round trips of %v", fastest, roundTrip)
		})
	}
}

// Between continents, Init is a matter of seconds, also with TLS and a short timeout.
func TestInitOverALongWay(t *testing.T) {
	if os.Getenv("EURYALE_FULL") != "1" {
		return // it takes a minute
	}
	const roundTrip = 200 * time.Millisecond
	for _, c := range []struct{ machines, P int }{{2, 2}, {3, 3}, {6, 6}, {2, 4}, {3, 6}} {
		for tls, limit := range []time.Duration{4 * time.Second, 6 * time.Second} {
			t.Run(fmt.Sprintf("%d ranks of %d machines, TLS=%d", c.P, c.machines, tls),
				func(t *testing.T) {
					took := initTime(t, c.machines, c.P, roundTrip,
						fmt.Sprint("EURYALE_TLS=", tls), "EURYALE_TIMEOUT=5s")
					t.Logf("%v, %.1f round trips", took, float64(took)/float64(roundTrip))
					require.Check(t, took <= limit, "it takes %v, more than %v", took, limit)
				})
		}
	}
	t.Run("longer than a timeout", func(t *testing.T) { // which is of each wait
		const timeout = 7500 * time.Millisecond
		took := initTime(t, 3, 6, 3*roundTrip, "EURYALE_TLS=1", fmt.Sprint("EURYALE_TIMEOUT=",
			timeout))
		require.Check(t, took >= timeout, "it takes %v, which proves nothing", took)
	})
}

// A timeout that is too short for the way says so.
func TestTimeoutThatIsTooShortForTheWay(t *testing.T) {
	m := proctest.Machines(t, 2, proctest.Wire{Delay: 50 * time.Millisecond})
	ranks := proctest.StartOn(t, "says when it is there", m, 1, "EURYALE_TIMEOUT=500ms")
	ranks[0].Says(t, "rank 1 did not join in time", "raise EURYALE_TIMEOUT")
	ranks[1].Says(t, "rank 0 is missing", "timeout after 500ms")
}
