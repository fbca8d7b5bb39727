package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"testing"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// attentionTolerance is how far results may be from those of the host, as a part of the largest
// one, or of 1: where there is one key, exact gradients are 0.
var attentionTolerance = map[backend.DType]float64{backend.F64: 1e-10, backend.F32: 1e-5,
	backend.BF16: 1e-2}

// normal fills a buffer with normally distributed numbers.
func (b *bench) normal(o operand) {
	numbers := make([]float64, o.host.Len())
	for i := range numbers {
		numbers[i] = b.rnd.NormFloat64()
	}
	if err := b.host.Cast(o.host, backend.Of(numbers)); err != nil {
		b.t.Fatal(err)
	}
}

// near does something on both sides and compares the memory: results with a tolerance, and
// everything else bit for bit.
func (b *bench) near(name string, tolerance float64, results []operand, onDevice,
	onHost func() error) {
	b.t.Helper()
	if err := b.m.Write(b.shadow[:b.used]); err != nil {
		b.t.Fatal(err)
	}
	got := make([]byte, b.used)
	if err := errors.Join(onDevice(), onHost(), b.m.Read(got)); err != nil {
		b.t.Fatalf("%s: %v", name, err)
	}
	for n, r := range results {
		at := int(uintptr(r.host.Addr()) - uintptr(unsafe.Pointer(unsafe.SliceData(b.shadow))))
		bits := got[at : at+r.host.NBytes()]
		x, want := b.wide(backend.Of(bits).As(r.host.DType())), b.wide(r.host)
		most := 1.0
		for _, w := range want {
			if !math.IsInf(w, 0) {
				most = max(most, math.Abs(w))
			}
		}
		for i, w := range want {
			if x[i] != w && !(math.Abs(x[i]-w) <= tolerance*most) {
				b.t.Fatalf("%s: element %d of result %d is %v, want %v, of up to %v", name, i, n,
					x[i], w, most)
			}
		}
		copy(bits, r.host.Bytes())
	}
	if !bytes.Equal(got, b.shadow[:b.used]) {
		b.t.Fatalf("%s: wrote outside of the results", name)
	}
}

// wide returns the elements of a buffer of the host.
func (b *bench) wide(x backend.Buffer) []float64 {
	wide := make([]float64, x.Len())
	if err := b.host.Cast(backend.Of(wide), x); err != nil {
		b.t.Fatal(err)
	}
	return wide
}

// heads are operands of attention.
type heads struct {
	batch, heads, queries, keys, size int
	causal                            bool
	// heads lie between the elements of a row: [batch, n, heads, size]
	between bool
	offset  int
}

func (h heads) String() string {
	return fmt.Sprintf("%d x %d heads, %d queries, %d keys of %d, causal %v, between %v + %d",
		h.batch, h.heads, h.queries, h.keys, h.size, h.causal, h.between, h.offset)
}

// rows returns how n rows of each head lie.
func (h heads) rows(b backend.Buffer, n int) kernels.HeadRows {
	r := denseHeads(b, h.heads, n, h.size)
	if h.between {
		r.Head, r.Row = h.size, h.heads*h.size
	}
	return r
}

// rows returns normal rows for n queries or keys of each head.
func (b *bench) rows(d backend.DType, h heads, n int) (host, device kernels.HeadRows) {
	o := b.alloc(d, h.batch*h.heads*n*h.size, h.offset)
	b.normal(o)
	return h.rows(o.host, n), h.rows(o.device, n)
}

func testAttention(t *testing.T, m machine) {
	b := newBench(t, m, 20)
	for _, d := range []backend.DType{backend.BF16, backend.F32, backend.F64} {
		for _, h := range someHeads(m) {
			b.reset(uint64(h.size))
			b.attention(fmt.Sprintf("%v of %v", d, h), d, h)
		}
	}
}

// someHeads are heads of all sizes that kernels are for, and of odd ones.
func someHeads(m machine) []heads {
	_, slow := m.(*emulator)
	slow = slow || os.Getenv("EMULATED_DEVICES") != ""
	var all []heads
	lengths := []int{1, 7, 64, 65, 129, 200}
	for i, queries := range lengths {
		for j, keys := range lengths {
			if slow && (i+j)%3 != 0 {
				continue
			}
			size := []int{64, 32, 40, 128, 33}[(i+2*j)%5]
			all = append(all, heads{1, 2, queries, keys, size, (i+j)%2 == 0, j%2 == 0,
				j % 2 * (i % 2)})
		}
	}
	all = append(all, heads{2, 3, 70, 70, 64, true, true, 0}, heads{1, 1, 30, 65, 256, true, false,
		0}, heads{1, 1, 40, 33, 200, false, true, 0},
		heads{1, 1, 40, 33, 1, false, true, 0}, heads{1, 1, 65, 65, 100, true, true, 1})
	if !slow {
		all = append(all, heads{2, 40, 130, 130, 64, true, false, 0},
			heads{1, 2, 500, 700, 128, true, true, 0}, heads{1, 3, 512, 512, 64, false, true, 0})
	}
	return all
}

