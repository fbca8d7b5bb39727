package tcp

import (
	"errors"
	"fmt"
	"io"

	"github.com/euryale-ml/euryale/internal/spinwait"
)

// lane is the data that travels in one direction of a connection in a call: pieces of memory, in
// order.
type lane struct {
	pieces [][]byte
	next   int // the first piece that has not travelled in full
	moved  int // bytes of the call that have travelled
	most   int // bytes that one system call moves
	turn   [8][]byte
}

func (l *lane) add(piece []byte) {
	if len(piece) > 0 {
		l.pieces = append(l.pieces, piece)
	}
}

func (l *lane) pending() bool { return l.next < len(l.pieces) }

// reset begins a call with operands of nbytes.
func (l *lane) reset(nbytes int) {
	clear(l.pieces)
	l.pieces, l.next, l.moved, l.most = l.pieces[:0], 0, 0, turnBytes
	if nbytes <= wholeBytes {
		l.most = wholeBytes
	}
}

// front returns what one system call can move next, and how many bytes that is.
func (l *lane) front() (pieces [][]byte, total int) {
	pieces = l.turn[:0]
	for _, piece := range l.pieces[l.next:] {
		if len(pieces) == cap(pieces) || total == l.most {
			break
		}
		piece = piece[:min(len(piece), l.most-total)]
		pieces, total = append(pieces, piece), total+len(piece)
	}
	return pieces, total
}

// fill copies bytes to where the next ones belong.
func (l *lane) fill(from []byte) {
	for _, piece := range l.pieces[l.next:] {
		from = from[copy(piece, from):]
	}
}

// advance notes that n more bytes have travelled.
func (l *lane) advance(n int) {
	l.moved += n
	for n > 0 {
		piece := l.pieces[l.next]
		if n < len(piece) {
			l.pieces[l.next] = piece[n:]
			return
		}
		n -= len(piece)
		l.next++
	}
}

// link is the connection to another rank: a socket that never blocks.
type link struct {
	sock    socket
	tunnel  *tunnel // nil without TLS, where the socket is the system's
	out, in lane
	packed  [packedBytes]byte  // short pieces, side by side
	lost    error              // why nothing travels any more
	grace   *spinwait.Patience // before blaming it: others may know better
}

func (l *link) close() error {
	err := l.sock.close()
	if l.tunnel != nil {
		err = errors.Join(err, l.tunnel.close())
	}
	return err
}

const (
	// turnBytes bounds what one system call moves, so that both directions of all links make
	// progress.
	turnBytes = 512 << 10
	// wholeBytes is that bound if the operand is no larger: two ranks then send at the same time
	// and receive at the same time, and do not contend for sockets that one reads and the other
	// fills. That takes 0.8 of the time at 1 MiB, but more at 16 MiB, which do not fit the caches
	// (bench/results/2026-11/2026-11-23-epyc2-tcp.md).
	wholeBytes = 2 << 20
	// packedBytes is the limit up to which pieces travel through one buffer: copying them costs
	// less than a vector of pieces costs the kernel, which is 0.3 us of 5
	// (bench/results/2026-11/2026-11-23-epyc2-tcp.md).
	packedBytes = 4 << 10
)

// send sends what it can without waiting, and returns how many bytes, or -1.
func (l *link) send() int {
	pieces, total := l.out.front()
	if len(pieces) > 1 && total <= packedBytes {
		packed := l.packed[:0]
		for _, piece := range pieces {
			packed = append(packed, piece...)
		}
		pieces = [][]byte{packed}
	}
	n, err := l.sock.send(pieces, total)
	if err != nil {
		l.lose(fmt.Errorf("send: %w", err))
	}
	l.out.advance(max(0, n))
	return n
}

// receive takes what has arrived of the call, and returns how many bytes, or -1.
func (l *link) receive() int {
	pieces, total := l.in.front()
	apart := len(pieces) > 1 && total <= packedBytes
	if apart {
		pieces = [][]byte{l.packed[:total]}
	}
	n, err := l.sock.receive(pieces, total)
	switch {
	case err != nil:
		l.lose(fmt.Errorf("receive: %w", err))
	case n == 0:
		l.lose(fmt.Errorf("receive: %w", io.ErrUnexpectedEOF))
	case apart:
		l.in.fill(l.packed[:max(0, n)])
	}
	l.in.advance(max(0, n))
	return n
}

// lose notes that the connection has ended. Mostly, others know the reason, and report it soon: the
// other rank is lost, has closed, or has learned that the group has ended.
func (l *link) lose(err error) {
	if l.tunnel != nil {
		err = l.tunnel.reason(err)
	}
	l.lost, l.grace = err, spinwait.Patient(lostGrace)
}
