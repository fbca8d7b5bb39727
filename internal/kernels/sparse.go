package kernels

import (
	"fmt"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
)

// Sparse is the arithmetic of package backend/compress/sparse: it selects the large elements of
// vectors, and adds the selections of several ranks. A Queue may implement it. It never blocks the
// host; counts stay in the memory of the message.
type Sparse interface {
	// Select moves the large elements of a vector to a message: see [Selection].
	Select(s *Selection) error
	// SelectScratch returns how many bytes of scratch a Selection of n elements
	// needs.
	SelectScratch(s *Selection) int
	// Combine adds up messages, in the order of the ranks:
	//
	//	for i { dst[i] = the sum over the messages of the value for i, 0 where there is none }
	//
	// in 32 bits. Values other than 0 are divided by the divisor. dst is F32 or F64. Entries for
	// elements that dst does not have are left out.
	Combine(dst backend.Buffer, m Messages, divisor int) error
	// NotFinite: note[0] = n - i of the first of the n elements that is NaN or
	// infinite, 0 if there is none. note is I64, x is F32 or F64.
	NotFinite(note, x backend.Buffer) error
}

// MaxSelect is the largest number of elements of a Selection: 4 GiB.
const MaxSelect = 1 << 30

// Message holds the elements of a vector that are sent: Values[i] belongs to place Index[i], in
// ascending order. Head[2] is their number, Head[1] the number that were selected, including those
// beyond the room. Kernels do not use Head[0].
type Message struct {
	Head   backend.Buffer // I64, HeadWords of them
	Values backend.Buffer // F32, F16 or BF16; there is room for so many entries
	Index  backend.Buffer // I32, as many
}

// HeadWords is the length of a message's head.
const HeadWords = 3

// Selection adds X to Residual and moves the large elements of the sum to Out:
//
//	for i {
//		v := Residual[i] + X[i]
//		picked := magnitude(v) > Above, or one of the K largest, of equal ones the first
//		Out.Head[1] += picked
//		if picked and there is room {
//			add (y, i) to Out, where y is v as Out.Values hold it
//			v = v - y, or 0 if y is NaN or infinite
//		}
//		Residual[i] = v
//	}
//
// A magnitude is the bits of an f32 without the sign, so infinity is larger than every number, and
// NaN larger than infinity.
type Selection struct {
	Out Message
	// Dense, if it is not empty, is F32 and gets every y at its place and zeros elsewhere; Out then
	// gets only the head. It may be X.
	Dense backend.Buffer
	// X and Residual are F32. If there is no Residual, v is X[i].
	X, Residual backend.Buffer

	K     int    // 0: those above Above
	Above uint32 // a magnitude

	// Saturate makes y the largest finite number where it would be infinite and v is not.
	// The remainder v - y is exact, except for F16 and v from 2^29 on, where f32 rounds it.
	Saturate bool
	// Fingerprint becomes Out.Head[0].
	Fingerprint int64
	// If any of the Notes is not 0, nothing is selected and Residual is unchanged. Notes
	// may be empty.
	Notes backend.Buffer
	// Scratch has SelectScratch bytes; what they hold does not matter.
	Scratch backend.Buffer
}

// Messages has the messages of several ranks, one after the other.
type Messages struct {
	All      backend.Buffer // U8
	Ranks    int
	NBytes   int // of one message
	DType    backend.DType
	Values   int // where they begin in a message, in bytes
	Index    int // likewise
	Capacity int // entries there is room for
}

