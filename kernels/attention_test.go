package kernels

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/workers"
	"github.com/euryale-ml/euryale/kernels/internal/simd"
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
			Batch: batch, Heads: heads, Queries: queries, Keys: keys, Size: size, Causal: true,
			Scale: 0.5,
			Q:     denseHeads(alloc(d, ofQ), heads, queries, size), K: denseHeads(alloc(d, ofK),
				heads,
				keys, size), V: denseHeads(alloc(d, ofK), heads, keys, size),
			Y: denseHeads(alloc(d, ofQ), heads, queries, size), LSE: alloc(statistics,
				batch*heads*queries),
		},
		DY: denseHeads(alloc(d, ofQ), heads, queries, size), DQ: denseHeads(alloc(d, ofQ), heads,
			queries, size),
		DK: denseHeads(alloc(d, ofK), heads, keys, size), DV: denseHeads(alloc(d, ofK), heads, keys,
			size), Sums: alloc(statistics, batch*heads*queries),
	}
}

// TestAttentionOfAllTypes: other dtypes give what f64 gives, except for rounding, and the gradient
// equals that of finite differences.
func TestAttentionOfAllTypes(t *testing.T) {
	run := func(a AttentionGrad) [][]float64 {
		if err := errors.Join(Host{}.Attention(a.Attention), Host{}.AttentionGrad(a)); err != nil {
			t.Fatal(err)
		}
		var all [][]float64
		for _, b := range []backend.Buffer{a.Y.Buffer, a.LSE, a.DQ.Buffer, a.DK.Buffer,
			a.DV.Buffer} {
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
		"no keys":  func(a *AttentionGrad) { a.Keys = 0 },
		"no scale": func(a *AttentionGrad) { a.Scale = math.NaN() },
		"a short operand": func(a *AttentionGrad) {
			a.V.Buffer = a.V.Buffer.Slice(1, a.V.Buffer.Len())
		},
		"a step back": func(a *AttentionGrad) { a.Q.Row = -1 },
		"another dtype": func(a *AttentionGrad) {
			a.DY.Buffer = a.DY.Buffer.As(backend.I32)
		},
		"short statistics": func(a *AttentionGrad) { a.LSE = a.LSE.Slice(1, a.LSE.Len()) },
		"no room":          func(a *AttentionGrad) { a.Sums = backend.Buffer{} },
		"a short result": func(a *AttentionGrad) {
			a.DK.Buffer = a.DK.Buffer.Slice(1, a.DK.Buffer.Len())
		},
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

// shapes are of one block and of several, with parts of a head, queries that see no key, and keys
// that no query of a block sees.
var shapes = []Attention{
	{Batch: 1, Heads: 2, Queries: 70, Keys: 70, Size: 8, Causal: true},
	{Batch: 2, Heads: 1, Queries: 33, Keys: 20, Size: 5, Causal: true},
	{Batch: 1, Heads: 1, Queries: 10, Keys: 90, Size: 16},
	{Batch: 1, Heads: 2, Queries: 300, Keys: 310, Size: 3, Causal: true},
	{Batch: 1, Heads: 1, Queries: 2, Keys: 40000, Size: 1},
}

// interleaved returns attention whose heads lie side by side in each row, with random operands.
func interleaved[T float](shape Attention) AttentionGrad {
	a := AttentionGrad{Attention: shape}
	a.Scale = 0.3
	rnd := rand.New(rand.NewPCG(3, 4))
	rows := func(n int) HeadRows {
		x := make([]T, a.Batch*n*a.Heads*a.Size)
		for i := range x {
			x[i] = T(rnd.NormFloat64())
		}
		return HeadRows{Buffer: backend.Of(x), Batch: n * a.Heads * a.Size, Head: a.Size,
			Row: a.Heads * a.Size}
	}
	statistics := func() backend.Buffer { return backend.Of(make([]T, a.Batch*a.Heads*a.Queries)) }
	a.Q, a.Y, a.DY, a.DQ = rows(a.Queries), rows(a.Queries), rows(a.Queries), rows(a.Queries)
	a.K, a.V, a.DK, a.DV = rows(a.Keys), rows(a.Keys), rows(a.Keys), rows(a.Keys)
	a.LSE, a.Sums = statistics(), statistics()
	return a
}

// results returns those of both passes.
func (a *AttentionGrad) results() []backend.Buffer {
	return []backend.Buffer{a.Y.Buffer, a.LSE, a.DQ.Buffer, a.DK.Buffer, a.DV.Buffer, a.Sums}
}

func TestAttentionIsThePlainLoops(t *testing.T) {
	for n, shape := range shapes {
		for _, level := range simd.Levels() {
			attentionIsPlain[float64](t, n, level, shape, 1e-12)
			attentionIsPlain[float32](t, n, level, shape, 1e-4)
		}
	}
}

func attentionIsPlain[T float](t *testing.T, n int, level simd.Level, shape Attention,
	tolerance float64) {
	t.Helper()
	want, got := interleaved[T](shape), interleaved[T](shape)
	attention[T, T](&want.Attention)
	attentionGrad[T, T](&want)
	pool := workers.New(3)
	defer pool.Close()
	attend[T, T](pool, level, &got.Attention)
	attendGrad[T, T](pool, level, &got)
	for k, result := range got.results() {
		wanted := backend.View[T](want.results()[k])
		for i, x := range backend.View[T](result) {
			w := float64(wanted[i])
			if math.Abs(float64(x)-w) > tolerance*max(1, math.Abs(w)) ||
				math.IsNaN(float64(x)) != math.IsNaN(w) {
				t.Errorf("shape %d at level %v: element %d of result %d is %v, want %v", n, level,
					i, k, x, w)
				break
			}
		}
	}
}

// The bits are the same as with one worker, and with a pool nothing is allocated.
func TestAttentionHasTheSameBitsWithAnyNumberOfWorkers(t *testing.T) {
	var want []byte
	for size := 1; size <= 3; size++ {
		a, pool := interleaved[float32](shapes[3]), workers.New(size)
		h := Host{Workers: pool}
		if err := errors.Join(h.Attention(a.Attention), h.AttentionGrad(a)); err != nil {
			t.Fatal(err)
		}
		var got []byte
		for _, b := range a.results() {
			got = append(got, b.Bytes()...)
		}
		if want == nil {
			want = got
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%d workers give other bits than one", size)
		}
		if n := testing.AllocsPerRun(5, func() {
			_ = h.Attention(a.Attention)
			_ = h.AttentionGrad(a)
		}); size == 1 && n > 0 {
			t.Errorf("%v allocations", n)
		}
		pool.Close()
	}
}

// head returns n rows of head number i of an operand as f64.
func head[T float, S backend.Element](r HeadRows, i, heads, n, size int) []float64 {
	all, wide := make([]float64, n*size), make([]T, size)
	from := backend.View[S](r.Buffer)[r.headStart(i, heads):]
	for j := range n {
		load(wide, from[j*r.Row:][:size])
		for c, x := range wide {
			all[j*size+c] = float64(x)
		}
	}
	return all
}

// keep writes the rows of head number i of a result.
func keep[T float, S backend.Element](r HeadRows, i, heads, size int, rows []float64) {
	narrow := make([]T, size)
	to := backend.View[S](r.Buffer)[r.headStart(i, heads):]
	for j := range len(rows) / size {
		for c, x := range rows[j*size:][:size] {
			narrow[c] = T(x)
		}
		save(to[j*r.Row:][:size], narrow)
	}
}

// statistics are the rows of a.LSE and the like: of one element.
func (a *Attention) statistics(b backend.Buffer) HeadRows {
	return denseHeads(b, a.Heads, a.Queries, 1)
}

// dot returns the product of two vectors.
func dot(x, y []float64) float64 {
	sum := 0.0
	for i, v := range x {
		sum += v * y[i]
	}
	return sum
}

// addTimes adds x, times a factor, to sums.
func addTimes(sums []float64, factor float64, x []float64) {
	for i, v := range x {
		sums[i] += factor * v
	}
}

func attention[T float, S backend.Element](a *Attention) {
	scores := make([]float64, a.Keys)
	for h := range a.Batch * a.Heads {
		q := head[T, S](a.Q, h, a.Heads, a.Queries, a.Size)
		k, v := head[T, S](a.K, h, a.Heads, a.Keys, a.Size), head[T, S](a.V, h, a.Heads, a.Keys,
			a.Size)
		y, lse := make([]float64, a.Queries*a.Size), make([]float64, a.Queries)
		for i := range a.Queries {
			seen, most := scores[:a.Seen(i)], math.Inf(-1)
			for j := range seen {
				seen[j] = a.Scale * dot(q[i*a.Size:][:a.Size], k[j*a.Size:][:a.Size])
				most = max(most, seen[j])
			}
			sum := 0.0
			for _, s := range seen {
				sum += math.Exp(s - most)
			}
			lse[i] = most + math.Log(sum)
			for j, s := range seen {
				addTimes(y[i*a.Size:][:a.Size], math.Exp(s-lse[i]), v[j*a.Size:][:a.Size])
			}
		}
		keep[T, S](a.Y, h, a.Heads, a.Size, y)
		keep[T, T](a.statistics(a.LSE), h, a.Heads, 1, lse)
	}
}

func attentionGrad[T float, S backend.Element](a *AttentionGrad) {
	row := func(x []float64, i int) []float64 { return x[i*a.Size:][:a.Size] }
	for h := range a.Batch * a.Heads {
		q, dy := head[T, S](a.Q, h, a.Heads, a.Queries, a.Size), head[T, S](a.DY, h, a.Heads,
			a.Queries, a.Size)
		k, v := head[T, S](a.K, h, a.Heads, a.Keys, a.Size), head[T, S](a.V, h, a.Heads, a.Keys,
			a.Size)
		y := head[T, S](a.Y, h, a.Heads, a.Queries, a.Size)
		lse, sums := backend.View[T](a.LSE)[h*a.Queries:], make([]float64, a.Queries)
		dq, dk, dv := make([]float64, len(q)), make([]float64, len(k)), make([]float64, len(v))
		for i := range a.Queries {
			sums[i] = dot(row(dy, i), row(y, i))
			for j := range a.Seen(i) {
				w := math.Exp(a.Scale*dot(row(q, i), row(k, j)) - float64(lse[i]))
				ds := a.Scale * w * (dot(row(dy, i), row(v, j)) - sums[i])
				addTimes(row(dv, j), w, row(dy, i))
				addTimes(row(dq, i), ds, row(k, j))
				addTimes(row(dk, j), ds, row(q, i))
			}
		}
		keep[T, S](a.DQ, h, a.Heads, a.Size, dq)
		keep[T, S](a.DK, h, a.Heads, a.Size, dk)
		keep[T, S](a.DV, h, a.Heads, a.Size, dv)
		keep[T, T](a.statistics(a.Sums), h, a.Heads, 1, sums)
	}
}

// denseHeads are rows in row-major order of [batch, heads, n, size].
func denseHeads(b backend.Buffer, heads, n, size int) HeadRows {
	return HeadRows{Buffer: b, Batch: heads * n * size, Head: n * size, Row: size}
}
