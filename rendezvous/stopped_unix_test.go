//go:build unix

package rendezvous

import (
	"fmt"
	"syscall"
	"testing"
)

// limitFiles bounds how many files this process may have open.
func limitFiles(files uint64) {
	var limit syscall.Rlimit
	set(&limit.Cur, files)
	set(&limit.Max, files)
	syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit)
}

// set takes numbers whose sign differs between systems.
func set[N int64 | uint64](to *N, n uint64) { *to = N(n) }

func TestStoppedRankIsNamed(t *testing.T) {
	for _, victim := range []int{0, 2} {
		t.Run(fmt.Sprint("rank", victim), func(t *testing.T) {
			t.Parallel()
			ps := start(t, t.TempDir(), 3, []int{0, 1, 2}, "EURYALE_TIMEOUT=1s")
			for _, p := range ps {
				p.expect(t, long, "joined")
			}
			ps[victim].signal(syscall.SIGSTOP)
			delete(ps, victim)
			for _, p := range ps {
				p.say("barrier")
			}
			for _, p := range ps {
				p.expect(t, long, "barrier", fmt.Sprintf("rank %d", victim), "timeout after 1s")
			}
		})
	}
}
