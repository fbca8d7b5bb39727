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
