package rendezvous

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// between accepts a connection to a listener in its place, and connects to it; with tls, it
// encrypts both.
func between(t *testing.T, addr string, tls bool) (ln net.Listener,
	ends func() (client, server net.Conn)) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err == nil {
		ln, err = secured(ln, identity{tls: tls})
	}
	require.NoError(t, err)
	t.Cleanup(func() { ln.Close() })
	return ln, func() (net.Conn, net.Conn) {
		client, err := ln.Accept()
		if err != nil {
			t.Error(err)
			return nil, nil
		}
		server, err := net.Dial("tcp", addr)
		if err != nil {
			t.Error(err)
			return nil, nil
		}
		if tls {
			server = overTLS(server)
		}
		return client, server
	}
}

// relay passes on what two ends say, and sees it.
func relay(a, b net.Conn, see io.Writer) {
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		both.Go(func() {
			io.Copy(io.MultiWriter(way[1], see), way[0])
			way[1].Close()
		})
	}
	both.Wait()
}

// seen is what a relay has seen.
type seen struct {
	mu   sync.Mutex
	text []byte
}

func (s *seen) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text = append(s.text, b...)
	return len(b), nil
}

// pairOver returns two Worlds of one machine, with or without TLS.
func pairOver(t *testing.T, encrypted bool) []*World {
	t.Helper()
	ws := require.Value(Local(2, long))(t)
	for _, w := range ws {
		w.TLS = encrypted
	}
	t.Cleanup(func() { each(ws, func(w *World) { w.Close() }) })
	return ws
}

// Whoever passes on everything sees the data if it is not encrypted.
func TestTheWireShowsDataWithoutTLSOnly(t *testing.T) {
	const data = "the weights of a model"
	for _, encrypted := range []bool{false, true} {
		ws := pairOver(t, encrypted)
		l := require.Value(ws[0].Listen("data", func(_ int, conn net.Conn) {
			conn.Write([]byte(data))
			conn.Close()
		}))(t)
		ln, ends := between(t, l.Addr(), false)
		var wire seen
		over := make(chan struct{})
		go func() {
			defer close(over)
			if a, b := ends(); b != nil {
				relay(a, b, &wire)
			}
		}()
		conn := require.Value(ws[1].Dial(within(t, long), "data", 0, ln.Addr().String()))(t)
		require.Equal(t, fmt.Sprintf("TLS %v: received", encrypted),
			string(require.Value(io.ReadAll(conn))(t)), data)
		conn.Close()
		<-over
		if shows := bytes.Contains(wire.text, []byte(data)); shows == encrypted {
			t.Errorf("TLS %v: the wire shows the data: %v", encrypted, shows)
		}
		require.Report(t, l.Close())
	}
}

// Whoever ends TLS between two ranks, and passes on their proofs, is refused by both.
func TestAProofIsWorthNothingOnAnotherConnection(t *testing.T) {
	ws := pairOver(t, true)
	l, err := ws[0].Listen("data", func(int, net.Conn) { t.Error("the one between was served") })
	require.NoError(t, err)
	ln, ends := between(t, l.Addr(), true)
	var wire seen
	over := make(chan struct{})
	go func() {
		defer close(over)
		if a, b := ends(); b != nil {
			relay(a, b, &wire)
		}
	}()
	_, err = ws[1].Dial(within(t, long), "data", 0, ln.Addr().String())
	require.Check(t, errors.Is(err, errToken) || errors.Is(err, io.EOF), "the error is %v", err)
	<-over
	require.Check(t, bytes.Contains(wire.text, []byte(magic)),
		"the one between saw no handshake: this test shows nothing")
	require.NoError(t, l.Close())
}

func TestARankWithoutTLSIsExplained(t *testing.T) {
	ws := pairOver(t, false)
	l := greeter(t, ws[0], "data")
	defer l.Close()
	ws[1].TLS = true
	require.Fails(t, "Dial without TLS",
		require.Err(ws[1].Dial(within(t, 3*retryTime), "data", 0, l.Addr())), "EURYALE_TLS")
}
