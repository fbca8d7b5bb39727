package launch

import (
	"bufio"
	"net"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestAMachineThatConnectsAgainIsNotAnother: the job begins once every machine has connected, with
// the last connection of each.
func TestAMachineThatConnectsAgainIsNotAnother(t *testing.T) {
	a := &agents{arrived: make(chan *agent, 4)}
	var ends []net.Conn
	for _, number := range []int{0, 0, 1, 0} {
		here, there := net.Pipe()
		ends = append(ends, there)
		a.arrived <- &agent{number: number, conn: here, out: bufio.NewReader(here),
			over: make(chan struct{})}
	}
	hosts := []*remote{{}, {}}
	require.NoError(t, a.await(t.Context(), hosts))
	for i, open := range []bool{false, true, true} {
		_ = ends[i].SetReadDeadline(time.Now().Add(10 * time.Millisecond)) // fails once closed
		_, err := ends[i].Read(make([]byte, 1))
		wrong, timeout := err.(net.Error)
		require.Check(t, (timeout && wrong.Timeout()) == open, "connection %d: %v", i, err)
	}
	require.Equal(t, "later ones", len(a.arrived), 1)
}
