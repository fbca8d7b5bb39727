//go:build unix

package group_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/shm"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// works posts calls on the boards of ranks, from one number to another, and waits until they
// are compared.
func works(t *testing.T, bs []*group.Sockets, from, to uint64) {
	t.Helper()
	for seq := from; seq <= to; seq++ {
		for _, b := range bs {
			b.Post(header(seq, 8), true)
		}
	}
	for _, b := range bs {
		compares(t, b, to, to)
	}
}

func TestSocketsOutliveTheirServers(t *testing.T) {
	for name, end := range map[string]func(b *group.Sockets){
		"killed":   (*group.Sockets).Kill,
		"released": func(b *group.Sockets) { b.Release() },
	} {
		t.Run(name, func(t *testing.T) {
			bs := sockets(t, 8, time.Minute)
			works(t, bs, 1, 100)
			bs[7].Note(1, []byte("before"))
			require.Soon(t, "the note", func() bool { _, ok := bs[0].Noted(7, 1); return ok })
			bs[0].Close()
			require.Soon(t, "rank 0 has closed", func() bool { return bs[6].Closed(0) })
			end(bs[0])
			bs[7].Post(header(101, 8), true)
			require.Soon(t, "what is begun after rank 0 is gone", func() bool {
				bs[5].Compare(101)
				return bs[5].Begun(7) == 101
			})
			s := bs[5].Server()
			require.Check(t, s == 1, "rank %d serves", s)
			end(bs[1])
			bs[7].Note(2, []byte("after"))
			require.Soon(t, "the note after two servers are gone", func() bool {
				_, ok := bs[4].Noted(7, 2)
				return ok
			})
			bs[3].Publish(group.Report{Reason: group.Aborted, Rank: 3, Peer: 3, Text: "no more"})
			for r, b := range bs[2:] {
				require.Soon(t, "the report", func() bool { _, ok := b.Reported(); return ok })
				if b.Begun(7) != 101 || !b.Closed(0) || b.Begun(0) != 100 || b.Server() != 2 {
					t.Errorf("rank %d knows of %d calls of rank 7, %d of rank 0, closed %v, and "+
						"follows %d", r+2, b.Begun(7), b.Begun(0), b.Closed(0), b.Server())
				}
			}
		})
	}
}

// A rank that serves may be gone before the others have connected to it.
func TestSocketsTellOfAServerThatLeftFirst(t *testing.T) {
	bs, addrs := unopened(t, 3, time.Minute)
	bs[0].Open(addrs)
	bs[0].Close()
	require.Report(t, bs[0].Release())
	for r, b := range bs[1:] {
		b.Open(addrs)
		require.Soon(t, "rank 0 has closed", func() bool { return b.Closed(0) })
		s := b.Server()
		require.Check(t, s != 0, "rank %d follows rank %d, which is gone", r+1, s)
	}
}

// What a rank that serves says last does not depend on its own way to its hub, which may be late.
func TestSocketsTellOfAServerThatDoesNotReachItself(t *testing.T) {
	bs, addrs := unopened(t, 3, time.Minute)
	nobody := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer nobody.Close()
	for r, b := range bs {
		theirs := slices.Clone(addrs)
		if r == 0 {
			theirs[0] = nobody.Addr().String()
		}
		b.Open(theirs)
	}
	for _, b := range bs {
		b.Post(header(1, 8), true)
	}
	for r, b := range bs[1:] {
		require.Soon(t, "rank 0 has heard the others", func() bool {
			b.Compare(1)
			return b.Begun(2-r) == 1
		})
	}
	bs[0].Close()
	require.Report(t, bs[0].Release())
	for _, b := range bs[1:] {
		require.Soon(t, "rank 0 has closed", func() bool { return b.Closed(0) })
		compares(t, b, 1, 1)
	}
}

// A process that is stopped while it leaves says afterwards what it has to say.
func TestSocketsTellOfAServerThatWasStoppedAsItLeft(t *testing.T) {
	bs, addrs := unopened(t, 2, time.Minute)
	way := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	bs[0].Open([]string{addrs[0], way.Addr().String()})
	var all sync.WaitGroup
	all.Go(func() {
		conn, err := way.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		out, err := exec.Command("sh", "-c",
			"kill -STOP $PPID; sleep .7; kill -CONT $PPID").CombinedOutput()
		require.Check(t, err == nil, "stop this process: %v: %s", err, out)
		there, err := net.Dial("tcp", addrs[1])
		if err != nil {
			t.Error(err)
			return
		}
		all.Go(func() { io.Copy(conn, there) })
		io.Copy(there, conn)
		there.Close()
	})
	bs[0].Close()
	require.Report(t, errors.Join(bs[0].Release(), way.Close()))
	bs[1].Open(addrs)
	require.Soon(t, "rank 0 has closed", func() bool { return bs[1].Closed(0) })
	all.Wait()
}

