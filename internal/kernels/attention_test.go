package kernels

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/workers"
)

// heads returns attention of normally distributed operands of a dtype, and its gradient.
func heads(t *testing.T, d backend.DType, shape Attention) AttentionGrad {
	t.Helper()
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
		require.NoError(t, (Host{}).Cast(b, backend.Of(numbers)))
		return b
	}
	a := AttentionGrad{Attention: shape.Filled()}
	rows := func(n, heads, size int) HeadRows {
		return denseHeads(alloc(d, a.Batch*heads*n*size), heads, n, size)
	}
	shared := a.Heads / a.Group
	a.Q, a.K, a.V = rows(a.Queries, a.Heads, a.Size), rows(a.Keys, shared, a.Size),
		rows(a.Keys, shared, a.ValueSize)
	a.Y, a.DY = rows(a.Queries, a.Heads, a.ValueSize), rows(a.Queries, a.Heads, a.ValueSize)
	a.DQ, a.DK, a.DV = rows(a.Queries, a.Heads, a.Size), rows(a.Keys, shared, a.Size),
		rows(a.Keys, shared, a.ValueSize)
	a.LSE = alloc(statistics, a.Batch*a.Heads*a.Queries)
	a.Sums = alloc(statistics, a.Batch*a.Heads*a.Queries)
	if a.SoftCap > 0 { // with a mask, shared by batch and heads, and lengths
		a.Mask = Mask{Buffer: alloc(statistics, a.Queries*a.Keys), Row: a.Keys, Key: 1}
		a.Lengths = backend.Of([]int64{int64(a.Keys), int64(a.Keys) - 2})
	}
	return a
}

var fewHeads = Attention{Batch: 2, Heads: 2, Queries: 3, Keys: 5, Size: 4, Causal: true, Scale: 0.5}

// TestAttentionOfAllTypes: other dtypes give what f64 gives, except for rounding, and the gradient
// equals that of finite differences.
func TestAttentionOfAllTypes(t *testing.T) {
	attentionOfAllTypes(t, fewHeads)
	grouped := fewHeads
	grouped.Group, grouped.ValueSize, grouped.SoftCap = 2, 3, 1.5
	attentionOfAllTypes(t, grouped)
}

