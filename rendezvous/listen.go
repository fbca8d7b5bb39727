package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"time"
)

// Listener takes connections from the other ranks of a job. Make one with [World.Listen].
type Listener struct {
	gate
	token string
	me    identity
	serve func(rank int, conn net.Conn)
}

// Listen takes connections that ranks of the job make by [World.Dial] with the same name, at the
// address by which this rank reaches the others. An unauthenticated client's connection has no
// effect: both ends first prove the job's token, as for the store, and the proof is worthless under
// another name. Listen passes each connection to serve, in a separate goroutine; serve closes it.
// With TLS it is a [*tls.Conn]. A World from [New] needs the Token of its Env.
func (w *World) Listen(name string, serve func(rank int, conn net.Conn)) (*Listener, error) {
	token, err := w.Secret(name)
	if err != nil {
		return nil, err
	}
	config := net.ListenConfig{KeepAliveConfig: keepAlive()}
	ln, err := config.Listen(w.down, "tcp", net.JoinHostPort(w.host, "0"))
	if err != nil {
		return nil, fmt.Errorf("rendezvous: rank %d: listen for other ranks: %w", w.Rank, err)
	}
	l := &Listener{token: token, me: w.identity(), serve: serve}
	if ln, err = secured(ln, l.me); err != nil {
		return nil, fmt.Errorf("rendezvous: rank %d: listen for other ranks: %w", w.Rank, err)
	}
	l.start(ln, l.takeConn)
	return l, nil
}

// Interface returns the network interface by which the other machines of the job reach this one. It
// is the interface of the route to rank 0, where the machines meet, or the loopback interface if
// the ranks meet on this machine alone.
func (w *World) Interface() (net.Interface, error) {
	own := net.ParseIP(w.host)
	all, err := net.Interfaces()
	if err != nil {
		return net.Interface{}, fmt.Errorf("rendezvous: rank %d: network interfaces: %w",
			w.Rank, err)
	}
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			return net.Interface{},
				fmt.Errorf("rendezvous: rank %d: addresses of network interface %s: %w", w.Rank,
					i.Name, err)
		}
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && n.IP.Equal(own) {
				return i, nil
			}
		}
	}
	return net.Interface{}, fmt.Errorf("rendezvous: rank %d: no network interface of this "+
		"machine has the address %s, by which it reaches rank 0", w.Rank, w.host)
}

// ListenAt is [World.Listen] without a World, at an address that the others know, for the launchers
// of a job, which come and go: they use [DialAt].
func ListenAt(addr string, e Env, serve func(rank int, conn net.Conn)) (*Listener, error) {
	l := &Listener{me: known(e), token: secretAt(e), serve: serve}
	ln, err := (&net.ListenConfig{KeepAliveConfig: keepAlive()}).Listen(context.Background(), "tcp",
		addr)
	if err == nil {
		ln, err = secured(ln, l.me)
	}
	if err != nil {
		return nil, fmt.Errorf("rendezvous: listen for the launchers of other machines: %w", err)
	}
	l.start(ln, l.takeConn)
	return l, nil
}

// DialAt connects to [ListenAt], as soon as somebody listens there, at most for the Timeout of e.
func DialAt(ctx context.Context, addr string, e Env) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, e.Timeout)
	defer cancel()
	for last := error(nil); ; pause(ctx, retryTime) {
		conn, _, err := reach(ctx, addr, secretAt(e), known(e), e.Timeout)
		if err == nil {
			return conn, nil
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		if errors.As(err, new(*refusal)) || errors.Is(err, errToken) || ctx.Err() != nil {
			return nil, fmt.Errorf("rendezvous: connect to the launcher of the job at %s: %w", addr,
				last)
		}
	}
}

// known is how a launcher identifies itself to others, and secretAt what they prove.
func known(e Env) identity {
	host, _ := os.Hostname() // only for messages
	return identity{rank: e.Rank, size: e.Size, pid: os.Getpid(), protocol: protocol,
		job: label(e.Job), host: label(host), tls: e.TLS}
}

