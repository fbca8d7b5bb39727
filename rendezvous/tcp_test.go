package rendezvous

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// tcpServer starts a server that the test's end stops.
func tcpServer(t *testing.T, size int) *server {
	t.Helper()
	before := goleak.IgnoreCurrent()
	s := startServer(t, size)
	t.Cleanup(func() {
		s.stop()
		err := goleak.Find(before)
		require.Check(t, err == nil || t.Failed(), "%v", err)
	})
	return s
}

// failure returns the published failure, or nil.
func (s *server) failure() (failure []byte) {
	s.table.tell(func() { failure = s.table.values[downKey] })
	return failure
}

// silentClient opens a connection that says nothing.
func silentClient(t *testing.T, s *server) net.Conn {
	t.Helper()
	conn := require.Value(net.Dial("tcp", s.ln.Addr().String()))(t)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// rawRank opens a connection that has shown the token, and nothing more.
func rawRank(t *testing.T, s *server, rank int) net.Conn {
	t.Helper()
	conn := silentClient(t, s)
	require.NoError(t, require.Err(greet(conn, testToken, testIdentity(rank, s.me.size), long)))
	return conn
}

// down waits for the failure that the server publishes.
func down(t *testing.T, s *server) *Failure {
	t.Helper()
	v := require.Value(s.table.get(within(t, long), downKey))(t)
	return decodeFailure(v)
}

// works sees that a rank can still use the store.
func works(t *testing.T, s Store) {
	t.Helper()
	err := s.Set(within(t, long), "alive", []byte("yes"))
	require.Check(t, err == nil, "the store no longer works: %v", err)
}

func TestWrongTokenIsRefused(t *testing.T) {
	s := tcpServer(t, 3)
	for _, token := range []string{"", "another", testToken + "x"} {
		_, err := dial(within(t, long), s.ln.Addr().String(), token, testIdentity(1, 3),
			handshakeTime, long)
		require.Fails(t, fmt.Sprintf("token %q", token), err, errToken, "EURYALE_TOKEN")
	}
	require.Check(t, s.failure() == nil, "an unauthenticated client made the job fail")
	require.Fails(t, "the server reports", s.turnedAway(), errToken)
	c := connectRank(t, s, 1)
	works(t, c)
	c.Close()
}

func TestServerMustKnowTheToken(t *testing.T) {
	ln := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer ln.Close()
	go func() { // accepts any proof, and makes up its own
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		hearHello(conn)
		nonce, _ := hello(conn)
		readFrame(conn, maxHandshake)
		proven(kindWelcome, "a guess", nonce, testIdentity(0, 2).pack()).writeTo(conn)
		io.Copy(io.Discard, conn)
	}()
	_, err := dial(within(t, long), ln.Addr().String(), testToken, testIdentity(1, 2),
		handshakeTime, long)
	require.Check(t, errors.Is(err, errToken), "an impostor was believed: %v", err)
}

func TestProofCannotBeReplayed(t *testing.T) {
	s := tcpServer(t, 2)
	first := silentClient(t, s)
	mine, _ := hello(first)
	theirs, _ := hearHello(first)
	stolen := proven(kindProof, testToken, append(mine, theirs...), testIdentity(1, 2).pack())

	second := silentClient(t, s)
	frame{kind: kindHello, body: append([]byte(magic), mine...)}.writeTo(second)
	hearHello(second)
	stolen.writeTo(second)
	require.Equal(t, "replayed proof: frame of kind",
		require.Value(readFrame(second, maxHandshake))(t).kind, kindRefuse)
}

func TestRanksThatDoNotFitAreNamedOnBothSides(t *testing.T) {
	for what, c := range map[string]struct {
		change func(*identity)
		want   string
	}{
		"protocol": {func(id *identity) { id.protocol = 7 }, "protocol versions differ: rank 0 " +
			"(process 1000 on h) has 6, rank 1 (process 1001 on h) has 7"},
		"build": {func(id *identity) {
			id.build = "c"
		}, "builds differ: rank 0 (process 1000 on h) has b, rank 1 (process 1001 on h) has c"},
		"job": {func(id *identity) {
			id.job = "k"
		}, "job names differ: rank 0 (process 1000 on h) has j, rank 1 (process 1001 on h) has k"},
		"size": {func(id *identity) { id.size = 4 }, "world sizes differ: rank 0 (process " +
			"1000 on h) has 3, rank 1 (process 1001 on h) has 4"},
		"range": {func(id *identity) {
			id.rank = 3
		}, "rank 3 (process 1001 on h) is out of range: there are 3 ranks"},
		"rank 0": {func(id *identity) {
			id.rank = 0
		}, "rank 0 (process 1001 on h) is out of range"},
	} {
		t.Run(what, func(t *testing.T) {
			s := tcpServer(t, 3)
			id := testIdentity(1, 3)
			c.change(&id)
			_, err := dial(within(t, long), s.ln.Addr().String(), testToken, id, handshakeTime,
				long)
			require.Check(t, lasting(err) && strings.Contains(err.Error(), c.want),
				"the rank gets %v", err)
			if f := down(t, s); f.Rank != id.rank || !strings.Contains(f.Error(), c.want) {
				t.Errorf("the others get %v", f)
			}
		})
	}
}

func TestRankThatIsTakenIsRefused(t *testing.T) {
	s := tcpServer(t, 3)
	c := connectRank(t, s, 1)
	id := testIdentity(1, 3)
	id.pid = 7
	want := "two processes say that they are rank 1: process 1001 on h and process 7 on h"
	_, err := dial(within(t, long), s.ln.Addr().String(), testToken, id, handshakeTime, long)
	require.Check(t, lasting(err) && strings.Contains(err.Error(), want), "%v", err)
	require.Fails(t, "down", down(t, s), want)
	c.Close()
}

func TestLostConnectionIsALostRank(t *testing.T) {
	s := tcpServer(t, 3)
	watcher := connectRank(t, s, 1)
	lost := rawRank(t, s, 2)
	lost.Close()
	v, err := watcher.Get(within(t, long), downKey)
	if f := decodeFailure(v); err != nil || f.Rank != 2 ||
		!strings.Contains(f.Error(), "process 1002 on h ended or was killed") {
		t.Errorf("%v, %v", f, err)
	}
	watcher.Close()
}

func TestLostServerIsLostRank0(t *testing.T) {
	s := tcpServer(t, 2)
	c := connectRank(t, s, 1)
	ended := make(chan error, 1)
	go func() { _, err := c.Get(t.Context(), "never"); ended <- err }()
	for _, m := range s.connected() { // as the end of its process would
		m.link.conn.Close()
	}
	var f *Failure
	err := <-ended
	require.Check(t, errors.As(err, &f) && f.Rank == 0, "Get: %v", err)
	err = c.Set(t.Context(), "k", nil)
	require.Check(t, errors.As(err, &f) && f.Rank == 0, "Set: %v", err)
	c.Close()
}

// What is to be said of a server that is stopped must not come late.
func TestServerThatDoesNotAnswerIsHardlyWaitedFor(t *testing.T) {
	s := tcpServer(t, 2)
	c := connectRank(t, s, 1)
	w, err := New(Env{Job: "j", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Timeout: long}, c)
	require.NoError(t, err)
	defer w.Close()
	got := w.NewsTime(-1)
	require.Check(t, got == newsTime, "news wait %v for a server of which nothing is known", got)
	s.table.mu.Lock()
	require.Fails(t, "a server that is stopped has taken the news",
		w.Fail(&Failure{Rank: 0, Cause: errors.New("it is stopped")}))
	if got := w.NewsTime(-1); got != silentTime {
		t.Errorf("a goodbye waits %v for a server that is stopped", got)
	}
	s.table.mu.Unlock()
	if f := down(t, s); f.Rank != 0 { // it was told all the same
		t.Errorf("the server has heard of %v", f)
	}
	works(t, c)
	if got := w.NewsTime(-1); got != newsTime {
		t.Errorf("news wait %v for a server that goes on", got)
	}
}

func TestRank0LeavesFirst(t *testing.T) {
	t.Parallel()
	all := over(t, append([]Store{}, stores["tcp"](t, 3)...))
	started := time.Now()
	require.Report(t, all[0].Close())
	took := time.Since(started)
	require.Check(t, took <= proctest.Within(linger+2*newsTime), "Close of rank 0 took %v", took)
	for _, w := range all[1:] {
		require.Fails(t, fmt.Sprint("rank ", w.Rank), w.Barrier(t.Context(), "b"), ErrClosed,
			"rank 0, which serves the store, has left")
		f := w.Failure()
		require.Check(t, f == nil, "rank %d takes it for a failure: %v", w.Rank, f)
		w.Close()
	}
}

func TestFailureOfRank0ArrivesBeforeItsGoodbye(t *testing.T) {
	for range 20 {
		all := over(t, stores["tcp"](t, 4))
		all[0].Fail(errors.New("no more"))
		all[0].Close()
		for _, w := range all[1:] {
			select {
			case <-w.Down():
				if f := w.Failure(); f.Rank != 0 || f.Cause.Error() != "no more" {
					t.Errorf("rank %d: %v", w.Rank, f)
				}
			case <-time.After(long):
				t.Errorf("rank %d does not know", w.Rank)
			}
			w.Close()
		}
	}
}

// Rank 0 may exit as soon as it hears of a failure. The others must have heard
// of the same one.
func TestRank0HearsOfAFailureLast(t *testing.T) {
	for range 20 {
		s := startServer(t, 4)
		all := []Store{s.open()}
		for r := 1; r < 4; r++ {
			all = append(all, connectRank(t, s, r))
		}
		ws := over(t, all)
		all[2].(*client).link.conn.Close()
		<-ws[0].Down()
		for _, m := range s.connected() { // as the end of its process would
			m.link.conn.Close()
		}
		for _, r := range []int{1, 3} {
			<-ws[r].Down()
			require.Equal(t, fmt.Sprint("rank ", r), ws[r].Failure().Rank, 2)
		}
		each(ws, func(w *World) { w.Close() })
	}
}

func TestServerSurvivesGarbage(t *testing.T) {
	s := tcpServer(t, 4)
	good := connectRank(t, s, 1)
	random := make([]byte, 5000)
	rand.Read(random)
	huge := binary.LittleEndian.AppendUint32(nil, 1<<31)
	for what, bytes := range map[string][]byte{
		"nothing": {}, "random": random, "http": []byte("GET / HTTP/1.1\r\n\r\n"),
		"huge": append(huge, make([]byte, 100)...), "half a header": {1, 0, 0},
	} {
		conn := silentClient(t, s)
		conn.Write(bytes)
		conn.(*net.TCPConn).CloseWrite()
		conn.SetReadDeadline(time.Now().Add(long))
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: the server keeps the connection", what)
		}
	}
	works(t, good)
	if s.failure() != nil {
		t.Errorf("garbage of unauthenticated clients made the job fail: %v", down(t, s))
	}
	good.Close()
}

