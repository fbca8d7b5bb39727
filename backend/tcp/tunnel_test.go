package tcp

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/internal/hosted"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
)

// flipper passes on the connections to an address, and flips the bits of what it passes on once it
// is told to.
type flipper struct {
	net.Listener
	to      string
	flips   atomic.Bool
	running sync.WaitGroup
}

func newFlipper(t *testing.T, to string) *flipper {
	t.Helper()
	ln := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	f := &flipper{Listener: ln, to: to}
	f.running.Go(f.serve)
	return f
}

func (f *flipper) serve() {
	for {
		near, err := f.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("tcp", f.to)
		if err != nil {
			near.Close()
			return
		}
		f.running.Go(func() { f.pass(near, far) })
		f.running.Go(func() { f.pass(far, near) })
	}
}

func (f *flipper) pass(to, from net.Conn) {
	defer to.Close()
	room := make([]byte, 4096)
	for {
		n, err := from.Read(room)
		if err != nil {
			return
		}
		if f.flips.Load() {
			room[n-1] ^= 1
		}
		if _, err := to.Write(room[:n]); err != nil {
			return
		}
	}
}

// arrives waits for n bytes, or for the link to be lost.
func arrives(t *testing.T, l *link, n int) []byte {
	t.Helper()
	got := make([]byte, n)
	l.in.reset(n)
	l.in.add(got)
	for end := time.Now().Add(10 * time.Second); l.in.pending() && l.lost == nil; {
		if l.receive() < 0 {
			time.Sleep(time.Millisecond)
		}
		require.That(t, !time.Now().After(end), "%d of %d bytes have arrived", l.in.moved, n)
	}
	return got
}

func TestAFlippedBitEndsAnEncryptedLinkEmulated(t *testing.T) {
	ws := require.Value(rendezvous.Local(2, 10*time.Second))(t)
	came := make(chan *link, 1)
	for _, w := range ws {
		w.TLS = true
		defer w.Close()
	}
	listener := require.Value(ws[0].Listen("data", func(_ int, conn net.Conn) {
		l, err := newLink(conn)
		require.Report(t, err)
		came <- l
	}))(t)
	middle := newFlipper(t, listener.Addr())
	conn := require.Value(ws[1].Dial(context.Background(), "data", 0, middle.Addr().String()))(t)
	near := require.Value(newLink(conn))(t)
	far := <-came
	data := strings.Repeat("gradients ", 50)
	for _, flips := range []bool{false, true} {
		middle.flips.Store(flips)
		far.out.reset(len(data))
		far.out.add([]byte(data))
		n := far.send()
		require.That(t, n == len(data), "sent %d bytes of %d", n, len(data))
		got := arrives(t, near, len(data))
		switch {
		case !flips && string(got) != data:
			t.Errorf("received %q, lost: %v", got, near.lost)
		case flips && (near.lost == nil || !strings.Contains(near.lost.Error(), "bad record MAC")):
			t.Errorf("the link is lost because of %v", near.lost)
		}
	}
	for _, c := range []io.Closer{listener, middle, closer(near.close), closer(far.close)} {
		require.Report(t, c.Close())
	}
	middle.running.Wait()
}

type closer func() error

func (c closer) Close() error { return c() }

func TestForgedBytesEndACallThatNamesTheRankEmulated(t *testing.T) {
	ranks := testranks.New(t, 2, 10*time.Second, func(w *rendezvous.World) (backend.Communicator,
		error) {
		w.TLS = true
		return Backend{}.Connect(context.Background(), w)
	})
	// application data without a seal
	record := append([]byte{23, 3, 3, 0, 32}, make([]byte, 32)...)
	_, err := ranks.Ranks[0].(*hosted.Comm).Engine.(*engine).links[1].tunnel.raw.Write(record)
	require.That(t, err == nil, "%v", err)
	errs := testranks.Each(2, func(r int) error {
		operand := make([]float32, 1000)
		for range 100 { // rank 0 may have all it needs for the first call before rank 1 ends
			testranks.NoError(backend.Run(ranks.Ranks[r],
				backend.Collective{Kind: backend.AllReduce},
				backend.Of(operand), backend.Of(operand)))
		}
		return nil
	})
	for r, err := range errs {
		require.Fails(t, fmt.Sprint("rank ", r), err, "lost its connection to rank",
			"bad record MAC")
	}
}
