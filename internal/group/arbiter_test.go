package group_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// step is an event that comes at ms, and what it must lead to.
type step struct {
	ms    int
	event group.Event
	state group.State
	end   string // part of the error of the end, "" if there is none
	peer  int    // who is to blame for the end
}

// The group of these tests is ranks 4, 5, 6 of a job, and this rank is number 1. It waits for
// others up to 1 s.
var (
	begun  = func(n ...uint64) []uint64 { return n }
	closed = func(ranks ...int) []bool {
		all := make([]bool, 3)
		for _, r := range ranks {
			all[r] = true
		}
		return all
	}
	aborted  = &group.Report{Reason: group.Aborted, Rank: 2, Peer: 2, Text: "no more data"}
	mismatch = group.Report{Reason: group.Mismatch, Peer: 0, Sides: [2]int{1, 0}}
	down     = group.Down{Failure: &rendezvous.Failure{Rank: 6, Cause: errors.New("killed")}}
	outside  = group.Down{Failure: &rendezvous.Failure{Rank: 9, Cause: errors.New("killed")}}
)

// differsIn is the report of a difference in a call.
func differsIn(seq uint64) *group.Report {
	r := mismatch
	h := backend.Header{Seq: seq}
	h.Put(&r.Mine)
	return &r
}

func wants(n uint64, b []uint64) group.Look {
	return group.Look{Wants: n, Begun: b, Closed: closed()}
}

