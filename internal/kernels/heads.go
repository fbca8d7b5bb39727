package kernels

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/workers"
)

// Attention on the host goes through the queries of a head in blocks: the scores of a block with
// all keys that it sees are one product and stay in the cache, so nothing is rescaled, unlike in
// FlashAttention. Products need keys and values with their elements in columns, which are
// transposed once for each part.

const (
	// queriesOfBlock is the largest number of queries of a block. The more there are, the more
	// scores a causal block computes that are then masked.
	queriesOfBlock = 32
	// scoresOfBlock bounds the scores of a block, in elements: 128 KiB of f32.
	scoresOfBlock = 32 << 10
	// queriesOfPart is how many queries of a head a part has. The transposition of the keys is a
	// small share of it.
	queriesOfPart = 256
)

// attending is the task of Attention and AttentionGrad. Operands of type S are computed as T.
type attending[T float, S backend.Element] struct {
	level  simd.Level
	pool   *workers.Pool
	a      AttentionGrad
	chunks int // parts of a head
	block  int // queries
}

func newAttending[T float, S backend.Element](pool *workers.Pool, level simd.Level,
	a AttentionGrad) attending[T, S] {
	a.Attention = a.Filled()
	return attending[T, S]{
		level: level, pool: pool, a: a,
		chunks: (a.Queries + queriesOfPart - 1) / queriesOfPart,
		block:  min(max(scoresOfBlock/a.Keys, 1), queriesOfBlock),
	}
}

func attend[T float, S backend.Element](pool *workers.Pool, level simd.Level, a *Attention) {
	t := newAttending[T, S](pool, level, AttentionGrad{Attention: *a})
	workers.Run(pool, a.Batch*a.Heads*t.chunks, forward[T, S]{t})
}

func attendGrad[T float, S backend.Element](pool *workers.Pool, level simd.Level,
	a *AttentionGrad) {
	t := newAttending[T, S](pool, level, *a)
	workers.Run(pool, a.Batch*a.Heads/t.a.Group, backward[T, S]{t})
}

// vectors are rows of Size or ValueSize elements.
type vectors[T float] struct {
	rows  []T
	pitch int
}

// from returns the vectors from number i on.
func (v vectors[T]) from(i int) []T { return v.rows[i*v.pitch:] }

// room divides scratch.
type room[T float] []T

func (r *room[T]) takeNumbers(n int) []T {
	taken := (*r)[:n]
	*r = (*r)[n:]
	return taken
}

// converted reports whether operands are not of the type in which they are computed.
func (t *attending[T, S]) converted() bool { return t.a.Y.Buffer.DType().Size() == 2 }

// own returns how many elements of scratch vectors of n elements together take.
func (t *attending[T, S]) own(n int) int {
	if t.converted() {
		return n
	}
	return 0
}

// headRows are rows of one head.
type headRows struct {
	HeadRows
	at, size int // the first element of the head, and the elements of a row
}

// ofQuery and ofKey are the rows of a head of queries, and of the head of keys that it shares.
func (t *attending[T, S]) ofQuery(r HeadRows, head, size int) headRows {
	return headRows{r, r.headStart(head, t.a.Heads), size}
}

func (t *attending[T, S]) ofKey(r HeadRows, head, size int) headRows {
	return headRows{r, r.headStart(head/t.a.Group, t.a.Heads/t.a.Group), size}
}

// open returns the n vectors of a head from number first on: where they are, or in scratch,
// converted if read is set.
func (t *attending[T, S]) open(r headRows, first, n int, scratch *room[T], read bool) vectors[T] {
	at := r.at + first*r.Row
	if !t.converted() {
		return vectors[T]{backend.View[T](r.Buffer)[at:], r.Row}
	}
	v := vectors[T]{scratch.takeNumbers(n * r.size), r.size}
	for i := 0; read && i < n; i++ {
		load(v.from(i)[:r.size], backend.View[S](r.Buffer)[at+i*r.Row:][:r.size])
	}
	return v
}

// storeVectors writes converted vectors.
func (t *attending[T, S]) storeVectors(r headRows, first, n int, v vectors[T]) {
	if !t.converted() {
		return
	}
	to := backend.View[S](r.Buffer)[r.at+first*r.Row:]
	for i := range n {
		save(to[i*r.Row:][:r.size], v.from(i)[:r.size])
	}
}

// seen returns where the keys end that query i of a head sees.
func (t *attending[T, S]) seen(head, i int) int { return t.a.Seen(i, t.length(head)) }

// from returns where they begin.
func (t *attending[T, S]) from(head, i int) int {
	start := count(t.a.Starts, head/t.a.Heads*t.a.Queries+i, 0)
	return min(t.a.First(i, t.length(head), start), t.seen(head, i))
}

