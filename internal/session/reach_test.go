package session

import (
	"fmt"
	"io"
	"net"
	"testing"

	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// TestWhoSaysNothingIsReachedUnlessItLives: a process that is stopped, or has ended, is; one that
// hears this one and whose answers are lost is not.
func TestWhoSaysNothingIsReachedUnlessItLives(t *testing.T) {
	r := &reach{register: rendezvous.NewMemStore()}
	listens := func(id elastic.ID, takes func(conn net.Conn)) net.Listener {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err == nil {
			err = r.register.Set(t.Context(), fmt.Sprintf("%s/%d", reachKey, id),
				[]byte(ln.Addr().String()))
		}
		require.NoError(t, err)
		t.Cleanup(func() { ln.Close() })
		go func() {
			for takes != nil {
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				go takes(conn)
			}
		}()
		return ln
	}
	const answers, stopped, ended, unheard = 1, 2, 3, 4
	listens(answers, serve)
	listens(stopped, nil)
	listens(ended, nil).Close()
	listens(unheard, func(conn net.Conn) {
		defer conn.Close()
		io.ReadFull(conn, make([]byte, reachBytes))
	})
	got := r.unreached(t.Context(), []elastic.ID{answers, stopped, ended, unheard})
	require.Slices(t, "it does not reach", got, []elastic.ID{unheard})
}
