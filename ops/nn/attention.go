package nn

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops"
)

// AttentionOptions are the options of [Attention]. The zero value is full attention.
type AttentionOptions struct {
	// Causal hides later keys: query i sees the keys j <= i + keys - queries, so the last query
	// sees all. The result of a query that sees none is 0.
	Causal bool
	// Appended makes Causal count from KeyLengths: query i sees the keys j <= i + length - queries,
	// as the queries of a text's last positions see a cache of keys.
	Appended bool
	// Window is how many keys a query sees at most with Causal, of which its own is the last; 0 is
	// no bound.
	Window int
	// Scale multiplies the scores; 0 stands for 1/sqrt(d).
	Scale float64
	// SoftCap bounds scores s by SoftCap tanh(s/SoftCap), before the mask; 0 is no bound.
	SoftCap float64
	// Mask is added to the scores. It has q's dtype, and a shape that is broadcast to [batch,
	// heads, queries, keys], as in a binary operation. -Inf hides a key. For a boolean mask, use
	// Where with 0 and -Inf.
	Mask *gorgonia.Node
	// KeyLengths are integers, [batch]: an entry's keys from its length on are padding, and hidden.
	KeyLengths *gorgonia.Node
	// KeyStarts are integers, [batch, queries], which do not descend along the queries: each query
	// sees the keys from its number on, such as those of its own document.
	KeyStarts *gorgonia.Node
	// MaskGradient gives Mask a gradient, as for a learned bias of positions.
	MaskGradient bool
}

// Attention returns scaled dot-product attention of each head.
//
//	in   q  [batch, heads, queries, d]
//	     k  [batch, shared, keys, d]      shared divides heads: neighbouring heads of q share one
//	     v  [batch, shared, keys, e]
//	out  y  [batch, heads, queries, e]    y = softmax(cap(scale q kᵀ) + mask) v, over the keys
//	                                      that a query sees
//
// Operands of another order of axes, such as [batch, queries, heads, d], are transposed first:
// package vm reads them as they lie. A query that sees no key, or all of whose keys the mask hides,
// gives 0 and no gradient, as PyTorch's scaled_dot_product_attention and ONNX's Attention do.
//
// Lengths, starts and windows skip the keys that they hide: prefer them to a mask. Padded causal
// attention takes both: keys behind a length are hidden, and the others as without it, or with
// Appended as if there were no others. An attention has lengths or starts, not both.
//
// Gradient: with w the softmax, dv = wᵀ dy, and with ds = scale cap' w (dy vᵀ - sum(dy y)), dq = ds
// k and dk = dsᵀ q; heads that share k and v add up their gradients. The mask has a gradient only
// with MaskGradient: w (dy vᵀ - sum(dy y)), summed to its shape. Only this gradient keeps queries x
// keys elements of each head. Cost: 2*batch*heads*queries*keys*(d+e) operations, half of them if it
// is causal; backward 2.5 times that, and in the tape machine for each of the three gradients
// again. In package vm it is one kernel, FlashAttention-2 (Dao 2023) on GPUs, which take d and e up
// to 256. Errors: [ops.ErrShape] if the operands do not fit; [backend.ErrArgument] if Scale or
// SoftCap is negative or not finite, for a length or a start out of range, for starts that descend,
// for both of them, for a Window without Causal, for MaskGradient without a mask, or together with
// Causal, KeyLengths or KeyStarts, and for Appended without Causal and KeyLengths; [ops.ErrDType].
// Where package vm computes lengths or starts in the graph, result and gradients of an entry that
// would be such an error are NaN.
func Attention(q, k, v *gorgonia.Node, o AttentionOptions) (*gorgonia.Node, error) {
	if o.Scale == 0 && q != nil && q.Dims() == 4 {
		o.Scale = 1 / math.Sqrt(float64(q.Shape()[3]))
	}
	s := attentionSpec{program.Attention{
		Causal: o.Causal, Appended: o.Appended, Window: o.Window, Scale: o.Scale,
		SoftCap: o.SoftCap, Mask: o.Mask != nil, Lengths: o.KeyLengths != nil,
		Starts: o.KeyStarts != nil,
	}, o.MaskGradient}
	x := []*gorgonia.Node{q, k, v}
	for _, n := range []*gorgonia.Node{o.Mask, o.KeyLengths, o.KeyStarts} {
		if n != nil {
			x = append(x, n)
		}
	}
	if o.KeyLengths != nil && o.KeyStarts != nil {
		return nil, fmt.Errorf("nn: Attention: %w: KeyLengths and KeyStarts: give one of them",
			backend.ErrArgument)
	}
	return build("Attention", [...]string{"q k v", "q k v mask", "q k v mask counts"}[len(x)-3], s,
		x...)
}

