package cuda

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Table says where the pieces of many buffers lie in a flat one: there is one for each
// block that copies, so that none has to look for its own. Its words have to be copied
// to the device once; it can be used as long as the buffers stay where they are.
type Table struct {
	words    []uint64
	nbytes   int           // of the flat buffer, at least
	from, to backend.DType // of elements that are rounded on the way; 0 for bytes
}

// What a block of pack or unpack copies, in bytes, at most, and its threads.
const (
	packPiece   = 8 << 10
	packThreads = 128
)

// pieceWords is the size of a table's row: address, offset, bytes.
const pieceWords = 3

// NewTable returns the table in which buffers[i] lies at byte offsets[i] of the
// flat buffer.
func NewTable(buffers []backend.Buffer, offsets []int) (Table, error) {
	return Table{}.of(buffers, offsets)
}

// Rounds reports whether there are tables that round elements of one type to another
// one: F32 and F64 to 16-bit floats.
func Rounds(from, to backend.DType) bool {
	return (from == backend.F32 || from == backend.F64) && half(to)
}

// NewRoundingTable returns the table in which the elements of buffers[i], which are of
// dtype from, lie as elements of dtype to, rounded, from byte offsets[i] of the flat buffer
// on: as a Cast rounds. There must be such tables, as [Rounds] says.
func NewRoundingTable(from, to backend.DType, buffers []backend.Buffer, offsets []int) (Table, error) {
	if !Rounds(from, to) {
		return Table{}, fmt.Errorf("%w: a table that rounds %v to %v: it rounds f32 and f64 to 16-bit floats", backend.ErrArgument, from, to)
	}
	for i, b := range buffers {
		if b.Len() > 0 && b.DType() != from {
			return Table{}, fmt.Errorf("%w: buffer %d is %v in a table of %v", backend.ErrArgument, i, b.DType(), from)
		}
	}
	return Table{from: from, to: to}.of(buffers, offsets)
}

// of returns t with rows for the buffers.
func (t Table) of(buffers []backend.Buffer, offsets []int) (Table, error) {
	if len(buffers) != len(offsets) {
		return Table{}, fmt.Errorf("%w: table of %d buffers with %d offsets", backend.ErrArgument, len(buffers), len(offsets))
	}
	var rest []uint64
	for i, b := range buffers {
		if offsets[i] < 0 {
			return Table{}, fmt.Errorf("%w: buffer %d lies at byte %d of the flat buffer", backend.ErrArgument, i, offsets[i])
		}
		if b.Len() == 0 {
			continue
		}
		if err := check.Zero(b); err != nil {
			return Table{}, err
		}
		at := 0
		for ; at+packPiece <= b.NBytes(); at += packPiece {
			t.words = append(t.words, word(b)+uint64(at), uint64(offsets[i]+t.packed(at)), packPiece)
		}
		if at < b.NBytes() {
			rest = append(rest, word(b)+uint64(at), uint64(offsets[i]+t.packed(at)), uint64(b.NBytes()-at))
		}
		t.nbytes = max(t.nbytes, offsets[i]+t.packed(b.NBytes()))
	}
	t.words = append(t.words, rest...)
	return t, nil
}

// packed is how many bytes of the flat buffer hold n bytes of another one.
func (t Table) packed(n int) int {
	if t.to == 0 {
		return n
	}
	return n / t.from.Size() * t.to.Size()
}

// Words returns what device memory must hold for Pack and Unpack.
func (t Table) Words() []uint64 { return t.words }

// Pack copies every buffer of the table to its place in flat, in one launch:
//
//	for b, offset in t { for i < b.NBytes() { flat[offset+i] = b[i] } }
//	for b, offset in t { for i < b.Len() { flat[offset:][i] = To(b[i]) } }  // that rounds
//
// onDevice holds the table's words. Buffers of any alignment are copied in accesses
// of 16 bytes; those aligned as their places are, modulo 16, take the least.
func (k Kernels) Pack(flat backend.Buffer, t Table, onDevice backend.Buffer) error {
	entry := Entry{Verb: "pack", Type: "b8"}
	if t.to != 0 {
		entry.Op, entry.Type = t.from.String(), t.to.String()
	}
	return k.move(entry, flat, t, onDevice)
}

// Unpack copies every buffer's place in flat to the buffer, in one launch. The table must
// be one that does not round.
func (k Kernels) Unpack(t Table, onDevice, flat backend.Buffer) error {
	if t.to != 0 {
		return fmt.Errorf("%w: unpack: the table rounds %v to %v, which there is no way back from", backend.ErrArgument, t.from, t.to)
	}
	return k.move(Entry{Verb: "unpack", Type: "b8"}, flat, t, onDevice)
}

func (k Kernels) move(entry Entry, flat backend.Buffer, t Table, onDevice backend.Buffer) error {
	if len(t.words) == 0 {
		return nil
	}
	for _, b := range []backend.Buffer{flat, onDevice} {
		if err := check.Zero(b); err != nil {
			return err
		}
	}
	if flat.NBytes() < t.nbytes {
		return fmt.Errorf("%w: %s: the flat buffer has %d bytes, the table needs %d", backend.ErrArgument, entry.Verb, flat.NBytes(), t.nbytes)
	}
	if need := 8 * len(t.words); onDevice.NBytes() < need || onDevice.Addr()%8 != 0 {
		return fmt.Errorf("%w: %s: the table on the device has %d bytes, want %d at a multiple of 8", backend.ErrArgument, entry.Verb, onDevice.NBytes(), need)
	}
	c := Call{Entry: entry}
	c.Grid, c.Block = Size{uint32(len(t.words) / pieceWords), 1}, Size{packThreads, 1}
	c.pass(word(flat), word(onDevice))
	return k.launcher.Launch(c)
}