// start returns the first of the keys that scores of a block of queries are of, which is there.
func (t *attending[T, S]) start(head, query int) int {
	return min(t.from(head, query), t.a.Keys-1)
}

// length returns how many keys the entry of a head has.
func (t *attending[T, S]) length(head int) int {
	return count(t.a.Lengths, head/t.a.Heads, t.a.Keys)
}

// count returns integer i, or what stands for it where there are none.
func count(integers backend.Buffer, i, otherwise int) int {
	switch {
	case integers.Len() == 0:
		return otherwise
	case integers.DType() == backend.I64:
		return int(backend.View[int64](integers)[i])
	}
	return int(backend.View[int32](integers)[i])
}

// limit caps the scores of a query for the keys from the first one on, and multiplies ds, unless
// nil, by the derivative of the cap. Then it adds the mask.
func (t *attending[T, S]) limit(scores, ds []T, head, query, first int) {
	if most := T(t.a.SoftCap); most > 0 {
		scale(t.level, scores, 1/most)
		unaryAt(t.level, simd.Tanh, scores)
		for j := range ds {
			ds[j] *= 1 - scores[j]*scores[j]
		}
		scale(t.level, scores, most)
	}
	m := &t.a.Mask
	if m.Buffer.Len() == 0 {
		return
	}
	mask := backend.View[T](m.Buffer)[head/t.a.Heads*m.Batch+head%t.a.Heads*m.Head+query*m.Row+
		first*m.Key:]
	for j := range scores {
		scores[j] += mask[j*m.Key]
	}
}

// product computes alpha*a*b + beta*c of dense or transposed operands.
func (t *attending[T, S]) product(p simd.Product[T], alpha, beta T) {
	p.Alpha, p.Beta = alpha, beta
	simd.Multiply(t.level, &p)
}

// exps computes the exponentials of rows of scores minus a number for each row, for the keys that
// each query sees; for the others they are 0. Scores are of the keys that the first query sees, and
// of those behind them.
func (t *attending[T, S]) exps(scores []T, width, head, first int, minus []T) {
	masked, start := t.a.Mask.Buffer.Len() > 0, t.start(head, first)
	for i, m := range minus {
		row := scores[i*width:][:width]
		from, seen := max(t.from(head, first+i)-start, 0), t.seen(head, first+i)-start
		if from == seen || masked && math.IsInf(float64(m), -1) {
			m = 0 // and not -Inf
		}
		subtract(t.level, row[from:seen], m)
		hide(row[:from])
		hide(row[seen:])
	}
	unaryAt(t.level, simd.Exp, scores[:len(minus)*width])
	if t.converted() { // they are rounded as v is
		narrow := [64]S{}
		for all := scores[:len(minus)*width]; len(all) > 0; {
			n := min(len(all), len(narrow))
			save(narrow[:n], all[:n])
			load(all[:n], narrow[:n])
			all = all[n:]
		}
	}
}

// hide makes scores those of hidden keys.
func hide[T float](scores []T) {
	for j := range scores {
		scores[j] = T(math.Inf(-1))
	}
}

// subtract subtracts a number from each element.
func subtract[T float](level simd.Level, x []T, number T) {
	var all [simd.Repeat]T
	for i := range all {
		all[i] = number
	}
	if !simd.Binary(level, simd.Sub, x, x, all[:]) {
		for i := range x {
			x[i] -= number
		}
	}
}

// scale multiplies each element with a number.
func scale[T float](level simd.Level, x []T, number T) {
	var all [simd.Repeat]T
	for i := range all {
		all[i] = number
	}
	if !simd.Binary(level, simd.Mul, x, x, all[:]) {
		for i := range x {
			x[i] *= number
		}
	}
}

// unaryAt computes a function of each element.
func unaryAt[T float](level simd.Level, op simd.Op, x []T) {
	if !simd.Unary(level, op, x, x) {
		simd.UnaryLoop(op, x, x)
	}
}

// forward computes attention, a part of the queries of a head at a time.
type forward[T float, S backend.Element] struct{ attending[T, S] }

