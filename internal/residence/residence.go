// Package residence says where the memory of a tensor is and what lies there, reads it, keeps the
// copies of tensors that a device has and what is computed of them once, and binds devices to
// threads.
package residence

import (
	"reflect"
	"unsafe"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// DType returns the backend's name for a dtype of package tensor, which may be of the backend's
// 16-bit floats. There is none for Bool, of which an element is a byte, and for dtypes that devices
// do not compute with.
func DType(dt tensor.Dtype) (d backend.DType, ok bool) {
	if d := half(dt); d != 0 {
		return d, true
	}
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

// Half reports whether elements are floats of 16 bits, which variables may hold: package tensor
// does not compute with them.
func Half(dt tensor.Dtype) bool { return half(dt) != 0 }

func half(dt tensor.Dtype) backend.DType {
	switch dt.Type {
	case reflect.TypeFor[backend.BFloat16]():
		return backend.BF16
	case reflect.TypeFor[backend.Float16]():
		return backend.F16
	}
	return 0
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
