package sparse

import (
	"math"
	"slices"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// block is how many elements are handled at a time, so that each step finds in
// the first-level cache what the one before left there: 4096 of residual and of
// gradient are 32 KiB.
const block = 4096

// selector selects elements of host memory and adds up messages. It is used by one call after the
// other.
type selector struct {
	rounder
	search
	at     [block]int32
	picked [block]float32
	sums   [block]float32
	wide   []float32 // values of messages
}

// run does what [kernels.Selection] says.
func (s *selector) run(w *kernels.Selection) {
	head := backend.View[int64](w.Out.Head)
	head[wordFingerprint], head[wordSelected], head[wordSent] = w.Fingerprint, 0, 0
	if slices.ContainsFunc(backend.View[int64](w.Notes), func(note int64) bool {
		return note != 0
	}) {
		return
	}
	s.dtype, s.saturate = w.Out.Values.DType(), w.Saturate
	v := backend.View[float32](w.X)
	if w.Residual.Len() > 0 {
		v = backend.View[float32](w.Residual)
	}
	dense := backend.View[float32](w.Dense)
	c := s.findCutoff(w, v)
	for lo := 0; lo < len(v); lo += block {
		hi := min(lo+block, len(v))
		if w.K == 0 {
			load(w, lo, hi)
		}
		picked := s.pick(&c, v[lo:hi])
		head[wordSelected] += int64(picked)
		if dense != nil { // now, because it may be the operand
			clear(dense[lo:hi])
		} else {
			picked = min(picked, w.Out.Values.Len()-int(head[wordSent]))
		}
		s.takePicked(w, v, lo, picked)
	}
}

// findCutoff returns what is selected. For a top-k it first adds the operand to the residual, since
// it has to see all of the sums. A threshold does that block by block.
func (s *selector) findCutoff(w *kernels.Selection, v []float32) cutoff {
	if w.K == 0 {
		return cutoff{above: w.Above}
	}
	for lo := 0; lo < len(v); lo += block {
		hi := min(lo+block, len(v))
		load(w, lo, hi)
		s.see(v[lo:hi])
	}
	return s.kth(v, w.K)
}

// load adds a block of the operand to the residual, if there is one.
func load(w *kernels.Selection, lo, hi int) {
	if w.Residual.Len() > 0 {
		r := w.Residual.Slice(lo, hi)
		// of one length and dtype: it cannot fail
		_ = kernels.Host{}.Reduce(backend.Sum, r, r, w.X.Slice(lo, hi))
	}
}

// pick finds the selected elements of a block, and notes their values.
func (s *selector) pick(c *cutoff, v []float32) int {
	n := c.pick(s.at[:], v)
	for j, i := range s.at[:n] {
		s.picked[j] = v[i]
	}
	return n
}

// takePicked moves the first n picked elements of the block at lo out of the values.
func (s *selector) takePicked(w *kernels.Selection, v []float32, lo, n int) {
	if n == 0 {
		return
	}
	at := s.at[:n]
	bytes, seen := s.round(s.picked[:n])
	if w.Residual.Len() > 0 {
		for j, i := range at {
			v[lo+int(i)] = remainder(v[lo+int(i)], seen[j])
		}
	}
	if w.Dense.Len() > 0 {
		dense := backend.View[float32](w.Dense)[lo:]
		for j, i := range at {
			dense[i] = seen[j]
		}
		return
	}
	sent := &backend.View[int64](w.Out.Head)[wordSent]
	first := int(*sent)
	copy(w.Out.Values.Slice(first, first+n).Bytes(), bytes)
	index := backend.View[int32](w.Out.Index)[first:]
	for j, i := range at {
		index[j] = int32(lo) + i
	}
	*sent += int64(n)
}

// remainder is what stays of v when seen was sent: 0 if seen is not finite. The difference is exact
// if seen is v rounded, or the largest number of BF16. If seen is the largest number of F16, 65504,
// the difference is exact as long as v is below 2^29: from there on, f32 has only every 64th
// number, and rounds.
func remainder(v, seen float32) float32 {
	if seen-seen != 0 {
		return 0
	}
	return v - seen
}

// source is what one rank has sent, as it is read.
type source struct {
	index  []int32
	values []float32
	next   int
}

// combine adds up messages, block by block, so that a block is cleared, summed, divided and
// cast while it is in the cache.
func (s *selector) combine(dst backend.Buffer, m kernels.Messages, divisor int) {
	sources := s.sources(m)
	for lo := 0; lo < dst.Len(); lo += block {
		hi := min(lo+block, dst.Len())
		acc := s.sums[:hi-lo]
		if dst.DType() == backend.F32 {
			acc = backend.View[float32](dst)[lo:hi]
		}
		clear(acc)
		for r := range sources {
			sources[r].add(acc, lo)
		}
		divide(acc, divisor)
		if dst.DType() != backend.F32 {
			narrow(dst.Slice(lo, hi), backend.Of(acc))
		}
	}
}

// sources opens messages.
func (s *selector) sources(m kernels.Messages) []source {
	all := make([]source, m.Ranks)
	if n := m.Ranks * m.Capacity; m.DType != backend.F32 && len(s.wide) < n {
		s.wide = make([]float32, n)
	}
	for r := range all {
		memory := m.All.Slice(r*m.NBytes, (r+1)*m.NBytes)
		sent := backend.View[int64](memory.Slice(0, 8*kernels.HeadWords).As(backend.I64))[wordSent]
		n := int(min(uint64(sent), uint64(m.Capacity)))
		all[r].index = backend.View[int32](memory.Slice(m.Index, m.Index+4*n).As(backend.I32))
		values := memory.Slice(m.Values, m.Values+n*m.DType.Size()).As(m.DType)
		if m.DType != backend.F32 {
			wide := backend.Of(s.wide[r*m.Capacity:][:n])
			narrow(wide, values)
			values = wide
		}
		all[r].values = backend.View[float32](values)
	}
	return all
}

// add adds the entries that belong to acc, whose first element is at lo. Entries of a damaged
// message that belong to no element are left out.
func (s *source) add(acc []float32, lo int) {
	for ; s.next < len(s.index); s.next++ {
		i := int(s.index[s.next]) - lo
		if i >= len(acc) {
			return
		}
		if i >= 0 {
			acc[i] += s.values[s.next]
		}
	}
}

// divide ends an average. Most elements are zero.
func divide(acc []float32, divisor int) {
	if divisor == 1 {
		return
	}
	for i, x := range acc {
		if x != 0 {
			acc[i] = x / float32(divisor)
		}
	}
}

// magnitude orders floats by their size: as an integer, infinity is larger than
// every number, and NaN than infinity. So neither is ever left behind.
func magnitude(x float32) uint32 { return math.Float32bits(x) &^ (1 << 31) }

// cutoff says which magnitudes are selected: those above, and the first ties of
// those that are equal.
type cutoff struct {
	above uint32
	ties  int
}

// atLeast is the cut of a threshold. Zeros are below every one.
func atLeast(limit float32) cutoff { return cutoff{above: max(magnitude(limit), 1) - 1} }

// pick finds the selected elements of v, at most len(at), and how many there are.
func (c *cutoff) pick(at []int32, v []float32) (picked int) {
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
func (s *search) kth(v []float32, k int) cutoff {
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
func kthOf(ms []uint32, k int) cutoff {
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
			return cutoff{above: ms[0]&^1023 | at, ties: k}
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
