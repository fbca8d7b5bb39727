package rendezvous

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
)

// A frame is the unit sent over a connection: a fixed header and a body.
//
//	bytes 0-3   length of the body, little endian
//	byte  4     kind
//	bytes 5-7   zero
//	bytes 8-15  id of the request, little endian
type frame struct {
	kind kind
	id   uint64
	body []byte
	sent func() // not on the wire: if not nil, called once the frame is written
}

type kind byte

// The kinds of frames. The handshake's are the same in every protocol version.
const (
	kindHello      kind = iota + 1 // both: magic, nonce
	kindProof                      // client: mac, identity
	kindWelcome                    // server: mac, identity
	kindRefuse                     // server: mac, text; an empty text to an unauthenticated client
	kindSet                        // key, value           -> kindDone
	kindGet                        // key                  -> kindDone: value, nothing else
	_                              // an addition, in earlier versions
	kindSwap                       // key, old, new        -> kindDone: swapped, current
	kindCancel                     // the id of a wait that its caller has given up; no reply
	kindBye                        // both: a clean leave, the last frame; server: failure
	kindDone                       // server: a result
	kindFailed                     // server: the text of an error
	kindServe                      // server: asks a rank to serve the failure detector
	kindServing                    // client: the address where it does
	kindMove                       // server: the address where another rank does
	kindLastReport                 // server: the failure to blame for its end
	// all-gather, see [gathering.pack] -> kindDone: values, once all are there
	kindGather
	// the same -> kindDone: values, nil if not set
	kindPeek
	kindAppend  // key, entry, value       -> kindDone: the entry
	kindEntries // key, entry              -> kindDone: entries, once the first is there
	kindEnd
)

const (
	headerSize = 16
	// maxHandshake bounds a body from a peer that has not shown the token yet.
	maxHandshake = 512
	// maxBody bounds all other bodies: the largest is a swap of two values.
	maxBody = 2*maxValue + maxKey + 64
)

// readFrame reads one frame with a body of at most limit bytes.
func readFrame(r io.Reader, limit int) (frame, error) {
	var h [headerSize]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return frame{}, err
	}
	n := binary.LittleEndian.Uint32(h[0:])
	f := frame{kind: kind(h[4]), id: binary.LittleEndian.Uint64(h[8:])}
	if f.kind == 0 || f.kind >= kindEnd || h[5]|h[6]|h[7] != 0 {
		return frame{}, fmt.Errorf("received bytes that are not a frame of Euryale's store")
	}
	if int64(n) > int64(limit) {
		return frame{}, fmt.Errorf("received a frame of %d bytes, at most %d are allowed", n, limit)
	}
	f.body = make([]byte, n)
	if _, err := io.ReadFull(r, f.body); err != nil {
		return frame{}, err
	}
	return f, nil
}

// writeTo writes the frame.
func (f frame) writeTo(w io.Writer) error {
	var h [headerSize]byte
	binary.LittleEndian.PutUint32(h[0:], uint32(len(f.body)))
	h[4] = byte(f.kind)
	binary.LittleEndian.PutUint64(h[8:], f.id)
	parts := net.Buffers{h[:], f.body}
	_, err := parts.WriteTo(w)
	return err
}

// packBytes appends v so that unpacker.bytes reads it back, nil as nil.
func packBytes(b, v []byte) []byte {
	if v == nil {
		return binary.LittleEndian.AppendUint32(b, 0)
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(v))+1)
	return append(b, v...)
}

func packString(b []byte, s string) []byte { return packBytes(b, append([]byte{}, s...)) }

func packInt(b []byte, n int64) []byte { return binary.LittleEndian.AppendUint64(b, uint64(n)) }

// unpacker reads a body back. After the first field that does not fit, it returns zeros, and done
// reports the error.
type unpacker struct {
	rest []byte
	bad  bool
}

func (u *unpacker) takeBytes(n int) []byte {
	if u.bad || n > len(u.rest) {
		u.bad = true
		return nil
	}
	v := u.rest[:n:n]
	u.rest = u.rest[n:]
	return v
}

func (u *unpacker) bytes() []byte {
	length := u.takeBytes(4)
	if u.bad {
		return nil
	}
	n := binary.LittleEndian.Uint32(length)
	if n == 0 {
		return nil
	}
	if int64(n)-1 > int64(len(u.rest)) {
		u.bad = true
		return nil
	}
	return u.takeBytes(int(n) - 1)
}

func (u *unpacker) string() string { return string(u.bytes()) }

func (u *unpacker) int() int64 {
	v := u.takeBytes(8)
	if u.bad {
		return 0
	}
	return int64(binary.LittleEndian.Uint64(v))
}

// list reads all values that are left.
func (u *unpacker) list() (values [][]byte, err error) {
	for len(u.rest) > 0 && !u.bad {
		values = append(values, u.bytes())
	}
	return values, u.done()
}

// done reports whether exactly everything was read.
func (u *unpacker) done() error {
	if u.bad || len(u.rest) != 0 {
		return fmt.Errorf("received a malformed frame")
	}
	return nil
}
