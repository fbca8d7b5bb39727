package bench

import (
	"bytes"
	"math"

	"github.com/x448/float16"

	"github.com/euryale-ml/euryale/backend"
)

// period is the number of elements after which a buffer repeats. It is a prime, so that a
// chunk in the wrong place is detected.
const period = 997

// data is the content of the buffers of a benchmark: one encoded period of each rank's
// operand and of their reduction.
type data struct {
	ranks   [][]byte
	reduced []byte
	size    int // of an element, in bytes
}

// newData makes the data of a collective among P ranks. Values are integers,
// small enough to be exact in every dtype, sums included.
func newData(c backend.Collective, d backend.DType, P int) data {
	all := data{size: d.Size()}
	reduced := make([]int64, period)
	for s := range P {
		own := make([]int64, period)
		for i := range own {
			own[i] = value(c, s, P, i)
			if s == 0 {
				reduced[i] = own[i]
			} else {
				reduced[i] = combine(c.Op, reduced[i], own[i])
			}
		}
		all.ranks = append(all.ranks, encode(d, own, 1))
	}
	divisor := 1
	if c.Op == backend.Avg {
		divisor = P
	}
	all.reduced = encode(d, reduced, divisor)
	return all
}

// value is element i of the operand of rank s.
func value(c backend.Collective, s, P, i int) int64 {
	switch {
	case !c.Kind.Reduces():
		return int64(i*7+s*31) % 251
	case c.Op == backend.Avg && P <= 16:
		return int64(i%5 + (s+i)%P) // the average is i%5 + (P-1)/2
	case c.Op == backend.Avg:
		return int64(i % 5)
	case c.Op == backend.Prod && (i+3*s)%4 == 0:
		return 2
	case c.Op == backend.Prod:
		return 1
	default:
		return int64(i+s*5) % 7
	}
}

func combine(op backend.ReduceOp, a, b int64) int64 {
	switch op {
	case backend.Prod:
		return a * b
	case backend.Min:
		return min(a, b)
	case backend.Max:
		return max(a, b)
	default:
		return a + b
	}
}

// encode returns values/divisor as elements of d, which hold them exactly. It uses no
// kernels, since these may be part of the measured call.
func encode(d backend.DType, values []int64, divisor int) []byte {
	out := make([]byte, len(values)*d.Size())
	buf := backend.Of(out).As(d)
	exact := func(i int) float64 { return float64(values[i]) / float64(divisor) }
	for i, v := range values {
		switch whole := v / int64(divisor); d {
		case backend.U8:
			out[i] = byte(whole)
		case backend.I32:
			backend.View[int32](buf)[i] = int32(whole)
		case backend.I64:
			backend.View[int64](buf)[i] = whole
		case backend.F32:
			backend.View[float32](buf)[i] = float32(exact(i))
		case backend.F64:
			backend.View[float64](buf)[i] = exact(i)
		case backend.F16:
			backend.View[backend.Float16](buf)[i] = backend.Float16(
				float16.Fromfloat32(float32(exact(i))))
		case backend.BF16:
			backend.View[backend.BFloat16](buf)[i] = backend.BFloat16(
				math.Float32bits(float32(exact(i))) >> 16)
		}
	}
	return out
}

// piece is a run of elements of a destination, and the data that belongs there,
// which begins with element from of a period.
type piece struct {
	lo, hi  int
	pattern []byte
	from    int
}

// want returns what the destination of rank r must hold after a call of n
// elements.
func (d data) want(c backend.Collective, r, n int) []piece {
	switch c.Kind {
	case backend.AllReduce, backend.Reduce:
		return []piece{{0, n, d.reduced, 0}}
	case backend.ReduceScatter:
		return []piece{{0, n, d.reduced, r * n}}
	case backend.Broadcast:
		return []piece{{0, n, d.ranks[c.Root], 0}}
	case backend.Scatter:
		return []piece{{0, n, d.ranks[c.Root], r * n}}
	}
	pieces := make([]piece, len(d.ranks))
	for s := range pieces {
		pieces[s] = piece{s * n, (s + 1) * n, d.ranks[s], 0}
		if c.Kind == backend.AllToAll {
			pieces[s].from = r * n
		}
	}
	return pieces
}

// fill writes the operand of rank r.
func (d data) fill(src []byte, r int) {
	for n := copy(src, d.ranks[r]); n < len(src); {
		n += copy(src[n:], src[:n]) // whole periods, twice as many each time
	}
}

// wrong counts the elements of dst that are not as they must be.
func (d data) wrong(dst []byte, pieces []piece) int {
	bad := 0
	for _, p := range pieces {
		bad += d.wrongIn(dst[p.lo*d.size:p.hi*d.size], p.pattern, p.from%period*d.size)
	}
	return bad
}

// wrongIn compares got with the pattern, begun at byte at.
func (d data) wrongIn(got, pattern []byte, at int) int {
	bad := 0
	for len(got) > 0 {
		n := min(len(got), len(pattern)-at)
		if expected := pattern[at : at+n]; !bytes.Equal(got[:n], expected) {
			for i := 0; i < n; i += d.size {
				if !bytes.Equal(got[i:i+d.size], expected[i:i+d.size]) {
					bad++
				}
			}
		}
		got, at = got[n:], 0
	}
	return bad
}
