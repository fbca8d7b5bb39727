package rendezvous

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// guest is a connection from an address, for a crowd.
type guest struct {
	net.Conn
	from   string
	closed bool
}

func (g *guest) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(g.from), Port: 1} }

func (g *guest) Close() error {
	g.closed = true
	return nil
}

// visitors are a storm on a crowd, as many from each source; they say hello if they are to.
func visitors(c *crowd, hello bool, sources ...string) {
	for range 10 * mostUnproven {
		for _, from := range sources {
			g := &guest{from: from}
			c.enter(g)
			if hello {
				c.greeted(g)
			}
		}
	}
}

func TestUnauthenticatedClientsTakePlacesOfTheirOwnSource(t *testing.T) {
	for _, c := range []struct{ rank, client, other string }{
		{"192.0.2.1", "192.0.2.2", "192.0.2.3"},
		{"2001:db8::1", "2001:db8:0:1::1", "2001:db8:0:1::2"}, // two addresses of one network
		{"192.0.2.1", "::ffff:192.0.2.2", "192.0.2.2"},
	} {
		crowd := newCrowd()
		rank, silent := &guest{from: c.rank}, &guest{from: c.rank}
		crowd.enter(silent)
		crowd.enter(rank)
		visitors(crowd, false, c.client, c.other)
		crowd.greeted(rank)
		visitors(crowd, true, c.client, c.other)
		require.Check(t,
			!rank.closed && !silent.closed && crowd.giveUp(rank) && crowd.giveUp(silent),
			"%v: it is dropped: %v, and before its hello: %v", c, rank.closed, silent.closed)
	}
}

func TestWhoHasSaidHelloStaysAmongSilentClients(t *testing.T) {
	c := newCrowd()
	rank := &guest{from: "192.0.2.1"}
	c.enter(rank)
	c.greeted(rank)
	visitors(c, false, "192.0.2.1", "192.0.2.2")
	require.Check(t, !rank.closed && c.giveUp(rank), "the rank is dropped")
}

func TestUnauthenticatedClientsThatSayHelloLeaveRoomForNewClients(t *testing.T) {
	c := newCrowd()
	visitors(c, true, "192.0.2.1")
	rank := &guest{from: "192.0.2.1"}
	c.enter(rank)
	require.Check(t, !rank.closed, "the rank is dropped before it can speak")
}

// A rank of the unauthenticated clients' own source, which has no place of its own, has a chance in
// each attempt: it is not the one that goes for certain, after however many new clients.
func TestDroppedConnectionIsARandomOne(t *testing.T) {
	stayed := 0
	for range 200 {
		c := newCrowd()
		rank := &guest{from: "192.0.2.1"}
		c.enter(rank)
		room := c.halls[0].room
		for range 2*room - 1 { // one drop for each place: the oldest would be gone
			c.enter(&guest{from: "192.0.2.1"})
		}
		if !rank.closed {
			stayed++
		}
	}
	if stayed < 30 || stayed > 120 { // 1/e of them is 74
		t.Errorf("it stayed %d times of 200", stayed)
	}
}

func TestDroppedConnectionHasNoPlace(t *testing.T) {
	c := newCrowd()
	g := &guest{from: "192.0.2.1"}
	c.enter(g)
	c.thin()
	c.greeted(g)
	require.Check(t, g.closed && !c.giveUp(g), "it is closed: %v, and has a place again", g.closed)
	c.thin() // there is nobody
	c.greeted(g)
	require.Check(t, len(c.halls[0].from)+len(c.halls[1].from) == 0 &&
		c.halls[0].held+c.halls[1].held == 0, "an empty crowd is %+v", c.halls)
}

// A rank whose messages take 25 ms each way joins while 3,000 unauthenticated clients come in a
// second, 1,500 with TLS.
func TestUnauthenticatedClientsDoNotKeepARankOutThatIsFarAway(t *testing.T) {
	testFarRank(t, false, false)
	testFarRank(t, false, true)
	testFarRank(t, true, false)
}

func TestUnauthenticatedClientsThatSayHelloDoNotKeepARankOutUnraced(t *testing.T) {
	if proctest.Race {
		t.Skip("it would measure the race detector's cost of a TLS handshake")
	}
	testFarRank(t, true, true)
}

func testFarRank(t *testing.T, tls, says bool) {
	for _, source := range []string{"127.0.0.2", "127.0.0.1"} {
		t.Run(fmt.Sprintf("TLS %v, from %s, hello %v", tls, source, says), func(t *testing.T) {
			farRank(t, tls, source, says)
		})
	}
}

func farRank(t *testing.T, tls bool, source string, says bool) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	me, you := testIdentity(0, 2), testIdentity(1, 2)
	me.tls, you.tls = tls, tls
	if err == nil {
		ln, err = secured(ln, me)
	}
	require.NoError(t, err)
	s := serve(ln, testToken, me, long, nil)
	defer s.stop()
	e := Env{Addr: "127.0.0.1", Token: testToken, Timeout: long}
	e.Port = proctest.Far(t, ln.Addr().String(), 25*time.Millisecond)
	second, words := 3000, func(conn net.Conn) {}
	if says {
		words = func(conn net.Conn) { hello(conn) }
	}
	if tls {
		second = 1500
	}
	// The same hello again costs the client nothing, and the server a handshake.
	if first := clientHello(t); tls && says {
		words = func(conn net.Conn) { conn.Write(first) }
	}
	came := proctest.Storm(t, source, ln.Addr().String(), second, words)
	for ctx := within(t, long); came.Load() < 1000 && ctx.Err() == nil; {
		pause(ctx, time.Millisecond)
	}
	began, before := time.Now(), came.Load()
	c, _, err := dialRank0(within(t, 3*time.Minute), e, you, false) // with other work
	if err != nil {
		t.Fatalf("after %v and %d unauthenticated clients: %v", time.Since(began), came.Load(), err)
	}
	took := time.Since(began)
	second = int(float64(came.Load()-before) / took.Seconds())
	t.Logf("the rank is there after %v; %d unauthenticated clients came in a second", took, second)
	works(t, c)
	c.Close()
}

// clientHello returns the first words of a client of TLS.
func clientHello(t *testing.T) []byte {
	t.Helper()
	here, there := net.Pipe()
	defer there.Close()
	go func() {
		overTLS(here).Write([]byte("hello")) // ends with there
		here.Close()
	}()
	words := make([]byte, 4096)
	n := require.Value(there.Read(words))(t)
	return words[:n]
}
