package kernels

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/workers"
)

// Host is the arithmetic on host memory. Results do not depend on the number of workers.
type Host struct {
	// Workers run large operations in parts, and nothing is allocated. With nil, everything runs on
	// the calling goroutine.
	Workers *workers.Pool
}

var _ backend.Arithmetic = Host{}

// pool returns the workers. Without any, it is the calling goroutine and memory for one operation.
func (h Host) pool() *workers.Pool {
	if h.Workers == nil {
		return workers.New(1)
	}
	return h.Workers
}

// Zero implements [backend.Arithmetic].
func (Host) Zero(dst backend.Buffer) error {
	if err := (Check{}).Zero(dst); err != nil {
		return err
	}
	clear(dst.Bytes())
	return nil
}

// Copy implements [backend.Arithmetic].
func (Host) Copy(dst, src backend.Buffer) error {
	if err := (Check{}).Copy(dst, src); err != nil {
		return err
	}
	copy(dst.Bytes(), src.Bytes())
	return nil
}

// Copy2D implements [backend.Arithmetic].
func (Host) Copy2D(dst backend.Buffer, dstPitch int, src backend.Buffer, srcPitch, width,
	rows int) error {
	if err := (Check{}).Copy2D(dst, dstPitch, src, srcPitch, width, rows); err != nil {
		return err
	}
	if width == 0 || rows == 0 {
		return nil
	}
	size := dst.DType().Size()
	d, s, row := dst.Bytes(), src.Bytes(), width*size
	if width == dstPitch && width == srcPitch {
		copy(d[:rows*row], s)
		return nil
	}
	for i := range rows {
		to, from := i*dstPitch*size, i*srcPitch*size
		copy(d[to:to+row], s[from:from+row])
	}
	return nil
}

// Cast implements [backend.Arithmetic].
func (Host) Cast(dst, src backend.Buffer) error {
	if err := (Check{}).Cast(dst, src); err != nil {
		return err
	}
	cast(dst, src)
	return nil
}

// Divide implements [backend.Arithmetic].
func (Host) Divide(dst, src backend.Buffer, n int) error {
	if err := (Check{}).Divide(dst, src, n); err != nil {
		return err
	}
	switch dst.DType() {
	case backend.F16:
		scaleHalf[backend.Float16](dst, src, float32(n), true)
	case backend.BF16:
		scaleHalf[backend.BFloat16](dst, src, float32(n), true)
	case backend.F32:
		divideFloats(backend.View[float32](dst), backend.View[float32](src), float32(n))
	case backend.F64:
		divideFloats(backend.View[float64](dst), backend.View[float64](src), float64(n))
	case backend.I32:
		divideInts[int32](dst, src, n)
	case backend.I64:
		divideInts[int64](dst, src, n)
	case backend.U8:
		divideInts[byte](dst, src, n)
	}
	return nil
}

// Scale: for i { dst[i] = src[i] * factor }, in float64 for F64, else in float32 and rounded once;
// for integers the product is truncated towards zero. dst may be src.
func (Host) Scale(dst, src backend.Buffer, factor float64) error {
	if err := (Check{}).Scale(dst, src, factor); err != nil {
		return err
	}
	switch dst.DType() {
	case backend.F16:
		scaleHalf[backend.Float16](dst, src, float32(factor), false)
	case backend.BF16:
		scaleHalf[backend.BFloat16](dst, src, float32(factor), false)
	case backend.F32:
		scaleFloats(backend.View[float32](dst), backend.View[float32](src), float32(factor))
	case backend.F64:
		scaleFloats(backend.View[float64](dst), backend.View[float64](src), factor)
	case backend.I32:
		scaleInt[int32](dst, src, factor)
	case backend.I64:
		scaleInt[int64](dst, src, factor)
	case backend.U8:
		scaleInt[byte](dst, src, factor)
	}
	return nil
}

// Reduce implements [backend.Arithmetic].
func (Host) Reduce(op backend.ReduceOp, dst backend.Buffer, srcs ...backend.Buffer) error {
	if err := (Check{}).Reduce(op, dst, srcs...); err != nil {
		return err
	}
	simd.Reduce(simd.Best(), op, dst, srcs)
	return nil
}
