package kernels

import (
	"cmp"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
)

// Attention is scaled dot-product attention, for each head of a batch:
//
//	s[i,j] = cap(Scale * sum over c of q[i,c] k[j,c]) + mask[i,j], of the keys j that query i sees
//	lse[i] = log of the sum over j of exp(s[i,j])
//	y[i,c] = sum over j of exp(s[i,j] - lse[i]) v[j,c]
//
// with cap(x) = SoftCap * tanh(x / SoftCap) if SoftCap is more than 0, and x if it is 0.
//
// Operands and results except Mask, Lengths and Starts have one dtype: f32, f64 or bf16. Attention
// of f32 or bf16 is computed in f32. The exponentials are rounded to the dtype of v before they are
// multiplied with it. Each implementation adds in its own order, the same in every run.
type Attention struct {
	Batch, Heads  int // heads of Q and Y
	Queries, Keys int // of each head
	Size          int // elements of a query and of a key
	// Group is how many neighbouring heads of Q share a head of K and V: it divides Heads, and 0
	// stands for 1.
	Group int
	// ValueSize is how many elements a value and a row of Y have; 0 stands for Size.
	ValueSize int

	// Causal hides later keys: query i sees the keys j <= i + Keys - Queries. The result of a query
	// that sees none is 0, and its lse -Inf.
	Causal bool
	// Appended makes Causal count from the length of an entry in place of Keys.
	Appended bool
	// Window is the most keys that a query of causal attention sees, its own the last of them; 0 is
	// no bound.
	Window  int
	Scale   float64 // more than 0
	SoftCap float64

	Q, K, V, Y HeadRows
	LSE        backend.Buffer // [Batch, Heads, Queries], f64 where Y is, otherwise f32

	// Mask is added to the scores, unless its buffer is empty: f64 where Y is, otherwise f32. -Inf
	// hides a key.
	Mask Mask
	// Lengths are I32 or I64, [Batch], unless empty: keys from a length on are hidden, and their
	// blocks are skipped.
	Lengths backend.Buffer
	// Starts are I32 or I64, [Batch, Queries], unless empty: the keys before it are hidden from a
	// query. They do not descend along the queries of an entry, so that blocks are skipped.
	Starts backend.Buffer
}

// Mask has a number for each batch entry, head, query and key. Its steps are in elements: 0 where
// they share a number.
type Mask struct {
	Buffer                backend.Buffer
	Batch, Head, Row, Key int
}

// AttentionGrad is the gradient of an [Attention], whose Y and LSE hold the results of the forward
// pass:
//
//	w[i,j] = exp(s[i,j] - lse[i])
//	sums[i] = sum over c of dy[i,c] y[i,c]
//	ds[i,j] = Scale * cap'[i,j] w[i,j] (sum over c of dy[i,c] v[j,c] - sums[i])
//	dq[i] = sum over j of ds[i,j] k[j]
//	dk[j] = sum over i of ds[i,j] q[i]
//	dv[j] = sum over i of w[i,j] dy[i]
//
// with cap' the derivative of cap. dk and dv are sums over the queries of all heads of a group.
type AttentionGrad struct {
	Attention
	DY, DQ, DK, DV HeadRows
	Sums           backend.Buffer // room like LSE
}

// HeadRows is an operand or a result of [Attention]: Size or ValueSize neighbouring elements for
// each query or key of each head.
type HeadRows struct {
	Buffer           backend.Buffer
	Batch, Head, Row int // elements from one entry of the batch, head or row to the next
}

// Filled returns a with 0 replaced by what it stands for.
func (a Attention) Filled() Attention {
	a.Group = max(a.Group, 1)
	if a.ValueSize == 0 {
		a.ValueSize = a.Size
	}
	return a
}

// Seen returns how many keys query i of an entry with a length sees: the first ones.
func (a *Attention) Seen(i, length int) int {
	end := a.Keys
	if length = min(max(length, 0), a.Keys); a.Appended {
		end = length
	}
	if !a.Causal {
		return length
	}
	return min(max(i+1+end-a.Queries, 0), length)
}

