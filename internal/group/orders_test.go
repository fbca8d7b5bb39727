package group_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Three ranks: rank 2 is stopped, rank 0 is the finder, whose time is up first and whose program
// then ends, rank 1 is judged. It sees these, in any order.
const (
	heard    = iota // the finder's report is on the board
	settled         // and so is what ranks had begun before
	lost            // the finder's process has ended, and the detector says so
	reported        // the same, and the detector has the finder's last report
	overdue         // this rank's own time is up
	answered        // the job has said who is missing
	begins          // a neighbour, which was late, has begun the call
	sights
)

// orders calls f with every order of some events, each once.
func orders(events []int, f func([]int)) {
	if len(events) == 0 {
		f(nil)
	}
	for i, e := range events {
		rest := slices.Delete(slices.Clone(events), i, i+1)
		orders(rest, func(order []int) { f(append([]int{e}, order...)) })
	}
}

func downOf(rank int, cause string) group.Event {
	return group.Down{Failure: &rendezvous.Failure{Rank: rank, Cause: errors.New(cause)}}
}

// judged plays an order, and returns the rank that rank 1 blames. A loss without a last report
// comes only after the finder's report: a rank has told what it has found when its program gets the
// error.
func judged(order []int) (peer int, names string) {
	m := group.NewArbiter(1, backend.Members{0, 1, 2}, time.Second)
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	report := group.Missing(nil, backend.Members{0, 1, 2}, []int{2}, time.Second)
	look := group.Look{Wants: 3, Begun: begun(2, 3, 2), Closed: closed()}
	var first *group.Report
	step := func(e group.Event) (end *group.End) {
		if l, ok := e.(*group.Look); ok {
			seen := *l
			return m.Step(now, &seen)
		}
		return m.Step(now, e)
	}
	end := step(&look)
	for _, e := range order {
		if end != nil {
			break
		}
		now = now.Add(time.Millisecond)
		switch e {
		case heard:
			first = &report
		case settled:
			look.Reported, first = &report, &report
		case lost:
			if first == nil { // it has not told: the process ended for another reason
				return -2, ""
			}
			end = step(downOf(0, "its process ended"))
		case reported:
			end = step(downOf(2, "no sign of rank 2"))
		case overdue:
			now = now.Add(time.Second)
			look.Asks = look.Missing == nil
		case answered:
			look.Asks, look.Missing = false, []int{2}
		case begins:
			look.Begun = begun(3, 3, 2)
		}
		if end == nil {
			end = step(&look)
		}
	}
	for ms := 0; end == nil && ms < 5000; ms += 5 { // what time alone decides
		now = now.Add(5 * time.Millisecond)
		look.Asks = look.Asks && ms < 500
		end = step(&look)
	}
	if end == nil {
		return -1, "nobody"
	}
	peer, cause := end.Report.Peer, end.Cause
	if first != nil && end.Heeds(*first) {
		peer, cause = first.Peer, first.Cause(backend.Members{0, 1, 2})
	}
	return peer, cause.Error()
}

// TestEveryOrderOfNewsBlamesTheStoppedRank: 7 events, of which rank 1 sees any, in any order. Of
// the two news of the finder's end it gets one.
func TestEveryOrderOfNewsBlamesTheStoppedRank(t *testing.T) {
	played := 0
	for set := range 1 << sights {
		if set&(1<<lost) != 0 && set&(1<<reported) != 0 {
			continue
		}
		var events []int
		for e := range sights {
			if set&(1<<e) != 0 {
				events = append(events, e)
			}
		}
		orders(events, func(order []int) {
			peer, names := judged(order)
			telling := []int{heard, settled, reported, answered, begins}
			known := slices.ContainsFunc(order, func(e int) bool {
				return slices.Contains(telling, e)
			})
			if peer == -2 || !known { // nothing tells the stopped rank from its neighbour
				return
			}
			if played++; peer != 2 {
				t.Fatalf("%v: rank %d is blamed: %s", order, peer, names)
			}
		})
	}
	require.Check(t, played >= 1000, "only %d orders were played", played)
}

// TestWhoHeedsWhom: a report that another rank has published first takes the place of a finding
// always, and of a loss if it is the last word of the rank that is lost, or that calls differ.
func TestWhoHeedsWhom(t *testing.T) {
	of := backend.Members{4, 5, 6}
	by := func(rank int) group.Report {
		return group.Report{Reason: group.TimedOut, Rank: rank, Peer: 2, Lost: 6}
	}
	for _, c := range []struct {
		what  string
		event group.Event
		first group.Report
		heeds bool
	}{
		{"the loss of the rank that has reported", downOf(4, "killed"), by(0), true},
		{"the loss of another rank", downOf(6, "killed"), by(0), false},
		{"the loss of a rank outside the group", downOf(9, "killed"), by(0), false},
		{"the loss of a rank after calls that differ", downOf(6, "killed"), mismatch, true},
		{"what a rank has declared of another", group.Down{Failure: &rendezvous.Failure{Rank: 6,
			Cause: errors.New("no sign"), Declared: true}}, by(0), true},
		{"a finding", group.Found{Report: mismatch}, by(0), true},
		{"a finding, told by this rank itself", group.Found{Report: mismatch}, by(1), false},
		{"Abort", group.Abort{Cause: errors.New("no more data")}, by(0), false},
		{"Close", group.Close{}, by(0), false},
	} {
		m := group.NewArbiter(1, of, time.Second)
		end := m.Step(time.Now(), c.event)
		require.Check(t, end != nil && end.Heeds(c.first) == c.heeds,
			"%s: %+v heeds a report of rank %d: want %v", c.what, end, c.first.Rank, c.heeds)
	}
}

// TestTheMissingAreNamedAlsoOutsideTheGroup: ranks of the group wait for others in groups of their
// own.
func TestTheMissingAreNamedAlsoOutsideTheGroup(t *testing.T) {
	of := backend.Members{4, 5, 6}
	for _, c := range []struct {
		missing []int
		peer    int
		lost    int
		text    string
	}{
		{[]int{6}, 2, 6, "no sign of rank 6 (2 of the group) for 1s"},
		{[]int{9}, -1, 9, "no sign of rank 9 for 1s"},
		{[]int{6, 9}, 2, 6, "no sign of ranks 6, 9 for 1s"},
	} {
		r := group.Missing(nil, of, c.missing, time.Second)
		if got := fmt.Sprint(r.Cause(of)); r.Peer != c.peer || r.Lost != c.lost ||
			r.Reason != group.TimedOut ||
			got[:len("timeout: ")+len(c.text)] != "timeout: "+c.text {
			t.Errorf("%v: peer %d, lost %d, %s; want peer %d, lost %d, %s", c.missing, r.Peer,
				r.Lost, got, c.peer, c.lost, c.text)
		}
	}
}
