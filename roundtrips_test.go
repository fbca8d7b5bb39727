package euryale_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/internal/proctest"
)

// saysWhenItIsThere prints when Init begins and ends, in nanoseconds.
func saysWhenItIsThere() error {
	began := time.Now()
	comm, err := euryale.Init(context.Background())
	if err != nil {
		return err
	}
	fmt.Println(began.UnixNano(), time.Now().UnixNano())
	return comm.Close()
}

// initTime returns how long Init takes from when all ranks have begun it, over a network where
// data takes half of roundTrip to get to another machine.
func initTime(t *testing.T, machines, P int, roundTrip time.Duration, env ...string) time.Duration {
	t.Helper()
	m := proctest.Machines(t, machines, proctest.Wire{Delay: roundTrip / 4}) // each way has two wires
	var began, ended int64
	for r, p := range proctest.StartOn(t, m, "says when it is there", P, env...) {
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

func TestTableOfRoundTrips(t *testing.T) {
	for _, c := range []struct{ machines, P int }{{2, 2}, {3, 3}, {6, 6}, {2, 4}, {3, 6}} {
		for _, tls := range []string{"0", "1"} {
			t.Run(fmt.Sprint(c, tls), func(t *testing.T) {
				const rtt = 50 * time.Millisecond
				d := initTime(t, c.machines, c.P, rtt, "EURYALE_TLS="+tls, os.Getenv("X"))
				t.Logf("%v: %.1f", d, float64(d)/float64(rtt))
			})
		}
	}
}
