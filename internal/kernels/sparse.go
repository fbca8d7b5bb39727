package kernels

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
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

// NotFinite does what [Sparse] says.
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
