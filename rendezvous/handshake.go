package rendezvous

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	// protocol is the version of everything said after the handshake.
	protocol = 6
	magic    = "euryale\n"
	// handshakeTime bounds the handshake on the server's side. A client waits that long at first,
	// and twice as long in each further attempt.
	handshakeTime = 5 * time.Second
	nonceSize     = 32
	// maxLabel bounds each string of an identity, so that it fits a frame.
	maxLabel = 64
	// maxRefusal bounds the text of a refusal, in bytes, for the same reason.
	maxRefusal = maxHandshake - sha256.Size
)

// errToken is the error of either side when the other does not prove the token. An unauthenticated
// client can cause it, so it does not end a job.
var errToken = errors.New("the other side does not have this token: start all ranks with the " +
	"same EURYALE_TOKEN, and see that no other program listens at the address of rank 0")

// refusal is a permanent error: both sides have the token, but the rank does not
// belong to the job. An unauthenticated client cannot cause one.
type refusal struct{ text string }

func (r *refusal) Error() string { return r.text }

// identity describes a rank in the handshake.
type identity struct {
	rank, size, pid  int
	protocol         int
	build, job, host string
	// ended is set by a launcher to report how the process of this rank ended.
	ended string
	// lasting marks a server that outlives the ranks: it is another program. It is not sent.
	lasting bool
	// tls says that this rank's connections use TLS. It is not sent: a peer without TLS could not
	// read it.
	tls bool
}

// identify returns the identity of this process as a rank.
func identify(e Env) (identity, error) {
	build, err := buildID()
	if err != nil {
		return identity{}, err
	}
	host, _ := os.Hostname() // only for messages
	return identity{
		rank: e.Rank, size: e.Size, pid: os.Getpid(), protocol: protocol,
		build: build, job: label(e.Job), host: label(host), tls: e.TLS,
	}, nil
}

func label(s string) string { return s[:min(len(s), maxLabel)] }

func (id identity) String() string {
	return fmt.Sprintf("rank %d (process %d on %s)", id.rank, id.pid, id.host)
}

func (id identity) pack() []byte {
	var b []byte
	for _, n := range []int{id.rank, id.size, id.pid, id.protocol} {
		b = packInt(b, int64(n))
	}
	for _, s := range []string{id.build, id.job, id.host, id.ended} {
		b = packString(b, label(s))
	}
	return b
}

func unpackIdentity(b []byte) (identity, error) {
	u := unpacker{rest: b}
	var id identity
	for _, n := range []*int{&id.rank, &id.size, &id.pid, &id.protocol} {
		*n = int(u.int())
	}
	for _, s := range []*string{&id.build, &id.job, &id.host, &id.ended} {
		*s = Printable(u.string())
	}
	return id, u.done()
}

// Printable escapes in the text of others what a terminal or a page would not show as it is:
// control characters, except newlines and tabs, and those that change the direction of text or have
// no width. Everything of a peer or of another's file goes through it before it is shown.
func Printable(text string) string {
	hidden := func(c rune) bool { return c != '\n' && c != '\t' && !strconv.IsPrint(c) }
	if utf8.ValidString(text) && !strings.ContainsFunc(text, hidden) {
		return text
	}
	var b strings.Builder
	for _, c := range text {
		if !hidden(c) {
			b.WriteRune(c)
			continue
		}
		quoted := strconv.QuoteRuneToASCII(c)
		b.WriteString(quoted[1 : len(quoted)-1])
	}
	return b.String()
}

// match returns an error if a client does not belong to the job of server.
func (server identity) match(client identity) error {
	differ := func(what string, mine, theirs any, do string) error {
		return &refusal{fmt.Sprintf("%s differ: %v has %v, %v has %v: %s", what, server, mine,
			client, theirs, do)}
	}
	switch {
	case client.protocol != server.protocol:
		return differ("protocol versions", server.protocol, client.protocol,
			"build all ranks from the same version of Euryale")
	case client.build != server.build && client.ended == "" && !server.lasting:
		// a launcher is another program
		return differ("builds", server.build, client.build,
			"start the same executable on all ranks")
	case client.job != server.job:
		return differ("job names", server.job, client.job, "give every job its own address, and "+
			"all its ranks the same EURYALE_JOB")
	case client.size != server.size:
		return differ("world sizes", server.size, client.size,
			"set the same WORLD_SIZE on all ranks")
	case client.rank < 1 || client.rank >= server.size:
		return &refusal{fmt.Sprintf("%v is out of range: there are %d ranks, and rank 0 serves "+
			"the store", client, server.size)}
	}
	return nil
}

