package kernels

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

// heads returns attention of normally distributed operands of a dtype, and its gradient.
func heads(t *testing.T, d backend.DType) AttentionGrad {
	t.Helper()
	const batch, heads, queries, keys, size = 2, 2, 3, 5, 4
	statistics := backend.F32
	if d == backend.F64 {
		statistics = d
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	alloc := func(d backend.DType, n int) backend.Buffer {
		numbers := make([]float64, n)
		for i := range numbers {
			numbers[i] = rnd.NormFloat64()
		}
		b := backend.Of(make([]float64, n)).As(d).Slice(0, n)
		if err := (Host{}).Cast(b, backend.Of(numbers)); err != nil {
			t.Fatal(err)
		}
		return b
	}
	ofQ, ofK := batch*heads*queries*size, batch*heads*keys*size
	return AttentionGrad{
		Attention: Attention{
			Batch: batch, Heads: heads, Queries: queries, Keys: keys, Size: size, Causal: true, Scale: 0.5,
			Q: DenseHeads(alloc(d, ofQ), heads, queries, size), K: DenseHeads(alloc(d, ofK), heads, keys, size), V: DenseHeads(alloc(d, ofK), heads, keys, size),
			Y: DenseHeads(alloc(d, ofQ), heads, queries, size), LSE: alloc(statistics, batch*heads*queries),
		},
		DY: DenseHeads(alloc(d, ofQ), heads, queries, size), DQ: DenseHeads(alloc(d, ofQ), heads, queries, size),
		DK: DenseHeads(alloc(d, ofK), heads, keys, size), DV: DenseHeads(alloc(d, ofK), heads, keys, size), Sums: alloc(statistics, batch*heads*queries),
	}
}

// TestAttentionOfAllTypes: other dtypes give what f64 gives, except for rounding, and the gradient is that of
// finite differences.
func TestAttentionOfAllTypes(t *testing.T) {
	run := func(a AttentionGrad) [][]float64 {
		if err := errors.Join(Host{}.Attention(a.Attention), Host{}.AttentionGrad(a)); err != nil {
			t.Fatal(err)
		}
		var all [][]float64
		for _, b := range []backend.Buffer{a.Y.Buffer, a.LSE, a.DQ.Buffer, a.DK.Buffer, a.DV.Buffer} {
			wide := make([]float64, b.Len())
			if err := (Host{}).Cast(backend.Of(wide), b); err != nil {
				t.Fatal(err)
			}
			all = append(all, wide)
		}
		return all
	}
	exact := heads(t, backend.F64)
	want := run(exact)
	for d, tolerance := range map[backend.DType]float64{backend.F32: 1e-5, backend.BF16: 3e-2} {
		for n, got := range run(heads(t, d)) {
			for i, x := range got {
				if !(math.Abs(x-want[n][i]) <= tolerance*max(1, math.Abs(want[n][i]))) {
					t.Errorf("element %d of result %d as %v is %v, want %v", i, n, d, x, want[n][i])
				}
			}
		}
	}
	const h = 1e-6
	dy := backend.View[float64](exact.DY.Buffer)
	for n, x := range []backend.Buffer{exact.Q.Buffer, exact.K.Buffer, exact.V.Buffer} {
		for i, before := range backend.View[float64](x) {
			slope := 0.0
			for _, sign := range []float64{1, -1} {
				backend.View[float64](x)[i] = before + sign*h
				for j, y := range run(exact)[0] {
					slope += sign * dy[j] * y / (2 * h)
				}
			}
			backend.View[float64](x)[i] = before
			if math.Abs(slope-want[2+n][i]) > 1e-7 {
				t.Errorf("element %d of gradient %d is %v, want %v", i, n, want[2+n][i], slope)
			}
		}
	}
}

func TestAttentionIsChecked(t *testing.T) {
	for name, spoil := range map[string]func(a *AttentionGrad){
		"no keys":              func(a *AttentionGrad) { a.Keys = 0 },
		"no scale":             func(a *AttentionGrad) { a.Scale = math.NaN() },
		"a short operand":      func(a *AttentionGrad) { a.V.Buffer = a.V.Buffer.Slice(1, a.V.Buffer.Len()) },
		"a step back":          func(a *AttentionGrad) { a.Q.Row = -1 },
		"another dtype":        func(a *AttentionGrad) { a.DY.Buffer = a.DY.Buffer.As(backend.I32) },
		"short statistics":     func(a *AttentionGrad) { a.LSE = a.LSE.Slice(1, a.LSE.Len()) },
		"no room":              func(a *AttentionGrad) { a.Sums = backend.Buffer{} },
		"a short result":       func(a *AttentionGrad) { a.DK.Buffer = a.DK.Buffer.Slice(1, a.DK.Buffer.Len()) },
		"operands of integers": func(a *AttentionGrad) { a.Y.Buffer = a.Y.Buffer.As(backend.I32) },
	} {
		a := heads(t, backend.F32)
		spoil(&a)
		err := Host{}.AttentionGrad(a)
		if !errors.Is(err, backend.ErrArgument) && !errors.Is(err, backend.ErrUnsupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
	a := heads(t, backend.F32)
	if err := (Check{Device: true}).Attention(a.Attention); !errors.Is(err, backend.ErrArgument) {
		t.Errorf("host memory on a device: %v", err)
	}
}