func TestOversizedFrameEndsItsConnection(t *testing.T) {
	s := tcpServer(t, 4)
	good := connectRank(t, s, 1)
	conn := rawRank(t, s, 2)
	header := binary.LittleEndian.AppendUint32(nil, maxBody+1)
	conn.Write(append(header, byte(kindSet), 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0))
	f := down(t, s)
	require.Check(t, f.Rank == 2 && strings.Contains(f.Error(), "at most"), "%v", f)
	works(t, good)
	good.Close()
}

func TestMalformedRequestIsAnswered(t *testing.T) {
	s := tcpServer(t, 2)
	conn := rawRank(t, s, 1)
	for _, k := range []kind{kindSet, kindGet, kindSwap} {
		for _, body := range [][]byte{nil, {1, 2, 3}, {255, 255, 255, 255}, packString(nil, "")} {
			frame{kind: k, id: 9, body: body}.writeTo(conn)
			if f, err := readFrame(conn, maxBody); err != nil || f.kind != kindFailed || f.id != 9 {
				t.Errorf("kind %d, body %v: %+v, %v", k, body, f, err)
			}
		}
	}
	frame{kind: kindBye}.writeTo(conn)
}

// A rank that does not read its replies must not hold up the others, nor make
// the server keep more and more for it.
func TestStalledReaderBlocksNobody(t *testing.T) {
	s := tcpServer(t, 3)
	good := connectRank(t, s, 1)
	require.NoError(t, good.Set(t.Context(), "big", make([]byte, maxValue)))
	stalled := rawRank(t, s, 2)
	stalled.SetWriteDeadline(time.Now().Add(time.Second))
	get := frame{kind: kindGet, body: packString(nil, "big")}
	for get.id = range 4 * waiting {
		if get.writeTo(stalled) != nil {
			break
		}
	}
	for range 100 {
		works(t, good)
	}
	stalled.Close()
	down(t, s)
	good.Close()
}

