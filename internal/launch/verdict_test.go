//go:build unix

package launch

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// exits, killedBy are statuses of processes.
func exits(code int) syscall.WaitStatus            { return syscall.WaitStatus(code << 8) }
func killedBy(s syscall.Signal) syscall.WaitStatus { return syscall.WaitStatus(s) }

// after returns the end of a rank so many milliseconds after the start, with its
// last lines.
func after(ms, rank int, status syscall.WaitStatus, lines ...string) ending {
	var t tail
	for _, line := range lines {
		t.add([]byte(line))
	}
	e := ending{rank: rank, Status: status, at: time.UnixMilli(int64(ms))}
	t.tell(&e)
	return e
}

// asked is the end of a rank that the launcher has signalled.
func asked(e ending) ending {
	e.Asked = true
	return e
}

// stopped is the end of a rank that was stopped.
func stopped(e ending) ending {
	e.Asked, e.Stopped = true, true
	return e
}

func TestFoundVerdictNamesTheRankThatFailedFirstInTruth(t *testing.T) {
	term, kill := killedBy(syscall.SIGTERM), killedBy(syscall.SIGKILL)
	const (
		closed = "step 20: rank 0 of run-X: allreduce(sum) of 3 f32 (call 21): because of rank " +
			"1: closed: rank 1 has closed its communicator"
		aborted = "rank 0 of run-X: allreduce(sum) of 3 f32 (call 21): because of rank 1: " +
			"aborted: rank 1 aborted: I do not like it"
		down = "rank 0 of run-X: allreduce(sum): because of rank 1: aborted: rank 1 is down: " +
			"its process ended"
		timeout = "rank 1 of run-X: because of rank 0: timeout: no sign of rank 0 for 1s: " +
			"stopped, busy, or at another point"
	)
	for _, c := range []struct {
		name  string
		ends  []ending
		rank  int
		cause cause
		code  int
		usage bool
	}{
		{name: "panic under a deferred Close, seen after the others",
			ends: []ending{after(0, 0, exits(1), closed), after(1, 2, exits(1), closed),
				after(30, 1, exits(2), "panic: I am broken", "goroutine 1 [running]:")},
			rank: 1, code: 2},
		{name: "panic that comes after the launcher has asked",
			ends: []ending{after(0, 0, exits(1), closed),
				asked(after(1100, 1, exits(2), "panic: I am broken"))},
			rank: 1, code: 2},
		{name: "panic where the others say nothing",
			ends: []ending{after(0, 0, exits(1)), after(5, 1, exits(2), "panic: I am broken"),
				after(6, 2, exits(1))},
			rank: 1, code: 2},
		{name: "panic of a rank because of another",
			ends: []ending{after(0, 2, exits(2), "panic: "+down),
				after(2, 0, exits(2), "error: "+down, "panic: runtime error"),
				after(3, 1, exits(3))},
			rank: 1, code: 3},
		{name: "Abort",
			ends: []ending{after(0, 2, exits(1), aborted), after(1, 0, exits(1), aborted),
				after(2, 1, exits(1),
					"rank 1 of run-X: allreduce(sum): aborted: I do not like it")},
			rank: 1, code: 1},
		{name: "SIGSTOP",
			ends: []ending{after(0, 2, exits(1), timeout), after(1, 1, exits(1), timeout),
				stopped(after(1000, 0, term))},
			rank: 0, cause: causeStopped, code: 1},
		{name: "SIGSTOP, and ranks that wait for each other",
			ends: []ending{after(0, 2, exits(1), "no sign of ranks 0, 1 for 1s"),
				after(1, 1, exits(1), "no sign of rank 2 for 1s"), stopped(after(1000, 0, kill))},
			rank: 0, cause: causeStopped, code: 1},
		{name: "exit 0 in the middle",
			ends: []ending{after(0, 1, exits(0)), after(1, 0, exits(1), down),
				after(2, 2, exits(1), down)},
			rank: 1, cause: causeLeft, code: 1},
		{name: "exit 0 before Init",
			ends: []ending{after(0, 1, exits(0)), after(9000, 0, exits(1), "rendezvous: rank 0: "+
				"join job run-X: rank 1 did not join in time (timeout after 9s): check")},
			rank: 1, cause: causeLeft, code: 1},
		{name: "exit 0 of rank 0 before Init",
			ends: []ending{after(0, 0, exits(0)), after(9000, 1, exits(1), "rendezvous: rank 1: "+
				"join job run-X: rank 0 is missing (timeout after 9s; last attempt: ")},
			rank: 0, cause: causeLeft, code: 1},
		{name: "exit 3",
			ends: []ending{after(0, 0, exits(1), down), after(4, 1, exits(3)),
				after(5, 2, exits(1), down)},
			rank: 1, code: 3},
		{name: "kill -9",
			ends: []ending{after(0, 0, exits(1)), after(4, 1, kill), after(5, 2, exits(1), down)},
			rank: 1, code: 137},
		{name: "ranks that the launcher has ended miss each other",
			ends: []ending{after(0, 1, kill), asked(after(1000, 0, term)),
				asked(after(1001, 2, exits(1), "rank 0 is down: its process ended")),
				asked(after(1001, 3, exits(1), "rank 0 is down: its process ended"))},
			rank: 1, code: 137},
		{name: "a hang",
			ends: []ending{after(0, 0, exits(1), "no sign of rank 1 for 1s"),
				asked(after(1000, 1, term))},
			rank: 1, cause: causeAbsent, code: 1},
		{name: "only rank 0 prints errors",
			ends: []ending{after(0, 2, exits(1)), after(1, 0, exits(1), aborted),
				after(200, 1, exits(4))},
			rank: 1, code: 4},
		{name: "a chain",
			ends: []ending{after(0, 1, exits(1), "because of rank 0: closed"),
				after(1, 2, exits(1), "because of rank 0: closed"), after(2, 0, exits(1),
					"rank 3 is down: EOF"), after(3, 3, exits(7))},
			rank: 3, code: 7},
		{name: "ranks of a group from Split",
			ends: []ending{after(0, 1, exits(1), "rank 1 of run-X/2: because of rank 3 (1 of the "+
				"group): timeout: no sign of rank 3 (1 of the group) for 1s"),
				after(200, 3, exits(5))},
			rank: 3, code: 5},
		{name: "ranks that disagree",
			ends: []ending{after(0, 0, exits(1), "because of rank 1: ranks disagree"),
				after(1, 1, exits(1), "because of rank 0: ranks disagree")},
			rank: 0, code: 1},
		{name: "a failure of which nobody speaks",
			ends: []ending{after(0, 1, exits(0)), after(1, 2, exits(3)),
				asked(after(1000, 0, term)), asked(after(1001, 3, exits(0)))},
			rank: 2, code: 3},
		{name: "a rank that does not exist is blamed",
			ends: []ending{after(0, 0, exits(3), "because of rank 77: closed"),
				after(1, 1, exits(0))},
			rank: 0, code: 3},
		{name: "a wrong command line",
			ends: []ending{after(0, 0, exits(2), "flag provided but not defined: -x"),
				after(1, 1, exits(2), "flag provided but not defined: -x")},
			rank: 0, code: 2, usage: true},
		{name: "a wrong command line, of which other ranks hear by the end of one",
			ends: []ending{after(0, 1, exits(1), "because of rank 0: closed"),
				after(4, 0, exits(2), "use finetune FOLDER"), asked(after(1000, 2, term))},
			rank: 0, code: 2, usage: true},
		{name: "exit 2 because of another rank is no wrong command line",
			ends: []ending{after(0, 1, exits(2), "because of rank 0: closed"),
				after(4, 0, exits(1))},
			rank: 0, code: 1},
		{name: "a panic on every rank is no wrong command line",
			ends: []ending{after(0, 0, exits(2), "panic: x"), after(1, 1, exits(2), "panic: x")},
			rank: 0, code: 2},
	} {
		for _, ends := range [][]ending{c.ends, reversed(c.ends)} {
			v := verdict(ends)
			require.Check(t, v != nil && v.Rank == c.rank && v.cause == c.cause &&
				v.ExitCode() == c.code && v.usage == c.usage, "%s: %+v", c.name, v)
			require.Check(t, (v.Seen != "") == (v.cause != causeEnded), "%s: %q was seen", c.name,
				v.Seen)
		}
	}
	v := verdict([]ending{after(0, 0, exits(0)), asked(after(1, 1, exits(0)))})
	require.Check(t, v == nil, "nobody failed: %+v", v)
}