func TestVerdicts(t *testing.T) {
	absent := wants(3, begun(3, 3, 2))
	left := group.Look{Wants: 3, Begun: begun(3, 3, 2), Closed: closed(2)}
	heard := group.Look{Wants: 3, Begun: begun(3, 3, 2), Closed: closed(), Reported: aborted}
	stopped := group.Look{Wants: 3, Begun: begun(2, 3, 2), Closed: closed(),
		Stopped: []rendezvous.Process{{Rank: 6, PID: 42}}}
	owed := func(sure bool) group.Look {
		return group.Look{Wants: 3, Begun: begun(3, 3, 3), Closed: closed(), Stragglers: []int{2},
			Sure: sure}
	}
	both := group.Look{Wants: 3, Begun: begun(2, 3, 3), Closed: closed(), Stragglers: []int{2},
		Sure: true}
	cause := errors.New("no more data")
	for _, c := range []struct {
		name  string
		steps []step
	}{
		{"a rank that is down", []step{{0, down, group.Ended, "rank 6 is down: killed", 2}}},
		{"a rank outside the group that is down",
			[]step{{0, outside, group.Ended, "rank 9 is down: killed", -1}}},
		{"Abort", []step{{0, group.Abort{Cause: cause}, group.Ended, "aborted: no more data", 1}}},
		{"Abort because of another rank", []step{{0, group.Abort{Cause: down.Failure}, group.Ended,
			"rank 6 is down: killed", 2}}},
		{"Close", []step{{0, group.Close{}, group.Ended, "closed: Close was called on this rank",
			-1}}},
		{"calls that differ", []step{{0, group.Found{Report: mismatch}, group.Ended,
			"ranks disagree: rank 5 (1 of the group)", 0}}},
		{"nothing after the end", []step{
			{0, group.Abort{Cause: cause}, group.Ended, "no more data", 1},
			{1, down, group.Ended, "", 0}, {2, group.Close{}, group.Ended, "", 0}, {5000, absent,
				group.Ended, "", 0}}},

		{"a rank that is absent", []step{
			{0, absent, group.Working, "", 0}, {999, absent, group.Working, "", 0}, {1000, absent,
				group.Working, "", 0},
			{1099, absent, group.Working, "", 0}, {1100, absent, group.Ended,
				"no sign of rank 6 (2 of the group) for 1s", 2}}},
		{"a rank that is absent, though another one is ahead and so has heard it", []step{
			{0, wants(3, begun(4, 3, 2)), group.Working, "", 0}, {999, wants(3, begun(4, 3, 2)),
				group.Working, "", 0},
			{1000, wants(3, begun(4, 3, 2)), group.Ended,
				"no sign of rank 6 (2 of the group) for 1s", 2}}},
		{"a rank that is absent, and then another rank reports whom that one waits for", []step{
			{0, absent, group.Working, "", 0}, {1000, absent, group.Working, "", 0}, {1060, heard,
				group.Ended, "no more data", 2}}},
		{"a rank that is absent, and then is lost", []step{
			{0, absent, group.Working, "", 0}, {1000, absent, group.Working, "", 0}, {1060, outside,
				group.Ended, "rank 9 is down", -1}}},
		{"two ranks that are absent", []step{
			{0, wants(3, begun(2, 3, 2)), group.Working, "", 0}, {1000, wants(3, begun(2, 3, 2)),
				group.Working, "", 0},
			{1100, wants(3, begun(2, 3, 2)), group.Ended,
				"no sign of ranks 4, 6 (0, 2 of the group)", 0}}},
		{"a stopped rank rather than the first that is absent", []step{
			{0, stopped, group.Working, "", 0}, {999, stopped, group.Working, "", 0},
			{1000, stopped, group.Ended, "no sign of rank 6 (2 of the group) for 1s: its process " +
				"42 is stopped", 2}}},
		{"a rank that is absent, and comes after all", []step{
			{0, absent, group.Working, "", 0}, {1000, absent, group.Working, "", 0},
			{1099, wants(4, begun(4, 4, 3)), group.Working, "", 0},
			{2198, wants(4, begun(4, 4, 3)), group.Working, "", 0}, {2199, wants(4, begun(4, 4, 3)),
				group.Ended, "no sign", 2}}},
		{"all take part, and one has not sent what it waits for nobody to send", []step{
			{0, owed(true), group.Working, "", 0}, {999, owed(true), group.Working, "", 0},
			{1000, owed(true), group.Ended, "no sign of rank 6", 2}}},
		{"all take part, and one has not sent what it may miss a part of", []step{
			{0, owed(false), group.Working, "", 0}, {1000, owed(false), group.Working, "", 0},
			{1099, owed(false), group.Working, "", 0},
			{1100, owed(false), group.Ended, "no sign of rank 6", 2}}},
		{"what was late a call before", []step{
			{0, owed(true), group.Working, "", 0},
			{5000, group.Look{Wants: 4, Begun: begun(4, 4, 4), Closed: closed(),
				Stragglers: []int{2},
				Sure:       true}, group.Working, "", 0}}},
		{"who is absent, before who has not sent", []step{
			{0, both, group.Working, "", 0}, {1000, both, group.Working, "", 0}, {1100, both,
				group.Ended, "no sign of rank 4", 0}}},
		{"all take part, and nothing goes on", []step{
			{0, wants(3, begun(3, 3, 3)), group.Working, "", 0},
			{1000, wants(3, begun(3, 3, 3)), group.Ended, "every rank has started the call", -1}}},
		{"every call has its own time", []step{
			{0, absent, group.Working, "", 0}, {900, wants(4, begun(4, 4, 3)), group.Working,
				"", 0},
			{1899, wants(4, begun(4, 4, 3)), group.Working, "", 0}, {1900, wants(4, begun(4, 4, 3)),
				group.Working, "", 0},
			{2000, wants(4, begun(4, 4, 3)), group.Ended, "no sign", 2}}},
		{"a rank that waits for nothing has all the time", []step{
			{0, wants(0, begun(3, 3, 2)), group.Working, "", 0}, {5000, wants(0, begun(3, 3, 2)),
				group.Working, "", 0},
			{5010, absent, group.Working, "", 0}, {6000, absent, group.Working, "", 0},
			{6010, absent, group.Working, "", 0},
			{6110, absent, group.Ended, "no sign", 2}}},

		{"a rank that has closed without taking part", []step{
			{0, left, group.Doubting, "", 0}, {99, left, group.Doubting, "", 0},
			{100, left, group.Ended, "closed: rank 6 (2 of the group) has closed", 2}}},
		{"a rank that has closed after it took part", []step{
			{0, group.Look{Wants: 3, Begun: begun(2, 3, 3), Closed: closed(2)}, group.Working, "",
				0}}},
		{"a rank that has closed is nobody's concern who waits for nothing", []step{
			{0, group.Look{Begun: begun(3, 3, 2), Closed: closed(2)}, group.Working, "", 0}}},
		{"closed, and then its reason is heard of", []step{
			{0, left, group.Doubting, "", 0}, {50, down, group.Ended, "rank 6 is down", 2}}},
		{"closed, and then another rank reports", []step{
			{0, left, group.Doubting, "", 0}, {50, heard, group.Ended, "no more data", 2}}},
		{"closed, and then calls differ", []step{
			{0, left, group.Doubting, "", 0}, {50, group.Found{Report: mismatch}, group.Ended,
				"disagree", 0}}},
		{"the first of two doubts", []step{
			{0, left, group.Doubting, "", 0},
			{50, group.Found{Report: group.Report{Reason: group.Aborted, Text: "other"},
				Doubt: time.Second}, group.Doubting, "", 0},
			{100, wants(0, begun(3, 3, 3)), group.Ended, "has closed", 2}}},
		{"a finding that stays in doubt", []step{
			{0, group.Found{Report: group.Report{Reason: group.Aborted, Peer: 1,
				Text: "a phase failed"}, Doubt: time.Second}, group.Doubting, "", 0},
			{1000, absent, group.Ended, "a phase failed", 1}}},

		{"a report ends what not all have begun",
			[]step{{0, heard, group.Ended, "aborted: no more data", 2}}},
		{"a report lets what all have begun finish", []step{
			{0, group.Look{Wants: 2, Begun: begun(3, 3, 2), Closed: closed(), Reported: aborted},
				group.Finishing, "", 0},
			{10, group.Look{Wants: 2, Begun: begun(3, 3, 3), Closed: closed(), Reported: aborted},
				group.Finishing, "", 0},
			{20, heard, group.Ended, "no more data", 2}}},
		{"but not for long", []step{
			{0, group.Look{Wants: 2, Begun: begun(3, 3, 2), Closed: closed(), Reported: aborted},
				group.Finishing, "", 0},
			{50, wants(2, begun(3, 3, 2)), group.Ended, "no more data", 2}}},
		{"a report of calls that differ lets nothing finish", []step{
			{0, group.Look{Wants: 2, Begun: begun(3, 3, 3), Closed: closed(), Reported: &mismatch},
				group.Ended, "disagree", 0}}},
		{"calls before those that differ may finish", []step{
			{0, group.Look{Wants: 2, Begun: begun(3, 3, 3), Closed: closed(),
				Reported: differsIn(3)}, group.Finishing, "", 0},
			{200, wants(2, begun(3, 3, 3)), group.Finishing, "", 0}, {210, wants(3, begun(3, 3, 3)),
				group.Ended, "disagree", 0}}},
		{"calls before those that differ finish soon or never", []step{
			{0, group.Look{Wants: 2, Begun: begun(3, 3, 3), Closed: closed(),
				Reported: differsIn(3)}, group.Finishing, "", 0},
			{250, wants(2, begun(3, 3, 3)), group.Ended, "disagree", 0}}},
		{"a report, and then the job loses a rank", []step{
			{0, group.Look{Wants: 2, Begun: begun(3, 3, 2), Closed: closed(), Reported: aborted},
				group.Finishing, "", 0},
			{10, outside, group.Ended, "rank 9 is down", -1}}},
		{"a report is heard by who waits for nothing", []step{
			{0, group.Look{Begun: begun(3, 3, 2), Closed: closed(), Reported: aborted}, group.Ended,
				"no more data", 2}}},
	} {
		t.Run(c.name, func(t *testing.T) { play(t, c.steps) })
	}
}

