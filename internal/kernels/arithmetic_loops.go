package kernels

import "github.com/euryale-ml/euryale/backend"

// load reads elements as the type they are computed in.
func load[T number, S backend.Element](out []T, x []S) {
	switch x := any(x).(type) {
	case []backend.Float16:
		widenAll(any(out).([]float32), x)
	case []backend.BFloat16:
		widenAll(any(out).([]float32), x)
	case []T:
		copy(out, x)
	}
}

// copyStrided moves elements, whatever their type.
func copyStrided[T any](d, s []T, shape, strides []int) {
	switch {
	case len(shape) == 0:
		d[0] = s[0]
	case len(shape) == 2 && strides[0] == 1:
		transpose(d, s, shape[0], shape[1], strides[1])
	case len(shape) > 1:
		row := len(d) / shape[0]
		for i := range shape[0] {
			copyStrided(d[i*row:(i+1)*row], s[i*strides[0]:], shape[1:], strides[1:])
		}
	case strides[0] == 1:
		copy(d, s)
	default:
		for i := range d {
			d[i] = s[i*strides[0]]
		}
	}
}

// transpose moves columns of a matrix, whose starts are apart elements apart, to rows: in blocks,
// since a row of each takes as many lines of the cache as it has elements.
func transpose[T any](d, s []T, rows, columns, apart int) {
	const block = 64 // two of these fit a core's first cache
	for r0 := 0; r0 < rows; r0 += block {
		for c0 := 0; c0 < columns; c0 += block {
			for c := c0; c < min(c0+block, columns); c++ {
				from := s[c*apart:]
				for r := r0; r < min(r0+block, rows); r++ {
					d[r*columns+c] = from[r]
				}
			}
		}
	}
}
