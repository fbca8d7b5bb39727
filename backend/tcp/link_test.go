package tcp

import (
	"bytes"
	"net"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// pair returns the two ends of a connection, one of them as a link.
func pair(t *testing.T) (*link, net.Conn) {
	t.Helper()
	listener := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer listener.Close()
	ours := require.Value(net.Dial("tcp", listener.Addr().String()))(t)
	theirs := require.Value(listener.Accept())(t)
	l := require.Value(newLink(ours))(t)
	t.Cleanup(func() { l.close(); theirs.Close() })
	return l, theirs
}

func TestShortPiecesTravelInAnyPartsEmulated(t *testing.T) {
	l, other := pair(t)
	l.out.reset(7)
	l.in.reset(7)
	l.out.add([]byte("head"))
	l.out.add([]byte("operand"))
	n := l.send()
	require.That(t, n == 11 && !l.out.pending(), "sent %d bytes, want 11", n)
	got := make([]byte, 11)
	_, err := other.Read(got)
	require.That(t, err == nil && string(got) == "headoperand", "received %q, %v", got, err)
	head, operand := make([]byte, 4), make([]byte, 7)
	l.in.add(head)
	l.in.add(operand)
	for i := range got {
		n := l.receive()
		require.That(t, n == -1, "received %d bytes before any were sent", n)
		require.NoError(t, require.Err(other.Write(got[i:i+1])))
		for end := time.Now().Add(10 * time.Second); l.in.moved == i; {
			if l.receive(); l.lost != nil || time.Now().After(end) {
				t.Fatalf("byte %d does not arrive: %v", i, l.lost)
			}
		}
	}
	require.Check(t, !l.in.pending() && string(head) == "head" &&
		bytes.Equal(operand, []byte("operand")), "received %q and %q", head, operand)
}
