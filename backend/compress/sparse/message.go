package sparse

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// layout says how a message of one rank is laid out, in 8-byte words: the head, the
// values, the indices in ascending order. It is the same on all ranks.
type layout struct {
	values   backend.DType
	capacity int // entries there is room for
}

// The words of the head.
const (
	wordFingerprint = iota // of what the ranks must agree on
	wordSelected           // entries that were selected, including those beyond capacity
	wordSent               // entries of the message
)

func words(nbytes int) int { return (nbytes + 7) / 8 }

func (l layout) valueWords() int { return words(l.capacity * l.values.Size()) }

// Sizes of messages are multiples of unit. Messages lie one behind the other, and NCCL copies 16
// bytes at a time only if all that it copies begins at such an address; otherwise it copies byte by
// byte.
const unit = 16

// nbytes returns the size of a message.
func (l layout) nbytes() int {
	n := 8 * (kernels.HeadWords + l.valueWords() + words(4*l.capacity))
	return (n + unit - 1) / unit * unit
}

// largest returns the capacity with which a message has at most nbytes, which may
// be negative.
func (l layout) largest(nbytes int) int {
	const padding = 2*7 + unit - 1 // of values and of indices, and of the end
	return (nbytes - 8*kernels.HeadWords - padding) / (l.values.Size() + 4)
}

// offsets returns where values and indices begin, in bytes.
func (l layout) offsets() (values, index int) {
	values = 8 * kernels.HeadWords
	return values, values + 8*l.valueWords()
}

// message is what kernels see of the memory of a message.
func (l layout) message(memory backend.Buffer) kernels.Message {
	head, index := l.offsets()
	return kernels.Message{
		Head:   memory.Slice(0, head).As(backend.I64),
		Values: memory.Slice(head, index).As(l.values).Slice(0, l.capacity),
		Index:  memory.Slice(index, memory.Len()).As(backend.I32).Slice(0, l.capacity),
	}
}

// messages is what kernels see of the messages of several ranks.
func (l layout) messages(all backend.Buffer, ranks int) kernels.Messages {
	values, index := l.offsets()
	return kernels.Messages{
		All: all, Ranks: ranks, NBytes: l.nbytes(),
		DType: l.values, Values: values, Index: index, Capacity: l.capacity,
	}
}
