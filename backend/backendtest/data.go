package backendtest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/euryale-ml/euryale/backend"
)

// pattern says what data look like.
type pattern int

const (
	integers pattern = iota // small, so that every sum and product is exact
	normals                 // normal floats; integers of all bits, which wrap
	specials                // NaN, infinities, zeros of both signs, subnormals
	patterns
	// signed powers of two so far apart that float sums depend on the order; not of the product
	uneven
)

// generate returns n elements. Products of integers stay exact because the
// factors are powers of two.
//
//go:norace
func generate(d backend.DType, p pattern, op backend.ReduceOp, n int, seed, rank uint64) []byte {
	rng := rand.New(rand.NewPCG(seed, rank))
	if !d.Float() {
		return generateInts(d, p, n, rng)
	}
	out := make([]byte, 0, n*d.Size())
	special := specialBits(d)
	for range n {
		switch {
		case p == specials && rng.IntN(2) == 0:
			out = appendBits(out, d, special[rng.IntN(len(special))])
		case p == uneven: // half a unit in the last place of 1 in the type of the sum, and between
			bits := 24
			if d == backend.F64 {
				bits = 53
			}
			out = appendFloat(out, d, math.Ldexp(float64(1-2*rng.IntN(2)), -bits*rng.IntN(3)/2))
		case p != integers:
			out = appendFloat(out, d, rng.NormFloat64())
		case op == backend.Prod:
			out = appendFloat(out, d, []float64{-2, -1, 1, 2}[rng.IntN(4)])
		default:
			out = appendFloat(out, d, float64(rng.IntN(17)-8))
		}
	}
	return out
}

//go:norace
func generateInts(d backend.DType, p pattern, n int, rng *rand.Rand) []byte {
	out := make([]byte, 0, n*d.Size())
	for range n {
		v := rng.Uint64()
		if p == integers {
			v = uint64(rng.IntN(17) - 8)
		}
		out = appendBits(out, d, v)
	}
	return out
}

// specialBits lists, for each float: NaN, zeros, infinities, ones, the largest,
// the smallest and the smallest normal number.
func specialBits(d backend.DType) []uint64 {
	switch d {
	case backend.F16:
		return []uint64{0x7e00, 0, 0x8000, 0x7c00, 0xfc00, 0x3c00, 0xbc00, 0x7bff, 1, 0x0400}
	case backend.BF16:
		return []uint64{0x7fc0, 0, 0x8000, 0x7f80, 0xff80, 0x3f80, 0xbf80, 0x7f7f, 1, 0x0080}
	case backend.F32:
		return []uint64{0x7fc00000, 0, 0x80000000, 0x7f800000, 0xff800000, 0x3f800000, 0xbf800000,
			0x7f7fffff, 1, 0x00800000}
	default:
		return []uint64{0x7ff8000000000000, 0, 1 << 63, 0x7ff << 52, 0xfff << 52, 0x3ff << 52,
			0xbff << 52, 0x7fefffffffffffff, 1, 1 << 52}
	}
}

//go:norace
func appendBits(b []byte, d backend.DType, v uint64) []byte {
	switch d.Size() {
	case 1:
		return append(b, byte(v))
	case 2:
		return binary.LittleEndian.AppendUint16(b, uint16(v))
	case 4:
		return binary.LittleEndian.AppendUint32(b, uint32(v))
	default:
		return binary.LittleEndian.AppendUint64(b, v)
	}
}

//go:norace
func appendFloat(b []byte, d backend.DType, v float64) []byte {
	if d == backend.F64 {
		return appendBits(b, d, math.Float64bits(v))
	}
	return append(b, encode(d, []float32{float32(v)})...)
}

// differ returns where got is not want, bit for bit except that any NaN is as
// good as another.
//
//go:norace
func differ(d backend.DType, got, want []byte) error {
	if bytes.Equal(got, want) {
		return nil
	}
	if len(got) != len(want) {
		return fmt.Errorf("got %d bytes, want %d", len(got), len(want))
	}
	size := d.Size()
	for at := 0; at < len(got); at += size {
		g, w := got[at:at+size], want[at:at+size]
		if !bytes.Equal(g, w) && !(isNaN(d, g) && isNaN(d, w)) {
			return fmt.Errorf("element %d of %d %v is %s, want %s", at/size, len(got)/size, d,
				show(d, g), show(d, w))
		}
	}
	return nil
}

// show prints one element.
func show(d backend.DType, x []byte) string {
	switch d {
	case backend.F16, backend.BF16, backend.F32:
		return fmt.Sprintf("%v (%#x)", decode(d, x)[0], reversed(x))
	case backend.F64:
		return fmt.Sprintf("%v (%#x)", math.Float64frombits(binary.LittleEndian.Uint64(x)),
			reversed(x))
	}
	return fmt.Sprintf("%#x", reversed(x))
}

func reversed(x []byte) []byte {
	out := make([]byte, len(x))
	for i, b := range x {
		out[len(x)-1-i] = b
	}
	return out
}