func attentionOfAllTypes(t *testing.T, shape Attention) {
	t.Helper()
	run := func(a AttentionGrad) [][]float64 {
		require.NoError(t, errors.Join(Host{}.Attention(a.Attention), Host{}.AttentionGrad(a)))
		var all [][]float64
		for _, b := range []backend.Buffer{a.Y.Buffer, a.LSE, a.DQ.Buffer, a.DK.Buffer,
			a.DV.Buffer} {
			wide := make([]float64, b.Len())
			require.NoError(t, (Host{}).Cast(backend.Of(wide), b))
			all = append(all, wide)
		}
		return all
	}
	exact := heads(t, backend.F64, shape)
	want := run(exact)
	for d, tolerance := range map[backend.DType]float64{backend.F32: 1e-5, backend.BF16: 3e-2} {
		for n, got := range run(heads(t, d, shape)) {
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
		"groups that do not divide the heads": func(a *AttentionGrad) { a.Group = 3 },
		"a cap below 0":                       func(a *AttentionGrad) { a.SoftCap = -1 },
		"a short mask": func(a *AttentionGrad) {
			a.Mask = Mask{Buffer: a.Sums, Row: a.Keys, Key: 1, Head: a.Queries * a.Keys}
		},
		"a mask of another dtype": func(a *AttentionGrad) {
			a.Mask = Mask{Buffer: a.Sums.As(backend.I32)}
		},
		"lengths that are no integers": func(a *AttentionGrad) { a.Lengths = a.Sums.Slice(0, 2) },
		"a length missing": func(a *AttentionGrad) {
			a.Lengths = backend.Of([]int32{1})
		},
		"values of another width": func(a *AttentionGrad) { a.ValueSize = 5 },
		"operands of integers": func(a *AttentionGrad) {
			a.Y.Buffer = a.Y.Buffer.As(backend.I32)
		},
	} {
		a := heads(t, backend.F32, fewHeads)
		spoil(&a)
		err := Host{}.AttentionGrad(a)
		require.Check(t, errors.Is(err, backend.ErrArgument) || errors.Is(err,
			backend.ErrUnsupported), "%s: %v", name, err)
	}
	a := heads(t, backend.F32, fewHeads)
	require.Fails(t, "host memory on a device", (Check{Device: true}).Attention(a.Attention),
		backend.ErrArgument)
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

// hiding are shapes with what models ask for besides: groups of heads, values of another width,
// scores with a cap, masks, windows, lengths and starts. In the fourth one a query's keys are all
// masked, and in the fifth one an entry of the batch has no keys.
var hiding = []struct {
	Attention
	masked  bool
	lengths []int32
	starts  func(i int) int32 // of the queries of each entry
}{
	{Attention: Attention{Batch: 2, Heads: 4, Queries: 35, Keys: 35, Size: 8, Group: 2,
		Causal: true}},
	{Attention: Attention{Batch: 1, Heads: 2, Queries: 33, Keys: 20, Size: 5, ValueSize: 9}},
	{Attention: Attention{Batch: 1, Heads: 3, Queries: 40, Keys: 70, Size: 9, Group: 3,
		ValueSize: 2, SoftCap: 0.7, Causal: true}},
	{Attention: Attention{Batch: 2, Heads: 2, Queries: 9, Keys: 40, Size: 4, SoftCap: 2},
		masked: true},
	{Attention: Attention{Batch: 3, Heads: 4, Queries: 40, Keys: 33, Size: 4, Group: 4,
		Causal: true}, masked: true, lengths: []int32{33, 0, 7}},
	{Attention: Attention{Batch: 2, Heads: 1, Queries: 300, Keys: 310, Size: 3}, lengths: []int32{
		100, 400}},
	{Attention: Attention{Batch: 4, Heads: 4, Queries: 40, Keys: 90, Size: 5, Group: 2,
		Causal: true, Appended: true}, lengths: []int32{90, 71, 40, 3}},
	{Attention: Attention{Batch: 2, Heads: 2, Queries: 90, Keys: 100, Size: 5, Causal: true,
		Window: 7}},
	{Attention: Attention{Batch: 3, Heads: 2, Queries: 60, Keys: 90, Size: 5, Causal: true,
		Appended: true, Window: 40}, lengths: []int32{90, 61, 33}},
	{Attention: Attention{Batch: 2, Heads: 4, Queries: 300, Keys: 300, Size: 4, Group: 2,
		Causal: true}, starts: func(i int) int32 { return int32(i / 37 * 37) }},
	{Attention: Attention{Batch: 2, Heads: 2, Queries: 50, Keys: 40, Size: 4, SoftCap: 1},
		masked: true, starts: func(i int) int32 { return int32(min(i*i/20, 40)) }},
	{Attention: Attention{Batch: 1, Heads: 2, Queries: 80, Keys: 80, Size: 4, Causal: true,
		Window: 20}, starts: func(i int) int32 { return int32(i / 50 * 50) }},
}

// hidden returns interleaved attention with a mask and lengths.
func hidden[T float](i int) AttentionGrad {
	of := hiding[i]
	a := interleaved[T](of.Attention)
	if of.masked { // one for all heads
		rnd := rand.New(rand.NewPCG(5, 6))
		x := make([]T, a.Batch*a.Queries*a.Keys)
		for i := range x {
			if x[i] = T(rnd.NormFloat64()); i/a.Keys == 3 || rnd.IntN(3) == 0 {
				x[i] = T(math.Inf(-1))
			}
		}
		a.Mask = Mask{Buffer: backend.Of(x), Batch: a.Queries * a.Keys, Row: a.Keys, Key: 1}
	}
	if of.lengths != nil {
		a.Lengths = backend.Of(of.lengths)
	}
	if of.starts != nil {
		starts := make([]int32, a.Batch*a.Queries)
		for i := range starts {
			starts[i] = of.starts(i % a.Queries)
		}
		a.Starts = backend.Of(starts)
	}
	return a
}

// interleaved returns attention whose heads lie side by side in each row, with random operands.
func interleaved[T float](shape Attention) AttentionGrad {
	a := AttentionGrad{Attention: shape.Filled()}
	a.Scale = 0.3
	rnd := rand.New(rand.NewPCG(3, 4))
	rows := func(n, heads, size int) HeadRows {
		x := make([]T, a.Batch*n*heads*size)
		for i := range x {
			x[i] = T(rnd.NormFloat64())
		}
		return HeadRows{Buffer: backend.Of(x), Batch: n * heads * size, Head: size,
			Row: heads * size}
	}
	statistics := func() backend.Buffer { return backend.Of(make([]T, a.Batch*a.Heads*a.Queries)) }
	ofQueries := func(size int) HeadRows { return rows(a.Queries, a.Heads, size) }
	ofKeys := func(size int) HeadRows { return rows(a.Keys, a.Heads/a.Group, size) }
	a.Q, a.Y, a.DY, a.DQ = ofQueries(a.Size), ofQueries(a.ValueSize), ofQueries(a.ValueSize),
		ofQueries(a.Size)
	a.K, a.V, a.DK, a.DV = ofKeys(a.Size), ofKeys(a.ValueSize), ofKeys(a.Size),
		ofKeys(a.ValueSize)
	a.LSE, a.Sums = statistics(), statistics()
	return a
}

// results returns those of both passes.
func (a *AttentionGrad) results() []backend.Buffer {
	return []backend.Buffer{a.Y.Buffer, a.LSE, a.DQ.Buffer, a.DK.Buffer, a.DV.Buffer, a.Sums}
}

func TestAttentionIsThePlainLoops(t *testing.T) {
	for n, shape := range shapes {
		attentionIsPlain(t, n, func() AttentionGrad { return interleaved[float64](shape) },
			func() AttentionGrad { return interleaved[float32](shape) })
	}
	for n := range hiding {
		attentionIsPlain(t, n, func() AttentionGrad { return hidden[float64](n) },
			func() AttentionGrad { return hidden[float32](n) })
	}
}

func attentionIsPlain(t *testing.T, n int, wide, narrow func() AttentionGrad) {
	t.Helper()
	for _, level := range simd.Levels() {
		attentionOfIsPlain[float64](t, n, level, wide(), wide(), 1e-12)
		attentionOfIsPlain[float32](t, n, level, narrow(), narrow(), 1e-4)
	}
}

func attentionOfIsPlain[T float](t *testing.T, n int, level simd.Level, want, got AttentionGrad,
	tolerance float64) {
	t.Helper()
	require.NoError(t, (Check{}).AttentionGrad(got))
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
			if !(math.Abs(float64(x)-w) <= tolerance*max(1, math.Abs(w))) && float64(x) != w {
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
		require.NoError(t, errors.Join(h.Attention(a.Attention), h.AttentionGrad(a)))
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

// eachKey calls f with the score of each key that query i of head h sees, and the derivative of the
// cap. q and k are the rows of the head.
func eachKey[T float](a *Attention, h, i int, q, k []float64, f func(j int, s, slope float64)) {
	length := a.Keys
	if a.Lengths.Len() > 0 {
		length = min(length, int(backend.View[int32](a.Lengths)[h/a.Heads]))
	}
	end := a.Keys
	if a.Appended {
		end = length
	}
	start := 0
	if a.Starts.Len() > 0 {
		start = int(backend.View[int32](a.Starts)[h/a.Heads*a.Queries+i])
	}
	for j := range length {
		if later := j - i - end + a.Queries; a.Causal && later > 0 || j < start ||
			a.Window > 0 && later <= -a.Window {
			continue
		}
		s, slope := a.Scale*dot(q[i*a.Size:][:a.Size], k[j*a.Size:][:a.Size]), 1.0
		if a.SoftCap > 0 {
			t := math.Tanh(s / a.SoftCap)
			s, slope = a.SoftCap*t, 1-t*t
		}
		if m := a.Mask; m.Buffer.Len() > 0 {
			s += float64(backend.View[T](m.Buffer)[h/a.Heads*m.Batch+h%a.Heads*m.Head+i*m.Row+
				j*m.Key])
		}
		if !math.IsInf(s, -1) {
			f(j, s, slope)
		}
	}
}

func attention[T float, S backend.Element](a *Attention) {
	for h := range a.Batch * a.Heads {
		q := head[T, S](a.Q, h, a.Heads, a.Queries, a.Size)
		k := head[T, S](a.K, h/a.Group, a.Heads/a.Group, a.Keys, a.Size)
		v := head[T, S](a.V, h/a.Group, a.Heads/a.Group, a.Keys, a.ValueSize)
		y, lse := make([]float64, a.Queries*a.ValueSize), make([]float64, a.Queries)
		for i := range a.Queries {
			most, sum := math.Inf(-1), 0.0
			eachKey[T](a, h, i, q, k, func(_ int, s, _ float64) { most = max(most, s) })
			eachKey[T](a, h, i, q, k, func(_ int, s, _ float64) { sum += math.Exp(s - most) })
			lse[i] = most + math.Log(sum)
			eachKey[T](a, h, i, q, k, func(j int, s, _ float64) {
				addTimes(y[i*a.ValueSize:][:a.ValueSize], math.Exp(s-lse[i]),
					v[j*a.ValueSize:][:a.ValueSize])
			})
		}
		keep[T, S](a.Y, h, a.Heads, a.ValueSize, y)
		keep[T, T](a.statistics(a.LSE), h, a.Heads, 1, lse)
	}
}

func attentionGrad[T float, S backend.Element](a *AttentionGrad) {
	row := func(x []float64, i int) []float64 { return x[i*a.Size:][:a.Size] }
	value := func(x []float64, i int) []float64 { return x[i*a.ValueSize:][:a.ValueSize] }
	shared := a.Heads / a.Group
	var dk, dv []float64
	for h := range a.Batch * a.Heads {
		q := head[T, S](a.Q, h, a.Heads, a.Queries, a.Size)
		dy := head[T, S](a.DY, h, a.Heads, a.Queries, a.ValueSize)
		y := head[T, S](a.Y, h, a.Heads, a.Queries, a.ValueSize)
		k := head[T, S](a.K, h/a.Group, shared, a.Keys, a.Size)
		v := head[T, S](a.V, h/a.Group, shared, a.Keys, a.ValueSize)
		lse, sums := backend.View[T](a.LSE)[h*a.Queries:], make([]float64, a.Queries)
		dq := make([]float64, len(q))
		if h%a.Group == 0 {
			dk, dv = make([]float64, len(k)), make([]float64, len(v))
		}
		for i := range a.Queries {
			sums[i] = dot(value(dy, i), value(y, i))
			eachKey[T](&a.Attention, h, i, q, k, func(j int, s, slope float64) {
				w := math.Exp(s - float64(lse[i]))
				ds := a.Scale * slope * w * (dot(value(dy, i), value(v, j)) - sums[i])
				addTimes(value(dv, j), w, value(dy, i))
				addTimes(row(dq, i), ds, row(k, j))
				addTimes(row(dk, j), ds, row(q, i))
			})
		}
		keep[T, S](a.DQ, h, a.Heads, a.Size, dq)
		keep[T, S](a.DK, h/a.Group, shared, a.Size, dk)
		keep[T, S](a.DV, h/a.Group, shared, a.ValueSize, dv)
		keep[T, T](a.statistics(a.Sums), h, a.Heads, 1, sums)
	}
}

// denseHeads are rows in row-major order of [batch, heads, n, size].
func denseHeads(b backend.Buffer, heads, n, size int) HeadRows {
	return HeadRows{Buffer: b, Batch: heads * n * size, Head: n * size, Row: size}
}
