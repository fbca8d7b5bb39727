package workers

import "unsafe"

// In place of a worker's number for scratch that belongs to the caller of Do. Tasks may use it
// between them.
const (
	Shared   = -1
	Operands = -2 // of a kernel that uses Shared itself
)

// alignment is a cache line and the longest vector.
const alignment = 64

// scratch is memory that stays from call to call.
type scratch struct {
	memory []byte
	_      line
}

// Scratch returns n elements of memory for intermediate results, aligned to 64 bytes. They hold
// anything, and are valid until the next Scratch for the same worker, number 0 up, [Shared] or
// [Operands]. A pool keeps as much as was ever asked for, and allocates nothing later; a nil Pool
// allocates it.
func Scratch[T float32 | float64 | int](p *Pool, worker, n int) []T {
	if n == 0 {
		return nil
	}
	var alone scratch
	s := &alone
	switch {
	case p == nil:
	case worker < 0:
		s = &p.scratch[p.size-1-worker]
	default:
		s = &p.scratch[worker]
	}
	size := int(unsafe.Sizeof(*new(T)))
	if need := n*size + alignment; len(s.memory) < need {
		s.memory = make([]byte, need)
	}
	first := unsafe.Pointer(unsafe.SliceData(s.memory))
	ahead := -uintptr(first) % alignment
	return unsafe.Slice((*T)(unsafe.Add(first, ahead)), n)
}