// attentionSpec is [Attention] of q, k and v, and of a mask and of lengths or starts if it has
// them, with a scale that is not 0.
type attentionSpec struct {
	program.Attention
	MaskGradient bool
}

// String returns "Attention{causal, scale 0.125}".
func (s attentionSpec) String() string { return s.name("Attention") }

func (s attentionSpec) name(name string) string {
	name += "{"
	if s.Causal {
		name += "causal, "
	}
	if s.Appended {
		name += "appended, "
	}
	if s.Window > 0 {
		name += fmt.Sprintf("window %d, ", s.Window)
	}
	name += fmt.Sprintf("scale %v", s.Scale)
	if s.SoftCap > 0 {
		name += fmt.Sprintf(", soft cap %v", s.SoftCap)
	}
	if s.Mask {
		name += ", masked"
	}
	if s.Lengths {
		name += ", lengths"
	}
	if s.Starts {
		name += ", starts"
	}
	return name + "}"
}

func (s attentionSpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	q, k, v := in[0], in[1], in[2]
	if len(q) != 4 || len(k) != 4 || len(v) != 4 || q[0] != k[0] || q[1]%k[1] != 0 ||
		q[3] != k[3] || !k[:3].Eq(v[:3]) {
		return nil, fmt.Errorf("%w: q has shape %v, k %v and v %v, want (b, h, queries, d), "+
			"(b, g, keys, d) and (b, g, keys, e), of which g divides h", ops.ErrShape, q, k, v)
	}
	if !(s.Scale > 0) || math.IsInf(s.Scale, 1) || !(s.SoftCap >= 0) || math.IsInf(s.SoftCap, 1) {
		return nil, fmt.Errorf("%w: the scale is %v, and the soft cap %v", backend.ErrArgument,
			s.Scale, s.SoftCap)
	}
	if s.MaskGradient && (!s.Mask || s.Causal || s.Lengths || s.Starts) {
		return nil, fmt.Errorf("%w: MaskGradient is for a mask that hides all keys itself, by "+
			"-Inf: without Causal, KeyLengths and KeyStarts", backend.ErrArgument)
	}
	if s.Window < 0 || s.Window > 0 && !s.Causal {
		return nil, fmt.Errorf("%w: Window is %d: it is at least 0, and for Causal attention",
			backend.ErrArgument, s.Window)
	}
	if s.Appended && !(s.Causal && s.Lengths) {
		return nil, fmt.Errorf("%w: Appended is for Causal attention with KeyLengths",
			backend.ErrArgument)
	}
	scores := tensor.Shape{q[0], q[1], q[2], k[2]}
	if s.Mask && !repeats(in[3], scores) {
		return nil, fmt.Errorf("%w: the mask has shape %v, want one that is repeated to %v",
			ops.ErrShape, in[3], scores)
	}
	if at := s.indices(); s.Lengths && !in[at].Eq(tensor.Shape{q[0]}) {
		return nil, fmt.Errorf("%w: the lengths have shape %v, want (%d)", ops.ErrShape, in[at],
			q[0])
	} else if s.Starts && !in[at].Eq(tensor.Shape{q[0], q[2]}) {
		return nil, fmt.Errorf("%w: the starts have shape %v, want (%d, %d)", ops.ErrShape, in[at],
			q[0], q[2])
	}
	return tensor.Shape{q[0], q[1], q[2], v[3]}, nil
}

// repeats reports whether an operand is repeated to a shape.
func repeats(x, to tensor.Shape) bool {
	return len(x) <= len(to) && slices.Equal(program.Common(to, x), to)
}

func (s attentionSpec) indices() int {
	switch {
	case !s.Lengths && !s.Starts:
		return -1
	case s.Mask:
		return 4
	}
	return 3
}

func (s attentionSpec) check(counts []int, in []tensor.Shape) error {
	what := "length"
	if s.Starts {
		what = "start"
	}
	for i, n := range counts {
		if keys := in[1][2]; n < 0 || n > keys {
			return fmt.Errorf("%w: %s %d is %d, out of range 0 to %d", backend.ErrArgument, what, i,
				n, keys)
		}
		if queries := in[0][2]; s.Starts && i%queries > 0 && n < counts[i-1] {
			return fmt.Errorf("%w: the start of query %d is %d, less than %d before it",
				backend.ErrArgument, i%queries, n, counts[i-1])
		}
	}
	return nil
}

func (s attentionSpec) gradients(in []tensor.Shape) []gradient {
	if s.MaskGradient {
		return gradientsOf(s, in, 4)
	}
	return gradientsOf(s, in, 3)
}