// attention computes attention and its gradient, this one twice.
func (b *bench) attention(name string, d backend.DType, h heads) {
	b.t.Helper()
	statistics := backend.F32
	if d == backend.F64 {
		statistics = d
	}
	n, ofQ, ofK := h.batch*h.heads*h.queries, h.batch*h.heads*h.queries*h.size,
		h.batch*h.heads*h.keys*h.size
	lse, sums := b.alloc(statistics, n, 0), b.alloc(statistics, n, h.offset)
	y, dq, dk, dv := b.alloc(d, ofQ, h.offset), b.alloc(d, ofQ, h.offset), b.alloc(d, ofK, 0),
		b.alloc(d, ofK, h.offset)
	p := kernels.Attention{Batch: h.batch, Heads: h.heads, Queries: h.queries, Keys: h.keys,
		Size: h.size, Causal: h.causal,
		Scale: 1 / math.Sqrt(float64(h.size)), Y: h.rows(y.host, h.queries), LSE: lse.host}
	g := p
	g.Y, g.LSE = h.rows(y.device, h.queries), lse.device
	p.Q, g.Q = b.rows(d, h, h.queries)
	p.K, g.K = b.rows(d, h, h.keys)
	p.V, g.V = b.rows(d, h, h.keys)
	dyHost, dyDevice := b.rows(d, h, h.queries)
	b.near("attention: "+name, attentionTolerance[d], []operand{y, lse}, func() error {
		return b.device.Attention(g)
	}, func() error { return b.host.Attention(p) })
	onHost := kernels.AttentionGrad{Attention: p, DY: dyHost, DQ: h.rows(dq.host, h.queries),
		DK: h.rows(dk.host, h.keys), DV: h.rows(dv.host, h.keys), Sums: sums.host}
	onDevice := kernels.AttentionGrad{Attention: g, DY: dyDevice, DQ: h.rows(dq.device, h.queries),
		DK: h.rows(dk.device, h.keys), DV: h.rows(dv.device, h.keys), Sums: sums.device}
	var runs [2][]byte
	for i := range runs {
		b.near("its gradient: "+name, attentionTolerance[d], []operand{dq, dk, dv, sums},
			func() error {
				err := b.device.AttentionGrad(onDevice)
				runs[i] = make([]byte, b.used)
				return errors.Join(err, b.m.Read(runs[i]))
			}, func() error { return b.host.AttentionGrad(onHost) })
	}
	if !bytes.Equal(runs[0], runs[1]) {
		b.t.Errorf("%s: two runs of the gradient give different bits", name)
	}
}

// attentions makes every call of attention with n queries and keys; none is refused.
func attentions(k Kernels, n int) error {
	if n == 0 {
		return nil
	}
	var errs []error
	for d, sizes := range headSizes {
		statistics := backend.F32
		if d == backend.F64 {
			statistics = d
		}
		for _, size := range sizes {
			x, lse := device(d, 1<<40, n*size), device(statistics, 1<<41, n)
			rows := denseHeads(x, 1, n, size)
			a := kernels.Attention{Batch: 1, Heads: 1, Queries: n, Keys: n, Size: size, Scale: 1,
				Q: rows, K: rows, V: rows, Y: rows, LSE: lse}
			errs = append(errs, k.Attention(a),
				k.AttentionGrad(kernels.AttentionGrad{Attention: a, DY: rows, DQ: rows, DK: rows,
					DV: rows, Sums: lse}))
		}
	}
	return errors.Join(errs...)
}

func TestHeadsTooLarge(t *testing.T) {
	x := device(backend.F32, 1<<40, 257)
	rows := denseHeads(x, 1, 1, 257)
	a := kernels.Attention{Batch: 1, Heads: 1, Queries: 1, Keys: 1, Size: 257, Scale: 1, Q: rows,
		K: rows, V: rows, Y: rows, LSE: x.Slice(0, 1)}
	if err := New(newValidator(t)).Attention(a); !errors.Is(err, backend.ErrUnsupported) {
		t.Errorf("a head of 257 elements: %v", err)
	}
}

// denseHeads are rows in row-major order of [batch, heads, n, size].
func denseHeads(b backend.Buffer, heads, n, size int) kernels.HeadRows {
	return kernels.HeadRows{Buffer: b, Batch: heads * n * size, Head: n * size, Row: size}
}