func play(t *testing.T, steps []step) {
	m := group.NewArbiter(1, backend.Members{4, 5, 6}, time.Second)
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for i, s := range steps {
		end := m.Step(start.Add(time.Duration(s.ms)*time.Millisecond), s.event)
		if m.State() != s.state || (end != nil) != (s.end != "") {
			t.Fatalf("step %d leads to state %d and %+v, want state %d and %q", i, m.State(), end,
				s.state, s.end)
		}
		if end == nil {
			continue
		}
		require.Check(t, strings.Contains(end.Cause.Error(), s.end) && end.Report.Peer == s.peer,
			"step %d ends with peer %d, %v; want peer %d, %q", i, end.Report.Peer, end.Cause,
			s.peer, s.end)
		require.Check(t, !end.Publish || end.Report.Rank == 1, "step %d reports as rank %d", i,
			end.Report.Rank)
	}
}

// TestWhoWaitsIsNotBlamed: of three machines of two ranks, machine 1 is not heard any more. Machine
// 0 misses what machine 2 has still got of it, so machine 2 waits for machine 0. All name machine
// 1, whoever looks first.
func TestWhoWaitsIsNotBlamed(t *testing.T) {
	const (
		timeout = 1000 // in ms
		news    = 60   // until the others see a report: settleTime, and a little for its way
		pause   = 5    // between looks
	)
	waiters := [2]int{0, 5}
	all := begun(7, 7, 7, 7, 7, 7)
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for name, looks := range map[string][2]group.Look{ // of waiters
		"a call ahead of it": {{Wants: 7, Begun: begun(7, 7, 6, 6, 8, 8)},
			{Wants: 8, Begun: begun(7, 7, 7, 7, 8, 8)}},
		"a call ahead of it, as it is": {{Wants: 7, Begun: begun(7, 7, 6, 6, 8, 8)},
			{Wants: 8, Begun: begun(7, 7, 8, 8, 8, 8)}},
		"in the same call": {{Wants: 7, Begun: all, Stragglers: []int{2, 3}, Sure: true},
			{Wants: 7, Begun: all, Stragglers: []int{0, 1}}},
	} {
		for _, first := range [][2]int{{0, 0}, {10, 0}, {30, 0}, {0, 20}} { // ms of the first looks
			var report *group.Report
			blamed, published := [2]int{-1, -1}, 0
			var machines [2]group.Arbiter
			for i, r := range waiters {
				machines[i] = group.NewArbiter(r, backend.Members{0, 1, 2, 3, 4, 5},
					timeout*time.Millisecond)
			}
			for ms := range 2 * timeout {
				for i, l := range looks {
					if ms < first[i] || (ms-first[i])%pause > 0 {
						continue
					}
					l.Closed = make([]bool, len(l.Begun))
					if report != nil && ms >= published+news {
						l.Reported = report
					}
					end := machines[i].Step(start.Add(time.Duration(ms)*time.Millisecond), l)
					if end == nil {
						continue
					}
					blamed[i] = end.Report.Peer
					if report == nil {
						report, published = &end.Report, ms
					}
				}
			}
			require.Check(t, blamed == [2]int{2, 2}, "machine 2 is %s, first looks %v: ranks %v "+
				"blame %v, want rank 2", name, first, waiters, blamed)
		}
	}
}

