package rendezvous

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// greeter listens on a rank, and tells every other rank its number.
func greeter(t *testing.T, w *World, name string) *Listener {
	t.Helper()
	l := require.Value(w.Listen(name, func(rank int, conn net.Conn) {
		conn.Write([]byte{byte(rank)})
		conn.Close()
	}))(t)
	return l
}

func TestRanksConnectToEachOther(t *testing.T) {
	onWorlds(t, 3, func(t *testing.T, worlds []*World) {
		l := greeter(t, worlds[1], "board")
		defer l.Close()
		each(worlds, func(w *World) {
			conn, err := w.Dial(within(t, long), "board", 1, l.Addr())
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			text, err := io.ReadAll(conn)
			require.Check(t, err == nil && len(text) == 1 && int(text[0]) == w.Rank,
				"rank %d is called %v, %v", w.Rank, text, err)
		})
	})
}

func TestConnectionIsForOneNameOfOneJob(t *testing.T) {
	worlds := require.Value(Local(2, long))(t)
	others := require.Value(Local(2, long))(t)
	l := greeter(t, worlds[0], "board")
	defer l.Close()
	for want, dial := range map[string]func() (net.Conn, error){
		"another name": func() (net.Conn, error) {
			return worlds[1].Dial(within(t, long), "other", 0, l.Addr())
		},
		"another job": func() (net.Conn, error) {
			return others[1].Dial(within(t, long), "board", 0, l.Addr())
		},
		"another rank": func() (net.Conn, error) {
			return worlds[1].Dial(within(t, long), "board", 1, l.Addr())
		},
	} {
		conn, err := dial()
		if err == nil {
			conn.Close()
			t.Errorf("%s: connected", want)
		}
	}
	if conn, err := worlds[1].Dial(within(t, long), "board", 0, l.Addr()); err != nil {
		t.Error(err)
	} else {
		conn.Close()
	}
	each(append(worlds, others...), func(w *World) { w.Close() })
}

func TestUnauthenticatedClientDoesNotReachAListener(t *testing.T) {
	worlds := require.Value(Local(1, long))(t)
	l := require.Value(worlds[0].Listen("board", func(rank int, conn net.Conn) {
		t.Error("an unauthenticated client was served")
	}))(t)
	conn := require.Value(net.Dial("tcp", l.Addr()))(t)
	defer conn.Close()
	require.Fails(t, "an unauthenticated client was welcomed",
		require.Err(greet(conn, strings.Repeat("x", 32), worlds[0].identity(), long)))
	silent := require.Value(net.Dial("tcp", l.Addr()))(t)
	defer silent.Close()
	if err := l.Close(); err != nil { // does not wait for it
		t.Error(err)
	}
	worlds[0].Close()
}

func TestConnectionsNeedAToken(t *testing.T) {
	w := require.Value(New(Env{Job: "x", Size: 2, LocalSize: 2, Timeout: long}, NewMemStore()))(t)
	defer w.Close()
	require.Fails(t, "Listen", require.Err(w.Listen("board", nil)), "Token")
}

// recorder forwards one connection to an address, and sends what came from its near end once that
// is closed.
func recorder(t *testing.T, to string) (addr string, said <-chan []byte) {
	t.Helper()
	ln := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { ln.Close() })
	done := make(chan []byte, 1)
	go func() {
		var heard bytes.Buffer
		defer func() { done <- heard.Bytes() }()
		near, err := ln.Accept()
		if err != nil {
			return
		}
		defer near.Close()
		far, err := net.Dial("tcp", to)
		if err != nil {
			return
		}
		defer far.Close()
		go func() {
			io.Copy(near, far)
			near.Close()
		}()
		io.Copy(far, io.TeeReader(near, &heard))
	}()
	return ln.Addr().String(), done
}

// The listeners of backend tcp and of boards are such.
func TestUnauthenticatedClientsDoNotDisturbAListener(t *testing.T) {
	worlds := require.Value(Local(2, long))(t)
	defer each(worlds, func(w *World) { w.Close() })
	var served atomic.Int32
	l := require.Value(worlds[0].Listen("board", func(rank int, conn net.Conn) {
		served.Add(1)
		conn.Write([]byte{byte(rank)})
		conn.Close()
	}))(t)
	defer l.Close()
	dial := func(addr string) {
		conn := require.Value(worlds[1].Dial(within(t, long), "board", 0, addr))(t)
		defer conn.Close()
		if text, err := io.ReadAll(conn); err != nil || !bytes.Equal(text, []byte{1}) {
			t.Fatalf("rank 1 is called %v, %v", text, err)
		}
	}
	by, said := recorder(t, l.Addr())
	dial(by)
	handshake := <-said
	require.That(t, len(handshake) != 0, "no handshake was recorded")
	garbage := make([]byte, 2<<20)
	rand.NewChaCha8([32]byte{1}).Read(garbage)
	silentClients(t, l.Addr(), 300, false)
	for what, text := range map[string][]byte{"a replayed handshake": handshake, "garbage": garbage,
		"a handshake and garbage": append(handshake, garbage...)} {
		conn := require.Value(net.Dial("tcp", l.Addr()))(t)
		conn.SetDeadline(time.Now().Add(long))
		conn.Write(text) // the listener may end it in between
		_, err := io.Copy(io.Discard, conn)
		require.Check(t, !errors.Is(err, os.ErrDeadlineExceeded), "%s is not refused", what)
		conn.Close()
	}
	dial(l.Addr())
	n := served.Load()
	require.Check(t, n == 2, "%d connections were served, want those of rank 1", n)
}

// A storm of connections drops those that have not proven the token yet, ranks' among them.
func TestUnauthenticatedClientsDoNotKeepARankOut(t *testing.T) {
	worlds := require.Value(Local(2, long))(t)
	defer each(worlds, func(w *World) { w.Close() })
	l := greeter(t, worlds[0], "board")
	defer l.Close()
	silentClients(t, l.Addr(), 300, true)
	for range 3 {
		conn := require.Value(worlds[1].Dial(within(t, long), "board", 0, l.Addr()))(t)
		require.Slices(t, "rank 1 is called", require.Got(io.ReadAll(conn))(t), []byte{1})
		conn.Close()
	}
}
