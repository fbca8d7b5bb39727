package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// unproven are frames that an unauthenticated client may send in place of a proof.
func unproven() map[string]frame {
	text := "a client \x1b[31mends your job"
	return map[string]frame{
		"a refusal with a reason": {kind: kindRefuse, body: packString(packInt(nil, 2), text)},
		"a refusal without proof": {kind: kindRefuse, body: append(make([]byte, 32), text...)},
		"an empty refusal":        {kind: kindRefuse},
		"a welcome":               {kind: kindWelcome, body: make([]byte, 100)},
		"a goodbye":               {kind: kindBye},
		"a wrong proof":           {kind: kindProof, body: make([]byte, 100)},
		"a value": {kind: kindSet, body: packBytes(packString(nil, downKey),
			[]byte("1 "+text))},
	}
}

func TestFoundUnauthenticatedClientCannotEndAJob(t *testing.T) {
	s := tcpServer(t, 2)
	for what, f := range unproven() {
		conn := silentClient(t, s)
		require.NoError(t, require.Err(hello(conn)))
		f.writeTo(conn)
		conn.SetReadDeadline(time.Now().Add(long))
		io.Copy(io.Discard, conn) // until the server has had enough
		if s.failure() != nil {
			t.Fatalf("%s ended the job: %v", what, down(t, s))
		}
		if err := s.turnedAway(); err == nil || strings.Contains(err.Error(), "ends your job") {
			t.Errorf("%s: the server reports %v", what, err)
		}
	}
	c := connectRank(t, s, 1)
	works(t, c)
	c.Close()
}

// squat answers ranks at an address with a frame in place of a welcome, until
// the listener is closed.
func squat(ln net.Listener, answer frame) {
	for {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		hearHello(conn)
		hello(conn)
		readFrame(conn, maxHandshake)
		answer.writeTo(conn)
		conn.Close()
	}
}

func TestFoundSquatterCannotEndARank(t *testing.T) {
	for what, f := range unproven() {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			all := distant(t, 2)
			ln, err := net.Listen("tcp", all[0].address())
			require.NoError(t, err)
			go squat(ln, f)
			_, err = Join(t.Context(), all[1])
			require.Check(t, errors.Is(err, context.DeadlineExceeded) &&
				!strings.Contains(err.Error(), "ends your job") && strings.Contains(err.Error(),
				all[0].address()), "ended by %v", err)
			// When the squatter has gone, the job starts.
			late := make(chan error, 1)
			all[0].Timeout, all[1].Timeout = long, long
			go func() {
				w, err := Join(t.Context(), all[1])
				if err == nil {
					defer w.Close()
				}
				late <- err
			}()
			ln.Close()
			w, err := Join(t.Context(), all[0])
			require.NoError(t, errors.Join(err, <-late))
			w.Close()
		})
	}
}

func TestFoundTextOfPeersIsEscaped(t *testing.T) {
	const evil, want = "a\x1b[2J\r\x07\u202e\u0085\xff b\n\tc",
		"a\\x1b[2J\\r\\a\\u202e\\u0085\uFFFD b\n\tc"
	require.Equal(t, "Printable", Printable(evil), want)
	f := decodeFailure((&Failure{Rank: 1, Cause: errors.New(evil)}).encode())
	require.Check(t, f.Cause.Error() == want, "a failure: %q", f.Cause)
	id := testIdentity(1, 2)
	id.host, id.job, id.build = evil, evil, evil
	got, err := unpackIdentity(id.pack())
	require.Check(t, err == nil && got.host == want && got.job == want && got.build == want,
		"an identity: %+v, %v", got, err)
	_, err = result(frame{kind: kindFailed, body: packString(nil, evil)})
	require.Check(t, err.Error() == want, "a result: %q", err)
}

func TestFoundShortTokenIsRefusedBetweenMachines(t *testing.T) {
	for _, e := range distant(t, 2) {
		e.Addr, e.Token = elsewhere, "fifteen bytes.."
		_, err := Join(t.Context(), e)
		for _, part := range []string{"EURYALE_TOKEN has 15 bytes", "16 bytes or more",
			"euryale token"} {
			require.Fails(t, fmt.Sprint("rank ", e.Rank), err, part)
		}
	}
}

// silentClients opens n connections that say nothing. If again, each that is
// closed is opened anew, until the test ends.
func silentClients(t *testing.T, addr string, n int, again bool) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running, opened sync.WaitGroup
	opened.Add(n)
	for range n {
		running.Go(func() {
			once := sync.OnceFunc(opened.Done)
			defer once()
			for {
				conn, err := net.Dial("tcp", addr)
				once()
				if err != nil {
					return // the port is closed: all ranks are there
				}
				stop := context.AfterFunc(ctx, func() { conn.Close() })
				conn.Read(make([]byte, 1))
				if !again && ctx.Err() == nil {
					<-ctx.Done()
				}
				stop()
				conn.Close()
				if ctx.Err() != nil {
					return
				}
			}
		})
	}
	opened.Wait()
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
}

func TestFoundSilentClientsDoNotDelayARank(t *testing.T) {
	for _, c := range []struct {
		n     int
		again bool
		files int
	}{{2000, false, 0}, {300, true, 0}, {2000, true, 0}, {600, false, 64}, {300, true, 64}} {
		t.Run(fmt.Sprintf("%d, again %v, in %d files", c.n, c.again, c.files), func(t *testing.T) {
			dir := t.TempDir()
			var vars []string
			if c.files > 0 {
				vars = append(vars, fmt.Sprintf("%s=%d", withFiles, c.files))
			}
			rank0 := start(t, dir, 2, []int{0}, vars...)[0]
			silentClients(t, published(t, dir), c.n, c.again)
			started := time.Now()
			rank1 := start(t, dir, 2, []int{1})[1]
			rank1.expect(t, long, "joined 1")
			if took := time.Since(started); took > handshakeTime { // a client's whole time
				t.Errorf("rank 1 has joined after %v", took)
			}
			rank0.expect(t, long, "joined 0")
			rank0.say("leave")
			rank1.say("leave")
			rank0.expect(t, long, "left")
			rank1.expect(t, long, "left")
		})
	}
}

// published waits for the address of rank 0 of a job that meets in dir.
func published(t *testing.T, dir string) string {
	t.Helper()
	for ctx := within(t, long); ctx.Err() == nil; pause(ctx, pollTime) {
		files, _ := filepath.Glob(filepath.Join(dir, "euryale", "*"))
		for _, path := range files {
			text, err := os.ReadFile(path)
			if n, ok := decodeRecord(string(text)); err == nil && ok {
				return n.addr
			}
		}
	}
	t.Fatal("rank 0 does not publish its address")
	return ""
}