func TestPeerThatTakesNothingIsLost(t *testing.T) {
	ln := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	s := serve(ln, testToken, testIdentity(0, 2), 100*time.Millisecond, nil)
	defer s.stop()
	s.table.tell(func() { s.table.put("big", make([]byte, maxValue)) })
	conn := rawRank(t, s, 1)
	for id := range uint64(100) {
		frame{kind: kindGet, id: id, body: packString(nil, "big")}.writeTo(conn)
	}
	f := down(t, s)
	require.Check(t, f.Rank == 1 && strings.Contains(f.Error(), "does not take data"), "%v", f)
}

func TestWaitsOfOneRankAreBounded(t *testing.T) {
	s := tcpServer(t, 2)
	conn := rawRank(t, s, 1)
	for id := range uint64(waiting + 1) {
		frame{kind: kindGet, id: id, body: packString(nil, "never")}.writeTo(conn)
	}
	f, err := readFrame(conn, maxBody)
	require.Check(t, err == nil && f.kind == kindFailed && f.id == waiting &&
		bytes.Contains(f.body, []byte("at most 1024 keys")), "%+v, %v", f, err)
	// Cancelling one makes room.
	frame{kind: kindCancel, id: 5}.writeTo(conn)
	frame{kind: kindGet, id: 5000, body: packString(nil, "now")}.writeTo(conn)
	s.table.tell(func() { s.table.put("now", []byte("here")) })
	if f, err := readFrame(conn, maxBody); err != nil || f.kind != kindDone || f.id != 5000 {
		t.Errorf("%+v, %v", f, err)
	}
	frame{kind: kindBye}.writeTo(conn)
}

