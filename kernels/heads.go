package kernels

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/workers"
	"github.com/euryale-ml/euryale/kernels/internal/simd"
)

// Attention on the host goes through the queries of a head in blocks: the scores of a block with
// all keys that it sees are one product and stay in the cache, so that nothing is rescaled as in
// FlashAttention. Products need keys and values with their elements in columns, which are
// transposed once for each part.

const (
	// queriesOfBlock is how many queries a block has at most: what a causal block computes for
	// nothing grows with it.
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
	a Attention) attending[T, S] {
	return attending[T, S]{
		level: level, pool: pool, a: AttentionGrad{Attention: a},
		chunks: (a.Queries + queriesOfPart - 1) / queriesOfPart,
		block:  min(max(scoresOfBlock/a.Keys, 1), queriesOfBlock),
	}
}

func attend[T float, S backend.Element](pool *workers.Pool, level simd.Level, a *Attention) {
	t := newAttending[T, S](pool, level, *a)
	workers.Run(pool, a.Batch*a.Heads*t.chunks, forward[T, S]{t})
}

func attendGrad[T float, S backend.Element](pool *workers.Pool, level simd.Level,
	a *AttentionGrad) {
	t := newAttending[T, S](pool, level, a.Attention)
	t.a = *a
	workers.Run(pool, a.Batch*a.Heads, backward[T, S]{t})
}

// vectors are rows of Size elements.
type vectors[T float] struct {
	rows  []T
	pitch int
}

// from returns the vectors from number i on.
func (v vectors[T]) from(i int) []T { return v.rows[i*v.pitch:] }

// room divides scratch.
type room[T float] []T

func (r *room[T]) take(n int) []T {
	taken := (*r)[:n]
	*r = (*r)[n:]
	return taken
}

// converted reports whether operands are not of the type in which they are computed.
func (t *attending[T, S]) converted() bool { return t.a.Y.Buffer.DType().Size() == 2 }

// own returns how many elements of scratch n vectors take.
func (t *attending[T, S]) own(n int) int {
	if t.converted() {
		return n * t.a.Size
	}
	return 0
}

// open returns the n vectors of a head from number first on: where they are, or in scratch,
// converted if they are to be read.
func (t *attending[T, S]) open(r HeadRows, head, first, n int, scratch *room[T],
	read bool) vectors[T] {
	at := r.headStart(head, t.a.Heads) + first*r.Row
	if !t.converted() {
		return vectors[T]{backend.View[T](r.Buffer)[at:], r.Row}
	}
	v := vectors[T]{scratch.take(n * t.a.Size), t.a.Size}
	for i := 0; read && i < n; i++ {
		load(v.from(i)[:t.a.Size], backend.View[S](r.Buffer)[at+i*r.Row:][:t.a.Size])
	}
	return v
}

// storeVectors writes converted vectors.
func (t *attending[T, S]) storeVectors(r HeadRows, head, first, n int, v vectors[T]) {
	if !t.converted() {
		return
	}
	to := backend.View[S](r.Buffer)[r.headStart(head, t.a.Heads)+first*r.Row:]
	for i := range n {
		save(to[i*r.Row:][:t.a.Size], v.from(i)[:t.a.Size])
	}
}

// product computes alpha*a*b + beta*c of dense or transposed operands.
func (t *attending[T, S]) product(p simd.Product[T], alpha, beta T) {
	p.Alpha, p.Beta = alpha, beta
	simd.Multiply(t.level, &p)
}

