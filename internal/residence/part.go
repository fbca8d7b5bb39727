package residence

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// Elements that a rank has left to others are NaNs of these payloads, which no arithmetic makes:
// processors make NaNs of payload 0, or pass one on that they are given.
const (
	others64 = 0x7ff8_e57a_1e00_0000
	others32 = 0x7fc0_e57a
)

// LeaveToOthers marks the elements of a tensor outside [from, to), which other ranks update from
// now on, so that nobody takes them for the present ones: [OfOthers] then says so, and a program
// that reads them without asking has NaN. It costs two reads where they are marked already.
func LeaveToOthers(memory backend.Buffer, from, to int) {
	before, behind := memory.Slice(0, from), memory.Slice(to, memory.Len())
	for _, part := range []backend.Buffer{before, behind} {
		if part.Len() == 0 || OfOthers(part) {
			continue
		}
		switch part.DType() {
		case backend.F64:
			fill(backend.View[float64](part), math.Float64frombits(others64))
		case backend.F32:
			fill(backend.View[float32](part), math.Float32frombits(others32))
		}
	}
}

func fill[T any](x []T, with T) {
	for i := range x {
		x[i] = with
	}
}

// OfOthers reports whether a part of a tensor belongs to other ranks, as LeaveToOthers says.
func OfOthers(memory backend.Buffer) bool {
	n := memory.Len()
	if n == 0 {
		return false
	}
	switch memory.DType() {
	case backend.F64:
		x := backend.View[float64](memory)
		return math.Float64bits(x[0]) == others64 || math.Float64bits(x[n-1]) == others64
	case backend.F32:
		x := backend.View[float32](memory)
		return math.Float32bits(x[0]) == others32 || math.Float32bits(x[n-1]) == others32
	}
	return false
}
