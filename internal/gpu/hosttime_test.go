package gpu

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/shm"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// instant is a device, its queue and its library in one. Everything that is started on it is done
// at once and costs nothing, so what remains of a call is the host's work. What a call does not
// use is nil.
type instant struct {
	Device
	queue
	library
}

type queue = stream // whose method has the name of the interface

func (*instant) Recording() *backend.Recording                { return nil }
func (*instant) Joined(backend.Event) bool                    { return true }
func (*instant) Name() string                                 { return "instant" }
func (d *instant) Default() backend.Queue                     { return d }
func (*instant) Alloc(int) (b backend.Buffer, err error)      { return b, nil }
func (*instant) Bind() (func(), error)                        { return func() {}, nil }
func (*instant) Holds(uintptr) bool                           { return true }
func (*instant) Close() error                                 { return nil }
func (*instant) Stream() uintptr                              { return 1 }
func (*instant) Exchange(*peers.Peers, *peers.PeerCall) error { return nil }
func (*instant) EventDone(uintptr) (bool, error)              { return true, nil }

// instantGroup returns ranks on such devices, with what Init puts around a communicator.
func instantGroup(t testing.TB, size int) (ranks []backend.Communicator) {
	worlds := require.Value(rendezvous.Local(size, time.Minute))(t)
	share := require.Value(shm.New(t.TempDir(), group.MemoryBytes(size)))(t)
	infos := make([]rankInfo, size)
	for r := range infos {
		infos[r] = rankInfo{Model: h200, Wires: wiring{Bus: fmt.Sprint(r), Switches: 18}}
	}
	plan, why := decide(Options{Table: prototype()}.settings(), infos)
	if why != "" {
		t.Fatal(why)
	}
	for r, w := range worlds {
		d := &instant{}
		c := newComm(&groupState{world: w, timeout: time.Minute, lib: d, dev: d}, group.Whole(w),
			group.NewMemory(share, r, size), newChoice(plan, ""))
		c.events, c.last = make([]uintptr, eventSlots), d
		t.Cleanup(func() {
			c.member.Leave()
			require.NoError(t, w.Close())
		})
		ranks = append(ranks, backend.WithHooks(c, observe.New(r, 1000)))
	}
	return ranks
}

// BenchmarkHostTime reports what Start of an all-reduce of 1 KiB costs the host, with warm caches
// and with caches that other work has used since, as the driver does in a launch.
func BenchmarkHostTime(b *testing.B) {
	start := func(c backend.Communicator) backend.Work {
		x := backend.OnDevice(backend.F32, 1<<20, 256)
		return require.Value(c.Start(nil, sum, x, x))(b)
	}
	b.Run("warm", func(b *testing.B) {
		ranks := instantGroup(b, 2)
		b.ReportAllocs()
		for b.Loop() {
			start(ranks[0])
			start(ranks[1])
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(2*b.N), "ns/start")
	})
	b.Run("cold", func(b *testing.B) {
		ranks := instantGroup(b, 2)
		other := make([]byte, 8<<20)
		var took []time.Duration
		for b.Loop() {
			for i := 0; i < len(other); i += 64 {
				other[i]++
			}
			began := time.Now()
			start(ranks[0])
			took = append(took, time.Since(began))
			start(ranks[1])
		}
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "ns/start")
	})
}

// TestInstantDevicesTakeCalls: what BenchmarkHostTime measures works, for more calls than there are
// events and headers on the board.
func TestInstantDevicesTakeCalls(t *testing.T) {
	ranks := instantGroup(t, 2)
	x := backend.OnDevice(backend.F32, 1<<20, 256)
	for i := range 3000 {
		for _, c := range ranks {
			w, err := c.Start(nil, sum, x, x)
			if err == nil && i%500 == 0 && c.Rank() == 1 { // the last of the two to start the call
				err = w.Join(t.Context())
			}
			require.NoError(t, err)
		}
	}
}
