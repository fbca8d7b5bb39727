package interpret

import (
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// sum adds terms up. The result is exact if all terms are, and no sum of some of them has more
// bits than the dtype.
type sum struct {
	arithmetic
	value, size, err float64
	least            float64 // the lowest bit of a term, 0 if one is not exact
	n                int
}

func (a arithmetic) sum() *sum { return &sum{arithmetic: a, least: math.Inf(1)} }

func (s *sum) add(x Number) {
	s.value += x.Value
	s.size += math.Abs(x.Value)
	s.err += x.Err
	s.least = min(s.least, lowest(x.Value))
	s.n++
}

// product adds x*y, which a machine may round or not.
func (s *sum) product(x, y Number) {
	p := x.Value * y.Value
	s.add(Number{p, productErr(x, y)})
	if math.FMA(x.Value, y.Value, -p) != 0 {
		s.least = 0
	}
}

// padding adds 0 of the padding times x, which a machine may skip: it is NaN if x is infinite.
func (s *sum) padding(x Number) {
	if !finite(x.Value) || math.IsInf(x.Err, 1) {
		s.add(Number{Err: math.Inf(1)})
	}
}

// join adds the terms of another sum up, too, as one sum or apart.
func (s *sum) join(of *sum) {
	s.value += of.value
	s.size += of.size
	s.err += of.result().Err
	s.least = min(s.least, of.least)
	s.n += of.n
}

func (s *sum) result() Number {
	if s.err == 0 && !finite(s.value) {
		return Number{Value: s.value}
	}
	exact := s.err == 0 && (s.size == 0 || s.size <= s.least*math.Ldexp(1, s.digits))
	err := s.err
	if !exact {
		err += float64(s.n+1) * s.unit * (s.size + s.err)
	}
	return s.rounded(s.value, err, exact)
}

// largest is the largest of some numbers.
func largest(x []Number) Number {
	low, value, high := math.Inf(-1), math.Inf(-1), math.Inf(-1)
	for _, e := range x {
		low, value, high = max(low, e.Value-e.Err), max(value, e.Value), max(high, e.Value+e.Err)
	}
	if low == high || math.IsNaN(value) {
		return Number{Value: value}
	}
	err := max(value-low, high-value)
	if math.IsNaN(err) { // of an infinity without a bound
		err = math.Inf(1)
	}
	return Number{value, err}
}

// Sum returns the sum of numbers, in a dtype and any order.
func Sum(d backend.DType, x ...Number) Number {
	s := in(d).sum()
	for _, e := range x {
		s.add(e)
	}
	return s.result()
}