// Run implements [workers.Task].
func (t *forward[T, S]) Run(part, worker int) {
	a := &t.a
	head, first := part/t.chunks, part%t.chunks*queriesOfPart
	queries := min(queriesOfPart, a.Queries-first)
	keys := t.seen(head, first+queries-1)
	scratch := room[T](workers.Scratch[T](t.pool, worker, a.Size*keys+t.block*(keys+1)+t.own(
		(keys+queries)*(a.Size+a.ValueSize))))
	turned, scores, most := scratch.takeNumbers(a.Size*keys), scratch.takeNumbers(t.block*keys),
		scratch.takeNumbers(t.block)
	ofY := t.ofQuery(a.Y, head, a.ValueSize)
	q := t.open(t.ofQuery(a.Q, head, a.Size), first, queries, &scratch, true)
	y := t.open(ofY, first, queries, &scratch, false)
	k := t.open(t.ofKey(a.K, head, a.Size), 0, keys, &scratch, true)
	v := t.open(t.ofKey(a.V, head, a.ValueSize), 0, keys, &scratch, true)
	simd.TransposeRows(t.level, turned, k.rows, keys, k.pitch, keys, a.Size)
	lse := backend.View[T](a.LSE)[head*a.Queries+first:]
	for i := 0; i < queries; i += t.block {
		rows := min(t.block, queries-i)
		start := t.start(head, first+i)
		width := t.seen(head, first+i+rows-1) - start
		t.product(simd.Product[T]{
			M: rows, N: width, K: a.Size, A: q.from(i), ARow: q.pitch, AStep: 1,
			B: backend.Of(turned[start:]), BStep: keys, C: scores, CPitch: width,
		}, T(a.Scale), 0)
		for r := range rows {
			query := first + i + r
			from := max(t.from(head, query), start)
			seen := scores[r*width:][from-start : t.seen(head, query)-start]
			t.limit(seen, nil, head, query, from)
			most[r] = largestOf(seen)
		}
		t.exps(scores, width, head, first+i, most[:rows])
		t.product(simd.Product[T]{
			M: rows, N: a.ValueSize, K: width, A: scores, ARow: width, AStep: 1,
			B: backend.Of(v.from(start)), BStep: v.pitch, C: y.from(i), CPitch: y.pitch,
		}, 1, 0)
		for r := range rows {
			sum := sumOf(scores[r*width:][:width])
			lse[i+r] = most[r] + T(math.Log(float64(sum)))
			if sum > 0 { // else the query sees no key
				scale(t.level, y.from(i + r)[:a.ValueSize], 1/sum)
			}
		}
	}
	t.storeVectors(ofY, first, queries, y)
}

// largestOf returns the largest element, -Inf if there is none.
func largestOf[T float](x []T) T {
	most := T(math.Inf(-1))
	for _, e := range x {
		if e > most {
			most = e
		}
	}
	return most
}

// sumOf returns the sum of elements, by eight sums.
func sumOf[T float](x []T) T {
	var s [8]T
	for ; len(x) >= 8; x = x[8:] {
		for i := range s {
			s[i] += x[i]
		}
	}
	for i, e := range x {
		s[i] += e
	}
	return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
}

// dotOf returns the product of two vectors, by eight sums.
func dotOf[T float](x, y []T) T {
	var s [8]T
	for ; len(x) >= 8; x, y = x[8:], y[8:] {
		for i := range s {
			s[i] += x[i] * y[i]
		}
	}
	for i, e := range x {
		s[i] += e * y[i]
	}
	return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
}

// backward computes the gradient, a head of keys at a time.
type backward[T float, S backend.Element] struct{ attending[T, S] }

// operands are what the gradient of a head reads and writes.
type operands[T float] struct {
	head                       int // of queries
	q, k, v, y, dy, dq, dk, dv vectors[T]
	turnedK, turnedV           []T // [Size, Keys] and [ValueSize, Keys]
	weights, grads             []T // [block, Keys]
	lse, sums                  []T
}

// Run implements [workers.Task]. The last block of queries sees the most keys, and comes first.
func (t *backward[T, S]) Run(shared, worker int) {
	a := &t.a
	keys, both := a.Keys, a.Size+a.ValueSize
	scratch := room[T](workers.Scratch[T](t.pool, worker, both*keys+2*t.block*keys+t.own(
		2*(a.Queries+keys)*both)))
	head := shared * a.Group
	ofDK, ofDV := t.ofKey(a.DK, head, a.Size), t.ofKey(a.DV, head, a.ValueSize)
	o := operands[T]{
		turnedK: scratch.takeNumbers(a.Size * keys),
		turnedV: scratch.takeNumbers(a.ValueSize * keys),
		weights: scratch.takeNumbers(t.block * keys), grads: scratch.takeNumbers(t.block * keys),
		k:  t.open(t.ofKey(a.K, head, a.Size), 0, keys, &scratch, true),
		v:  t.open(t.ofKey(a.V, head, a.ValueSize), 0, keys, &scratch, true),
		dk: t.open(ofDK, 0, keys, &scratch, false), dv: t.open(ofDV, 0, keys, &scratch, false),
	}
	simd.TransposeRows(t.level, o.turnedK, o.k.rows, keys, o.k.pitch, keys, a.Size)
	simd.TransposeRows(t.level, o.turnedV, o.v.rows, keys, o.v.pitch, keys, a.ValueSize)
	for j := t.seen(head, a.Queries-1); j < keys; j++ { // which no query sees
		clear(o.dk.from(j)[:a.Size])
		clear(o.dv.from(j)[:a.ValueSize])
	}
	for n := range a.Group {
		o.head = head + n
		t.addHead(&o, scratch, n == 0)
	}
	t.storeVectors(ofDK, 0, keys, o.dk)
	t.storeVectors(ofDV, 0, keys, o.dv)
}

