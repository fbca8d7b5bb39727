package backend

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
)

// Header is what the ranks of one call must agree on: the fingerprint that
// package check compares, and the record that traces print. It is comparable
// and has a fixed size.
type Header struct {
	Seq       uint64 // number of the call on its communicator, from 1
	Count     int64  // see [Collective.Check]
	Splits    uint64 // hash of the splits, 0 for none
	Root      int32
	Slot      int32
	Kind      Kind
	Op        ReduceOp
	DType     DType
	Algorithm Algorithm
}

// HeaderSize is the size of an encoded Header in bytes.
const HeaderSize = 36

// Header returns the header of call number seq. count is the result of Check,
// d the dtype of the buffers. What does not matter to the kind is left out, so
// that it is not compared: Op where nothing is reduced, Root where there is
// none.
func (c Collective) Header(seq uint64, count int, d DType) (h Header) {
	h.Set(&c, seq, count, d)
	return h
}

// Set makes h the [Collective.Header] of a call, where it lies: a copy of what has just been
// written in small pieces takes a processor longer than to write it.
func (h *Header) Set(c *Collective, seq uint64, count int, d DType) {
	h.Seq, h.Count, h.Splits, h.Root, h.Slot = seq, int64(count), 0, 0, int32(c.Slot)
	h.Kind, h.Op, h.DType, h.Algorithm = c.Kind, 0, d, c.Algorithm
	if c.Splits != nil {
		h.Splits = hashSplits(c.Splits)
	}
	if c.Kind.Reduces() {
		h.Op = c.Op
	}
	if c.Kind.Rooted() {
		h.Root = int32(c.Root)
	}
}

func hashSplits(splits []int) uint64 {
	h := fnv.New64a()
	var b [8]byte
	for _, n := range splits {
		binary.LittleEndian.PutUint64(b[:], uint64(n))
		h.Write(b[:])
	}
	return h.Sum64() | 1 // never 0, which means none
}

// Put encodes h into the first HeaderSize bytes of b.
func (h Header) Put(b []byte) {
	le := binary.LittleEndian
	_ = b[HeaderSize-1]
	le.PutUint64(b[0:], h.Seq)
	le.PutUint64(b[8:], uint64(h.Count))
	le.PutUint64(b[16:], h.Splits)
	le.PutUint32(b[24:], uint32(h.Root))
	le.PutUint32(b[28:], uint32(h.Slot))
	b[32], b[33], b[34], b[35] = byte(h.Kind), byte(h.Op), byte(h.DType), byte(h.Algorithm)
}

// GetHeader decodes what Put wrote. Any bytes give a Header, a meaningless one
// from meaningless bytes.
func GetHeader(b []byte) Header {
	le := binary.LittleEndian
	_ = b[HeaderSize-1]
	return Header{
		Seq: le.Uint64(b[0:]), Count: int64(le.Uint64(b[8:])), Splits: le.Uint64(b[16:]),
		Root: int32(le.Uint32(b[24:])), Slot: int32(le.Uint32(b[28:])),
		Kind: Kind(b[32]), Op: ReduceOp(b[33]), DType: DType(b[34]), Algorithm: Algorithm(b[35]),
	}
}

// String describes the call in full: "allreduce(sum) of 1024 f32 (call 17)". No call has
// the zero Header: a rank that does not compare its calls posts that.
func (h Header) String() string {
	if h == (Header{}) {
		return "something that it does not compare (the check is off there)"
	}
	c := Collective{Kind: h.Kind, Op: h.Op, Root: int(h.Root)}
	s := fmt.Sprintf("%v of %d %v", c, h.Count, h.DType)
	if h.Splits != 0 {
		s += fmt.Sprintf(" with splits #%08x", uint32(h.Splits>>32))
	}
	if h.Algorithm != Auto {
		s += fmt.Sprintf(" by %v", h.Algorithm)
	}
	if h.Slot != 0 {
		s += fmt.Sprintf(" in slot %d", h.Slot)
	}
	return fmt.Sprintf("%s (call %d)", s, h.Seq)
}
