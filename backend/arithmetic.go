package backend

// Arithmetic is what a [Queue] computes: the steps around collectives. Everything else is a program
// of package kernels/fuse. Every call is started on the queue, in order.
//
// The buffers of one call are on the queue's device and have the same dtype, and the same length
// unless stated otherwise. dst may be the same run of memory as a source of the same length, and
// must not overlap a source otherwise. Arguments that do not fit are an ErrArgument, found before
// anything is written.
//
// The loops in the comments define the results. Every device gives bitwise identical results,
// except for those of a NaN. Operands of 16-bit floats are widened to 32 bits for the computation,
// and the result is rounded once, to nearest even. Integers wrap.
//
// Every queue has all of it. Matrix multiplications are not part of Arithmetic: devices offer them
// separately.
type Arithmetic interface {
	// Zero: for i { dst[i] = 0 }
	Zero(dst Buffer) error
	// Copy: for i { dst[i] = src[i] }. The buffers may overlap.
	Copy(dst, src Buffer) error
	// Copy2D moves rows of width elements, dstPitch and srcPitch elements apart:
	//
	//	for i := range rows { for j := range width { dst[i*dstPitch+j] = src[i*srcPitch+j] } }
	//
	// To split a tensor along any axis, or to concatenate along any axis, takes one Copy2D for each
	// piece.
	Copy2D(dst Buffer, dstPitch int, src Buffer, srcPitch, width, rows int) error
	// Cast: for i { dst[i] = T(src[i]) }, between any two floats, to nearest even.
	Cast(dst, src Buffer) error
	// CastScale: for i { dst[i] = T(src[i]) * factor }, from 16-bit floats to F32 or
	// F64. The factor is rounded to T, and so is the product.
	CastScale(dst, src Buffer, factor float64) error
	// Divide: for i { dst[i] = src[i] / n }, as Reduce does for Avg: in float64 for F64, in float32
	// and rounded once for other floats, and truncated towards zero for integers. n is positive; a
	// byte divided by more than 255 is 0. dst may be src.
	Divide(dst, src Buffer, n int) error
	// Reduce combines in the order of srcs; [ReduceOp] defines the operations:
	//
	//	for i { acc := srcs[0][i]; for s in srcs[1:] { acc = op(acc, s[i]) }; dst[i] = acc }
	//
	// dst may be one of srcs.
	Reduce(op ReduceOp, dst Buffer, srcs ...Buffer) error

	// Move: for i { dst[i] = src[i] }, where each of dst and src is memory of this device or of the
	// host. Host memory stays in use until the queue has got there.
	Move(dst, src Buffer) error

	// CopyStrided copies a strided tensor into row-major order:
	//
	//	for i := range product(shape) {
	//		at := the sum over axes k of (index k of element i)*strides[k]
	//		dst[i] = src[at]
	//	}
	//
	// A permutation of axes permutes the strides; an axis of stride 0 repeats elements; a slice
	// starts later in its buffer. There are at most MaxAxes axes. Strides are in elements and not
	// negative.
	CopyStrided(dst, src Buffer, shape, strides []int) error
}

// MaxAxes is the largest number of axes of [Arithmetic.CopyStrided].
const MaxAxes = 8
