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
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	ours, err := net.Dial("tcp", listener.Addr().String())
	require.NoError(t, err)
	theirs, err := listener.Accept()
	require.NoError(t, err)
	l, err := take(ours)
	require.NoError(t, err)
	t.Cleanup(func() { l.close(); theirs.Close() })
	return l, theirs
}

func TestShortPiecesTravelInAnyParts(t *testing.T) {
	l, other := pair(t)
	l.out.reset(7)
	l.in.reset(7)
	l.out.add([]byte("head"))
	l.out.add([]byte("operand"))
	if n := l.send(); n != 11 || l.out.pending() {
		t.Fatalf("sent %d bytes, want 11", n)
	}
	got := make([]byte, 11)
	if _, err := other.Read(got); err != nil || string(got) != "headoperand" {
		t.Fatalf("received %q, %v", got, err)
	}
	head, operand := make([]byte, 4), make([]byte, 7)
	l.in.add(head)
	l.in.add(operand)
	for i := range got {
		if n := l.receive(); n != -1 {
			t.Fatalf("received %d bytes before any were sent", n)
		}
		if _, err := other.Write(got[i : i+1]); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(10 * time.Second); l.in.moved == i; {
			if l.receive(); l.lost != nil || time.Now().After(end) {
				t.Fatalf("byte %d does not arrive: %v", i, l.lost)
			}
		}
	}
	if l.in.pending() || string(head) != "head" || !bytes.Equal(operand, []byte("operand")) {
		t.Errorf("received %q and %q", head, operand)
	}
}