// addHead computes dq of a head of queries, and its terms of dk and dv. The first head of a group
// has the first term.
func (t *backward[T, S]) addHead(o *operands[T], scratch room[T], first bool) {
	a, queries := &t.a, t.a.Queries
	ofDQ := t.ofQuery(a.DQ, o.head, a.Size)
	o.q = t.open(t.ofQuery(a.Q, o.head, a.Size), 0, queries, &scratch, true)
	o.y = t.open(t.ofQuery(a.Y, o.head, a.ValueSize), 0, queries, &scratch, true)
	o.dy = t.open(t.ofQuery(a.DY, o.head, a.ValueSize), 0, queries, &scratch, true)
	o.dq = t.open(ofDQ, 0, queries, &scratch, false)
	o.lse = backend.View[T](a.LSE)[o.head*queries:][:queries]
	o.sums = backend.View[T](a.Sums)[o.head*queries:][:queries]
	beta := T(1)
	if first {
		beta = 0
	}
	for end := queries; end > 0; beta = 1 {
		start := (end - 1) / t.block * t.block
		t.addBlock(o, start, end-start, beta)
		end = start
	}
	t.storeVectors(ofDQ, 0, queries, o.dq)
}

// addBlock computes dq of a block of queries, and its terms of dk and dv. If beta is 0, it writes
// dk and dv instead of adding to them.
func (t *backward[T, S]) addBlock(o *operands[T], first, rows int, beta T) {
	a := &t.a
	start := t.start(o.head, first)
	width := t.seen(o.head, first+rows-1) - start
	if beta == 0 {
		for j := range start { // which none of these queries sees
			clear(o.dk.from(j)[:a.Size])
			clear(o.dv.from(j)[:a.ValueSize])
		}
	}
	weights := simd.Product[T]{M: rows, N: width, K: a.Size, A: o.q.from(first), ARow: o.q.pitch,
		AStep: 1, B: backend.Of(o.turnedK[start:]), BStep: a.Keys, C: o.weights, CPitch: width}
	grads := weights
	grads.K, grads.A, grads.ARow, grads.B, grads.C = a.ValueSize, o.dy.from(first), o.dy.pitch,
		backend.Of(o.turnedV[start:]), o.grads
	t.product(weights, T(a.Scale), 0)
	t.product(grads, 1, 0)
	for r := range rows {
		i := first + r
		o.sums[i] = dotOf(o.dy.from(i)[:a.ValueSize], o.y.from(i)[:a.ValueSize])
		ds := o.grads[r*width:][:width]
		subtract(t.level, ds, o.sums[i])
		t.limit(o.weights[r*width:][:width], ds, o.head, i, start)
	}
	t.exps(o.weights, width, o.head, first, o.lse[first:first+rows])
	add := simd.Product[T]{M: width, N: a.Size, K: rows, ARow: 1, AStep: width}
	dv, dk := add, add
	dv.N, dv.A, dv.C, dv.CPitch = a.ValueSize, o.weights, o.dv.from(start), o.dv.pitch
	dv.B, dv.BStep = backend.Of(o.dy.from(first)), o.dy.pitch
	t.product(dv, 1, beta)
	ds := o.grads[:rows*width]
	if !simd.Binary(t.level, simd.Mul, ds, ds, o.weights[:len(ds)]) {
		for i := range ds {
			ds[i] *= o.weights[i]
		}
	}
	dk.A, dk.C, dk.CPitch = ds, o.dk.from(start), o.dk.pitch
	dk.B, dk.BStep = backend.Of(o.q.from(first)), o.q.pitch
	t.product(dk, T(a.Scale), beta)
	t.product(simd.Product[T]{
		M: rows, N: a.Size, K: width, A: ds, ARow: width, AStep: 1,
		B: backend.Of(o.k.from(start)), BStep: o.k.pitch, C: o.dq.from(first), CPitch: o.dq.pitch,
	}, T(a.Scale), 0)
}
