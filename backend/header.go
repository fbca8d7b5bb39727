package backend

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math/bits"
	"strings"
)

// Header holds what the ranks must agree on in one call. Ranks compare it as a fingerprint, and
// traces print it. It has a fixed size. Headers are compared as [Header.Put] encodes them, since
// Origin is a pointer.
type Header struct {
	Seq        uint64 // number of the call on its communicator, from 1
	Count      int64  // see [Collective.Check]
	Splits     uint64 // hash of the splits and rows, 0 for none
	Generation uint32 // of the group: 0 until groups are made anew after a failure
	State      uint32 // see [Collective]
	Root       int32
	Kind       Kind
	Op         ReduceOp
	DType      DType
	Algorithm  Algorithm
	Exact      bool
	// Association of the call.
	Association Association
	Origin      *Origin // nil if it says nothing
	Original    Original
}

// HeaderSize is the size of an encoded Header in bytes.
//
//	 0  Seq            40  State                     54  kind of Shape   60  Association
//	 8  Count          44  Origin.Ordinal            55  Origin.Cut      61  zero, like 62
//	16  Splits         48  Kind, Op, DType,          56  Origin.Join     63  1 if 64 to 119 count
//	24  Original.Hash      Algorithm, Exact          57  Original.Op     64  Origin.Shape
//	32  Generation     53  Origin.Purpose            58  Original.DType  88  Origin.Name
//	36  Root                                         59  Original.Transport
//
// Most calls have no Origin, or one without name and axes. Their headers are one cache line: the
// second half is neither written nor read.
const HeaderSize = 128

// half is the part of an encoded header that every call has.
const half = HeaderSize / 2

// named, in the last byte of the first half, says that the second half counts.
const named = 1 << 56

// Header returns the header of call number seq. count is the result of Check, d the dtype of the
// buffers. Fields that do not matter to the kind are left out, so they are not compared: Op where
// nothing is reduced, Root where there is none.
func (c Collective) Header(seq uint64, count int, d DType) (h Header) {
	h.Set(&c, seq, count, d)
	return h
}

// Set sets h, in place, to the [Collective.Header] of a call. A processor takes longer to copy what
// it has just written in small pieces than to write it.
func (h *Header) Set(c *Collective, seq uint64, count int, d DType) {
	h.Seq, h.Count, h.Generation, h.State = seq, int64(count), 0, uint32(c.State)
	h.Kind, h.DType, h.Algorithm, h.Exact = c.Kind, d, c.Algorithm, c.Exact
	h.Association, h.Origin, h.Original = c.Association, c.Origin, c.Original
	h.Op, h.Root, h.Splits = c.compared()
}

// compared returns the fields that ranks compare only for some kinds.
func (c *Collective) compared() (op ReduceOp, root int32, splits uint64) {
	if c.Splits != nil || c.Rows != nil {
		splits = c.hashSplits()
	}
	if c.Kind.Reduces() {
		op = c.Op
	}
	if c.Kind.Rooted() {
		root = int32(c.Root)
	}
	return op, root, splits
}

// hashSplits is the hash of Splits and Rows.
func (c *Collective) hashSplits() uint64 {
	h := fnv.New64a()
	var b [8]byte
	add := func(list []int) {
		for _, n := range list {
			binary.LittleEndian.PutUint64(b[:], uint64(n))
			h.Write(b[:])
		}
	}
	add(c.Splits)
	if c.Rows != nil {
		add(c.Rows.Src)
		add(c.Rows.Dst)
	}
	return h.Sum64() | 1 // never 0, which means none
}

// Put encodes h into b and returns its [Digest]. It writes the second half of b only if Origin
// has a name or axes; otherwise those bytes mean nothing.
func (h *Header) Put(b *[HeaderSize]byte) (digest uint64) {
	kind := kindWord(h.Kind, h.Op, h.DType, h.Algorithm, h.Exact)
	return encode(b, h.Seq, uint64(h.Count), h.Splits,
		uint64(h.Generation)|uint64(uint32(h.Root))<<32, uint64(h.State), kind,
		uint64(h.Association)<<32, &h.Original, h.Origin)
}

// PutHeader is [Header.Put] of the [Collective.Header] of a call, without making that Header, which
// takes 8 ns.
func (c *Collective) PutHeader(b *[HeaderSize]byte, seq uint64, count int,
	d DType) (digest uint64) {
	op, root, splits := c.compared()
	kind := kindWord(c.Kind, op, d, c.Algorithm, c.Exact)
	return encode(b, seq, uint64(count), splits, uint64(uint32(root))<<32, uint64(uint32(c.State)),
		kind, uint64(c.Association)<<32, &c.Original, c.Origin)
}

// kindWord is the word at 48 of a header without Origin.
func kindWord(k Kind, op ReduceOp, d DType, a Algorithm, exact bool) uint64 {
	word := uint64(k) | uint64(op)<<8 | uint64(d)<<16 | uint64(a)<<24
	if exact {
		word |= 1 << 32
	}
	return word
}

// encode writes the words of a header. It adds original to asked, and o to the words that it is
// part of.
func encode(b *[HeaderSize]byte, seq, count, splits, root, state, kind, asked uint64,
	original *Original, o *Origin) (digest uint64) {
	le := binary.LittleEndian
	asked |= uint64(original.Op)<<8 | uint64(original.DType)<<16 | uint64(original.Transport)<<24
	if o != nil {
		state |= uint64(o.Ordinal) << 32
		kind |= uint64(o.Purpose)<<40 | uint64(o.Shape.kind)<<48 | uint64(o.Cut)<<56
		asked |= uint64(o.Join)
		if o.Name != (Name{}) || o.Shape.axes != [shownAxes]uint32{} {
			asked |= named
			o.Shape.encode(b[half:])
			copy(b[88:120], o.Name[:])
			le.PutUint64(b[120:], 0)
		}
	}
	// Write whole words: a copy of smaller pieces would wait until they are in the cache.
	le.PutUint64(b[0:], seq)
	le.PutUint64(b[8:], count)
	le.PutUint64(b[16:], splits)
	le.PutUint64(b[24:], original.Hash)
	le.PutUint64(b[32:], root)
	le.PutUint64(b[40:], state)
	le.PutUint64(b[48:], kind)
	le.PutUint64(b[56:], asked)
	return Digest(b)
}

