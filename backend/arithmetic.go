package backend

// Arithmetic is what a [Queue] computes: the steps around collectives. Everything else
// is a program of package kernels/fuse. Every call is started on the queue, in order.
//
// Buffers of one call are of the queue's device and have the same dtype, and the
// same length where nothing else is said. dst may be the same run of memory as a
// source of the same length, and must not overlap a source otherwise. What does
// not fit is ErrArgument, found before anything is written.
//
// The loops in the comments are the meaning. Every device gives their bits, except for those of a
// NaN. Operands of 16-bit floats are widened to 32 bits, computed with, and the
// result is rounded once, to nearest even. Integers wrap.
//
// A queue may lack functions: they return ErrUnsupported. It embeds
// [NotImplemented] and adds what it has. Matrix products are not part of
// Arithmetic: devices have them apart.
type Arithmetic interface {
	// Zero: for i { dst[i] = 0 }
	Zero(dst Buffer) error
	// Copy: for i { dst[i] = src[i] }. The buffers may overlap.
	Copy(dst, src Buffer) error
	// Copy2D moves rows of width elements, dstPitch and srcPitch elements apart:
	//
	//	for i := range rows { for j := range width { dst[i*dstPitch+j] = src[i*srcPitch+j] } }
	//
	// Splitting a tensor along any axis, and concatenating along any axis, is one
	// Copy2D for each piece.
	Copy2D(dst Buffer, dstPitch int, src Buffer, srcPitch, width, rows int) error
	// Cast: for i { dst[i] = T(src[i]) }, between any two floats, to nearest even.
	Cast(dst, src Buffer) error
	// CastScale: for i { dst[i] = T(src[i]) * factor }, from 16-bit floats to F32 or
	// F64. The factor is rounded to T, and so is the product.
	CastScale(dst, src Buffer, factor float64) error
	// Divide: for i { dst[i] = src[i] / n }, as Reduce does for Avg: in float64 for F64, in
	// float32 and rounded once for other floats, and truncated towards zero for integers. n is
	// positive; a byte over more than 255 is 0. dst may be src.
	Divide(dst, src Buffer, n int) error
	// Reduce combines in the order of srcs, with the meaning given at [ReduceOp]:
	//
	//	for i { acc := srcs[0][i]; for s in srcs[1:] { acc = op(acc, s[i]) }; dst[i] = acc }
	//
	// dst may be one of srcs.
	Reduce(op ReduceOp, dst Buffer, srcs ...Buffer) error

	// Move: for i { dst[i] = src[i] }, where each of dst and src is memory of this
	// device or of the host. Host memory is in use until the queue has got there.
	Move(dst, src Buffer) error

	// CopyStrided copies a strided tensor into row-major order:
	//
	//	for i := range product(shape) {
	//		at := the sum over axes k of (index k of element i)*strides[k]
	//		dst[i] = src[at]
	//	}
	//
	// A permutation of axes is one of strides; to repeat along an axis is an axis
	// of stride 0; a slice starts later in its buffer. There are at most
	// MaxAxes axes, strides are in elements and not negative.
	CopyStrided(dst, src Buffer, shape, strides []int) error
}

// MaxAxes is the largest number of axes of [Arithmetic.CopyStrided].
const MaxAxes = 8