func reversed(ends []ending) []ending {
	ends = slices.Clone(ends)
	slices.Reverse(ends)
	return ends
}

func TestVerdictSaysHowTheRankFailed(t *testing.T) {
	for _, c := range []struct {
		failed Failed
		want   string
	}{
		{Failed{Rank: 1, Status: exits(3)}, "rank 1 failed: exit status 3"},
		{Failed{Rank: 1, Status: exits(143), Others: []int{0}},
			"rank 1 failed first: exit status 143, as of a program that a signal ended or told " +
				"to end (terminated)\nthen rank 0 failed or was stopped"},
		{Failed{Rank: 1, Status: killedBy(syscall.SIGKILL), Others: []int{0}},
			"rank 1 failed first: signal: killed\nthen rank 0 failed or was stopped"},
		{Failed{Rank: 1, Status: killedBy(syscall.SIGSEGV) | 0x80},
			"rank 1 failed: signal: segmentation fault (core dumped)"},
		{Failed{Rank: 1, cause: causeLeft, Seen: "rank 2: because of rank 1", Others: []int{0, 2}},
			"rank 1 failed first: it ended with exit status 0 while other ranks still needed " +
				"it\nas seen by rank 2: because of rank 1\nthen ranks 0, 2 failed or were stopped"},
		{Failed{Rank: 0, cause: causeStopped}, "rank 0 failed: it was stopped by a " +
			"signal such as SIGSTOP, so the launcher ended it"},
		{Failed{Rank: 0, cause: causeAbsent, Lines: []string{"a", "b"}}, "rank 0 failed: it took " +
			"no part any more, so the launcher ended it; its last lines:\n    a\n    b"},
		{*verdict([]ending{after(0, 0, exits(1), "because of rank 3: aborted: rank 3 is down: EOF"),
			after(1, 1, exits(1))}), "rank 0 failed because of rank 3, on another machine: exit " +
			"status 1; its last lines:\n    because of rank 3: aborted: rank 3 is down: " +
			"EOF\nthen rank 1 failed or was stopped"},
	} {
		require.Equal(t, "Error", c.failed.Error(), c.want)
	}
}

