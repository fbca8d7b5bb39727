package nn

import (
	"fmt"
	"math"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// This file computes operations by plain loops, in float64: the oracle of their programs.

// float are the types that operations compute with.
type float interface{ float32 | float64 }

// array is an operand or a result on the host: elements in row-major order. One of indices has ints
// and no data.
type array[T float] struct {
	shape tensor.Shape
	data  []T
	ints  []int
}

// row returns row i of all: the elements along the last axis.
func (a array[T]) row(i int) []T {
	n := a.shape[len(a.shape)-1]
	return a.data[i*n:][:n]
}

// around returns how many elements are before, along and behind an axis: element (i, k, j) is at
// (i*along + k)*behind + j.
func around(shape tensor.Shape, axis int) (before, along, behind int) {
	return product(shape[:axis]), shape[axis], product(shape[axis+1:])
}

// product returns the number of elements of a shape, 1 for a scalar's.
func product(shape tensor.Shape) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// lines calls f for each line of elements along an axis: element k of n is at at(k).
func lines(shape tensor.Shape, axis int, f func(at func(k int) int, n int)) {
	before, along, behind := around(shape, axis)
	for i := range before {
		for j := range behind {
			f(func(k int) int { return (i*along+k)*behind + j }, along)
		}
	}
}

func gelu[T float](s geluSpec, y, x array[T]) error {
	for i, v := range x.data {
		half, _ := geluParts(s.Tanh, float64(v))
		y.data[i] = T(float64(v) * half)
	}
	return nil
}

// geluParts returns y/x and its derivative by x.
func geluParts(approximate bool, x float64) (half, slope float64) {
	if !approximate {
		return (1 + math.Erf(x/math.Sqrt2)) / 2, math.Exp(-x*x/2) / math.Sqrt(2*math.Pi)
	}
	const cubic = 0.044715
	scale := math.Sqrt(2 / math.Pi)
	t := math.Tanh(scale * (x + cubic*x*x*x))
	return (1 + t) / 2, (1 - t*t) / 2 * scale * (1 + 3*cubic*x*x)
}

func geluGrad[T float](s geluSpec, dx, x, dy array[T]) error {
	for i, v := range x.data {
		half, slope := geluParts(s.Tanh, float64(v))
		dx.data[i] = T(float64(dy.data[i]) * (half + float64(v)*slope))
	}
	return nil
}

func softmax[T float](s softMaxSpec, y, x array[T]) error {
	lines(x.shape, s.Axis, func(at func(k int) int, n int) {
		most, sum := math.Inf(-1), 0.0
		for k := range n {
			most = max(most, float64(x.data[at(k)]))
		}
		for k := range n {
			sum += math.Exp(float64(x.data[at(k)]) - most)
		}
		for k := range n {
			v := float64(x.data[at(k)]) - most
			if s.Log {
				y.data[at(k)] = T(v - math.Log(sum))
			} else {
				y.data[at(k)] = T(math.Exp(v) / sum)
			}
		}
	})
	return nil
}

func softmaxGrad[T float](s softMaxSpec, dx, y, dy array[T]) error {
	lines(y.shape, s.Axis, func(at func(k int) int, n int) {
		sum := 0.0
		for k := range n {
			if s.Log {
				sum += float64(dy.data[at(k)])
			} else {
				sum += float64(dy.data[at(k)]) * float64(y.data[at(k)])
			}
		}
		for k := range n {
			v, d := float64(y.data[at(k)]), float64(dy.data[at(k)])
			if s.Log {
				dx.data[at(k)] = T(d - math.Exp(v)*sum)
			} else {
				dx.data[at(k)] = T(v * (d - sum))
			}
		}
	})
	return nil
}

func layerNorm[T float](s layerNormSpec, y, x, gain, bias array[T]) error {
	n := len(gain.data)
	for at := 0; at < len(x.data); at += n {
		mean, scale := moments(x.data[at:at+n], s.Epsilon)
		for k := range n {
			z := (float64(x.data[at+k]) - mean) * scale
			y.data[at+k] = T(z*float64(gain.data[k]) + float64(bias.data[k]))
		}
	}
	return nil
}

// moments returns the mean of a row and 1 / sqrt(variance + epsilon), NaN if the variance
// overflows.
func moments[T float](row []T, epsilon float64) (mean, scale float64) {
	n := float64(len(row))
	for _, v := range row {
		mean += float64(v)
	}
	mean /= n
	variance := 0.0
	for _, v := range row {
		variance += (float64(v) - mean) * (float64(v) - mean)
	}
	if math.IsInf(variance, 1) {
		return mean, math.NaN()
	}
	return mean, 1 / math.Sqrt(variance/n+epsilon)
}

func layerNormGrad[T float](s layerNormSpec, dx, x, gain, dy array[T]) error {
	n := len(gain.data)
	for at := 0; at < len(x.data); at += n {
		mean, scale := moments(x.data[at:at+n], s.Epsilon)
		z := func(k int) float64 { return (float64(x.data[at+k]) - mean) * scale }
		g := func(k int) float64 { return float64(dy.data[at+k]) * float64(gain.data[k]) }
		sum, along := 0.0, 0.0
		for k := range n {
			sum += g(k)
			along += g(k) * z(k)
		}
		for k := range n {
			dx.data[at+k] = T((g(k) - (sum+z(k)*along)/float64(n)) * scale)
		}
	}
	return nil
}

func layerNormGainGrad[T float](s layerNormSpec, dgain, x, dy array[T]) error {
	n := len(dgain.data)
	sum := make([]float64, n)
	for at := 0; at < len(x.data); at += n {
		mean, scale := moments(x.data[at:at+n], s.Epsilon)
		for k := range n {
			sum[k] += float64(dy.data[at+k]) * (float64(x.data[at+k]) - mean) * scale
		}
	}
	round(dgain.data, sum)
	return nil
}

func layerNormBiasGrad[T float](dbias, dy array[T]) error {
	sum := make([]float64, len(dbias.data))
	for at, v := range dy.data {
		sum[at%len(sum)] += float64(v)
	}
	round(dbias.data, sum)
	return nil
}

// round stores sums that were accumulated in float64.
func round[T float](to []T, sums []float64) {
	for k, v := range sums {
		to[k] = T(v)
	}
}

func norm[T float](s normSpec, y, x array[T]) error {
	line := 0
	lines(x.shape, s.Axis, func(at func(k int) int, n int) {
		sum := 0.0
		for k := range n {
			sum += powerOf(math.Abs(float64(x.data[at(k)])), s.P)
		}
		y.data[line] = T(root(sum, s.P))
		line++
	})
	return nil
}

// powerOf returns x^n.
func powerOf(x float64, n int) float64 {
	switch n {
	case 0:
		return 1
	case 1:
		return x
	case 2:
		return x * x
	}
	return math.Pow(x, float64(n))
}

func root(x float64, n int) float64 {
	switch n {
	case 1:
		return x
	case 2:
		return math.Sqrt(x)
	}
	return math.Pow(x, 1/float64(n))
}

func normGrad[T float](s normSpec, dx, x, y, dy array[T]) error {
	line := 0
	lines(x.shape, s.Axis, func(at func(k int) int, n int) {
		size, d := float64(y.data[line]), float64(dy.data[line])
		line++
		for k := range n {
			if e := float64(x.data[at(k)]); size != 0 {
				dx.data[at(k)] = T(sign(e) * powerOf(math.Abs(e)/size, s.P-1) * d)
			}
		}
	})
	return nil
}

// sign returns 1, -1, or x itself if it is 0 or NaN.
func sign(x float64) float64 {
	switch {
	case x > 0:
		return 1
	case x < 0:
		return -1
	}
	return x
}

func crossEntropy[T float](s crossEntropySpec, loss, logits array[T], labels []int) error {
	n := len(logits.data) / len(labels)
	counted, err := counting(labels, n, s.Ignore)
	if err != nil || counted == 0 {
		return err
	}
	sum := 0.0
	for i, label := range labels {
		if label == s.Ignore {
			continue
		}
		row := logits.data[i*n : (i+1)*n]
		most, total := exponentials(row)
		sum += math.Log(total) + (most - float64(row[label])) // equal logits cancel
	}
	loss.data[0] = T(sum / float64(counted))
	return nil
}

// counting returns how many labels count, and checks them.
func counting(labels []int, n, ignore int) (counted int, err error) {
	for k, label := range labels {
		if label == ignore {
			continue
		}
		if label < 0 || label >= n {
			return 0, fmt.Errorf("%w: label %d is %d, out of range 0 to %d", backend.ErrArgument, k,
				label, n-1)
		}
		counted++
	}
	return counted, nil
}

// exponentials returns the largest element of a row, and the sum of exp(x - largest).
func exponentials[T float](row []T) (most, sum float64) {
	most = math.Inf(-1)
	for _, v := range row {
		most = max(most, float64(v))
	}
	for _, v := range row {
		sum += math.Exp(float64(v) - most)
	}
	return most, sum
}

func crossEntropyGrad[T float](s crossEntropySpec, dx, logits array[T], labels []int,
	dy array[T]) error {
	n := len(logits.data) / len(labels)
	counted, err := counting(labels, n, s.Ignore)
	if err != nil || counted == 0 {
		return err
	}
	scale := float64(dy.data[0]) / float64(counted)
	for i, label := range labels {
		if label == s.Ignore {
			continue
		}
		row, to := logits.data[i*n:(i+1)*n], dx.data[i*n:(i+1)*n]
		most, total := exponentials(row)
		for k, v := range row {
			p := math.Exp(float64(v)-most) / total
			if k == label {
				p--
			}
			to[k] = T(p * scale)
		}
	}
	return nil
}

func dropout[T float](s dropoutSpec, y, x array[T]) error {
	if !s.Mask.Training() {
		copy(y.data, x.data)
		return nil
	}
	step, first, _ := s.Mask.Random.at()
	key := [2]uint32{s.Mask.Random.Seed(), s.Mask.Op}
	p, scale := T(s.P), T(1/(1-s.P))
	sample := len(x.data) / x.shape[0]
	for i := range x.shape[0] {
		row, to := x.data[i*sample:(i+1)*sample], y.data[i*sample:(i+1)*sample]
		var u [4]T
		for k, v := range row {
			if k%len(u) == 0 {
				u = uniforms[T](key, step, first+uint64(i), k/len(u))
			}
			if u[k%len(u)] >= p {
				to[k] = v * scale
			}
		}
	}
	return nil
}

// philox returns the four random words of a counter and a key: Philox4x32-10 of Salmon, Moraes,
// Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
func philox(counter [4]uint32, key [2]uint32) [4]uint32 {
	const rounds, m0, m1, w0, w1 = 10, 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
	for range rounds {
		p, q := uint64(counter[0])*m0, uint64(counter[2])*m1
		counter = [4]uint32{uint32(q>>32) ^ counter[1] ^ key[0], uint32(q), uint32(p>>32) ^
			counter[3] ^ key[1], uint32(p)}
		key[0] += w0
		key[1] += w1
	}
	return counter
}

// uniforms returns the random numbers in [0, 1) of four elements of a sample: elements 4*quad to
// 4*quad+3. The numbers come from fuse.Uniform, which has 24 bits in float32 and 32 in float64.
func uniforms[T float](key [2]uint32, step, sample uint64, quad int) (u [4]T) {
	words := philox([4]uint32{uint32(quad), uint32(sample), uint32(step), uint32(step >> 32)}, key)
	for i, w := range words {
		if _, small := any(u[i]).(float32); small {
			u[i] = T(w>>8) / (1 << 24)
		} else {
			u[i] = T(float64(w) / (1 << 32))
		}
	}
	return u
}

func slice[T float](s sliceSpec, y, x array[T]) error {
	before, along, behind := around(x.shape, s.Axis)
	n := y.shape[s.Axis]
	for i := range before {
		for k := range n {
			from := (i*along + s.Start + k*s.Step) * behind
			copy(y.data[(i*n+k)*behind:][:behind], x.data[from:from+behind])
		}
	}
	return nil
}

func unslice[T float](s unsliceSpec, y, x array[T]) error {
	before, along, behind := around(x.shape, s.Axis)
	for i := range before {
		for k := range along {
			to := (i*s.Length + s.Start + k*s.Step) * behind
			copy(y.data[to:to+behind], x.data[(i*along+k)*behind:])
		}
	}
	return nil
}

func concat[T float](s concatSpec, y array[T], x []array[T]) error {
	before, _, _ := around(y.shape, s.Axis)
	place := 0
	for i := range before {
		for _, part := range x {
			row := len(part.data) / before
			place += copy(y.data[place:], part.data[i*row:(i+1)*row])
		}
	}
	return nil
}

func byIndices[T float](s byIndicesSpec, y, x array[T], indices []int) error {
	before, along, behind := around(x.shape, s.Axis)
	if err := inRange(indices, along); err != nil {
		return err
	}
	for i := range before {
		for k, index := range indices {
			from := (i*along + index) * behind
			copy(y.data[(i*len(indices)+k)*behind:][:behind], x.data[from:from+behind])
		}
	}
	return nil
}

func byIndicesGrad[T float](s byIndicesGradSpec, dx, dy array[T], indices []int) error {
	before, along, behind := around(dx.shape, s.Axis)
	if err := inRange(indices, along); err != nil {
		return err
	}
	for i := range before {
		for k, index := range indices {
			to, from := (i*along+index)*behind, (i*len(indices)+k)*behind
			for j := range behind {
				dx.data[to+j] += dy.data[from+j]
			}
		}
	}
	return nil
}

// batchedMatMul reads rows of b in order: each is multiplied with one element of a, or, if b is
// transposed, with a row of a.
func batchedMatMul[T float](s batchedMatMulSpec, c, a, b array[T]) error {
	m, k := size(a.shape, s.TransA)
	_, n := size(b.shape, s.TransB)
	step, next := steps(k, m, s.TransA)
	sums, row := make([]float64, n), make([]float64, k)
	for batch := range len(c.data) / (m * n) {
		left, right := a.data[batch*m*k:][:m*k], b.data[batch*k*n:][:k*n]
		for i := range m {
			for p := range row {
				row[p] = float64(left[i*step+p*next])
			}
			if s.TransB {
				dots(sums, row, right)
			} else {
				addRows(sums, row, right)
			}
			round(c.data[(batch*m+i)*n:][:n], sums)
		}
	}
	return nil
}

// dots sets each sum to the product of x and a row of b.
func dots[T float](sums, x []float64, b []T) {
	for j := range sums {
		sum := 0.0
		for p, v := range b[j*len(x):][:len(x)] {
			sum += x[p] * float64(v)
		}
		sums[j] = sum
	}
}

// addRows sets the sums to the rows of b, multiplied with the elements of x.
func addRows[T float](sums, x []float64, b []T) {
	clear(sums)
	for p, v := range x {
		for j, w := range b[p*len(sums):][:len(sums)] {
			sums[j] += v * float64(w)
		}
	}
}

// steps returns the distance between rows and between columns of a matrix, as it is used.
func steps(columns, rows int, trans bool) (row, column int) {
	if trans {
		return 1, rows
	}
	return columns, 1
}

func outer[T float](c, a, b array[T]) error {
	for i, v := range a.data {
		for j, w := range b.data {
			c.data[i*len(b.data)+j] = v * w
		}
	}
	return nil
}

func matVec[T float](s matVecSpec, y, m, v array[T]) error {
	rows, columns := size(m.shape, s.Trans)
	row, column := steps(columns, rows, s.Trans)
	for i := range rows {
		sum := 0.0
		for k, x := range v.data {
			sum += float64(m.data[i*row+k*column]) * float64(x)
		}
		y.data[i] = T(sum)
	}
	return nil
}

func attention[T float](s attentionSpec, y array[T], x []array[T]) error {
	sums := make([]float64, y.shape[3])
	eachQuery(s, x, x[3:], func(i int, keys []seenKey) {
		clear(sums)
		for _, k := range keys {
			for c := range sums {
				sums[c] += k.w * float64(x[2].row(k.row)[c])
			}
		}
		round(y.row(i), sums)
	})
	return nil
}

// seenKey is a key that a query sees: its row among all heads, its place in the scores, its weight,
// and the derivative of the soft cap.
type seenKey struct {
	row, at  int
	w, slope float64
}

// eachQuery calls f for each query with the keys that it sees. hides are the mask and the lengths.
func eachQuery[T float](s attentionSpec, x, hides []array[T], f func(i int, keys []seenKey)) {
	q, k := x[0], x[1]
	heads, queries, shared, all := q.shape[1], q.shape[2], k.shape[1], k.shape[2]
	for i := range product(q.shape[:3]) {
		entry, head, query := i/(heads*queries), i/queries%heads, i%queries
		var keys []seenKey
		most, sum := math.Inf(-1), 0.0
		for n := range all {
			key := seenKey{row: (entry*shared+head/(heads/shared))*all + n, at: i*all + n, slope: 1}
			score := s.Scale * inner(q.row(i), k.row(key.row))
			if s.SoftCap > 0 {
				t := math.Tanh(score / s.SoftCap)
				score, key.slope = s.SoftCap*t, 1-t*t
			}
			if s.Mask {
				m := hides[0]
				score += float64(m.data[m.repeated([]int{entry, head, query, n})])
			}
			hidden := s.Causal && n > query+all-queries ||
				s.Lengths && n >= hides[len(hides)-1].ints[entry]
			if key.w = score; hidden || math.IsInf(score, -1) {
				continue
			}
			keys, most = append(keys, key), max(most, score)
		}
		for n := range keys {
			keys[n].w = math.Exp(keys[n].w - most)
			sum += keys[n].w
		}
		for n := range keys {
			keys[n].w /= sum
		}
		f(i, keys)
	}
}

// repeated returns the place of an element of a shape that the array is repeated to.
func (x array[T]) repeated(index []int) int {
	at := 0
	for axis, n := range x.shape {
		at = at*n + index[len(index)-len(x.shape)+axis]%n
	}
	return at
}

// inner returns the product of two vectors.
func inner[T float](x, y []T) float64 {
	sum := 0.0
	for i, v := range x {
		sum += float64(v) * float64(y[i])
	}
	return sum
}

func attentionGrad[T float](s attentionSpec, of int, dx array[T], x []array[T],
	y, dy array[T]) error {
	q, k, v := x[0], x[1], x[2]
	sums := make([]float64, len(dx.data))
	add := func(to int, factor float64, row []T) {
		for c, e := range row {
			sums[to*len(row)+c] += factor * float64(e)
		}
	}
	heads, queries, all := q.shape[1], q.shape[2], k.shape[2]
	eachQuery(s, x, x[3:], func(i int, keys []seenKey) {
		less := inner(dy.row(i), y.row(i))
		for _, key := range keys {
			ds := key.w * (inner(dy.row(i), v.row(key.row)) - less)
			switch scaled := s.Scale * key.slope * ds; of {
			case 0:
				add(i, scaled, k.row(key.row))
			case 1:
				add(key.row, scaled, q.row(i))
			case 2:
				add(key.row, key.w, dy.row(i))
			case 3:
				sums[dx.repeated([]int{i / (heads * queries), i / queries % heads, i % queries,
					key.at % all})] += ds
			}
		}
	})
	round(dx.data, sums)
	return nil
}
