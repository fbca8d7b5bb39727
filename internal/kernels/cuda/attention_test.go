package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/require"
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
	hiding
}

// hiding is what attention may have besides: see kernels.Attention.
type hiding struct {
	group, values int
	cap           float64
	mask          string  // the axes of the mask that are not 1: "bhqk"
	lengths       []int64 // nil for none
	appended      bool    // if it is causal
	window        int     // likewise
	documents     int     // the queries of each, 0 for no starts
}

func (h heads) String() string {
	return fmt.Sprintf("%d x %d heads, %d queries, %d keys of %d, causal %v, between %v + %d, %+v",
		h.batch, h.heads, h.queries, h.keys, h.size, h.causal, h.between, h.offset, h.hiding)
}

// bound returns the window, which only causal attention has.
func (h heads) bound() int {
	if h.causal {
		return h.window
	}
	return 0
}

// rows returns how n rows of size elements of each of some heads lie.
func (h heads) rows(b backend.Buffer, heads, n, size int) kernels.HeadRows {
	r := denseHeads(b, heads, n, size)
	if h.between {
		r.Head, r.Row = size, heads*size
	}
	return r
}

// result allocates rows, behind an offset.
func (b *bench) result(d backend.DType, h heads, of, n, size, offset int) (o operand,
	host, device kernels.HeadRows) {
	o = b.alloc(d, h.batch*of*n*size, offset)
	return o, h.rows(o.host, of, n, size), h.rows(o.device, of, n, size)
}

// rows returns normal rows.
func (b *bench) rows(d backend.DType, h heads, of, n, size int) (host, device kernels.HeadRows) {
	o, host, device := b.result(d, h, of, n, size, h.offset)
	b.normal(o)
	return host, device
}

// hide gives attention on both sides a mask, of which every third number and the second row are
// -Inf, and lengths or starts.
func (b *bench) hide(h heads, host, device *kernels.Attention) {
	if h.mask != "" {
		size, n := map[rune]int{'b': h.batch, 'h': h.heads, 'q': h.queries, 'k': h.keys}, 1
		steps := map[rune]int{}
		for _, axis := range "kqhb" {
			if strings.ContainsRune(h.mask, axis) {
				steps[axis] = n
				n *= size[axis]
			}
		}
		o := b.alloc(host.LSE.DType(), n, 0)
		numbers := make([]float64, n)
		for i := range numbers {
			if numbers[i] = b.rnd.NormFloat64(); i%3 == 2 || steps['q'] > 0 && i/steps['q'] == 1 {
				numbers[i] = math.Inf(-1)
			}
		}
		if err := b.host.Cast(o.host, backend.Of(numbers)); err != nil {
			b.t.Fatal(err)
		}
		host.Mask = kernels.Mask{Buffer: o.host, Batch: steps['b'], Head: steps['h'],
			Row: steps['q'], Key: steps['k']}
		device.Mask = host.Mask
		device.Mask.Buffer = o.device
	}
	if h.lengths != nil {
		o := b.alloc(backend.I64, len(h.lengths), 0)
		copy(backend.View[int64](o.host), h.lengths)
		host.Lengths, device.Lengths = o.host, o.device
	}
	if n := h.documents; n > 0 {
		o := b.alloc(backend.I64, h.batch*h.queries, 0)
		starts := backend.View[int64](o.host)
		for i := range starts { // those of the second entry begin one query before
			at := i%h.queries + i/h.queries%2
			starts[i] = int64(min(at/n*n, h.keys))
		}
		host.Starts, device.Starts = o.host, o.device
	}
}

func testAttention(t *testing.T, m machine) {
	b := newBench(t, m, 20)
	for i, d := range []backend.DType{backend.BF16, backend.F32, backend.F64} {
		for j, h := range someHeads(m, i) {
			if d == backend.F64 && slow(m) && j%2 > 0 {
				continue // F32 has the same source
			}
			b.reset(uint64(h.size))
			b.attention(fmt.Sprintf("%v of %v", d, h), d, h)
		}
	}
}

