package residence

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// Absence is why a tensor's elements on the host are not the present ones. Elements are marked by
// NaNs whose payload it is, which no arithmetic makes: processors make NaNs of payload 0, or pass
// one on that they are given. A program that reads them without asking has NaN.
type Absence uint16

const (
	// OfOthers is for elements that other ranks update: see LeaveToOthers.
	OfOthers Absence = 0xe57a
	// OnDevice is for a tensor that a machine has changed on a device: see [Copy.Outdate].
	OnDevice Absence = 0xe57b
)

// Error says what the tensor has, and how to get the elements.
func (a Absence) Error() string {
	if a == OfOthers {
		return "has only this rank's shard (vm.WithShards): call Pull of the machine that trains " +
			"it first, on all ranks"
	}
	return "is older on the host than on the device where a machine changes it: call Pull or " +
		"Close of that machine first"
}

// mark returns the NaN of a dtype whose payload is as much of a as there is room for, and 0 for
// integers, which have none.
func (a Absence) mark(d backend.DType) uint64 {
	switch d {
	case backend.F64:
		return 0x7ff8_0000_1e00_0000 | uint64(a)<<32
	case backend.F32:
		return 0x7fc0_0000 | uint64(a)
	case backend.BF16:
		return 0x7fc0 | uint64(a)&0x3f
	case backend.F16:
		return 0x7e00 | uint64(a)&0x1ff
	}
	return 0
}

// fill marks all elements of a tensor.
func (a Absence) fill(memory backend.Buffer) {
	mark := a.mark(memory.DType())
	switch memory.DType() {
	case backend.F64:
		fill(backend.View[float64](memory), math.Float64frombits(mark))
	case backend.F32:
		fill(backend.View[float32](memory), math.Float32frombits(uint32(mark)))
	case backend.BF16:
		fill(backend.View[backend.BFloat16](memory), backend.BFloat16(mark))
	case backend.F16:
		fill(backend.View[backend.Float16](memory), backend.Float16(mark))
	}
}

func fill[T any](x []T, with T) {
	for i := range x {
		x[i] = with
	}
}

// marks reports whether the first or the last element of a tensor is marked.
func (a Absence) marks(memory backend.Buffer) bool {
	n, mark := memory.Len(), a.mark(memory.DType())
	if n == 0 || mark == 0 {
		return false
	}
	return elementBits(memory, 0) == mark || elementBits(memory, n-1) == mark
}

// elementBits returns the bits of a float.
func elementBits(memory backend.Buffer, i int) uint64 {
	switch memory.DType() {
	case backend.F64:
		return math.Float64bits(backend.View[float64](memory)[i])
	case backend.F32:
		return uint64(math.Float32bits(backend.View[float32](memory)[i]))
	case backend.BF16:
		return uint64(backend.View[backend.BFloat16](memory)[i])
	}
	return uint64(backend.View[backend.Float16](memory)[i])
}

// Present returns nil if all elements of a tensor are the present ones, else its [Absence].
func Present(memory backend.Buffer) error {
	for _, a := range []Absence{OfOthers, OnDevice} {
		if a.marks(memory) {
			return a
		}
	}
	return nil
}

// LeaveToOthers marks the elements of a tensor outside [from, to), which other ranks update from
// now on, so that nobody takes them for the present ones. It costs two reads where they are marked
// already.
func LeaveToOthers(memory backend.Buffer, from, to int) {
	before, behind := memory.Slice(0, from), memory.Slice(to, memory.Len())
	for _, part := range []backend.Buffer{before, behind} {
		if !OfOthers.marks(part) {
			OfOthers.fill(part)
		}
	}
}