// Select checks the arguments, so that implementations need not.
func (c Check) Select(s *Selection) error {
	n := s.X.Len()
	d := s.Out.Values.DType()
	switch {
	case n == 0 || n > MaxSelect:
		return fmt.Errorf("%w: select from %d elements: at least one, and %d at most",
			backend.ErrUnsupported, n, MaxSelect)
	case s.X.DType() != backend.F32 || s.Residual.Len() > 0 && (s.Residual.DType() != backend.F32 ||
		s.Residual.Len() != n):
		return fmt.Errorf("%w: select from %d %v with a residual of %d %v: both must be f32, of "+
			"the same length",
			backend.ErrArgument, n, s.X.DType(), s.Residual.Len(), s.Residual.DType())
	case s.Dense.Len() > 0 && (s.Dense.DType() != backend.F32 || s.Dense.Len() != n):
		return fmt.Errorf("%w: select from %d f32 to %d %v", backend.ErrArgument, n, s.Dense.Len(),
			s.Dense.DType())
	case s.Out.Head.DType() != backend.I64 || s.Out.Head.Len() != HeadWords ||
		s.Out.Index.Len() != s.Out.Values.Len() ||
		s.Out.Values.Len() > 0 && s.Out.Index.DType() != backend.I32:
		return fmt.Errorf("%w: select to a message with a head of %d %v, %d values and %d %v",
			backend.ErrArgument,
			s.Out.Head.Len(), s.Out.Head.DType(), s.Out.Values.Len(), s.Out.Index.Len(),
			s.Out.Index.DType())
	case d != backend.F32 && d != backend.F16 && d != backend.BF16:
		return fmt.Errorf("%w: select values as %v: use f32, f16 or bf16", backend.ErrArgument, d)
	case s.K < 0 || s.K > n:
		return fmt.Errorf("%w: select the %d largest of %d elements", backend.ErrArgument, s.K, n)
	case s.Notes.Len() > 0 && s.Notes.DType() != backend.I64:
		return fmt.Errorf("%w: select with notes of %v", backend.ErrArgument, s.Notes.DType())
	case overlap(s.Residual, s.X) || overlap(s.Residual, s.Dense):
		return fmt.Errorf("%w: select: the residual overlaps an operand", backend.ErrArgument)
	}
	return c.checkDevice("select", s.X, s.Residual, s.Dense, s.Out.Head, s.Out.Values, s.Out.Index,
		s.Notes, s.Scratch)
}

// Combine checks the arguments, so that implementations need not.
func (c Check) Combine(dst backend.Buffer, m Messages, divisor int) error {
	switch {
	case dst.DType() != backend.F32 && dst.DType() != backend.F64 || dst.Len() > MaxSelect:
		return fmt.Errorf("%w: combine %d %v: use f32 or f64, %d elements at most",
			backend.ErrUnsupported, dst.Len(), dst.DType(), MaxSelect)
	case m.DType != backend.F32 && m.DType != backend.F16 && m.DType != backend.BF16:
		return fmt.Errorf("%w: combine values of %v", backend.ErrArgument, m.DType)
	case m.Ranks < 1 || divisor < 1 || m.NBytes%8 != 0 || m.Values%8 != 0 || m.Index%8 != 0 ||
		m.Values < 8*HeadWords ||
		m.Values+m.Capacity*m.DType.Size() > m.NBytes || m.Index+4*m.Capacity > m.NBytes ||
		m.All.NBytes() < m.Ranks*m.NBytes:
		return fmt.Errorf("%w: combine %d messages of %d bytes, with %d entries at %d and %d, in "+
			"%d bytes, divided by %d",
			backend.ErrArgument, m.Ranks, m.NBytes, m.Capacity, m.Values, m.Index, m.All.NBytes(),
			divisor)
	}
	return c.checkDevice("combine", dst, m.All)
}

// NotFinite checks the arguments, so that implementations need not.
func (c Check) NotFinite(note, x backend.Buffer) error {
	if note.DType() != backend.I64 || note.Len() != 1 || x.DType() != backend.F32 &&
		x.DType() != backend.F64 {
		return fmt.Errorf("%w: look for NaN in %d %v, to %d %v", backend.ErrArgument, x.Len(),
			x.DType(), note.Len(), note.DType())
	}
	return c.checkDevice("notfinite", note, x)
}

var _ Sparse = Host{}

// SelectScratch implements [Sparse].
func (Host) SelectScratch(*Selection) int { return 0 }

