package kernels

import "github.com/euryale-ml/euryale/backend"

var _ backend.Arithmetic = Host{}

// Move implements [backend.Arithmetic].
func (h Host) Move(dst, src backend.Buffer) error { return h.Copy(dst, src) }

// Fill implements [backend.Arithmetic].
func (Host) Fill(dst backend.Buffer, value float64) error {
	if err := (Check{}).Fill(dst, value); err != nil {
		return err
	}
	switch dst.DType() {
	case backend.F16:
		fill(dst, narrowOne[backend.Float16](value))
	case backend.BF16:
		fill(dst, narrowOne[backend.BFloat16](value))
	case backend.F32:
		fill(dst, float32(value))
	case backend.F64:
		fill(dst, value)
	case backend.I32:
		fill(dst, int32(value))
	case backend.I64:
		fill(dst, int64(value))
	case backend.U8:
		fill(dst, byte(value))
	}
	return nil
}

// Unary: for i { dst[i] = op(x[i]) }. It is the loop of package fuse on the host.
func (Host) Unary(op backend.UnaryOp, dst, x backend.Buffer) error {
	if err := (Check{}).Unary(op, dst, x); err != nil {
		return err
	}
	switch dst.DType() {
	case backend.F16:
		unaryHalf[backend.Float16](op, dst, x)
	case backend.BF16:
		unaryHalf[backend.BFloat16](op, dst, x)
	case backend.F32:
		unaryFloat(op, backend.View[float32](dst), backend.View[float32](x))
	case backend.F64:
		unaryFloat(op, backend.View[float64](dst), backend.View[float64](x))
	case backend.I32:
		unary(op, backend.View[int32](dst), backend.View[int32](x))
	case backend.I64:
		unary(op, backend.View[int64](dst), backend.View[int64](x))
	case backend.U8:
		unary(op, backend.View[byte](dst), backend.View[byte](x))
	}
	return nil
}

// Binary implements [backend.Arithmetic].
func (Host) Binary(op backend.BinaryOp, dst, x, y backend.Buffer) error {
	if err := (Check{}).Binary(op, dst, x, y); err != nil {
		return err
	}
	switch dst.DType() {
	case backend.F16:
		binaryHalf[backend.Float16](op, dst, x, y)
	case backend.BF16:
		binaryHalf[backend.BFloat16](op, dst, x, y)
	case backend.F32:
		binaryFloat(op, backend.View[float32](dst), backend.View[float32](x),
			backend.View[float32](y))
	case backend.F64:
		binaryFloat(op, backend.View[float64](dst), backend.View[float64](x),
			backend.View[float64](y))
	case backend.I32:
		binaryInt(op, backend.View[int32](dst), backend.View[int32](x), backend.View[int32](y))
	case backend.I64:
		binaryInt(op, backend.View[int64](dst), backend.View[int64](x), backend.View[int64](y))
	case backend.U8:
		binaryInt(op, backend.View[byte](dst), backend.View[byte](x), backend.View[byte](y))
	}
	return nil
}

// BinaryScalar implements [backend.Arithmetic]. It fills a block with the scalar
// and goes through Binary, so that there is one loop for each function.
func (h Host) BinaryScalar(op backend.BinaryOp, dst, x backend.Buffer, s float64,
	reverse bool) error {
	if err := (Check{}).BinaryScalar(op, dst, x, s, reverse); err != nil {
		return err
	}
	var scratch [block]float64
	scalars := backend.Of(scratch[:]).As(dst.DType()).Slice(0, min(block, dst.Len()))
	if err := h.Fill(scalars, s); err != nil {
		return err
	}
	for lo := 0; lo < dst.Len(); lo += block {
		hi := min(lo+block, dst.Len())
		a, b := x.Slice(lo, hi), scalars.Slice(0, hi-lo)
		if reverse {
			a, b = b, a
		}
		if err := h.Binary(op, dst.Slice(lo, hi), a, b); err != nil {
			return err
		}
	}
	return nil
}

// CopyStrided implements [backend.Arithmetic].
func (Host) CopyStrided(dst, src backend.Buffer, shape, strides []int) error {
	if err := (Check{}).CopyStrided(dst, src, shape, strides); err != nil || dst.Len() == 0 {
		return err
	}
	switch dst.DType().Size() { // elements are only moved
	case 1:
		copyStrided(backend.View[byte](dst), backend.View[byte](src), shape, strides)
	case 2:
		copyStrided(backend.View[backend.Float16](dst), backend.View[backend.Float16](src), shape,
			strides)
	case 4:
		copyStrided(backend.View[float32](dst), backend.View[float32](src), shape, strides)
	case 8:
		copyStrided(backend.View[float64](dst), backend.View[float64](src), shape, strides)
	}
	return nil
}