// Digest is a hash of an encoded header, never 0 and the same in every process. Equal digests mean
// equal headers. Ranks that share memory compare digests, because one fits into the cache line that
// announces a call.
//
// Origin: wyhash
func Digest(header *[HeaderSize]byte) uint64 {
	a, b := mixHalf(0xa0761d6478bd642f, 0xe7037ed1a0b428db, (*[half]byte)(header[:half]))
	if header[half-1] != 0 {
		a, b = mixHalf(a, b, (*[half]byte)(header[half:]))
	}
	return mix(a^0x1d8e4e27c47d124f, b^HeaderSize) | 1
}

// mixHalf advances two chains of products, which a processor computes at the same time.
//
// Origin: wyhash
func mixHalf(a, b uint64, header *[half]byte) (uint64, uint64) {
	const c, d = 0x8ebc6af09c88c6e3, 0x589965cc75374cc3
	le := binary.LittleEndian
	a = mix(le.Uint64(header[0:])^c, le.Uint64(header[8:])^a)
	b = mix(le.Uint64(header[16:])^d, le.Uint64(header[24:])^b)
	a = mix(le.Uint64(header[32:])^c, le.Uint64(header[40:])^a)
	b = mix(le.Uint64(header[48:])^d, le.Uint64(header[56:])^b)
	return a, b
}

func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// GetHeader decodes what Put wrote. It accepts any bytes; meaningless bytes give a meaningless
// Header.
func GetHeader(b *[HeaderSize]byte) Header {
	le := binary.LittleEndian
	h := Header{
		Seq: le.Uint64(b[0:]), Count: int64(le.Uint64(b[8:])), Splits: le.Uint64(b[16:]),
		Generation: le.Uint32(b[32:]), Root: int32(le.Uint32(b[36:])), State: le.Uint32(b[40:]),
		Kind: Kind(b[48]), Op: ReduceOp(b[49]), DType: DType(b[50]), Algorithm: Algorithm(b[51]),
		Exact: b[52] != 0, Association: Association(b[60]),
		Original: Original{Hash: le.Uint64(b[24:]), Op: ReduceOp(b[57]), DType: DType(b[58]),
			Transport: DType(b[59])},
	}
	o := Origin{Ordinal: le.Uint32(b[44:]), Purpose: Purpose(b[53]), Cut: b[55], Join: b[56],
		Shape: Shape{kind: b[54]}}
	if b[half-1] != 0 {
		o.Shape.get(b[half:])
		copy(o.Name[:], b[88:120])
	}
	if o != (Origin{}) {
		h.Origin = &o
	}
	return h
}

// Asked returns the header of the call that h stands for: the call that the program asked a wrapper
// for, if the wrapper recorded it.
func (h Header) Asked() Header {
	if o := h.Original; o.DType != 0 {
		h.Op, h.DType, h.Original = o.Op, o.DType, Original{Hash: o.Hash}
	}
	return h
}

// String describes the call in full: "allreduce(sum) of 1024 f32 (call 17)", or "DataParallel.Save:
// allgather of 40 u8 (call 17)". No call has the zero Header: ranks that do not compare their calls
// post it.
func (h Header) String() string {
	if h == (Header{}) {
		return "something that it does not compare (the check is off there)"
	}
	h = h.Asked()
	o := h.origin()
	if o.Purpose == ForReplay {
		return fmt.Sprintf("replay %d of a graph of %d collectives #%08x (call %d)", h.State,
			h.Count, uint32(h.Original.Hash), h.Seq)
	}
	var s strings.Builder
	if o.Purpose.method() {
		fmt.Fprintf(&s, "%v: ", o.Purpose)
	}
	fmt.Fprintf(&s, "%v of ", Collective{Kind: h.Kind, Op: h.Op, Association: h.Association,
		Root: int(h.Root)})
	if o.Name != (Name{}) {
		fmt.Fprintf(&s, "%v, ", o.Name)
	}
	if o.Shape.known() {
		fmt.Fprintf(&s, "%v %v", o.Shape, h.DType)
	} else {
		fmt.Fprintf(&s, "%d %v", h.Count, h.DType)
	}
	s.WriteString(o.along())
	if h.Splits != 0 {
		fmt.Fprintf(&s, " with splits #%08x", uint32(h.Splits>>32))
	}
	if h.Algorithm != Auto {
		fmt.Fprintf(&s, " by %v", h.Algorithm)
	}
	if h.Exact && !o.Purpose.method() { // each method has its own
		s.WriteString(", exact")
	}
	if h.State != 0 && !o.Purpose.method() {
		fmt.Fprintf(&s, " with state %d", h.State)
	}
	if h.Original.Hash != 0 { // of a wrapper that could not say more
		fmt.Fprintf(&s, " for a call #%08x", uint32(h.Original.Hash))
	}
	fmt.Fprintf(&s, " (call %d%s)", h.Seq, o.where())
	return s.String()
}

// origin returns Origin, never nil.
func (h *Header) origin() *Origin {
	if h.Origin == nil {
		return &Origin{}
	}
	return h.Origin
}
