package backend

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math/bits"
	"strings"
)

// Header is what the ranks of one call must agree on: the fingerprint that
// ranks compare, and the record that traces print. It is comparable
// and has a fixed size.
type Header struct {
	Seq        uint64 // number of the call on its communicator, from 1
	Count      int64  // see [Collective.Check]
	Splits     uint64 // hash of the splits, 0 for none
	Generation uint32 // of the group: 0 until groups are made anew after a failure
	State      uint32 // see [Collective]
	Root       int32
	Kind       Kind
	Op         ReduceOp
	DType      DType
	Algorithm  Algorithm
	Exact      bool
	Origin     Origin
	Original   Original
}

// HeaderSize is the size of an encoded Header in bytes.
//
//	 0  Seq            40  State              79  Origin.Cut
//	 8  Count          44  Origin.Ordinal     80  Origin.Join
//	16  Splits         48  Origin.Shape       81  Original.Op
//	24  Original.Hash  72  Kind, Op, DType,   82  Original.DType
//	32  Generation         Algorithm, Exact   83  Original.Transport
//	36  Root           77  Origin.Purpose     88  Origin.Name
//	                   78  kind of Shape     120  zero, like 84, for later
const HeaderSize = 128

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
	h.Seq, h.Count, h.Splits, h.Generation, h.State, h.Root = seq, int64(count), 0, 0, uint32(c.State), 0
	h.Kind, h.Op, h.DType, h.Algorithm, h.Exact = c.Kind, 0, d, c.Algorithm, c.Exact
	h.Origin, h.Original = Origin{}, c.Original
	if c.Origin != nil {
		h.Origin = *c.Origin
	}
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
func (h *Header) Put(b []byte) {
	le := binary.LittleEndian
	_ = b[HeaderSize-1]
	exact := uint64(0)
	if h.Exact {
		exact = 1
	}
	a := &h.Origin.Shape.axes
	// Whole words: a copy of smaller pieces would wait until they are in the cache.
	le.PutUint64(b[0:], h.Seq)
	le.PutUint64(b[8:], uint64(h.Count))
	le.PutUint64(b[16:], h.Splits)
	le.PutUint64(b[24:], h.Original.Hash)
	le.PutUint64(b[32:], uint64(h.Generation)|uint64(uint32(h.Root))<<32)
	le.PutUint64(b[40:], uint64(h.State)|uint64(h.Origin.Ordinal)<<32)
	le.PutUint64(b[48:], uint64(a[0])|uint64(a[1])<<32)
	le.PutUint64(b[56:], uint64(a[2])|uint64(a[3])<<32)
	le.PutUint64(b[64:], uint64(a[4])|uint64(a[5])<<32)
	le.PutUint64(b[72:], uint64(h.Kind)|uint64(h.Op)<<8|uint64(h.DType)<<16|uint64(h.Algorithm)<<24|exact<<32|
		uint64(h.Origin.Purpose)<<40|uint64(h.Origin.Shape.kind)<<48|uint64(h.Origin.Cut)<<56)
	le.PutUint64(b[80:], uint64(h.Origin.Join)|uint64(h.Original.Op)<<8|uint64(h.Original.DType)<<16|uint64(h.Original.Transport)<<24)
	copy(b[88:120], h.Origin.Name[:])
	le.PutUint64(b[120:], 0)
}

// Digest is a hash of an encoded header, never 0 and the same in every process. Ranks that
// share memory compare it first, because it fits into the cache line that tells of a call.
func Digest(header *[HeaderSize]byte) uint64 {
	le := binary.LittleEndian
	// Two chains of products, which a processor works on at once. The constants are
	// wyhash's.
	a, b := uint64(0xa0761d6478bd642f), uint64(0xe7037ed1a0b428db)
	for i := 0; i < HeaderSize; i += 32 {
		a = mix(le.Uint64(header[i:])^0x8ebc6af09c88c6e3, le.Uint64(header[i+8:])^a)
		b = mix(le.Uint64(header[i+16:])^0x589965cc75374cc3, le.Uint64(header[i+24:])^b)
	}
	return mix(a^0x1d8e4e27c47d124f, b^HeaderSize) | 1
}

