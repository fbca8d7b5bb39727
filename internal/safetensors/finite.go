package safetensors

import (
	"encoding/binary"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// block is how many bytes of a tensor are looked at together.
const block = 64

// NotFinite returns the index of the first element that is NaN, or infinite unless infinities are
// allowed; -1 if there is none. Integers are finite. It costs about as much as a checksum.
func NotFinite(x backend.Buffer, infinities bool) int {
	f, ok := floatOf(x.DType())
	if !ok {
		return -1
	}
	limit := f.infinity
	if infinities {
		limit++
	}
	// The sum of a magnitude and add has the sign bit if the magnitude is at least the limit.
	magnitudes, add, sign := f.each(1<<(f.bits-1)-1), f.each(1<<(f.bits-1)-limit),
		f.each(1<<(f.bits-1))
	b, size := x.Bytes(), f.bits/8
	for at := 0; at < len(b); at += block {
		part := b[at:min(at+block, len(b))]
		if len(part) < block {
			part = append(make([]byte, 0, block), part...)[:block]
		}
		over := func(from int) uint64 {
			return binary.LittleEndian.Uint64(part[from:])&magnitudes + add
		}
		found := over(0) | over(8) | over(16) | over(24) | over(32) | over(40) | over(48) | over(56)
		if found&sign == 0 {
			continue
		}
		for i := 0; ; i++ {
			var bits [8]byte
			copy(bits[:], part[i*size:(i+1)*size])
			if binary.LittleEndian.Uint64(bits[:])&(1<<(f.bits-1)-1) >= limit {
				return at/size + i
			}
		}
	}
	return -1
}

// Indices returns where an element of a tensor is, from its number in row-major order.
func Indices(i int, shape []int) []int {
	at := make([]int, len(shape))
	for axis, n := range slices.Backward(shape) {
		at[axis], i = i%n, i/n
	}
	return at
}

// float is a format of floats: its bits, and those of an infinity.
type float struct {
	bits     int
	infinity uint64
}

func floatOf(d backend.DType) (f float, ok bool) {
	switch d {
	case backend.F64:
		return float{64, 0x7ff0 << 48}, true
	case backend.F32:
		return float{32, 0x7f800000}, true
	case backend.F16:
		return float{16, 0x7c00}, true
	case backend.BF16:
		return float{16, 0x7f80}, true
	}
	return f, false
}

// each returns a word with the bits of x for each float in it.
func (f float) each(x uint64) (word uint64) {
	for at := 0; at < 64; at += f.bits {
		word |= x << at
	}
	return word
}
