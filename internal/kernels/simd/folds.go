package simd

import "math"

// sums is how many sums a fold has.
const sums = 16

// Sum adds elements in float64, in an order that depends on their number alone: element i is added
// to sum i%16, each of which begins with -0, and then sum j+8 is added to sum j, j+4 to j, j+2 to
// j, and j+1 to j. That is as many sums as vectors can add at a time without waiting for each
// other.
func Sum[T Float](l Level, x []T) float64 {
	if len(x) <= sums/2 {
		return shortSum(x)
	}
	if l > Go {
		return sumVectors(l, &x[0], len(x))
	}
	var s [sums]float64
	for j := range s {
		s[j] = math.Copysign(0, -1)
	}
	for i, e := range x {
		s[i%sums] += float64(e)
	}
	for n := sums / 2; n > 0; n /= 2 {
		for j := range n {
			s[j] += s[j+n]
		}
	}
	return s[0]
}

// shortSum is Sum of at most half as many elements as there are sums, in less time than it takes to
// begin with vectors.
func shortSum[T Float](x []T) float64 {
	none := math.Copysign(0, -1)
	a, b, c, d := none, none, none, none
	switch len(x) {
	case 8:
		d = float64(x[7])
		fallthrough
	case 7:
		c = float64(x[6])
		fallthrough
	case 6:
		b = float64(x[5])
		fallthrough
	case 5:
		a = float64(x[4])
		fallthrough
	case 4:
		d += float64(x[3])
		fallthrough
	case 3:
		c += float64(x[2])
		fallthrough
	case 2:
		b += float64(x[1])
		fallthrough
	case 1:
		a += float64(x[0])
	}
	return (a + c) + (b + d)
}

// Max returns the greatest of at least one element, NaN if one is NaN. -0 is less than +0.
func Max[T Float](l Level, x []T) T {
	if l > Go {
		return maxVectors(l, &x[0], len(x))
	}
	m := x[0]
	for _, e := range x[1:] {
		m = max(m, e)
	}
	return m
}

// Min returns the least of at least one element, as Max does the greatest.
func Min[T Float](l Level, x []T) T {
	if l > Go {
		return minVectors(l, &x[0], len(x))
	}
	m := x[0]
	for _, e := range x[1:] {
		m = min(m, e)
	}
	return m
}

// Accumulate adds x[i] to sums[i]. x has at least len(sums) elements.
func Accumulate[T Float](l Level, sums []float64, x []T) {
	x = x[:len(sums)]
	if l > Go && len(sums) > 0 {
		accumulateVectors(l, &sums[0], &x[0], len(sums))
		return
	}
	for i, e := range x {
		sums[i] += float64(e)
	}
}

// Spread fills rows of n elements, of each of which all are an element of x. dst has len(x)*n
// elements.
func Spread[T Float](l Level, dst, x []T, n int) {
	dst = dst[:len(x)*n]
	if l > Go && len(dst) > 0 {
		spreadVectors(l, &dst[0], &x[0], len(x), n)
		return
	}
	for i, e := range x {
		for j := range n {
			dst[i*n+j] = e
		}
	}
}