// First returns the first key that query i of an entry with a length may see, if it sees those from
// a start on.
func (a *Attention) First(i, length, start int) int {
	end := a.Keys
	if a.Appended {
		end = min(max(length, 0), a.Keys)
	}
	if start = max(start, 0); a.Window > 0 {
		start = max(start, i+1+end-a.Queries-a.Window)
	}
	return start
}

// Attention checks its argument.
func (c Check) Attention(a Attention) error {
	a = a.Filled()
	if err := a.check(); err != nil {
		return err
	}
	if err := cmp.Or(a.fit("q", a.Q, a.Heads, a.Queries, a.Size),
		a.fit("k", a.K, a.Heads/a.Group, a.Keys, a.Size),
		a.fit("v", a.V, a.Heads/a.Group, a.Keys, a.ValueSize),
		a.fit("y", a.Y, a.Heads, a.Queries, a.ValueSize), a.checkHidden()); err != nil {
		return err
	}
	for _, b := range []backend.Buffer{a.Mask.Buffer, a.Lengths, a.Starts} {
		if b.Len() > 0 {
			if err := c.checkDevice("attention", b); err != nil {
				return err
			}
		}
	}
	return c.checkDevice("attention", a.Y.Buffer, a.LSE, a.Q.Buffer, a.K.Buffer, a.V.Buffer)
}

// AttentionGrad checks its argument.
func (c Check) AttentionGrad(a AttentionGrad) error {
	if err := c.Attention(a.Attention); err != nil {
		return err
	}
	a.Attention = a.Filled()
	if err := cmp.Or(a.fit("dy", a.DY, a.Heads, a.Queries, a.ValueSize),
		a.fit("dq", a.DQ, a.Heads, a.Queries, a.Size),
		a.fit("dk", a.DK, a.Heads/a.Group, a.Keys, a.Size),
		a.fit("dv", a.DV, a.Heads/a.Group, a.Keys, a.ValueSize)); err != nil {
		return err
	}
	if a.Sums.DType() != a.LSE.DType() || a.Sums.Len() != a.LSE.Len() {
		return fmt.Errorf("%w: gradient of attention: room of %d %v for sums, want %d %v",
			backend.ErrArgument, a.Sums.Len(), a.Sums.DType(), a.LSE.Len(), a.LSE.DType())
	}
	return c.checkDevice("gradient of attention", a.DQ.Buffer, a.DK.Buffer, a.DV.Buffer,
		a.DY.Buffer, a.Sums)
}

// check checks sizes and dtypes.
func (a *Attention) check() error {
	if min(a.Batch, a.Heads, a.Queries, a.Keys, a.Size, a.ValueSize) < 1 || !(a.Scale > 0) {
		return fmt.Errorf("%w: attention of %d x %d heads, %d queries, %d keys of %d elements, "+
			"values of %d, scale %v: all are at least 1, and the scale is more than 0",
			backend.ErrArgument, a.Batch, a.Heads, a.Queries, a.Keys, a.Size, a.ValueSize, a.Scale)
	}
	if a.Heads%a.Group != 0 || !(a.SoftCap >= 0) || a.Appended && a.Lengths.Len() == 0 {
		return fmt.Errorf("%w: attention of %d heads in groups of %d, soft cap %v, appended %v, "+
			"%d lengths: groups divide the heads, the cap is at least 0, and appended queries "+
			"have lengths",
			backend.ErrArgument, a.Heads, a.Group, a.SoftCap, a.Appended, a.Lengths.Len())
	}
	if a.Window < 0 || a.Window > 0 && !a.Causal {
		return fmt.Errorf("%w: attention with a window of %d, causal %v: windows are of causal "+
			"attention, and at least 0", backend.ErrArgument, a.Window, a.Causal)
	}
	d, statistics := a.Y.Buffer.DType(), backend.F32
	switch d {
	case backend.F64:
		statistics = backend.F64
	case backend.F32, backend.BF16:
	default:
		return fmt.Errorf("%w: attention of %v: of f32, f64 and bf16 only",
			backend.ErrUnsupported, d)
	}
	if n := a.Batch * a.Heads * a.Queries; a.LSE.DType() != statistics || a.LSE.Len() != n {
		return fmt.Errorf("%w: attention of %v: lse has %d %v, want %d %v", backend.ErrArgument, d,
			a.LSE.Len(), a.LSE.DType(), n, statistics)
	}
	return nil
}