// Select implements [Sparse]. It defines the meaning, and serves fake devices. Package
// backend/compress/sparse has a faster one for the host.
func (Host) Select(s *Selection) error {
	if err := (Check{}).Select(s); err != nil {
		return err
	}
	head := backend.View[int64](s.Out.Head)
	head[0], head[1], head[2] = s.Fingerprint, 0, 0
	if slices.ContainsFunc(backend.View[int64](s.Notes), func(note int64) bool {
		return note != 0
	}) {
		return nil
	}
	v := backend.View[float32](s.Residual)
	if v == nil {
		v = slices.Clone(backend.View[float32](s.X))
	} else if err := (Host{}).Reduce(backend.Sum, s.Residual, s.Residual, s.X); err != nil {
		return err
	}
	above, ties := s.Above, 0
	if s.K > 0 {
		above, ties = kthMagnitude(v, s.K)
	}
	dense := backend.View[float32](s.Dense)
	clear(dense)
	for i, x := range v {
		m := magnitude(x)
		if m < above || m == above && ties == 0 {
			continue
		}
		if m == above {
			ties--
		}
		head[1]++
		at := int(head[2])
		y, sent := narrowed(x, s.Out.Values.DType(), s.Saturate)
		switch {
		case dense != nil:
			dense[i] = y
		case at < s.Out.Values.Len():
			setElement(s.Out.Values, at, sent)
			backend.View[int32](s.Out.Index)[at] = int32(i)
			head[2]++
		default:
			continue
		}
		if v[i] = x - y; y-y != 0 {
			v[i] = 0
		}
	}
	return nil
}

func magnitude(x float32) uint32 { return math.Float32bits(x) &^ (1 << 31) }

// kthMagnitude returns the k-th largest magnitude, and how many of the k are equal
// to it.
func kthMagnitude(v []float32, k int) (kth uint32, ties int) {
	all := make([]uint32, len(v))
	for i, x := range v {
		all[i] = magnitude(x)
	}
	slices.Sort(all)
	all = all[len(all)-k:]
	first, _ := slices.BinarySearch(all, all[0]+1)
	return all[0], first
}

// narrowed returns x as a type holds it, and the bits of that.
func narrowed(x float32, d backend.DType, saturate bool) (y float32, bits uint32) {
	clip := func(h, infinite uint16) uint16 {
		if saturate && h&0x7fff == infinite && x-x == 0 {
			h--
		}
		return h
	}
	switch d {
	case backend.F16:
		h := clip(simd.NarrowF16(x), 0x7c00)
		return simd.WidenF16(h), uint32(h)
	case backend.BF16:
		h := clip(simd.NarrowBF16(x), 0x7f80)
		return math.Float32frombits(uint32(h) << 16), uint32(h)
	}
	return x, math.Float32bits(x)
}

// setElement sets element i of values.
func setElement(values backend.Buffer, i int, bits uint32) {
	if values.DType() == backend.F32 {
		backend.View[float32](values)[i] = math.Float32frombits(bits)
		return
	}
	backend.View[backend.Float16](values.As(backend.F16))[i] = backend.Float16(bits)
}

// Combine implements [Sparse].
func (Host) Combine(dst backend.Buffer, m Messages, divisor int) error {
	if err := (Check{}).Combine(dst, m, divisor); err != nil {
		return err
	}
	sums := make([]float32, dst.Len())
	for r := range m.Ranks {
		message := m.All.Slice(r*m.NBytes, (r+1)*m.NBytes)
		sent := backend.View[int64](message.Slice(0, 8*HeadWords).As(backend.I64))[2]
		n := int(min(uint64(sent), uint64(m.Capacity)))
		index := backend.View[int32](message.Slice(m.Index, m.Index+4*n).As(backend.I32))
		values := make([]float32, n)
		if err := (Host{}).Cast(backend.Of(values),
			message.Slice(m.Values, m.Values+n*m.DType.Size()).As(m.DType)); err != nil {
			return err
		}
		for j, i := range index {
			if uint(i) < uint(len(sums)) {
				sums[i] += values[j]
			}
		}
	}
	if divisor != 1 {
		for i, x := range sums {
			if x != 0 {
				sums[i] = x / float32(divisor)
			}
		}
	}
	return Host{}.Cast(dst, backend.Of(sums))
}

// NotFinite implements [Sparse].
func (Host) NotFinite(note, x backend.Buffer) error {
	if err := (Check{}).NotFinite(note, x); err != nil {
		return err
	}
	var first int
	if x.DType() == backend.F32 {
		first = firstNotFinite(backend.View[float32](x))
	} else {
		first = firstNotFinite(backend.View[float64](x))
	}
	backend.View[int64](note)[0] = int64(x.Len() - first)
	return nil
}

// firstNotFinite returns the index of the first NaN or infinity, the length if
// there is none.
func firstNotFinite[T float](x []T) int {
	if i := slices.IndexFunc(x, func(v T) bool { return v-v != 0 }); i >= 0 {
		return i
	}
	return len(x)
}