func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// GetHeader decodes what Put wrote. Any bytes give a Header, a meaningless one
// from meaningless bytes.
func GetHeader(b []byte) Header {
	le := binary.LittleEndian
	_ = b[HeaderSize-1]
	h := Header{
		Seq: le.Uint64(b[0:]), Count: int64(le.Uint64(b[8:])), Splits: le.Uint64(b[16:]),
		Generation: le.Uint32(b[32:]), Root: int32(le.Uint32(b[36:])), State: le.Uint32(b[40:]),
		Kind: Kind(b[72]), Op: ReduceOp(b[73]), DType: DType(b[74]), Algorithm: Algorithm(b[75]), Exact: b[76] != 0,
		Origin:   Origin{Ordinal: le.Uint32(b[44:]), Purpose: Purpose(b[77]), Cut: b[79], Join: b[80], Shape: Shape{kind: b[78]}},
		Original: Original{Hash: le.Uint64(b[24:]), Op: ReduceOp(b[81]), DType: DType(b[82]), Transport: DType(b[83])},
	}
	h.Origin.Shape.get(b[48:72])
	copy(h.Origin.Name[:], b[88:120])
	return h
}

// Asked returns the header of the call that h stands for: what the program has asked a wrapper
// for, if the wrapper says so.
func (h Header) Asked() Header {
	if o := h.Original; o.DType != 0 {
		h.Op, h.DType, h.Original = o.Op, o.DType, Original{Hash: o.Hash}
	}
	return h
}

// String describes the call in full: "allreduce(sum) of 1024 f32 (call 17)", or
// "DataParallel.Save: allgather of 40 u8 (call 17)". No call has
// the zero Header: a rank that does not compare its calls posts that.
func (h Header) String() string {
	if h == (Header{}) {
		return "something that it does not compare (the check is off there)"
	}
	h = h.Asked()
	var s strings.Builder
	if h.Origin.Purpose.method() {
		fmt.Fprintf(&s, "%v: ", h.Origin.Purpose)
	}
	fmt.Fprintf(&s, "%v of ", Collective{Kind: h.Kind, Op: h.Op, Root: int(h.Root)})
	if h.Origin.Name != (Name{}) {
		fmt.Fprintf(&s, "%v, ", h.Origin.Name)
	}
	if h.Origin.Shape.known() {
		fmt.Fprintf(&s, "%v %v", h.Origin.Shape, h.DType)
	} else {
		fmt.Fprintf(&s, "%d %v", h.Count, h.DType)
	}
	s.WriteString(h.along())
	if h.Splits != 0 {
		fmt.Fprintf(&s, " with splits #%08x", uint32(h.Splits>>32))
	}
	if h.Algorithm != Auto {
		fmt.Fprintf(&s, " by %v", h.Algorithm)
	}
	if h.Exact && !h.Origin.Purpose.method() { // of which each has its own
		s.WriteString(", exact")
	}
	if h.State != 0 && !h.Origin.Purpose.method() {
		fmt.Fprintf(&s, " with state %d", h.State)
	}
	if h.Original.Hash != 0 { // of a wrapper which could not tell of it
		fmt.Fprintf(&s, " for a call #%08x", uint32(h.Original.Hash))
	}
	fmt.Fprintf(&s, " (call %d%s)", h.Seq, h.place())
	return s.String()
}

// along says which axes are cut and joined.
func (h *Header) along() string {
	switch cut, join := int(h.Origin.Cut)-1, int(h.Origin.Join)-1; {
	case cut >= 0 && join >= 0:
		return fmt.Sprintf(" along axes %d→%d", cut, join)
	case cut >= 0:
		return fmt.Sprintf(" along axis %d", cut)
	case join >= 0:
		return fmt.Sprintf(" along axis %d", join)
	}
	return ""
}

// place says where in the program the call is from.
func (h *Header) place() string {
	n := h.Origin.Ordinal
	switch {
	case n == 0:
		return ""
	case h.Origin.Purpose == ForGraph:
		return fmt.Sprintf(", collective %d of its graph", n)
	case h.Origin.Purpose == ForGradient:
		return fmt.Sprintf(", for the gradient of collective %d of its graph", n)
	case h.Origin.Shape.kind == hashedLayout:
		return fmt.Sprintf(", bucket %d %v", n-1, h.Origin.Shape)
	}
	return fmt.Sprintf(", number %d", n)
}