// fit checks that an operand of n rows of each head lies within its buffer.
func (a *Attention) fit(name string, r HeadRows, heads, n, size int) error {
	if d := r.Buffer.DType(); d != a.Y.Buffer.DType() {
		return fmt.Errorf("%w: attention: %s is %v, y is %v", backend.ErrArgument, name, d,
			a.Y.Buffer.DType())
	}
	need := (a.Batch-1)*r.Batch + (heads-1)*r.Head + (n-1)*r.Row + size
	if min(r.Batch, r.Head, r.Row) < 0 || r.Buffer.Len() < need {
		return fmt.Errorf("%w: attention: %s takes %d elements at steps of %d, %d, %d; its "+
			"buffer has %d",
			backend.ErrArgument, name, need, r.Batch, r.Head, r.Row, r.Buffer.Len())
	}
	return nil
}

// checkHidden checks the mask and the lengths.
func (a *Attention) checkHidden() error {
	if m, n, d := a.Mask, a.Mask.Buffer.Len(), a.LSE.DType(); n > 0 {
		need := (a.Batch-1)*m.Batch + (a.Heads-1)*m.Head + (a.Queries-1)*m.Row + 1
		need += (a.Keys - 1) * m.Key
		if min(m.Batch, m.Head, m.Row, m.Key) < 0 || n < need || m.Buffer.DType() != d {
			return fmt.Errorf("%w: attention: the mask takes %d %v at steps of %d, %d, %d, %d; "+
				"its buffer has %d %v",
				backend.ErrArgument, need, d, m.Batch, m.Head, m.Row, m.Key, n, m.Buffer.DType())
		}
	}
	return cmp.Or(checkCounts("lengths", a.Lengths, a.Batch),
		checkCounts("starts", a.Starts, a.Batch*a.Queries))
}

// checkCounts checks integers of which there are want, or none.
func checkCounts(what string, b backend.Buffer, want int) error {
	if n, d := b.Len(), b.DType(); n > 0 && (n != want || d != backend.I32 && d != backend.I64) {
		return fmt.Errorf("%w: attention: %d %s of %v, want %d of i32 or i64", backend.ErrArgument,
			n, what, d, want)
	}
	return nil
}

// Attention multiplies blocks of queries by all keys that they see, in f64 or f32.
func (h Host) Attention(a Attention) error {
	if err := (Check{}).Attention(a); err != nil {
		return err
	}
	switch pool, level := h.pool(), simd.Best(); a.Y.Buffer.DType() {
	case backend.F64:
		attend[float64, float64](pool, level, &a)
	case backend.F32:
		attend[float32, float32](pool, level, &a)
	default:
		attend[float32, backend.BFloat16](pool, level, &a)
	}
	return nil
}

// AttentionGrad computes as Attention does, a head at a time.
func (h Host) AttentionGrad(a AttentionGrad) error {
	if err := (Check{}).AttentionGrad(a); err != nil {
		return err
	}
	switch pool, level := h.pool(), simd.Best(); a.Y.Buffer.DType() {
	case backend.F64:
		attendGrad[float64, float64](pool, level, &a)
	case backend.F32:
		attendGrad[float32, float32](pool, level, &a)
	default:
		attendGrad[float32, backend.BFloat16](pool, level, &a)
	}
	return nil
}

// headStart returns where head number i of all begins.
func (r HeadRows) headStart(i, heads int) int { return i/heads*r.Batch + i%heads*r.Head }