// hides returns the operands that hide keys. A mask gets all axes.
func (s attentionSpec) hides(b *program.Builder, x []program.Value) []program.Value {
	if !s.Mask {
		return x
	}
	shape := b.Of(x[0]).Shape
	shape = slices.Concat([]int{1, 1, 1, 1}[len(shape):], shape)
	return slices.Concat([]program.Value{b.Reshape(x[0], shape...)}, x[1:])
}

func (s attentionSpec) program(b *program.Builder, x ...program.Value) program.Value {
	y, _ := b.Attention(s.Attention, slices.Concat(x[:3], s.hides(b, x[3:]))...)
	return s.poisoned(b, x, y)
}

// poisoned is y, or a gradient, with NaN for the entries of which a length or a start is out of
// range, or less than the start before it, if the graph computes them.
func (s attentionSpec) poisoned(b *program.Builder, x []program.Value, y program.Value,
) program.Value {
	if s.indices() < 0 || b.InRange(x[s.indices()]) {
		return y
	}
	counts := x[s.indices()]
	q, n := b.Of(x[0]).Shape, 1
	if s.Starts {
		n = q[2]
	}
	counts = b.Reshape(counts, q[0], n)
	inside := b.Do(fuse.Mul, program.With(b, fuse.GreaterEqual, counts, 0),
		program.With(b, fuse.LessEqual, counts, float64(b.Of(x[1]).Shape[2])))
	right := program.With(b, fuse.Equal, program.Sum(b, inside, 1), float64(n))
	if n > 1 {
		ascend := b.Do(fuse.GreaterEqual, b.Slice(counts, 1, 1, 1, n-1),
			b.Slice(counts, 1, 0, 1, n-1))
		right = b.Do(fuse.Mul, right,
			program.With(b, fuse.Equal, program.Sum(b, ascend, 1), float64(n-1)))
	}
	right = b.Reshape(right, q[0], 1, 1, 1)
	return b.Do(fuse.Where, right, y, b.Number(math.NaN(), y))
}

// back computes again what the forward pass keeps for the gradient.
func (s attentionSpec) back(
	b *program.Builder, i int, x []program.Value, _, dy program.Value,
) program.Value {
	hides := s.hides(b, x[3:])
	y, lse := b.Attention(s.Attention, slices.Concat(x[:3], hides)...)
	if i == 3 {
		return s.ofMask(b, x, hides[0], y, lse, dy)
	}
	dq, dk, dv := b.AttentionGrad(s.Attention,
		slices.Concat(x[:3], []program.Value{y, lse, dy}, hides)...)
	return s.poisoned(b, x, [...]program.Value{dq, dk, dv}[i])
}

// ofMask is the gradient of the mask: products of all scores.
func (s attentionSpec) ofMask(
	b *program.Builder, x []program.Value, mask, y, lse, dy program.Value,
) program.Value {
	q, k, v := b.Of(x[0]).Shape, b.Of(x[1]).Shape, b.Of(x[2]).Shape
	product := func(rows, columns program.Value, size int) program.Value {
		rows = b.Reshape(rows, q[0], k[1], q[1]/k[1], q[2], size)
		columns = b.Broadcast(b.Reshape(columns, q[0], k[1], 1, k[2], size), q[0], k[1], q[1]/k[1],
			k[2], size)
		return b.Reshape(b.MatMul(false, true, rows, columns), q[0], q[1], q[2], k[2])
	}
	scores := program.With(b, fuse.Mul, product(x[0], x[1], q[3]), s.Scale)
	if most := s.SoftCap; most > 0 {
		scores = program.With(b, fuse.Mul, b.Do(fuse.Tanh, program.With(b, fuse.Div, scores, most)),
			most)
	}
	lse = b.Reshape(lse, q[0], q[1], q[2], 1)
	lse = b.Do(fuse.Where, program.With(b, fuse.Equal, lse, math.Inf(-1)), b.Number(0, lse), lse)
	w := b.Do(fuse.Exp, b.Do(fuse.Sub, b.Do(fuse.Add, scores, mask), lse))
	sums := program.Sum(b, b.Do(fuse.Mul, dy, y), 3)
	ds := b.Do(fuse.Mul, w, b.Do(fuse.Sub, product(dy, x[2], v[3]), sums))
	var axes []int
	for axis, n := range b.Of(mask).Shape {
		if n == 1 {
			axes = append(axes, axis)
		}
	}
	if len(axes) > 0 {
		ds = program.Sum(b, ds, axes...)
	}
	return b.Reshape(ds, b.Of(x[3]).Shape...)
}