// exps computes the exponentials of rows of scores minus a number for each, of the keys that each
// query sees; those of the others are 0.
func (t *attending[T, S]) exps(scores []T, width, first int, minus []T) {
	a := &t.a
	for i, m := range minus {
		row, seen := scores[i*width:][:width], a.Seen(first+i)
		if seen == 0 {
			m = 0 // and not -Inf
		}
		subtract(t.level, row[:seen], m)
		for j := seen; j < width; j++ {
			row[j] = T(math.Inf(-1))
		}
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
	keys := a.Seen(first + queries - 1)
	scratch := room[T](workers.Scratch[T](t.pool, worker, a.Size*keys+t.block*(keys+1)+t.own(
		2*keys+2*queries)))
	turned, scores, most := scratch.take(a.Size*keys), scratch.take(t.block*keys),
		scratch.take(t.block)
	q, y := t.open(a.Q, head, first, queries, &scratch, true), t.open(a.Y, head, first, queries,
		&scratch, false)
	k, v := t.open(a.K, head, 0, keys, &scratch, true), t.open(a.V, head, 0, keys, &scratch, true)
	simd.TransposeRows(t.level, turned, k.rows, keys, k.pitch, keys, a.Size)
	lse := backend.View[T](a.LSE)[head*a.Queries+first:]
	for i := 0; i < queries; i += t.block {
		rows := min(t.block, queries-i)
		width := a.Seen(first + i + rows - 1)
		t.product(simd.Product[T]{
			M: rows, N: width, K: a.Size, A: q.from(i), ARow: q.pitch, AStep: 1, B: turned,
			BStep: keys, C: scores, CPitch: width,
		}, T(a.Scale), 0)
		for r := range rows {
			most[r] = largestOf(scores[r*width:][:a.Seen(first+i+r)])
		}
		t.exps(scores, width, first+i, most[:rows])
		t.product(simd.Product[T]{
			M: rows, N: a.Size, K: width, A: scores, ARow: width, AStep: 1, B: v.rows,
			BStep: v.pitch, C: y.from(i), CPitch: y.pitch,
		}, 1, 0)
		for r := range rows {
			sum := sumOf(scores[r*width:][:width])
			lse[i+r] = most[r] + T(math.Log(float64(sum)))
			if sum > 0 { // else the query sees no key
				scale(t.level, y.from(i + r)[:a.Size], 1/sum)
			}
		}
	}
	t.storeVectors(a.Y, head, first, queries, y)
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

// backward computes the gradient, a head at a time.
type backward[T float, S backend.Element] struct{ attending[T, S] }

// operands are what the gradient of a head reads and writes.
type operands[T float] struct {
	q, k, v, y, dy, dq, dk, dv vectors[T]
	turnedK, turnedV           []T // [Size, Keys]
	weights, grads             []T // [block, Keys]
	lse, sums                  []T
}

// Run implements [workers.Task]. The last block of queries sees all keys, and comes first.
func (t *backward[T, S]) Run(head, worker int) {
	a := &t.a
	queries, keys := a.Queries, a.Keys
	scratch := room[T](workers.Scratch[T](t.pool, worker, 2*a.Size*keys+2*t.block*keys+t.own(
		4*queries+4*keys)))
	o := operands[T]{
		turnedK: scratch.take(a.Size * keys), turnedV: scratch.take(a.Size * keys),
		weights: scratch.take(t.block * keys), grads: scratch.take(t.block * keys),
		q: t.open(a.Q, head, 0, queries, &scratch, true), k: t.open(a.K, head, 0, keys, &scratch,
			true), v: t.open(a.V, head, 0, keys, &scratch, true),
		y: t.open(a.Y, head, 0, queries, &scratch, true), dy: t.open(a.DY, head, 0, queries,
			&scratch, true),
		dq: t.open(a.DQ, head, 0, queries, &scratch, false), dk: t.open(a.DK, head, 0, keys,
			&scratch, false), dv: t.open(a.DV, head, 0, keys, &scratch, false),
		lse: backend.View[T](a.LSE)[head*queries:][:queries], sums: backend.View[T](
			a.Sums)[head*queries:][:queries],
	}
	simd.TransposeRows(t.level, o.turnedK, o.k.rows, keys, o.k.pitch, keys, a.Size)
	simd.TransposeRows(t.level, o.turnedV, o.v.rows, keys, o.v.pitch, keys, a.Size)
	for end, beta := queries, T(0); end > 0; beta = 1 {
		first := (end - 1) / t.block * t.block
		t.addBlock(&o, first, end-first, beta)
		end = first
	}
	t.storeVectors(a.DQ, head, 0, queries, o.dq)
	t.storeVectors(a.DK, head, 0, keys, o.dk)
	t.storeVectors(a.DV, head, 0, keys, o.dv)
}

// addBlock computes dq of a block of queries, and what it adds to dk and dv, which it only writes
// if beta is 0.
func (t *backward[T, S]) addBlock(o *operands[T], first, rows int, beta T) {
	a := &t.a
	width := a.Seen(first + rows - 1)
	one := simd.Product[T]{M: rows, N: width, K: a.Size, AStep: 1, BStep: a.Keys, CPitch: width}
	weights, grads := one, one
	weights.A, weights.ARow, weights.B, weights.C = o.q.from(first), o.q.pitch, o.turnedK, o.weights
	grads.A, grads.ARow, grads.B, grads.C = o.dy.from(first), o.dy.pitch, o.turnedV, o.grads
	t.product(weights, T(a.Scale), 0)
	t.product(grads, 1, 0)
	t.exps(o.weights, width, first, o.lse[first:first+rows])
	for r := range rows {
		i := first + r
		o.sums[i] = dotOf(o.dy.from(i)[:a.Size], o.y.from(i)[:a.Size])
		subtract(t.level, o.grads[r*width:][:width], o.sums[i])
	}
	add := simd.Product[T]{M: width, N: a.Size, K: rows, ARow: 1, AStep: width}
	dv, dk := add, add
	dv.A, dv.B, dv.BStep, dv.C, dv.CPitch = o.weights, o.dy.from(first), o.dy.pitch, o.dv.rows,
		o.dv.pitch
	t.product(dv, 1, beta)
	ds := o.grads[:rows*width]
	if !simd.Binary(t.level, simd.Mul, ds, ds, o.weights[:len(ds)]) {
		for i := range ds {
			ds[i] *= o.weights[i]
		}
	}
	dk.A, dk.B, dk.BStep, dk.C, dk.CPitch = ds, o.q.from(first), o.q.pitch, o.dk.rows, o.dk.pitch
	t.product(dk, T(a.Scale), beta)
	t.product(simd.Product[T]{
		M: rows, N: a.Size, K: width, A: ds, ARow: width, AStep: 1, B: o.k.rows, BStep: o.k.pitch,
		C: o.dq.from(first), CPitch: o.dq.pitch,
	}, T(a.Scale), 0)
}
