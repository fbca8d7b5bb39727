//go:build !portable

package session

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/backend/tcp"
	"github.com/euryale-ml/euryale/internal/scale"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// recording notes how long the values are that a rank tells all others.
type recording struct {
	rendezvous.Store
	keys  []string
	bytes []int
}

func (s *recording) CompareAndSwap(ctx context.Context, key string, old, new []byte) ([]byte, bool,
	error) {
	if old == nil {
		s.keys, s.bytes = append(s.keys, key), append(s.bytes, len(new))
	}
	return s.Store.CompareAndSwap(ctx, key, old, new)
}

// sockets counts those of this process.
func sockets(t *testing.T) (n int) {
	for _, f := range require.Value(os.ReadDir("/proc/self/fd"))(t) {
		if to, _ := os.Readlink("/proc/self/fd/" + f.Name()); strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

// TestAStartIsAsPredicted: how often ranks tell each other something, how much, and how many
// connections they make. Where they have joined, their notes and nodes are known from that.
func TestAStartIsAsPredicted(t *testing.T) {
	for size, boards := range map[[2]int]int{ // a board of a rank listens
		{1, 6}: 0, {6, 1}: 1, {2, 3}: 3, {4, 2}: 3,
	} {
		machines, devices := size[0], size[1]
		ranks := machines * devices
		before, store := sockets(t), rendezvous.NewMemStore()
		stores, comms := make([]*recording, ranks), make([]*Session, ranks)
		var all sync.WaitGroup
		for r := range ranks {
			stores[r] = &recording{Store: store}
			env := rendezvous.Env{Job: "job", Rank: r, Size: ranks, LocalRank: r % devices,
				LocalSize: devices, Node: r / devices, Token: strings.Repeat("secret", 4),
				Timeout: time.Minute}
			all.Go(func() {
				w, err := rendezvous.New(env, stores[r])
				if err == nil {
					comms[r], err = Connect(t.Context(), w,
						[]backend.Backend{host.Backend{}, tcp.Backend{}}, nil, -1)
				}
				require.Check(t, err == nil, "rank %d of %v: %v", r, size, err)
			})
		}
		all.Wait()
		opened := sockets(t) - before
		var got []int
		for i, key := range stores[ranks-1].keys {
			if strings.Contains(key, "connect") {
				got = append(got, stores[ranks-1].bytes[i])
			}
		}
		want := scale.Rounds(machines, devices)[1:]
		alike := len(got) == len(want)
		for i := 0; alike && i < len(got); i++ {
			alike = 10*max(got[i]-want[i], want[i]-got[i]) <= got[i]
		}
		require.Check(t, alike, "%v: ranks tell each other %v bytes, predicted %v", size, got, want)
		cost := scale.Start(machines, devices, scale.Network{Bandwidth: 1})
		require.Check(t, opened == 2*cost.Connections+ranks*boards, "%v: %d sockets, "+
			"predicted %d connections", size, opened, cost.Connections)
		for _, c := range comms {
			all.Go(func() { c.Close() })
		}
		all.Wait()
	}
}
