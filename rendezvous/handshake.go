package rendezvous

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

const (
	// protocol is the version of what is said after the handshake.
	protocol = 1
	magic    = "euryale\n"
	// handshakeTime bounds the handshake.
	handshakeTime = 5 * time.Second
	nonceSize     = 32
	// maxLabel bounds each string of an identity, so that it fits a frame.
	maxLabel = 64
)

// errToken is what both sides get when their tokens differ.
var errToken = errors.New("the token differs from that of rank 0: start all ranks with the same EURYALE_TOKEN")

// refusal is a rank's lasting error: it has the token, but does not belong.
type refusal struct{ text string }

func (r *refusal) Error() string { return r.text }

// The reasons in a kindRefuse frame.
const (
	refuseToken = iota + 1
	refuseRank
)

// identity is what a rank says of itself in the handshake.
type identity struct {
	rank, size, pid  int
	protocol         int
	build, job, host string
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
		build: build, job: label(e.Job), host: label(host),
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
	for _, s := range []string{id.build, id.job, id.host} {
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
	for _, s := range []*string{&id.build, &id.job, &id.host} {
		*s = strings.ToValidUTF8(u.string(), "?")
	}
	return id, u.done()
}

// match returns what is wrong with a rank that wants to join server.
func (server identity) match(client identity) error {
	differ := func(what string, mine, theirs any, do string) error {
		return &refusal{fmt.Sprintf("%s differ: %v has %v, %v has %v: %s", what, server, mine, client, theirs, do)}
	}
	switch {
	case client.protocol != server.protocol:
		return differ("protocol versions", server.protocol, client.protocol, "build all ranks from the same version of Euryale")
	case client.build != server.build:
		return differ("builds", server.build, client.build, "start the same executable on all ranks")
	case client.job != server.job:
		return differ("job names", server.job, client.job, "give every job an address of its own, and all its ranks the same EURYALE_JOB")
	case client.size != server.size:
		return differ("world sizes", server.size, client.size, "set the same WORLD_SIZE on all ranks")
	case client.rank < 1 || client.rank >= server.size:
		return &refusal{fmt.Sprintf("%v is out of range: there are %d ranks, and rank 0 holds the store", client, server.size)}
	}
	return nil
}

// mac proves the token for one side of one handshake.
func mac(token, role string, nonces, identity []byte) []byte {
	h := hmac.New(sha256.New, []byte(token))
	h.Write([]byte(role))
	h.Write(nonces)
	h.Write(identity)
	return h.Sum(nil)
}

// hello sends a fresh nonce.
func hello(conn net.Conn) ([]byte, error) {
	nonce := make([]byte, nonceSize)
	rand.Read(nonce) // never fails
	return nonce, frame{kind: kindHello, body: append([]byte(magic), nonce...)}.writeTo(conn)
}

// hearHello reads the peer's nonce.
func hearHello(conn net.Conn) ([]byte, error) {
	f, err := readFrame(conn, maxHandshake)
	if err != nil {
		return nil, err
	}
	if f.kind != kindHello || len(f.body) != len(magic)+nonceSize || string(f.body[:len(magic)]) != magic {
		return nil, errors.New("the peer does not speak the protocol of Euryale's store")
	}
	return f.body[len(magic):], nil
}

// hearProof reads a frame of kind want and checks its proof.
func hearProof(conn net.Conn, want kind, token, role string, nonces []byte) (identity, error) {
	f, err := readFrame(conn, maxHandshake)
	if err != nil {
		return identity{}, err
	}
	if f.kind == kindRefuse {
		return identity{}, refused(f.body)
	}
	if f.kind != want || len(f.body) < sha256.Size {
		return identity{}, errors.New("the peer does not speak the protocol of Euryale's store")
	}
	sum, body := f.body[:sha256.Size], f.body[sha256.Size:]
	if !hmac.Equal(sum, mac(token, role, nonces, body)) {
		return identity{}, errToken
	}
	return unpackIdentity(body)
}

// proof is a frame with a proof and an identity.
func proof(k kind, token, role string, nonces []byte, me identity) frame {
	body := me.pack()
	return frame{kind: k, body: append(mac(token, role, nonces, body), body...)}
}

// refuse tells the client why it is refused.
func refuse(conn net.Conn, why error) error {
	reason := int64(refuseRank)
	if errors.Is(why, errToken) {
		reason = refuseToken
	}
	text := why.Error()
	body := packString(packInt(nil, reason), text[:min(len(text), maxHandshake-32)])
	return frame{kind: kindRefuse, body: body}.writeTo(conn)
}

// refused is the error in a kindRefuse frame.
func refused(body []byte) error {
	u := unpacker{rest: body}
	reason, text := u.int(), strings.ToValidUTF8(u.string(), "?")
	switch {
	case u.done() != nil:
		return u.done()
	case reason == refuseToken:
		return errToken
	default:
		return &refusal{text}
	}
}

// greet is the client's side of the handshake. The client proves first: a
// server tells strangers nothing that depends on its token.
func greet(conn net.Conn, token string, me identity) (server identity, err error) {
	conn.SetDeadline(time.Now().Add(handshakeTime))
	mine, err := hello(conn)
	if err != nil {
		return identity{}, err
	}
	theirs, err := hearHello(conn)
	if err != nil {
		return identity{}, err
	}
	nonces := append(mine, theirs...)
	if err := proof(kindProof, token, "client", nonces, me).writeTo(conn); err != nil {
		return identity{}, err
	}
	if server, err = hearProof(conn, kindWelcome, token, "server", nonces); err != nil {
		return identity{}, err
	}
	return server, conn.SetDeadline(time.Time{})
}

// receive is the server's side. admit has the last word on a client that has
// the token, and is given the frame that welcomes it.
func receive(conn net.Conn, token string, me identity, admit func(client identity, welcome frame) error) (client identity, err error) {
	conn.SetDeadline(time.Now().Add(handshakeTime))
	theirs, err := hearHello(conn)
	if err != nil {
		return identity{}, err
	}
	mine, err := hello(conn)
	if err != nil {
		return identity{}, err
	}
	nonces := append(theirs, mine...)
	client, err = hearProof(conn, kindProof, token, "client", nonces)
	if err == nil {
		conn.SetDeadline(time.Time{})
		err = admit(client, proof(kindWelcome, token, "server", nonces, me))
	}
	if err != nil {
		conn.SetDeadline(time.Now().Add(handshakeTime))
		refuse(conn, err) // the peer may be gone, which changes nothing
	}
	return client, err
}
