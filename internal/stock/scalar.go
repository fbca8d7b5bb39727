package stock

import (
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Scalar returns a new scalar of Gorgonia, 0, or nil for a dtype that has none.
func Scalar(dt tensor.Dtype) gorgonia.Value {
	switch dt {
	case tensor.Float64:
		return gorgonia.NewF64(0)
	case tensor.Float32:
		return gorgonia.NewF32(0)
	case tensor.Int:
		return gorgonia.NewI(0)
	case tensor.Int64:
		return gorgonia.NewI64(0)
	case tensor.Int32:
		return gorgonia.NewI32(0)
	case tensor.Uint8:
		return gorgonia.NewU8(0)
	case tensor.Bool:
		return gorgonia.NewB(false)
	}
	return nil
}