// What this rank finds it tells, what it hears or does for itself alone it does not.
func TestOwnFindingsArePublished(t *testing.T) {
	for _, c := range []struct {
		event   group.Event
		publish bool
	}{
		{down, true},
		{group.Abort{Cause: errors.New("no more data")}, true},
		{group.Found{Report: mismatch}, true},
		{group.Close{}, false},
		{group.Look{Begun: begun(0, 0, 0), Closed: closed(), Reported: aborted}, false},
	} {
		m := group.NewArbiter(1, backend.Members{4, 5, 6}, time.Second)
		if end := m.Step(time.Now(), c.event); end == nil || end.Publish != c.publish {
			t.Errorf("%T: %+v, want it published: %v", c.event, end, c.publish)
		}
	}
}

func TestDeadlineIsWhenTimeAloneChangesTheState(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	m := group.NewArbiter(1, backend.Members{4, 5, 6}, time.Second)
	d := m.Deadline()
	require.Check(t, d.IsZero(), "a rank that waits for nothing has a deadline, %v", d)
	m.Step(start, wants(3, begun(3, 3, 2)))
	require.Equal(t, "waiting, it is after", m.Deadline().Sub(start), time.Second)
	m.Step(start, group.Look{Wants: 3, Begun: begun(3, 3, 2), Closed: closed(2)})
	require.Equal(t, "in doubt, it is after", m.Deadline().Sub(start), 100*time.Millisecond)
	require.Check(t, m.Step(m.Deadline(), wants(0, begun(3, 3, 2))) != nil,
		"nothing happens at the deadline")
}

func TestLongWaitsAreSaidBeforeTheTimeout(t *testing.T) {
	for _, c := range []struct {
		timeout, waited time.Duration
		look            group.Look
		want            []int
	}{
		{time.Minute, 19 * time.Second, wants(3, begun(2, 3, 3)), nil},
		{time.Minute, 20 * time.Second, wants(3, begun(2, 3, 3)), []int{0}},
		{time.Minute, 20 * time.Second, wants(3, begun(2, 3, 2)), []int{0, 2}},
		{time.Minute, 20 * time.Second, wants(3, begun(3, 3, 3)), nil}, // for its device
		{time.Minute, 20 * time.Second, wants(0, begun(2, 3, 2)), nil},
		{20 * time.Second, 20 * time.Second, wants(3, begun(2, 3, 3)), nil},
		{5 * time.Minute, 99 * time.Second, wants(3, begun(2, 3, 3)), nil},
		{5 * time.Minute, 100 * time.Second, wants(3, begun(2, 3, 3)), []int{0}},
	} {
		m, start := group.NewArbiter(1, backend.Members{4, 5, 6}, c.timeout), time.Unix(0, 0)
		now := start.Add(c.waited)
		m.Step(start, c.look)
		m.Step(now, c.look)
		for i, want := range [][]int{c.want, nil} {
			got, waited := m.Awaited(now, &c.look)
			if !slices.Equal(got, want) || got != nil && waited != c.waited {
				t.Errorf("%v of %v, time %d: %v after %v, want %v",
					c.waited, c.timeout, i, got, waited, want)
			}
		}
	}
}
