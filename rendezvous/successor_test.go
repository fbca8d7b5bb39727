package rendezvous

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// leaveInTurn has ranks leave, one after the other, while all others stay.
func leaveInTurn(t *testing.T, ps map[int]*process, ranks ...int) {
	t.Helper()
	for _, r := range ranks {
		ps[r].say("leave")
		ps[r].expect(t, long, "left")
		ps[r].cmd.Wait()
		delete(ps, r)
	}
}

func TestFoundKilledRankIsNamedAfterRank0HasLeft(t *testing.T) {
	for name, c := range map[string]struct {
		leave  []int
		victim int
		vars   []string
	}{
		"another rank":                {[]int{0}, 3, nil},
		"another rank, by an address": {[]int{0}, 3, machines(t)},
		"the rank that serves":        {[]int{0}, 1, nil},
		"after two servers have left": {[]int{0, 1}, 3, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ps := start(t, t.TempDir(), 4, []int{0, 1, 2, 3}, c.vars...)
			for _, p := range ps {
				p.expect(t, long, "joined")
			}
			leaveInTurn(t, ps, c.leave...)
			ps[c.victim].signal(syscall.SIGKILL)
			for r, p := range ps {
				if r != c.victim {
					p.expect(t, notice, fmt.Sprintf("down %d", c.victim), "ended or was killed")
				}
			}
		})
	}
}

func TestRanksLeaveAfterRank0WithoutAFailure(t *testing.T) {
	t.Parallel()
	ps := start(t, t.TempDir(), 4, []int{0, 1, 2, 3})
	for _, p := range ps {
		p.expect(t, long, "joined")
	}
	leaveInTurn(t, ps, 0)
	for _, p := range ps {
		p.say("leave")
	}
	for r, p := range ps {
		p.expect(t, long, "left")
		line, more := <-p.lines
		require.Check(t, !more, "rank %d said %q", r, line)
	}
}

func TestFailReachesEveryRankAfterRank0HasLeft(t *testing.T) {
	t.Parallel()
	all := over(t, stores["tcp"](t, 4))
	all[0].Close()
	require.Report(t, all[2].Fail(fmt.Errorf("no more")))
	for _, w := range all[1:] {
		<-w.Down()
		if f := w.Failure(); f.Rank != 2 || !strings.Contains(f.Error(), "no more") {
			t.Errorf("rank %d: %v", w.Rank, f)
		}
	}
	each(all[1:], func(w *World) { w.Close() })
}
