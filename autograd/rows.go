package autograd

import (
	"fmt"
	"slices"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// Rows copies rows of src, the samples with these numbers, into dst:
//
//	src   [n, d...]    all samples, of any dtype
//	rows  [b]          numbers below n, such as one step of [Sampler.Epoch]
//	dst   [B, d...]    B >= b, of the same dtype: dst[i] = src[rows[i]] for i < b
//
// If a share is shorter than the graph's batch, the rest of dst becomes zero. Make dst once, bind
// it to the graph's input with gorgonia.Let, and fill it again in each step.
//
// Both are contiguous tensors on the host. Cost: one copy of the rows; nothing is allocated.
//
// Errors: ErrArgument for shapes or dtypes that do not fit, and for a number out of range; dst is
// unchanged then.
func Rows(dst, src *tensor.Dense, rows []int) error {
	if err := backend.Given("autograd.Rows", "dst", dst, "src", src); err != nil {
		return err
	}
	if err := rowsFit(dst, src, rows); err != nil {
		return wrapped("rows: %w: %w", backend.ErrArgument, err)
	}
	to, from := dst.Raw, src.Raw
	n := len(to) / dst.Shape()[0] // bytes of a row
	for i, row := range rows {
		copy(to[i*n:(i+1)*n], from[row*n:(row+1)*n])
	}
	clear(to[len(rows)*n:])
	return nil
}

// rowsFit returns an error if Rows cannot copy.
func rowsFit(dst, src *tensor.Dense, rows []int) error {
	for _, t := range []*tensor.Dense{dst, src} {
		switch {
		case !t.IsNativelyAccessible():
			return fmt.Errorf("a tensor %v is not in the memory of the host: gather on the host, "+
				"and copy the batch to the device", t.Shape())
		case t.Dims() == 0 || t.RequiresIterator() || !t.DataOrder().IsRowMajor() ||
			len(t.Raw) != t.Shape().TotalSize()*int(t.Dtype().Size()):
			return fmt.Errorf("a tensor %v is a scalar, a view or transposed: it must be "+
				"contiguous, with at least one axis", t.Shape())
		case !pointerless(t.Dtype()):
			return fmt.Errorf("a tensor of %v: numbers and bool are supported", t.Dtype())
		}
	}
	d, s := dst.Shape(), src.Shape()
	if dst.Dtype() != src.Dtype() || !slices.Equal(d[1:], s[1:]) {
		return fmt.Errorf("rows of %v%v for rows of %v%v: they must be alike", src.Dtype(), s[1:],
			dst.Dtype(), d[1:])
	}
	if d[0] == 0 || len(rows) > d[0] {
		return fmt.Errorf("%d rows for a tensor %v, which has room for %d", len(rows), d, d[0])
	}
	for i, row := range rows {
		if row < 0 || row >= s[0] {
			return fmt.Errorf("row %d of the batch is number %d: there are %d, from 0", i, row,
				s[0])
		}
	}
	return nil
}

// pointerless reports whether elements hold no pointers.
func pointerless(d tensor.Dtype) bool {
	switch d {
	case tensor.Bool, tensor.Int, tensor.Int8, tensor.Int16, tensor.Int32, tensor.Int64,
		tensor.Uint, tensor.Uint8, tensor.Uint16, tensor.Uint32, tensor.Uint64,
		tensor.Float32, tensor.Float64, tensor.Complex64, tensor.Complex128:
		return true
	}
	return false
}
