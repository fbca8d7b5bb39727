package nn

import (
	"fmt"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/ops"
)

// A spec computes Float32 from Float32 and Float64 from Float64, unless it is one of these.
type (
	// indexed is a spec with an operand of indices, which are of tensor.Int and have no gradient.
	indexed interface {
		// indices returns the number of that operand, -1 for none.
		indices() int
		// check returns what is wrong with indices, before the program runs.
		check(indices []int, in []tensor.Shape) error
	}
	// mover is a spec that only moves elements, whatever they are.
	mover interface{ moves() }
	// typed is a spec whose result has another dtype than its operands, or whose operands may be
	// more than floats.
	typed interface {
		// dtype returns the dtype of the result, or what is wrong with the operands'.
		dtype(in []tensor.Dtype) (tensor.Dtype, error)
	}
)

// kind is what operands can be.
type kind int

const (
	floats kind = iota
	anyNumber
	anything // numbers, Bool or Uint8
)

// String says which dtypes these are.
func (k kind) String() string {
	return [...]string{"this operation is for Float32 and Float64",
		"it can be Float32, Float64, Int, Int64 or Int32",
		"it can be Float32, Float64, Int, Int64, Int32, Bool or Uint8"}[k]
}

func (k kind) has(dt tensor.Dtype) bool {
	switch dt {
	case tensor.Float32, tensor.Float64:
		return true
	case tensor.Int, tensor.Int64, tensor.Int32:
		return k >= anyNumber
	case tensor.Bool, tensor.Uint8:
		return k == anything
	}
	return false
}

// alike returns the dtype of all operands except number other, and what is wrong with it.
func (k kind) alike(in []tensor.Dtype, other int) (dt tensor.Dtype, err error) {
	for i, d := range in {
		switch {
		case i == other:
		case !k.has(d):
			return dt, fmt.Errorf("%w: operand %d is %v: %v", ops.ErrDType, i, d, k)
		case dt.Type != nil && dt != d:
			return dt, fmt.Errorf("%w: operand %d is %v, another one is %v", ops.ErrDType, i, d, dt)
		default:
			dt = d
		}
	}
	return dt, nil
}

// dtypeOf returns the dtype of the result of a spec, or what is wrong with the operands'.
func dtypeOf(s spec, in []tensor.Dtype) (tensor.Dtype, error) {
	k, at := floats, -1
	if _, moves := s.(mover); moves {
		k = anyNumber
	}
	if x, ok := s.(indexed); ok {
		if at = x.indices(); at >= 0 && in[at] != tensor.Int {
			return in[at], fmt.Errorf("%w: operand %d is %v: indices are Int", ops.ErrDType, at,
				in[at])
		}
	}
	if t, ok := s.(typed); ok {
		return t.dtype(in)
	}
	return k.alike(in, at)
}

func isFloat(dt tensor.Dtype) bool { return floats.has(dt) }

// dtypeOn returns the dtype of memory for a dtype of Gorgonia that an operation takes. Booleans are
// bytes, 1 or 0.
func dtypeOn(dt tensor.Dtype) backend.DType {
	if dt == tensor.Bool {
		return backend.U8
	}
	d, _ := residence.DType(dt) // which dtypeOf has checked
	return d
}