// slow reports whether attention is sampled, as EURYALE_FULL=1 forbids.
func slow(m machine) bool {
	_, slow := m.(*emulator)
	return (slow || os.Getenv("EMULATED_DEVICES") != "") && os.Getenv("EURYALE_FULL") != "1"
}

// someHeads are heads of all sizes that kernels are for, and of odd ones; on a slow machine, a part
// of them by a number.
func someHeads(m machine, part int) []heads {
	slow := slow(m)
	var all []heads
	lengths := []int{1, 7, 64, 65, 129, 200}
	for i, queries := range lengths {
		for j, keys := range lengths {
			if slow && (i+j)%3 != 0 {
				continue
			}
			size := []int{64, 32, 40, 128, 33}[(i+2*j)%5]
			all = append(all, heads{1, 2, queries, keys, size, (i+j)%2 == 0, j%2 == 0,
				j % 2 * (i % 2), hiding{}})
		}
	}
	all = append(all, heads{2, 3, 70, 70, 64, true, true, 0, hiding{}}, heads{1, 1, 30, 65, 256,
		true, false, 0, hiding{}}, heads{1, 1, 40, 33, 200, false, true, 0, hiding{}}, heads{1, 1,
		40, 33, 1, false, true, 0, hiding{}}, heads{1, 1, 65, 65, 100, true, true, 1, hiding{}})
	// few queries of many keys
	all = append(all, []heads{{2, 8, 1, 300, 128, false, false, 0, hiding{group: 4,
		lengths: []int64{300, 33}}}, {1, 16, 1, 900, 64, false, true, 0, hiding{group: 16}}, {2, 4,
		3, 130, 40, true, true, 0, hiding{group: 4, values: 24}}, {2, 2, 5, 70, 72, true, false, 0,
		hiding{values: 128, lengths: []int64{0, 70}}}, {2, 4, 1, 500, 64, true, true, 0,
		hiding{group: 2, lengths: []int64{480, 70}, appended: true, window: 200}}, {2, 4, 4, 600,
		128, true, false, 0, hiding{group: 4, documents: 3, window: 333}}}...)
	for i, x := range []hiding{
		{group: 2}, {group: 4, values: 24}, {values: 70, lengths: []int64{70, 0}},
		{group: 2, lengths: []int64{9, 65}}, {cap: 1.5}, {cap: 0.5, group: 4, mask: "qk"},
		{mask: "bhqk", values: 33, lengths: []int64{70, 33}}, {mask: "bk"}, {mask: "q"},
		{group: 2, lengths: []int64{69, 66}, appended: true},
		{lengths: []int64{12, 70}, cap: 1, appended: true},
		{documents: 9, group: 2}, {window: 5}, {window: 33, documents: 40},
		{mask: "qk", documents: 30, window: 20}, {lengths: []int64{68, 66}, appended: true,
			window: 40},
	} {
		for j, causal := range []bool{false, true} {
			if slow && (i+j+part)%2 > 0 {
				continue
			}
			all = append(all, heads{2, 4, 66, 70, 40, causal, causal, 0, x})
		}
	}
	if !slow {
		all = append(all, heads{2, 40, 130, 130, 64, true, false, 0, hiding{}}, heads{1, 2, 500,
			700, 128, true, true, 0, hiding{}}, heads{1, 3, 512, 512, 64, false, true, 0, hiding{}},
			heads{2, 8, 300, 400, 64, true, true, 0, hiding{group: 4, lengths: []int64{400, 70}}},
			heads{2, 4, 130, 700, 128, true, true, 0, hiding{group: 4, lengths: []int64{600, 200},
				appended: true}},
			heads{2, 4, 500, 500, 64, true, true, 0, hiding{group: 2, documents: 150}},
			heads{2, 4, 700, 700, 64, true, true, 0, hiding{window: 128}},
			heads{1, 4, 400, 400, 128, true, true, 0, hiding{window: 100, documents: 230}},
			heads{1, 2, 300, 500, 32, false, true, 0, hiding{documents: 70}})
	}
	return all
}

