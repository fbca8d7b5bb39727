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

// Unary implements [backend.Arithmetic].
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
		binaryFloat(op, backend.View[float32](dst), backend.View[float32](x), backend.View[float32](y))
	case backend.F64:
		binaryFloat(op, backend.View[float64](dst), backend.View[float64](x), backend.View[float64](y))
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
func (h Host) BinaryScalar(op backend.BinaryOp, dst, x backend.Buffer, s float64, reverse bool) error {
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

// ReduceAxisScratch returns 0: partial results are on the stack.
func (Host) ReduceAxisScratch(_, _, _ int) int { return 0 }

// ReduceAxis implements [backend.Arithmetic]. Runs of 32 elements are combined in
// order, then runs of 32 of the results, and so on until one is left:
//
//	func fold(x) {
//		for len(x) > 1 { x = for each run of 32 { run[0] op run[1] op ... } }
//		return x[0]
//	}
//
// This loses less to rounding than one long sum.
func (h Host) ReduceAxis(op backend.ReduceOp, dst, src, scratch backend.Buffer, outer, n, inner int) error {
	if err := (Check{}).ReduceAxis(op, dst, src, scratch, outer, n, inner); err != nil {
		return err
	}
	if n == 0 {
		return h.Zero(dst)
	}
	f := folding{op, outer, n, inner}
	switch dst.DType() {
	case backend.F16:
		foldHalf[backend.Float16](f, dst, src)
	case backend.BF16:
		foldHalf[backend.BFloat16](f, dst, src)
	case backend.F32:
		fold[float32](f, dst, src)
	case backend.F64:
		fold[float64](f, dst, src)
	case backend.I32:
		fold[int32](f, dst, src)
	case backend.I64:
		fold[int64](f, dst, src)
	case backend.U8:
		fold[byte](f, dst, src)
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
		copyStrided(backend.View[backend.Float16](dst), backend.View[backend.Float16](src), shape, strides)
	case 4:
		copyStrided(backend.View[float32](dst), backend.View[float32](src), shape, strides)
	case 8:
		copyStrided(backend.View[float64](dst), backend.View[float64](src), shape, strides)
	}
	return nil
}