// The texts are made by other packages, whose types are asked here where that is
// possible.
func TestBlameIsReadFromErrors(t *testing.T) {
	missing := &rendezvous.MissingError{Rank: 0, What: "join", Ranks: []int{1, 4},
		Cause: errors.New("timeout")}
	down := &rendezvous.Failure{Rank: 3, Cause: errors.New("EOF")}
	failed := &rendezvous.Failure{Rank: 4, Cause: errors.New("no data"), Declared: true}
	for line, want := range map[string][]int{
		fmt.Sprint("x: ", missing):                                   {1, 4},
		fmt.Sprint("x: ", down):                                      {3},
		fmt.Sprint("x: ", failed):                                    {4},
		"because of rank 2: no sign of ranks 2, 3 for 1s":            {2, 3},
		"no sign of ranks 2 (0 of the group), 3 (1 of it) for 1s":    {2, 3},
		"because of rank 3 (1 of the group): closed":                 {3},
		"rank 3 (1 of the group) is down: EOF":                       {3},
		"because of rank 1: aborted: rank 4 is down: EOF":            {4},
		"because of rank 99999999999999999999: closed":               nil,
		"rank 1 of run-X: closed: Close was called on this rank":     nil,
		"frank 1 is down: to earth":                                  nil,
		"nothing":                                                    nil,
		"euryale: rank 0 failed: exit status 1":                      nil, // of a rank's own job
		strings.Repeat("x", tailLine) + " because of rank 5: closed": {5},
	} {
		require.Slices(t, fmt.Sprintf("%q blames", line), blamed([]byte(line)), want)
	}
}

// TestErrorsOnStandardOutputBlameToo: programs print their errors there, and panic without them.
func TestErrorsOnStandardOutputBlameToo(t *testing.T) {
	r := &tail{}
	r.overhear([]byte("step 3"))
	r.overhear([]byte("error: because of rank 2: ranks disagree"))
	r.overhear([]byte("error: because of rank 1: ranks disagree"))
	r.add([]byte("panic: the end"))
	var e ending
	if r.tell(&e); !slices.Equal(e.blames, []int{1}) || len(e.lines) != 1 {
		t.Errorf("%v blame %v", e.lines, e.blames)
	}
	r.add([]byte("because of rank 3: closed"))
	r.overhear([]byte("because of rank 1: ranks disagree"))
	if r.tell(&e); !slices.Equal(e.blames, []int{3}) {
		t.Errorf("%v blame %v", e.lines, e.blames)
	}
}
