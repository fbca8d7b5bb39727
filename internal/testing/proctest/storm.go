package proctest

import (
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Far passes connections on to an address, by a way that takes bytes a while in each direction,
// until the test ends. It returns the port of 127.0.0.1 to connect to.
func Far(t T, addr string, delay time.Duration) (port int) {
	t.Helper()
	ln := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	var running sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() {
		ln.Close()
		cancel()
		running.Wait()
	})
	running.Go(func() {
		for near, err := ln.Accept(); err == nil; near, err = ln.Accept() {
			running.Go(func() {
				there, err := net.Dial("tcp", addr)
				if err != nil {
					near.Close()
					return
				}
				defer context.AfterFunc(ctx, func() { near.Close() })()
				var both sync.WaitGroup
				both.Go(func() { late(there, near, delay) })
				both.Go(func() { late(near, there, delay) })
				both.Wait()
			})
		}
	})
	return ln.Addr().(*net.TCPAddr).Port
}

// late copies what from says, and its end, after a delay.
func late(to, from net.Conn, delay time.Duration) {
	type piece struct {
		at   time.Time
		data []byte
	}
	way := make(chan piece, 1000)
	go func() {
		defer close(way)
		for {
			data := make([]byte, 4096)
			n, err := from.Read(data)
			if way <- (piece{time.Now().Add(delay), data[:n]}); err != nil {
				return
			}
		}
	}()
	for p := range way {
		time.Sleep(time.Until(p.at))
		to.Write(p.data) // an error ends the other direction
	}
	to.Close()
	from.Close()
}

// crowded bounds the unauthenticated clients that are there at once, where a store holds 1,024.
// More would only fill the kernel's queue of connections on a machine that has no time to accept
// them.
const crowded = 2048

// Storm has unauthenticated clients connect to an address from a source, so many in a second, until
// the test ends. They say what says does, and then nothing. It returns how many have come.
func Storm(t T, source, addr string, second int, says func(net.Conn)) *atomic.Int64 {
	t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}, Control: portLater}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	var came atomic.Int64
	present := make(chan struct{}, crowded)
	visit := func() {
		defer func() { <-present }()
		conn, err := dialer.DialContext(ctx, "tcp", addr)
		if err != nil {
			return
		}
		defer context.AfterFunc(ctx, func() { conn.Close() })()
		defer conn.Close()
		came.Add(1)
		conn.(*net.TCPConn).SetLinger(0) // leaves no port behind
		says(conn)
		io.Copy(io.Discard, conn)
	}
	running.Go(func() {
		for began, n := time.Now(), 0; ctx.Err() == nil; time.Sleep(time.Millisecond) {
			due := int(time.Since(began).Seconds() * float64(second))
			for n = max(n, due-second/20); n < due; n++ { // no burst after it has waited for a core
				select {
				case present <- struct{}{}:
					running.Go(visit)
				default:
				}
			}
		}
	})
	return &came
}
