package host

import (
	"math"

	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// rows are the runs of elements along one axis: n elements that are stride apart.
type rows struct{ outer, n, stride int }

func rowsOf(shape ir.Dims, axis int) rows {
	r := rows{1, shape.At(axis), 1}
	for i := range shape.Len() {
		switch {
		case i < axis:
			r.outer *= shape.At(i)
		case i > axis:
			r.stride *= shape.At(i)
		}
	}
	return r
}

// each calls f with the place of the first element of each row.
func (r rows) each(f func(first int)) {
	for o := range r.outer {
		for i := range r.stride {
			f(o*r.n*r.stride + i)
		}
	}
}

// softmax is y = exp(x-max) / sum(exp(x-max)) of each row, or its logarithm. Sums are in
// float64.
func softmax[T float](y, x []T, r rows, log bool) {
	r.each(func(first int) {
		end := first + r.n*r.stride
		most := float64(x[first])
		for i := first; i < end; i += r.stride {
			most = max(most, float64(x[i]))
		}
		sum := 0.0
		for i := first; i < end; i += r.stride {
			e := math.Exp(float64(x[i]) - most)
			y[i] = T(e)
			sum += e
		}
		for i := first; i < end; i += r.stride {
			if log {
				y[i] = T(float64(x[i]) - most - math.Log(sum))
			} else {
				y[i] = T(float64(y[i]) / sum)
			}
		}
	})
}

// softmaxGrad is dx = y (dy - sum(dy y)) of each row, or dx = dy - exp(y) sum(dy) for the
// logarithm.
func softmaxGrad[T float](dx, y, dy []T, r rows, log bool) {
	r.each(func(first int) {
		end := first + r.n*r.stride
		sum := 0.0
		for i := first; i < end; i += r.stride {
			if log {
				sum += float64(dy[i])
			} else {
				sum += float64(dy[i]) * float64(y[i])
			}
		}
		for i := first; i < end; i += r.stride {
			if log {
				dx[i] = T(float64(dy[i]) - math.Exp(float64(y[i]))*sum)
			} else {
				dx[i] = T(float64(y[i]) * (float64(dy[i]) - sum))
			}
		}
	})
}
