package group

import (
	"encoding/binary"
	"errors"
	"io"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/rendezvous"
)

// fact is what goes over a connection of a [Sockets].
//
//	bytes 0-3   length of the body, little endian
//	byte  4     kind
//	bytes 5-7   rank, little endian
//	bytes 8-15  number, little endian
//
// What ranks show is never taken back, and numbers only grow. So it does no harm to hear a
// fact twice, or late, and a rank that knows nothing yet is told all that another one knows.
type fact struct {
	kind   factKind
	rank   int
	number uint64
	body   []byte
}

type factKind byte

// The facts that are kept; rank is whose fact it is.
const (
	factBegun   factKind = iota + 1 // number: the last call begun
	factDigests                     // number: of the first call; body: a digest for each
	factClosed
	factLeaving // number: counted or gaveUp
	factLeft    // number: together or apart
	factNote    // number: the round; body: the note
	factReport  // body: see packReport
	factAgreed  // number: the last call that is the same on all ranks
	factDiffers // number: the first call that is not; body: a digest for each rank
	factHeader  // number: that call; body: its header
	// And what is only said between a rank and its server.
	factHello   // first of a rank; number: the term
	factBye     // of both: the other should follow the server of term number
	factAsk     // number: of the question; the answer has what each rank has begun
	factAnswer  // number: of the question
	factHeard   // the rank has heard the report, and has told before what it has begun
	factSettled // all have heard the report, and the rank was told what they have begun
	factEnd
)

const (
	counted, gaveUp = 1, 2 // of factLeaving
	together, apart = 1, 2 // of factLeft

	factHead = 16
	// maxTerm bounds terms, so that they can be counted up.
	maxTerm = 1 << 40
	// reportHead is what a report is without its text, reportText the most of that.
	reportWords = 4 * 6
	reportHead  = reportWords + 2*backend.HeaderSize
	reportText  = 1024
)

var errFact = errors.New("received bytes that are no fact of a group")

// fits reports whether a fact among size ranks may have a body of n bytes.
func (k factKind) fits(n, size int) bool {
	switch k {
	case factDigests:
		return n > 0 && n <= 8*ringSlots && n%8 == 0
	case factNote:
		return n <= NoteBytes
	case factReport:
		return n >= reportHead && n <= reportHead+reportText
	case factDiffers:
		return n == 8*size
	case factHeader:
		return n == backend.HeaderSize
	}
	return n == 0
}

// append encodes a fact.
func (f fact) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(f.body)))
	b = binary.LittleEndian.AppendUint32(b, uint32(f.kind)|uint32(f.rank)<<8)
	b = binary.LittleEndian.AppendUint64(b, f.number)
	return append(b, f.body...)
}

// readFact reads a fact of a group of size ranks.
func readFact(r io.Reader, size int) (fact, error) {
	var h [factHead]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return fact{}, err
	}
	n := binary.LittleEndian.Uint32(h[0:])
	word := binary.LittleEndian.Uint32(h[4:])
	f := fact{kind: factKind(word), rank: int(word >> 8), number: binary.LittleEndian.Uint64(h[8:])}
	term := f.kind == factHello || f.kind == factBye
	if f.kind == 0 || f.kind >= factEnd || f.rank >= size || n > 1<<24 ||
		!f.kind.fits(int(n), size) || term && f.number > maxTerm {
		return fact{}, errFact
	}
	if n > 0 {
		f.body = make([]byte, n)
	}
	_, err := io.ReadFull(r, f.body)
	return f, err
}

// digest returns digest number i of a body.
func (f fact) digest(i int) uint64 { return binary.LittleEndian.Uint64(f.body[8*i:]) }

// packReport is the body of a factReport. A longer text is cut.
func packReport(r Report) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(r.Reason))
	for _, n := range []int{r.Rank, r.Peer, r.Lost, r.Sides[0], r.Sides[1]} {
		b = binary.LittleEndian.AppendUint32(b, uint32(int32(n)))
	}
	b = append(append(b, r.Mine[:]...), r.Theirs[:]...)
	return append(b, r.Text[:min(len(r.Text), reportText)]...)
}

// unpackReport is its inverse. The text cannot harm a terminal.
func unpackReport(b []byte) Report {
	word := func(i int) int { return int(int32(binary.LittleEndian.Uint32(b[4*i:]))) }
	r := Report{Reason: Reason(word(0)), Rank: word(1), Peer: word(2), Lost: word(3),
		Sides: [2]int{word(4), word(5)}}
	copy(r.Mine[:], b[reportWords:])
	copy(r.Theirs[:], b[reportWords+backend.HeaderSize:])
	r.Text = rendezvous.Printable(string(b[reportHead:]))
	return r
}

// known is what is known of a group, but for the digests of calls.
type known struct {
	begun   []uint64
	closed  []bool
	leaving []uint64
	notes   [][2]fact // they alternate
	left    uint64
	agreed  uint64
	report  fact
	differs fact
	headers []fact // of the call that differs
}

func newKnown(size int) known {
	return known{begun: make([]uint64, size), closed: make([]bool, size),
		leaving: make([]uint64, size),
		notes:   make([][2]fact, size), headers: make([]fact, size)}
}

// addFact adds a fact, and reports whether it is new.
func (k *known) addFact(f fact) bool {
	switch f.kind {
	case factBegun:
		return raise(&k.begun[f.rank], f.number)
	case factClosed:
		was := k.closed[f.rank]
		k.closed[f.rank] = true
		return !was
	case factLeaving:
		return raise(&k.leaving[f.rank], min(f.number, gaveUp))
	case factNote:
		return later(&k.notes[f.rank][f.number%2], f)
	case factLeft:
		return k.left == 0 && raise(&k.left, min(f.number, apart))
	case factAgreed:
		return raise(&k.agreed, f.number)
	case factReport:
		return first(&k.report, f)
	case factDiffers:
		return first(&k.differs, f)
	case factHeader:
		return f.number == k.differs.number && first(&k.headers[f.rank], f)
	}
	return false
}

func raise(to *uint64, n uint64) bool {
	higher := n > *to
	*to = max(*to, n)
	return higher
}

func later(at *fact, f fact) bool {
	if f.number <= at.number {
		return false
	}
	*at = f
	return true
}

func first(at *fact, f fact) bool {
	if at.kind != 0 {
		return false
	}
	*at = f
	return true
}

// facts returns all that is known, in an order in which it can be taken.
func (k *known) facts() []fact {
	all := append(k.allBegun(), fact{kind: factAgreed, number: k.agreed})
	for r := range k.begun {
		all = append(all, k.notes[r][0], k.notes[r][1])
		if n := k.leaving[r]; n > 0 {
			all = append(all, fact{kind: factLeaving, rank: r, number: n})
		}
		if k.closed[r] { // who sees that must see the others
			all = append(all, fact{kind: factClosed, rank: r})
		}
	}
	if k.left != 0 {
		all = append(all, fact{kind: factLeft, number: k.left})
	}
	all = append(append(all, k.report, k.differs), k.headers...)
	there := all[:0]
	for _, f := range all {
		if f.kind != 0 {
			there = append(there, f)
		}
	}
	return there
}

// allBegun returns what each rank has begun.
func (k *known) allBegun() []fact {
	all := make([]fact, len(k.begun))
	for r, n := range k.begun {
		all[r] = fact{kind: factBegun, rank: r, number: n}
	}
	return all
}