func TestCancelledWaitEndsOnTheServer(t *testing.T) {
	s := tcpServer(t, 2)
	c := connectRank(t, s, 1)
	require.Fails(t, "Get", require.Err(c.Get(within(t, soon), "never")), context.DeadlineExceeded)
	works(t, c) // the cancel went before it
	for range 1000 {
		s.table.mu.Lock()
		left := len(s.table.waits)
		s.table.mu.Unlock()
		if left == 0 {
			break
		}
		pause(t.Context(), time.Millisecond)
	}
	n := len(s.table.waits)
	require.Check(t, n == 0, "%d waits are left", n)
	c.Close()
}

func TestUnauthenticatedClientsAreBoundedAndMakeRoom(t *testing.T) {
	s := tcpServer(t, 2)
	for range mostUnproven + 20 {
		silentClient(t, s)
	}
	c := connectRank(t, s, 1)
	works(t, c)
	c.Close()
	s.unproven.mu.Lock()
	defer s.unproven.mu.Unlock()
	for i, h := range s.unproven.halls {
		require.Check(t, h.held <= mostUnproven/2, "%d unauthenticated clients are left in hall %d",
			h.held, i)
	}
}

func TestRequestsAreMultiplexed(t *testing.T) {
	s := tcpServer(t, 2)
	c := connectRank(t, s, 1)
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			key := fmt.Sprint(i)
			if i%2 == 0 {
				v, err := c.Get(t.Context(), key+"?")
				require.Check(t, err == nil && string(v) == key, "%d: %q, %v", i, v, err)
				return
			}
			require.Report(t, c.Set(t.Context(), fmt.Sprint(i-1)+"?", []byte(fmt.Sprint(i-1))))
		})
	}
	wg.Wait()
	c.Close()
}

