package rendezvous

import (
	"io"
	"net"
	"strings"
	"testing"
)

// greeter listens on a rank, and tells every other rank its number.
func greeter(t *testing.T, w *World, name string) *Listener {
	t.Helper()
	l, err := w.Listen(name, func(rank int, conn net.Conn) { conn.Write([]byte{byte(rank)}); conn.Close() })
	if err != nil {
		t.Fatal(err)
	}
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
			if text, err := io.ReadAll(conn); err != nil || len(text) != 1 || int(text[0]) != w.Rank {
				t.Errorf("rank %d is called %v, %v", w.Rank, text, err)
			}
		})
	})
}

func TestConnectionIsForOneNameOfOneJob(t *testing.T) {
	worlds, err := Local(2, long)
	if err != nil {
		t.Fatal(err)
	}
	others, err := Local(2, long)
	if err != nil {
		t.Fatal(err)
	}
	l := greeter(t, worlds[0], "board")
	defer l.Close()
	for want, dial := range map[string]func() (net.Conn, error){
		"another name": func() (net.Conn, error) { return worlds[1].Dial(within(t, long), "other", 0, l.Addr()) },
		"another job":  func() (net.Conn, error) { return others[1].Dial(within(t, long), "board", 0, l.Addr()) },
		"another rank": func() (net.Conn, error) { return worlds[1].Dial(within(t, long), "board", 1, l.Addr()) },
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

func TestStrangerDoesNotReachAListener(t *testing.T) {
	worlds, err := Local(1, long)
	if err != nil {
		t.Fatal(err)
	}
	l, err := worlds[0].Listen("board", func(rank int, conn net.Conn) { t.Error("a stranger was served") })
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("tcp", l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := greet(conn, strings.Repeat("x", 32), worlds[0].identity(), long); err == nil {
		t.Error("a stranger was welcomed")
	}
	silent, err := net.Dial("tcp", l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	if err := l.Close(); err != nil { // does not wait for it
		t.Error(err)
	}
	worlds[0].Close()
}

func TestConnectionsNeedAToken(t *testing.T) {
	w, err := New(Env{Job: "x", Size: 2, LocalSize: 2, Timeout: long}, NewMemStore())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.Listen("board", nil); err == nil || !strings.Contains(err.Error(), "Token") {
		t.Errorf("got %v", err)
	}
}