// covered returns what the proofs of one handshake cover: both nonces and, with TLS, the binding to
// the connection.
func covered(conn net.Conn, client, server []byte) ([]byte, error) {
	bound, err := binding(conn)
	return slices.Concat(client, server, bound), err
}

// mac proves the token for one frame of one handshake. It covers the kind, so that no
// frame can stand for another.
func mac(token string, k kind, nonces, body []byte) []byte {
	h := hmac.New(sha256.New, []byte(token))
	h.Write([]byte{byte(k)})
	h.Write(nonces)
	h.Write(body)
	return h.Sum(nil)
}

// proven is a frame with a proof of the token.
func proven(k kind, token string, nonces, body []byte) frame {
	return frame{kind: k, body: append(mac(token, k, nonces, body), body...)}
}

// hello sends a fresh nonce.
func hello(conn net.Conn) ([]byte, error) {
	nonce := make([]byte, nonceSize)
	rand.Read(nonce) // never fails
	return nonce, frame{kind: kindHello, body: append([]byte(magic), nonce...)}.writeTo(conn)
}

// errNotEuryale is the error of a peer that is neither a store nor a rank.
var errNotEuryale = errors.New("the peer does not speak the protocol of Euryale's store")

// hearHello reads the peer's nonce.
func hearHello(conn net.Conn) ([]byte, error) {
	f, err := readFrame(conn, maxHandshake)
	if err != nil {
		return nil, err
	}
	if f.kind != kindHello || len(f.body) != len(magic)+nonceSize ||
		string(f.body[:len(magic)]) != magic {
		return nil, errNotEuryale
	}
	return f.body[len(magic):], nil
}

// hearProven reads a frame of one of the kinds, and checks its proof.
func hearProven(conn net.Conn, token string, nonces []byte, kinds ...kind) (kind, []byte, error) {
	f, err := readFrame(conn, maxHandshake)
	if err != nil {
		return 0, nil, err
	}
	if !slices.Contains(kinds, f.kind) {
		return 0, nil, errNotEuryale
	}
	if len(f.body) < sha256.Size {
		return 0, nil, errToken
	}
	sum, body := f.body[:sha256.Size], f.body[sha256.Size:]
	if !hmac.Equal(sum, mac(token, f.kind, nonces, body)) {
		return 0, nil, errToken
	}
	return f.kind, body, nil
}

// greet is the client's side of the handshake; it takes at most wait. The client proves the token
// first, so nothing that a server sends to unauthenticated clients depends on its token. A
// [refusal] comes from a server that has proven the token.
func greet(conn net.Conn, token string, me identity, wait time.Duration) (server identity,
	err error) {
	conn.SetDeadline(time.Now().Add(wait))
	mine, err := hello(conn)
	if err != nil {
		return identity{}, explainTLS(conn, err)
	}
	theirs, err := hearHello(conn)
	if err != nil {
		return identity{}, err
	}
	nonces, err := covered(conn, mine, theirs)
	if err != nil {
		return identity{}, err
	}
	if err := proven(kindProof, token, nonces, me.pack()).writeTo(conn); err != nil {
		return identity{}, err
	}
	k, body, err := hearProven(conn, token, nonces, kindWelcome, kindRefuse)
	if err != nil {
		return identity{}, err
	}
	if k == kindRefuse {
		return identity{}, &refusal{Printable(string(body))}
	}
	if server, err = unpackIdentity(body); err != nil {
		return identity{}, err
	}
	return server, conn.SetDeadline(time.Time{})
}

// receive is the server's side. admit decides about a client that has proven the token, and gets
// the frame that welcomes the client. A refusal has a text only for such a client: unauthenticated
// clients get an empty one.
func (g *gate) receive(conn net.Conn, token string, me identity,
	admit func(client identity, welcome frame) error) (client identity, err error) {
	conn.SetDeadline(time.Now().Add(handshakeTime))
	theirs, err := hearHello(conn)
	if err != nil {
		return identity{}, explainTLS(conn, err)
	}
	g.unproven.greeted(conn)
	mine, err := hello(conn)
	if err != nil {
		return identity{}, err
	}
	nonces, err := covered(conn, theirs, mine)
	if err != nil {
		return identity{}, err
	}
	_, body, err := hearProven(conn, token, nonces, kindProof)
	if err != nil {
		frame{kind: kindRefuse}.writeTo(conn) // the peer may be gone, which changes nothing
		return identity{}, err
	}
	if client, err = unpackIdentity(body); err != nil {
		return identity{}, err
	}
	if err = admit(client, proven(kindWelcome, token, nonces, me.pack())); err != nil {
		text := err.Error()
		proven(kindRefuse, token, nonces, []byte(text[:min(len(text), maxRefusal)])).writeTo(conn)
	}
	return client, err
}
