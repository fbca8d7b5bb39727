package kernels

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/internal/simd"
)

// Attention is scaled dot-product attention, for each head of a batch:
//
//	s[i,j] = Scale * sum over c of q[i,c] k[j,c], of the keys j that query i sees
//	lse[i] = log of the sum over j of exp(s[i,j])
//	y[i,c] = sum over j of exp(s[i,j] - lse[i]) v[j,c]
//
// Operands and results are f32, f64 or bf16, of one dtype. It is computed in f32 where they are f32
// or bf16, the exponentials are rounded to the dtype of v before they are multiplied with it, and
// each implementation adds in an order of its own, with the same bits in every run.
type Attention struct {
	Batch, Heads  int
	Queries, Keys int // of each head
	Size          int // elements of a query, of a key and of a value

	// Causal hides later keys: query i sees the keys j <= i + Keys - Queries. The result of a query
	// that sees none is 0, and its lse -Inf.
	Causal bool
	Scale  float64 // more than 0

	Q, K, V, Y HeadRows
	LSE        backend.Buffer // [Batch, Heads, Queries], f64 where Y is, otherwise f32
}

// AttentionGrad is the gradient of an [Attention], of which Y and LSE are the results now:
//
//	w[i,j] = exp(s[i,j] - lse[i])
//	sums[i] = sum over c of dy[i,c] y[i,c]
//	ds[i,j] = Scale * w[i,j] (sum over c of dy[i,c] v[j,c] - sums[i])
//	dq[i] = sum over j of ds[i,j] k[j]
//	dk[j] = sum over i of ds[i,j] q[i]
//	dv[j] = sum over i of w[i,j] dy[i]
type AttentionGrad struct {
	Attention
	DY, DQ, DK, DV HeadRows
	Sums           backend.Buffer // room like LSE
}

// HeadRows is an operand or a result of [Attention]: Size neighbouring elements for each query or
// key of each head.
type HeadRows struct {
	Buffer           backend.Buffer
	Batch, Head, Row int // elements from one entry of the batch, head or row to the next
}

// Seen returns how many keys query i sees: the first ones.
func (a *Attention) Seen(i int) int {
	if !a.Causal {
		return a.Keys
	}
	return min(max(i+1+a.Keys-a.Queries, 0), a.Keys)
}

// Attention checks its argument.
func (c Check) Attention(a Attention) error {
	if err := a.check(); err != nil {
		return err
	}
	if err := a.fit(map[string]HeadRows{"q": a.Q, "y": a.Y}, a.Queries); err != nil {
		return err
	}
	if err := a.fit(map[string]HeadRows{"k": a.K, "v": a.V}, a.Keys); err != nil {
		return err
	}
	return c.checkDevice("attention", a.Y.Buffer, a.LSE, a.Q.Buffer, a.K.Buffer, a.V.Buffer)
}

// AttentionGrad checks its argument.
func (c Check) AttentionGrad(a AttentionGrad) error {
	if err := c.Attention(a.Attention); err != nil {
		return err
	}
	if err := a.fit(map[string]HeadRows{"dy": a.DY, "dq": a.DQ}, a.Queries); err != nil {
		return err
	}
	if err := a.fit(map[string]HeadRows{"dk": a.DK, "dv": a.DV}, a.Keys); err != nil {
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
	if min(a.Batch, a.Heads, a.Queries, a.Keys, a.Size) < 1 || !(a.Scale > 0) {
		return fmt.Errorf("%w: attention of %d x %d heads, %d queries, %d keys of %d elements, "+
			"scale %v: all are at least 1, and the scale is more than 0",
			backend.ErrArgument, a.Batch, a.Heads, a.Queries, a.Keys, a.Size, a.Scale)
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

// fit checks that operands of n rows for each head lie within their buffers.
func (a *Attention) fit(operands map[string]HeadRows, n int) error {
	for name, r := range operands {
		if d := r.Buffer.DType(); d != a.Y.Buffer.DType() {
			return fmt.Errorf("%w: attention: %s is %v, y is %v", backend.ErrArgument, name, d,
				a.Y.Buffer.DType())
		}
		need := (a.Batch-1)*r.Batch + (a.Heads-1)*r.Head + (n-1)*r.Row + a.Size
		if min(r.Batch, r.Head, r.Row) < 0 || r.Buffer.Len() < need {
			return fmt.Errorf("%w: attention: %s takes %d elements at steps of %d, %d, %d; its "+
				"buffer has %d",
				backend.ErrArgument, name, need, r.Batch, r.Head, r.Row, r.Buffer.Len())
		}
	}
	return nil
}

// Attention computes by products of blocks of queries with all keys that they see, in f64 or f32.
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
