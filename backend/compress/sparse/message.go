package sparse

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// layout says how a message of one rank is laid out, in 8-byte words: the head,
// the values, the indices. It is the same on all ranks.
//
// An index is an i32 within its segment of 2^31 elements, so that operands may be
// longer; entries are in the order of their elements.
type layout struct {
	values   backend.DType
	segments int
	capacity int // entries there is room for
}

// The words of the head. What follows are the entries of each segment.
const (
	wordPrint    = iota // fingerprint of what the ranks must agree on
	wordSelected        // entries that were selected, also those beyond capacity
	wordCounts
)

func words(nbytes int) int { return (nbytes + 7) / 8 }

func (l layout) headWords() int { return wordCounts + l.segments }

func (l layout) valueWords() int { return words(l.capacity * l.values.Size()) }

// unit is what sizes of messages are multiples of. They lie one behind the other, and NCCL
// copies 16 bytes at a time only where all that it copies begins at such an address: bytes
// otherwise, one by one.
const unit = 16

// nbytes returns the size of a message.
func (l layout) nbytes() int {
	n := 8 * (l.headWords() + l.valueWords() + words(4*l.capacity))
	return (n + unit - 1) / unit * unit
}

// largest returns the capacity with which a message has at most nbytes, which may
// be negative.
func (l layout) largest(nbytes int) int {
	const padding = 2*7 + unit - 1 // of values and of indices, and of the end
	return (nbytes - 8*l.headWords() - padding) / (l.values.Size() + 4)
}

// message is a view of the memory of a message.
type message struct {
	head   []int64
	values backend.Buffer
	index  []int32
}

// offsets returns where values and indices begin, in bytes.
func (l layout) offsets() (values, index int) {
	values = 8 * l.headWords()
	return values, values + 8*l.valueWords()
}

func (l layout) view(memory backend.Buffer) message {
	head, index := l.offsets()
	return message{
		head:   backend.View[int64](memory.Slice(0, head).As(backend.I64)),
		values: memory.Slice(head, index).As(l.values).Slice(0, l.capacity),
		index:  backend.View[int32](memory.Slice(index, memory.Len()).As(backend.I32).Slice(0, l.capacity)),
	}
}

// entries returns how many entries the message has, or why it cannot be right.
func (m message) entries() (int, error) {
	n := int64(0)
	for _, k := range m.head[wordCounts:] {
		if k < 0 || k > int64(len(m.index)) {
			return 0, fmt.Errorf("a message with %d entries, where there is room for %d", k, len(m.index))
		}
		n += k
	}
	if n > int64(len(m.index)) {
		return 0, fmt.Errorf("a message with %d entries, where there is room for %d", n, len(m.index))
	}
	return int(n), nil
}

// source is what one rank has sent, as it is read: entries next to end are those
// of a segment that are left.
type source struct {
	message
	seen      []float32 // the values, widened
	next, end int
}

// add adds the entries that belong to acc, whose first element is the one at lo
// of its segment.
func (s *source) add(acc []float32, lo int) error {
	for ; s.next < s.end; s.next++ {
		i := int(s.index[s.next]) - lo
		if i >= len(acc) {
			return nil
		}
		if i < 0 {
			return fmt.Errorf("a message whose entry %d is for element %d, out of order", s.next, lo+i)
		}
		acc[i] += s.seen[s.next]
	}
	return nil
}