func TestFramesComeBack(t *testing.T) {
	body := packInt(packBytes(packBytes(packString(nil, "text"), nil), []byte{}), -5)
	var wire bytes.Buffer
	frame{kind: kindSwap, id: 1 << 60, body: body}.writeTo(&wire)
	f, err := readFrame(&wire, len(body))
	require.That(t, err == nil && f.kind == kindSwap && f.id == 1<<60, "%+v, %v", f, err)
	u := unpacker{rest: f.body}
	s, null, empty, n := u.string(), u.bytes(), u.bytes(), u.int()
	require.Check(t, s == "text" && null == nil && empty != nil && len(empty) == 0 && n == -5,
		"%q, %v, %v, %d", s, null, empty, n)
	require.Report(t, u.done())
	if u.int(); u.done() == nil {
		t.Error("reading past the end is no error")
	}
}

func FuzzReadFrame(f *testing.F) {
	var good bytes.Buffer
	swap := packBytes(packBytes(packString(nil, "key"), nil), nil)
	frame{kind: kindSwap, id: 3, body: swap}.writeTo(&good)
	f.Add(good.Bytes())
	f.Add([]byte{})
	f.Add(bytes.Repeat([]byte{255}, 40))
	f.Fuzz(func(t *testing.T, wire []byte) {
		got, err := readFrame(bytes.NewReader(wire), maxHandshake)
		if err != nil {
			return
		}
		require.That(t, len(got.body) <= maxHandshake, "a body of %d bytes", len(got.body))
		var again bytes.Buffer
		got.writeTo(&again)
		if !bytes.HasPrefix(wire, again.Bytes()) {
			t.Fatalf("%v became %v", wire, again.Bytes())
		}
		unpackIdentity(got.body)
		text := Printable(string(got.body))
		require.That(t, Printable(text) == text, "%q is not printable", text)
		newTable().request(&member{}, got)
		unpackGathering(got.body)
	})
}

// FuzzServer feeds a connection with garbage, from the start or after it has
// shown the token. The server must stay up for others and leave nothing behind.
func FuzzServer(f *testing.F) {
	var requests bytes.Buffer
	frame{kind: kindSet, id: 1, body: packBytes(packString(nil, "k"), []byte("v"))}.writeTo(
		&requests)
	frame{kind: kindGet, id: 2, body: packString(nil, "k")}.writeTo(&requests)
	frame{kind: kindGet, id: 3, body: packString(nil, "never")}.writeTo(&requests)
	frame{kind: kindCancel, id: 3}.writeTo(&requests)
	frame{kind: kindSwap, id: 4, body: packBytes(packBytes(packString(nil, "k"), []byte("v")),
		nil)}.writeTo(&requests)
	all := gathering{key: "all", size: 3, rank: 1, value: []byte("v")}
	frame{kind: kindGather, id: 5, body: all.pack(0)}.writeTo(&requests)
	frame{kind: kindPeek, id: 6, body: all.pack(1)}.writeTo(&requests)
	frame{kind: kindBye}.writeTo(&requests)
	f.Add(true, requests.Bytes())
	f.Add(false, requests.Bytes())
	f.Add(false, []byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, known bool, wire []byte) {
		s := startServer(t, 3)
		defer s.stop()
		conn := silentClient(t, s)
		if known {
			conn = rawRank(t, s, 1)
		}
		conn.SetDeadline(time.Now().Add(long))
		go func() {
			conn.Write(wire)
			conn.(*net.TCPConn).CloseWrite()
		}()
		io.Copy(io.Discard, conn)
		conn.Close()
		other := connectRank(t, s, 2)
		works(t, other)
		other.Close()
	})
}