// Servers lose their ranks again and again, while these call.
func TestSocketsCompareAcrossServers(t *testing.T) {
	bs := sockets(t, 5, time.Minute)
	const each = 300
	for r := range 3 {
		works(t, bs, uint64(r*each+1), uint64(r*each+each/2))
		for seq := uint64(r*each + each/2 + 1); seq <= uint64((r+1)*each); seq++ {
			for _, b := range bs {
				b.Post(header(seq, 8), true)
			}
			if seq%100 == 0 { // while calls are on their way
				bs[bs[0].Server()].Cut()
			}
		}
		for _, b := range bs {
			compares(t, b, uint64((r+1)*each), uint64((r+1)*each))
		}
	}
	for r, b := range bs {
		b.Post(header(3*each+1, r/4), true)
	}
	for r, b := range bs {
		d := differs(t, b, 3*each+1, 3*each+1)
		require.Check(t, d.Peer == 4, "rank %d differs from rank %d", r, d.Peer)
	}
}

func TestSocketsFindTheFirstDifference(t *testing.T) {
	for _, call := range []uint64{1, 64, 1000} {
		t.Run(fmt.Sprint(call), func(t *testing.T) {
			bs := sockets(t, 8, time.Minute)
			require.NoError(t, testranks.All(8, func(r int) error {
				for seq := uint64(1); seq <= call+100; seq++ {
					count := 8
					if r == 5 && seq >= call {
						count = 9
					}
					bs[r].Post(header(seq, count), true)
					if seq%50 == 0 {
						bs[r].Compare(seq)
					}
				}
				return nil
			}))
			for r, b := range bs {
				d := differs(t, b, call+100, call)
				mine, theirs := backend.GetHeader(&d.Mine), backend.GetHeader(&d.Theirs)
				require.Check(t, mine.Seq == call && theirs.Seq == call && mine.Count == 8 &&
					theirs.Count == 9 && d.Peer == 5 && d.Sides == [2]int{0, 5}, "rank %d: rank "+
					"%d is to blame: %v and %v of %v", r, d.Peer, mine, theirs, d.Sides)
			}
		})
	}
}

// A server that is stopped is left, and follows when it goes on.
func TestSocketsLeaveAStoppedServer(t *testing.T) {
	bs := sockets(t, 4, 2*time.Second) // so half a second of silence
	works(t, bs, 1, 10)
	proceed := bs[0].Stall()
	for _, b := range bs[1:] {
		b.Post(header(11, 8), true)
	}
	require.Soon(t, "rank 3 knows what rank 2 has begun", func() bool {
		bs[3].Compare(11)
		return bs[3].Begun(2) == 11
	})
	s := bs[3].Server()
	require.Check(t, s == 1, "rank %d serves", s)
	if !bs[3].Misses(0) || bs[3].Misses(1) {
		t.Errorf("whoever leaves waits for rank 0: %v, tells rank 1: %v", !bs[3].Misses(0),
			!bs[3].Misses(1))
	}
	if n, d := bs[3].Compare(11); n != 10 || d != nil || bs[3].Begun(0) != 10 {
		t.Errorf("compared up to %d, %v; rank 0 has begun %d", n, d, bs[3].Begun(0))
	}
	proceed()
	bs[0].Post(header(11, 8), true)
	for _, b := range bs {
		compares(t, b, 11, 11)
	}
	require.Soon(t, "rank 1 hears rank 0", func() bool { return !bs[1].Misses(0) })
}

// Whoever leaves has an error to report, and a lost rank never says goodbye: neither to the rank
// that serves it, nor as the server of others. Who leaves a dissolved world says none.
func TestSocketsLeaveWithoutWaitingForALostRank(t *testing.T) {
	for _, dissolved := range []bool{false, true} {
		for _, lost := range []int{0, 2} {
			t.Run(fmt.Sprintf("rank %d lost, dissolved %t", lost, dissolved), func(t *testing.T) {
				leavesWithout(t, lost, dissolved)
			})
		}
	}
}

func leavesWithout(t *testing.T, lost int, dissolved bool) {
	const trials = 3 // of which one runs without a pause of this machine
	fastest := time.Hour
	for range trials {
		bs := sockets(t, 4, time.Minute)
		works(t, bs, 1, 10)
		proceed := bs[lost].Stall()
		if !dissolved {
			bs[lost].World().Fail(errors.New("stopped"))
		}
		var longest time.Duration
		for r, b := range bs {
			if dissolved {
				b.World().Dissolve()
			} else {
				<-b.World().Down()
			}
			if r == lost {
				continue
			}
			start := time.Now()
			require.Report(t, b.Release())
			longest = max(longest, time.Since(start))
		}
		fastest = min(fastest, longest)
		proceed()
	}
	require.Check(t, fastest < group.PartTime,
		"a rank leaves after %v: it has waited for the lost one", fastest)
}

