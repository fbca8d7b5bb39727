package sparse

import (
	"math"
	"slices"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// block is how many elements are handled at a time, so that each step finds in
// the first-level cache what the one before left there: 4096 of residual and of
// gradient are 32 KiB. It divides every segment.
const block = 4096

// magnitude orders floats by their size: as an integer, infinity is larger than
// every number, and NaN than infinity. So neither is ever left behind.
func magnitude(x float32) uint32 { return math.Float32bits(x) &^ (1 << 31) }

// cut says which magnitudes are selected: those above, and the first ties of
// those that are equal.
type cut struct {
	above uint32
	ties  int
}

// atLeast is the cut of a threshold. Zeros are below every one.
func atLeast(limit float32) cut { return cut{above: max(magnitude(limit), 1) - 1} }

// pick finds the selected elements of v, at most len(at), and how many there are.
func (c *cut) pick(at []int32, v []float32) (picked int) {
	for lo := 0; lo < len(v); lo += few {
		if lo+few <= len(v) && allBelow(c.above, (*[few]float32)(v[lo:])) {
			continue
		}
		for i := lo; i < min(lo+few, len(v)); i++ {
			m := magnitude(v[i])
			if m < c.above || m == c.above && c.ties == 0 {
				continue
			}
			if m == c.above {
				c.ties--
			}
			at[picked] = int32(i)
			picked++
		}
	}
	return picked
}

// few is how many elements are looked at without a branch for each: where few are
// selected, most of such groups have none.
const few = 8

// allBelow reports whether no magnitude of x reaches limit: no difference is
// negative then, and magnitudes have 31 bits, so that none overflows.
func allBelow(limit uint32, x *[few]float32) bool {
	last := int32(limit) - 1
	all := (last - int32(magnitude(x[0]))) | (last - int32(magnitude(x[1]))) |
		(last - int32(magnitude(x[2]))) | (last - int32(magnitude(x[3]))) |
		(last - int32(magnitude(x[4]))) | (last - int32(magnitude(x[5]))) |
		(last - int32(magnitude(x[6]))) | (last - int32(magnitude(x[7])))
	return all >= 0
}

// The bits of a magnitude, from the top, that the two steps of the search for
// the k-th largest look at: the exponent and three of the fraction, then the rest.
const (
	coarseBits = 11
	fineBits   = 31 - coarseBits
)

// search finds the k-th largest of many magnitudes: first, while they are seen,
// how many share the coarse bits, and then among those that have the right ones.
type search struct {
	coarse [1 << coarseBits]int
	odd    [1 << coarseBits]int // of every other element: neighbours are often alike
	close  []uint32
}

func (s *search) see(v []float32) {
	i := 0
	for ; i+2 <= len(v); i += 2 {
		s.coarse[magnitude(v[i])>>fineBits]++
		s.odd[magnitude(v[i+1])>>fineBits]++
	}
	for _, x := range v[i:] {
		s.coarse[magnitude(x)>>fineBits]++
	}
}

// kth returns the cut that selects exactly k of the elements of v, which were
// all seen.
func (s *search) kth(v []float32, k int) cut {
	for i, n := range s.odd {
		s.coarse[i] += n
	}
	at := uint32(len(s.coarse) - 1)
	for ; s.coarse[at] < k; at-- {
		k -= s.coarse[at]
	}
	s.close = slices.Grow(s.close[:0], s.coarse[at])
	clear(s.coarse[:])
	clear(s.odd[:])
	for lo := 0; lo < len(v); lo += few {
		if lo+few <= len(v) && allBelow(at<<fineBits, (*[few]float32)(v[lo:])) {
			continue
		}
		for _, x := range v[lo:min(lo+few, len(v))] {
			if m := magnitude(x); m>>fineBits == at {
				s.close = append(s.close, m)
			}
		}
	}
	return kthOf(s.close, k)
}

// kthOf is kth of a list, by ten bits at a time: at most two rounds are left.
func kthOf(ms []uint32, k int) cut {
	for shift := fineBits - 10; ; shift -= 10 {
		var count [1 << 10]int
		for _, m := range ms {
			count[m>>shift&1023]++
		}
		at := uint32(1023)
		for ; count[at] < k; at-- {
			k -= count[at]
		}
		if shift == 0 {
			return cut{above: ms[0]&^1023 | at, ties: k}
		}
		keep := ms[:0]
		for _, m := range ms {
			if m>>shift&1023 == at {
				keep = append(keep, m)
			}
		}
		ms = keep
	}
}

// firstNotFinite returns the index of the first NaN or infinity, -1 if there is
// none.
func firstNotFinite(x backend.Buffer) int {
	if x.DType() == backend.F64 {
		return slices.IndexFunc(backend.View[float64](x), func(v float64) bool { return math.IsNaN(v - v) })
	}
	return slices.IndexFunc(backend.View[float32](x), func(v float32) bool { return v-v != 0 })
}

// rounder rounds values to what is sent.
type rounder struct {
	dtype    backend.DType
	saturate bool // rather than make a number infinite
	wide     [block]float32
	half     [block]uint16
}

// round returns values as they are sent, and widened again: as every rank sees
// them. They last until the next call.
func (r *rounder) round(values []float32) (sent []byte, seen []float32) {
	if r.dtype == backend.F32 {
		return backend.Of(values).Bytes(), values
	}
	n := len(values)
	half := backend.Host(r.dtype, unsafe.Pointer(&r.half), n)
	narrow(half, backend.Of(values))
	if r.saturate {
		r.clip(values)
	}
	narrow(backend.Of(r.wide[:n]), half)
	return half.Bytes(), r.wide[:n]
}

// clip replaces infinities that numbers were rounded to by the largest number,
// whose bits come just before.
func (r *rounder) clip(values []float32) {
	infinite := uint16(0x7c00)
	if r.dtype == backend.BF16 {
		infinite = 0x7f80
	}
	for i, v := range values {
		if r.half[i]&0x7fff == infinite && v-v == 0 {
			r.half[i]--
		}
	}
}

// narrow casts between floats on the host, of the same length: nothing can fail.
func narrow(dst, src backend.Buffer) { kernels.Host{}.Cast(dst, src) }
