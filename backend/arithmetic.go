package backend

import "fmt"

// Arithmetic is what a [Queue] computes: the steps around collectives. Everything else
// is a program of package kernels/fuse. Every call is started on the queue, in order.
//
// Buffers of one call are of the queue's device and have the same dtype, and the
// same length where nothing else is said. dst may be the same run of memory as a
// source of the same length, and must not overlap a source otherwise. What does
// not fit is ErrArgument, found before anything is written.
//
// The loops in the comments are the meaning, on every device bit for bit, but for the bits of a
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

// UnaryOp is a function of one element.
//
// Those marked "rounded" are for floats only and are right up to rounding: the
// result is within four units in the last place of the exact one. The others
// give the bits of the formula, where every operation is rounded to the type.
type UnaryOp uint8

// The unary functions.
const (
	Neg    UnaryOp = iota + 1 // -x
	Abs                       // x < 0 ? -x : x, with the sign bit of a float cleared
	Sign                      // 1 if x > 0, -1 if x < 0, else x (a zero or a NaN)
	Square                    // x * x
	Cube                      // (x * x) * x
	Relu                      // x < 0 ? 0 : x, so that -0 and NaN stay what they are

	// The functions from here on are for floats.

	Inv      // 1 / x
	Sqrt     // the square root
	InvSqrt  // 1 / sqrt(x), rounded twice
	Ceil     // the least integer that is not less than x
	Floor    // the greatest integer that is not greater than x
	Exp      // rounded
	Expm1    // exp(x) - 1, rounded
	Log      // the natural logarithm, rounded
	Log2     // rounded; powers of two are exact
	Log1p    // log(1 + x), rounded
	Tanh     // rounded
	Sigmoid  // 1 / (1 + exp(-x)), rounded
	Softplus // log(1 + exp(x)), rounded
)

var unaryNames = [...]string{
	Neg: "neg", Abs: "abs", Sign: "sign", Square: "square", Cube: "cube", Relu: "relu",
	Inv: "inv", Sqrt: "sqrt", InvSqrt: "invsqrt", Ceil: "ceil", Floor: "floor",
	Exp: "exp", Expm1: "expm1", Log: "log", Log2: "log2", Log1p: "log1p",
	Tanh: "tanh", Sigmoid: "sigmoid", Softplus: "softplus",
}

// UnaryOps lists every UnaryOp.
func UnaryOps() []UnaryOp { return all[UnaryOp](len(unaryNames)) }

// Valid reports whether o is one of the listed functions.
func (o UnaryOp) Valid() bool { return o >= Neg && o <= Softplus }

// Takes reports whether o is a function of elements of type d.
func (o UnaryOp) Takes(d DType) bool { return o.Valid() && d.Valid() && (o < Inv || d.Float()) }

// Rounded reports whether the result is right up to rounding only.
func (o UnaryOp) Rounded() bool { return o >= Exp && o.Valid() }

// String returns the name: "tanh".
func (o UnaryOp) String() string {
	if !o.Valid() {
		return fmt.Sprintf("UnaryOp(%d)", uint8(o))
	}
	return unaryNames[o]
}

// BinaryOp is a function of two elements.
//
// A comparison gives 1 or 0 in the type of its operands; with a NaN, only
// NotEqual is 1.
type BinaryOp uint8

// The binary functions.
const (
	Add     BinaryOp = iota + 1 // x + y
	Sub                         // x - y
	Mul                         // x * y
	Div                         // x / y; an integer over 0 is 0
	Pow                         // x to the power y, for floats, rounded as a UnaryOp is
	Minimum                     // NaN if any operand is, -0 before +0
	Maximum                     // NaN if any operand is, -0 before +0

	Less         // x < y
	LessEqual    // x <= y
	Greater      // x > y
	GreaterEqual // x >= y
	Equal        // x == y
	NotEqual     // x != y
)

var binaryNames = [...]string{
	Add: "add", Sub: "sub", Mul: "mul", Div: "div", Pow: "pow", Minimum: "minimum",
	Maximum: "maximum",
	Less:    "less", LessEqual: "lessequal", Greater: "greater", GreaterEqual: "greaterequal",
	Equal: "equal", NotEqual: "notequal",
}

// BinaryOps lists every BinaryOp.
func BinaryOps() []BinaryOp { return all[BinaryOp](len(binaryNames)) }

// Valid reports whether o is one of the listed functions.
func (o BinaryOp) Valid() bool { return o >= Add && o <= NotEqual }

// Takes reports whether o is a function of elements of type d.
func (o BinaryOp) Takes(d DType) bool { return o.Valid() && d.Valid() && (o != Pow || d.Float()) }

// Compares reports whether o gives 1 or 0.
func (o BinaryOp) Compares() bool { return o >= Less && o.Valid() }

// Rounded reports whether the result is right up to rounding only.
func (o BinaryOp) Rounded() bool { return o == Pow }

// String returns the name: "add".
func (o BinaryOp) String() string {
	if !o.Valid() {
		return fmt.Sprintf("BinaryOp(%d)", uint8(o))
	}
	return binaryNames[o]
}

// all lists the values of an enumeration that starts at 1.
func all[T ~uint8](n int) []T {
	list := make([]T, n-1)
	for i := range list {
		list[i] = T(i + 1)
	}
	return list
}