// watched returns the members of a group of sockets, with a watchdog that compares their calls.
func watched(t *testing.T, size int, timeout time.Duration) ([]*group.Member, []*group.Sockets) {
	t.Helper()
	bs := sockets(t, size, timeout)
	of := make(backend.Members, size)
	for r := range of {
		of[r] = r
	}
	all := make([]*group.Member, size)
	for r, b := range bs {
		all[r] = group.NewMember(group.Config{Name: "test", Rank: r, Members: of, World: b.World(),
			Health: b})
		all[r].Watch(comparer{b})
	}
	t.Cleanup(func() {
		for _, m := range all {
			m.Leave()
		}
	})
	return all, bs
}

// comparer is an engine whose calls are done once they are compared.
type comparer struct{ *group.Sockets }

func (c comparer) Wants() uint64 {
	if n, _ := c.Compare(0); n < c.Posted() {
		return n + 1
	}
	return 0
}

func (c comparer) Advance() error {
	if _, d := c.Compare(c.Posted()); d != nil {
		return d.Differs()
	}
	return nil
}

func (comparer) Stop() {}

func TestGroupOverSocketsEnds(t *testing.T) {
	for _, c := range []struct {
		name   string
		ends   func(ms []*group.Member, bs []*group.Sockets) // after all have begun 70 calls
		want   string
		is     error
		spared int // a rank that ends otherwise, or -1
	}{
		{"a rank aborts while others wait", func(ms []*group.Member, bs []*group.Sockets) {
			for _, b := range bs[:7] {
				b.Post(header(71, 8), true)
			}
			ms[7].Abort(errors.New("no \x1b[31mmore"))
		}, `no `, backend.ErrAborted, -1},
		{"a rank closes early", func(ms []*group.Member, bs []*group.Sockets) {
			ms[2].Close()
			for r, b := range bs {
				if r != 2 {
					b.Post(header(71, 8), true)
				}
			}
		}, "rank 2 has closed its communicator without taking part", backend.ErrClosed, 2},
		{"the server closes early and is gone", func(ms []*group.Member, bs []*group.Sockets) {
			ms[0].Close()
			ms[0].Leave()
			bs[0].Release()
			for _, b := range bs[1:] {
				b.Post(header(71, 8), true)
			}
		}, "rank 0 has closed its communicator without taking part", backend.ErrClosed, 0},
		{"calls differ", func(ms []*group.Member, bs []*group.Sockets) {
			for r, b := range bs {
				b.Post(header(71, 8+r/7), true)
			}
		}, "ranks disagree", backend.ErrMismatch, -1},
		{"a rank does not come", func(ms []*group.Member, bs []*group.Sockets) {
			for _, b := range bs[:7] {
				b.Post(header(71, 8), true)
			}
		}, "no sign of rank 7 for 2s", backend.ErrTimeout, -1},
		{"the server does not come", func(ms []*group.Member, bs []*group.Sockets) {
			for _, b := range bs[1:] {
				b.Post(header(71, 8), true)
			}
		}, "no sign of rank 0 for 2s", backend.ErrTimeout, -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			ms, bs := watched(t, 8, 2*time.Second)
			works(t, bs, 1, 70)
			c.ends(ms, bs)
			for r, m := range ms {
				if r != c.spared {
					ended(t, m, c.want, c.is)
				}
			}
		})
	}
}

func TestSocketsOfOneRank(t *testing.T) {
	b := sockets(t, 1, time.Minute)
	works(t, b, 1, 200)
	require.Check(t, b[0].Leave(time.Minute), "it does not leave together with itself")
}

// BenchmarkPost also reports the time of the processor, in which other programs have no part.
func BenchmarkPost(b *testing.B) {
	share := require.Value(shm.New("/dev/shm", group.MemoryBytes(2)))(b)
	for name, board := range map[string]group.Board{"memory": group.NewMemory(share, 0, 2),
		"sockets": sockets(b, 2, time.Minute)[0]} {
		b.Run(name, func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			h := header(1, 8)
			start := threadTime()
			for i := range b.N {
				h.Seq = uint64(i + 1)
				board.Post(h, true)
			}
			b.ReportMetric(float64(threadTime()-start)/float64(b.N), "cpu-ns/op")
		})
	}
}

// threadTime returns the time that this thread has had a processor.
func threadTime() time.Duration {
	var t unix.Timespec
	unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return time.Duration(t.Nano())
}

// BenchmarkSocketsJoin is the time from the post of a call on all ranks until all know that
// it is the same.
func BenchmarkSocketsJoin(b *testing.B) {
	for _, size := range []int{2, 8} {
		b.Run(fmt.Sprintf("%d ranks", size), func(b *testing.B) {
			bs := sockets(b, size, time.Minute)
			b.ResetTimer()
			testranks.Each(size, func(r int) error {
				for i := range b.N {
					seq := uint64(i + 1)
					bs[r].Post(header(seq, 8), true)
					for n, _ := bs[r].Compare(seq); n < seq; n, _ = bs[r].Compare(seq) {
						time.Sleep(20 * time.Microsecond)
					}
				}
				return nil
			})
		})
	}
}
