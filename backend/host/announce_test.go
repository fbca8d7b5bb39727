package host

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// told are hooks that pass on what they are told.
type told chan string

func (h told) Start(c *backend.Call) (id uint64) {
	h <- fmt.Sprintf("start %d of %d bytes, %v", c.Header.Seq, c.Bytes, c.Work.Done())
	return 100 + c.Header.Seq
}

func (h told) End(id uint64, err error) { h <- fmt.Sprintf("end %d, %v", id, err != nil) }

// Hooks are told of each call once, and before it waits for a rank, however it ends.
func TestHooksAreToldBeforeACallWaits(t *testing.T) {
	x := make([]float32, 1<<17)
	for _, P := range []int{1, 2} {
		comms, h := connect(t, P, time.Minute), make(told, 16)
		hooked := backend.WithHooks(comms[0], h)
		next := func(line string) {
			t.Helper()
			select {
			case got := <-h:
				require.Equal(t, fmt.Sprintf("%d ranks: told", P), got, line)
			case <-time.After(30 * time.Second):
				t.Fatalf("%d ranks: not told %q", P, line)
			}
		}
		for i, n := range []int{1, shownBytes/4 + 1, 1 << 17} {
			end := make(chan error, 1)
			go func() { end <- allReduce(hooked, x[:n]) }()
			// while nobody else has joined the call
			next(fmt.Sprintf("start %d of %d bytes, false", i+1, 4*n))
			for _, c := range comms[1:] {
				require.Report(t, allReduce(c, make([]float32, n)))
			}
			require.Report(t, <-end)
			next(fmt.Sprintf("end %d, false", 101+i))
		}
		device := backend.OnDevice(backend.F32, 4096, 1)
		require.Fails(t, fmt.Sprintf("%d ranks: device memory", P),
			backend.Run(hooked, backend.Collective{Kind: backend.AllReduce}, device, device),
			backend.ErrArgument)
		next("start 4 of 4 bytes, false")
		next("end 104, true")
		hooked.Abort(errors.New("for a test"))
		err := allReduce(hooked, x[:1])
		require.Check(t, err != nil, "%d ranks: a call after Abort succeeds", P)
		next("start 5 of 4 bytes, false")
		next("end 105, true")
	}
}