// attention computes attention and its gradient, this one twice; on slow machines, where the order
// of additions is the program's, only for one of the heads.
func (b *bench) attention(name string, d backend.DType, h heads) {
	b.t.Helper()
	statistics := backend.F32
	if d == backend.F64 {
		statistics = d
	}
	p := kernels.Attention{Batch: h.batch, Heads: h.heads, Queries: h.queries, Keys: h.keys,
		Size: h.size, Group: h.group, ValueSize: h.values, SoftCap: h.cap, Causal: h.causal,
		Appended: h.causal && h.appended, Window: h.bound(),
		Scale: 1 / math.Sqrt(float64(h.size))}.Filled()
	shared, width := h.heads/p.Group, p.ValueSize
	n := h.batch * h.heads * h.queries
	lse, sums := b.alloc(statistics, n, 0), b.alloc(statistics, n, h.offset)
	y, yHost, yDevice := b.result(d, h, h.heads, h.queries, width, h.offset)
	dq, dqHost, dqDevice := b.result(d, h, h.heads, h.queries, h.size, h.offset)
	dk, dkHost, dkDevice := b.result(d, h, shared, h.keys, h.size, 0)
	dv, dvHost, dvDevice := b.result(d, h, shared, h.keys, width, h.offset)
	p.Y, p.LSE = yHost, lse.host
	g := p
	g.Y, g.LSE = yDevice, lse.device
	p.Q, g.Q = b.rows(d, h, h.heads, h.queries, h.size)
	p.K, g.K = b.rows(d, h, shared, h.keys, h.size)
	p.V, g.V = b.rows(d, h, shared, h.keys, width)
	dyHost, dyDevice := b.rows(d, h, h.heads, h.queries, width)
	b.hide(h, &p, &g)
	b.near("attention: "+name, attentionTolerance[d], []operand{y, lse}, func() error {
		return b.device.Attention(g)
	}, func() error { return b.host.Attention(p) })
	for _, parts := range []int{1, 2, fewParts} {
		if !FitsFewQueries(g) {
			break
		}
		b.near(fmt.Sprintf("attention of few, in %d parts: %s", parts, name),
			attentionTolerance[d], []operand{y, lse}, func() error {
				return b.device.FewQueriesIn(g, b.workspace(), parts)
			}, func() error { return b.host.Attention(p) })
	}
	onHost := kernels.AttentionGrad{Attention: p, DY: dyHost, DQ: dqHost, DK: dkHost, DV: dvHost,
		Sums: sums.host}
	onDevice := kernels.AttentionGrad{Attention: g, DY: dyDevice, DQ: dqDevice, DK: dkDevice,
		DV: dvDevice, Sums: sums.device}
	var runs [2][]byte
	for i := range runs {
		if i > 0 && slow(b.m) && h.heads != 3 {
			runs[i] = runs[0]
			break
		}
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
			errs = append(errs, k.Attention(a), k.AttentionGrad(kernels.AttentionGrad{Attention: a,
				DY: rows, DQ: rows, DK: rows, DV: rows, Sums: lse}))
			if a.Queries = 1; d == backend.BF16 && size <= 128 {
				a.LSE = lse.Slice(0, 1)
				errs = append(errs, k.FewQueries(a, device(backend.U8, 1<<43, FewRowsWorkspace)))
			}
		}
	}
	return errors.Join(errs...)
}

func TestHeadsTooLarge(t *testing.T) {
	x := device(backend.F32, 1<<40, 257)
	rows := denseHeads(x, 1, 1, 257)
	a := kernels.Attention{Batch: 1, Heads: 1, Queries: 1, Keys: 1, Size: 257, Scale: 1, Q: rows,
		K: rows, V: rows, Y: rows, LSE: x.Slice(0, 1)}
	require.Fails(t, "a head of 257 elements", New(newValidator(t)).Attention(a),
		backend.ErrUnsupported)
}

// denseHeads are rows in row-major order of [batch, heads, n, size].
func denseHeads(b backend.Buffer, heads, n, size int) kernels.HeadRows {
	return kernels.HeadRows{Buffer: b, Batch: heads * n * size, Head: n * size, Row: size}
}
