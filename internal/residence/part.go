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

func (a Absence) f64() float64 {
	return math.Float64frombits(0x7ff8_0000_1e00_0000 | uint64(a)<<32)
}

func (a Absence) f32() float32 { return math.Float32frombits(0x7fc0_0000 | uint32(a)) }

// fill marks all elements of a tensor.
func (a Absence) fill(memory backend.Buffer) {
	switch memory.DType() {
	case backend.F64:
		fill(backend.View[float64](memory), a.f64())
	case backend.F32:
		fill(backend.View[float32](memory), a.f32())
	}
}

func fill[T any](x []T, with T) {
	for i := range x {
		x[i] = with
	}
}

// marks reports whether the first or the last element of a tensor is marked.
func (a Absence) marks(memory backend.Buffer) bool {
	n := memory.Len()
	if n == 0 {
		return false
	}
	switch memory.DType() {
	case backend.F64:
		x, mark := backend.View[float64](memory), math.Float64bits(a.f64())
		return math.Float64bits(x[0]) == mark || math.Float64bits(x[n-1]) == mark
	case backend.F32:
		x, mark := backend.View[float32](memory), math.Float32bits(a.f32())
		return math.Float32bits(x[0]) == mark || math.Float32bits(x[n-1]) == mark
	}
	return false
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