func secretAt(e Env) string {
	return string(mac(e.Token, kindHello, []byte(e.Job+"\n"), []byte("launchers")))
}

// Addr returns the address for [World.Dial].
func (l *Listener) Addr() string { return l.ln.Addr().String() }

// Close takes no more connections, and waits for the calls of serve to return.
func (l *Listener) Close() error {
	err := l.ln.Close()
	l.end()
	l.running.Wait()
	return err
}

func (l *Listener) takeConn(conn net.Conn) {
	stop := context.AfterFunc(l.over, func() { conn.Close() })
	peer, err := l.receive(conn, l.token, l.me, func(peer identity, welcome frame) error {
		if peer.size != l.me.size || peer.rank < 0 || peer.rank >= peer.size {
			return &refusal{fmt.Sprintf("%v is no rank of this job", peer)}
		}
		if !l.unproven.giveUp(conn) { // just dropped for newer ones: a welcome would be a lie
			return net.ErrClosed
		}
		return welcome.writeTo(conn)
	})
	l.unproven.giveUp(conn)
	if !stop() || err != nil {
		conn.Close()
		return
	}
	conn.SetDeadline(time.Time{})
	l.serve(peer.rank, conn)
}

// Dial connects to a rank's [Listener] of the same name, at its Addr. If many unauthenticated
// clients connect at once, the listener drops connections that have not proven the token yet, which
// delays Dial: it tries again until ctx ends, a rank is lost, or Timeout passes.
func (w *World) Dial(ctx context.Context, name string, rank int, addr string) (net.Conn, error) {
	token, err := w.Secret(name)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, w.Timeout)
	defer cancel()
	for last := error(nil); ; pause(ctx, retryTime) {
		conn, peer, err := reach(ctx, addr, token, w.identity(), w.Timeout)
		if err == nil && peer.rank == rank {
			return conn, nil
		}
		if err == nil {
			conn.Close()
			err = fmt.Errorf("%v answers", peer)
		}
		if last == nil || !errors.Is(err, context.DeadlineExceeded) &&
			!errors.Is(err, os.ErrDeadlineExceeded) {
			last = err
		}
		if !hungUp(err) || w.Failure() != nil {
			return nil, fmt.Errorf("rendezvous: rank %d: connect to rank %d at %s: %w", w.Rank,
				rank, addr, last)
		}
	}
}

// hungUp reports whether the other side has ended a connection without a word.
func hungUp(err error) bool {
	return slices.ContainsFunc(append(hangUps(), io.EOF, io.ErrUnexpectedEOF),
		func(end error) bool { return errors.Is(err, end) })
}

// identity is how this rank identifies itself to peers other than the store.
func (w *World) identity() identity {
	host, _ := os.Hostname() // only for messages
	return identity{rank: w.Rank, size: w.Size, pid: os.Getpid(), protocol: protocol,
		job: label(w.Name), host: label(host), tls: w.TLS}
}

// Secret derives 32 bytes from the job's token and a name: the same on all ranks, and known to
// nobody else. It is an error without a token, as in a World from [New] whose Env has none.
func (w *World) Secret(name string) (string, error) {
	if w.token == "" {
		return "", errors.New("rendezvous: connections between ranks need a secret: give New an " +
			"Env with a Token, the same on all ranks")
	}
	return string(mac(w.token, kindHello, []byte(w.Name+"\n"), []byte(name))), nil
}

// rooted is a store over connections, which others can use, too.
type rooted interface {
	// root returns the token, and this rank's address among the others.
	root() (token, host string)
}

func (c *client) root() (token, host string) { return c.token, hostOf(c.link.conn.LocalAddr()) }

func (h *hostStore) root() (token, host string) {
	return h.server.token, hostOf(h.server.ln.Addr())
}

func hostOf(a net.Addr) string {
	host, _, err := net.SplitHostPort(a.String())
	if err != nil {
		return loopbackHost
	}
	return host
}

// loopbackHost is where the ranks of one process reach each other.
const loopbackHost = "127.0.0.1"
