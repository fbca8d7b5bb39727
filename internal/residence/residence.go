// Package residence says where the memory of a tensor is and what lies there, reads it, keeps the
// copies of tensors that a device has, and binds devices to threads.
package residence

import (
	"unsafe"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// DType returns the backend's name for a dtype of package tensor. There is none for Bool, of which
// an element is a byte, and for dtypes that devices do not compute with.
func DType(dt tensor.Dtype) (d backend.DType, ok bool) {
	switch dt {
	case tensor.Float64:
		return backend.F64, true
	case tensor.Float32:
		return backend.F32, true
	case tensor.Int64:
		return backend.I64, true
	case tensor.Int32:
		return backend.I32, true
	case tensor.Int:
		if unsafe.Sizeof(int(0)) == 4 {
			return backend.I32, true
		}
		return backend.I64, true
	case tensor.Uint8:
		return backend.U8, true
	}
	return 0, false
}

// RowMajor reports whether the elements of a tensor lie in row-major order without gaps. It goes by
// the strides, where those of axes of length 1 do not matter: what package tensor says of the order
// (whether an iterator is required, what Materialize returns) is wrong for a slice of a transposed
// tensor.
func RowMajor(t *tensor.Dense) bool {
	shape, strides := t.Shape(), t.Strides()
	if shape.TotalSize() <= 1 {
		return true
	}
	if len(strides) != len(shape) { // vectors that are columns have one stride
		return len(strides) == 1 && strides[0] == 1
	}
	step := 1
	for axis := len(shape) - 1; axis >= 0; axis-- {
		if shape[axis] != 1 && strides[axis] != step {
			return false
		}
		step *= shape[axis]
	}
	return true
}
