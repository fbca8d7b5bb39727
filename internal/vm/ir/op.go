package ir

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Op is one operation: one of the structs of this file. All are comparable, and equal ones
// compute the same from the same operands, except those that have an effect ([Effect]).
type Op interface {
	// String names the operation and its parameters, for plans and messages.
	String() string
}

// Values that come from outside.
type (
	// Input is the value of the graph's variable number Index, bound before each run.
	Input struct{ Index int }
	// Constant is a constant tensor of the graph, number Index.
	Constant struct{ Index int }
	// Scalar is a constant number. Bits encode it as a float64, whatever the dtype.
	Scalar struct{ Bits uint64 }
	// State is vector number Vector that is kept for the graph's variable number Input, as the run
	// before left it.
	State struct{ Input, Vector int }
	// Setting is number Index of those that are bound before a step, repeated.
	Setting struct{ Index int }
	// PartialSum is a sum of some runs of gradient number Index, as the run before left it: number
	// Vector of those that ranks exchange, or of the Inner ones that are added to these.
	PartialSum struct {
		Index, Vector int
		Inner         bool
	}
)

// Views: results that share the memory of their operand.
type (
	// Reshape keeps the elements in row-major order. If the operand's strides do not allow a
	// view, planning puts a Copy before it.
	Reshape struct{}
	// Permute makes axis i of the result from axis Axes[i] of x.
	Permute struct{ Axes Dims }
	// Slice takes elements Start, Start+Step, ... of an axis, as many as the result has.
	Slice struct{ Axis, Start, Step int }
	// Broadcast repeats axes of length 1. Operand and result have the same number of axes.
	Broadcast struct{}
)

// Result is what the operation of its operand gives besides: its result number Index, from 1 on.
type Result struct{ Index int }

// Element by element.
type (
	// Unary is y = f(x).
	Unary struct{ Op fuse.Op }
	// Binary is z = f(x, y), all of one shape. Comparisons give the dtype of the result:
	// that of the operands, or U8 for booleans.
	Binary struct{ Op fuse.Op }
	// Copy is y = x, in row-major order.
	Copy struct{}
	// Cast converts between dtypes; floats become integers by truncation.
	Cast struct{}
	// Locate is, in I64, the number of the element along Axis where x is not 0, and the length of
	// the axis elsewhere.
	Locate struct{ Axis int }
	// Select is a where the label l is the number of the element along Axis, b elsewhere: of
	// operands l, a, b of one shape. Labels are integers.
	Select struct{ Axis int }
	// Where is a where c is not 0, b elsewhere: of operands c, a, b of one shape.
	Where struct{}
	// Dropout is x / (1-P) where the random number of the element is at least P, and 0 elsewhere:
	// of operands x, step and first sample, which are integers, of one shape. The number comes from
	// fuse.Uniform, with the first axis as samples.
	Dropout struct {
		P        float64
		Seed, Op uint32
	}
)

// Reductions and rearrangements.
type (
	// Reduce combines (by Sum, Max or Min) the elements along Axes, which the result does not have.
	Reduce struct {
		Op   backend.ReduceOp
		Axes Dims
	}
	// Unslice is the gradient of Slice: zeros of the result's shape, with x at the elements
	// that Slice takes.
	Unslice struct{ Axis, Start, Step int }
	// Concat joins its operands along an axis.
	Concat struct{ Axis int }
	// Gather takes the elements of an axis of x that a list of integers names: of operands x and
	// list, which has one axis. Where an integer is out of range, the result is NaN.
	Gather struct{ Axis int }
	// GatherGrad is dx of Gather from dy and the list: it adds dy, in the order of the list, to the
	// elements that were taken.
	GatherGrad struct{ Axis int }
	// Put is x with other elements of an axis, those that a list of integers names, in the order of
	// the list: of operands x, list and elements. Integers out of range name none. Planning writes
	// over x.
	Put struct{ Axis int }
)

// Products.
type (
	// MatMul is c = op(a) op(b) with op the transposition of the last two axes if set. Axes
	// before the last two are equal: one product for each entry of them. Operands may be BF16 where
	// the result is F32. TF32 permits a device to round F32 operands to 10 bits of mantissa.
	MatMul struct{ TransA, TransB, TF32 bool }
)

// Layers.
type (
	// Attention has the meaning of kernels.Attention, of q [B, H, Queries, Size], k [B, G, Keys,
	// Size] and v [B, G, Keys, ValueSize], of a mask whose axes are B, H, Queries and Keys or 1,
	// and of lengths [B]: y [B, H, Queries, ValueSize], and lse [B, H, Queries] as result 1.
	Attention struct {
		Causal         bool
		Appended       bool
		Window         int
		Scale, SoftCap float64
		Mask           bool // is an operand
		Lengths        bool // likewise
		Starts         bool // likewise, and not with lengths
	}
	// AttentionGrad is the gradient of Attention from q, k, v, y, lse, dy, mask and lengths: dq,
	// and dk and dv as results 1 and 2.
	AttentionGrad Attention
	// LSTM has the meaning of kernels.LSTM, of the input's share [Steps*Batch, 4*Size], h0 and c0
	// [Batch, Size], and weights [4*Size, Size], with products in a precision: all [Steps+2, Batch,
	// Size], what is kept [Steps, 5, Batch, Size] as result 1, and in BF16 all rounded as result 2.
	// Grad is its gradient from all, what is kept, dy [Steps, Batch, Size], dc [Batch, Size] and
	// weights: of the gates' operands [(Steps+1)*Batch, 4*Size], and in BF16 the same rounded as
	// result 1.
	LSTM struct {
		Grad, Reverse bool
		Precision     Precision
	}
	// Window says which elements of an image [.., H, W] an operation sees at each place.
	Window struct {
		H, W int // of the kernel
		// before the first row and column; rows and columns outside are zeros
		PadH, PadW int
		// behind the last row and column, more than before the first
		MoreH, MoreW         int
		StrideH, StrideW     int
		DilationH, DilationW int
	}
	// Im2Col makes of images [B, C, H, W] their patches [B, OH, OW, C*KH*KW].
	Im2Col struct{ Window Window }
	// Col2Im is the gradient of Im2Col: it adds patches up to images.
	Col2Im struct{ Window Window }
	// Convolution is y [B, L, OH, OW] of images x [B, C, H, W] and filters w [L, C/Groups, KH, KW],
	// dx of dy and w, or dw of x and dy: see kernels.Convolution. Planning makes it of products of
	// patches, too. TF32 means what it means in MatMul. With ChannelsLast all three have the axes
	// 0, 2, 3 and 1.
	Convolution struct {
		Pass         kernels.Pass
		Window       Window
		Groups       int // 0 is 1
		TF32         bool
		ChannelsLast bool
	}
	// MaxPool is the largest element of each window inside of the image: [B, C, H, W] to [B, C, OH,
	// OW]. NaN is the largest. Rectified is the pool of Relu of x.
	MaxPool struct {
		Window    Window
		Rectified bool
	}
	// MaxPoolGrad gives dy to the first largest element of each window, or to the last NaN, from x
	// and dy. Rectified is the gradient by x of the rectified one.
	MaxPoolGrad struct {
		Window    Window
		Rectified bool
	}
)

// What the ranks that train together have in common.
type (
	// AllReduce is the sum of gradient number Index over all ranks, each of which has the sums of
	// some runs: one in its order, or those of its branches in the association [backend.Tree].
	AllReduce struct{ Index int }
	// AllGather is the variable of gradient number Index, of which each rank has some elements,
	// this one x or none, rounded to the dtype of the result.
	AllGather struct{ Index int }
)

// Opaque is an operation that only the graph knows: its number Index. It runs always, and in the
// order of the graph: where its operands are if it is Placed, else by its Do method on host
// tensors. One that Carries takes elements of F32 or of BF16: it gives each of them a place, or
// adds those of several ranks.
type Opaque struct {
	Index           int
	Name            string
	Placed, Carries bool
}

// String implements [Op].
func (o Input) String() string { return fmt.Sprintf("input %d", o.Index) }

// String implements [Op].
func (o Constant) String() string { return fmt.Sprintf("constant %d", o.Index) }

// String implements [Op].
func (o Scalar) String() string { return fmt.Sprintf("scalar %v", o.Float()) }

// String implements [Op].
func (o State) String() string { return fmt.Sprintf("state %d of input %d", o.Vector, o.Input) }

// String implements [Op].
func (o Setting) String() string { return fmt.Sprintf("setting %d", o.Index) }

// String implements [Op].
func (o PartialSum) String() string {
	inner := ""
	if o.Inner {
		inner = "inner "
	}
	return fmt.Sprintf("%ssum %d of gradient %d", inner, o.Vector, o.Index)
}

// String implements [Op].
func (o AllReduce) String() string { return fmt.Sprintf("all-reduce %d", o.Index) }

// String implements [Op].
func (o AllGather) String() string { return fmt.Sprintf("all-gather %d", o.Index) }

// String implements [Op].
func (Reshape) String() string { return "reshape" }

// String implements [Op].
func (o Permute) String() string { return "permute" + o.Axes.String() }

// String implements [Op].
func (o Slice) String() string {
	return fmt.Sprintf("slice axis %d from %d step %d", o.Axis, o.Start, o.Step)
}

// String implements [Op].
func (Broadcast) String() string { return "broadcast" }

// String implements [Op].
func (o Unary) String() string { return o.Op.String() }

// String implements [Op].
func (o Binary) String() string { return o.Op.String() }

// String implements [Op].
func (Copy) String() string { return "copy" }

// String implements [Op].
func (Cast) String() string { return "cast" }

// String implements [Op].
func (o Locate) String() string { return fmt.Sprintf("locate axis %d", o.Axis) }

// String implements [Op].
func (o Select) String() string { return fmt.Sprintf("select axis %d", o.Axis) }

// String implements [Op].
func (Where) String() string { return "where" }

// String implements [Op].
func (o Dropout) String() string { return fmt.Sprintf("dropout %v #%d", o.P, o.Op) }

// String implements [Op].
func (o Reduce) String() string { return fmt.Sprintf("reduce-%v over %v", o.Op, o.Axes) }

// String implements [Op].
func (o Unslice) String() string {
	return fmt.Sprintf("unslice axis %d from %d step %d", o.Axis, o.Start, o.Step)
}

// String implements [Op].
func (o Concat) String() string { return fmt.Sprintf("concat axis %d", o.Axis) }

// String implements [Op].
func (o Gather) String() string { return fmt.Sprintf("gather axis %d", o.Axis) }

// String implements [Op].
func (o GatherGrad) String() string { return fmt.Sprintf("gather-grad axis %d", o.Axis) }

// String implements [Op].
func (o Put) String() string { return fmt.Sprintf("put axis %d", o.Axis) }

// String implements [Op].
func (o MatMul) String() string {
	return "matmul " + letter(o.TransA) + letter(o.TransB) + tf32(o.TF32)
}

// String implements [Op].
func (o Attention) String() string { return o.name("attention") }

// String implements [Op].
func (o AttentionGrad) String() string { return Attention(o).name("attention-grad") }

// String implements [Op].
func (o LSTM) String() string {
	name := "lstm"
	if o.Grad {
		name += "-grad"
	}
	if o.Reverse {
		name += " reverse"
	}
	return name + [...]string{F32: "", TF32: tf32(true), BF16: " bf16"}[o.Precision]
}

// String implements [Op].
func (o Result) String() string { return fmt.Sprintf("result %d", o.Index) }

// String implements [Op].
func (o Im2Col) String() string { return "im2col " + o.Window.String() }

// String implements [Op].
func (o Col2Im) String() string { return "col2im " + o.Window.String() }

// String implements [Op].
func (o Convolution) String() string {
	groups := ""
	if o.Groups > 1 {
		groups = fmt.Sprintf(" in %d groups", o.Groups)
	}
	last := ""
	if o.ChannelsLast {
		last = " channels last"
	}
	return o.Pass.String() + " " + o.Window.String() + groups + tf32(o.TF32) + last
}

// String implements [Op].
func (o MaxPool) String() string { return rectified("maxpool", o.Rectified) + o.Window.String() }

// String implements [Op].
func (o MaxPoolGrad) String() string {
	return rectified("maxpool-grad", o.Rectified) + o.Window.String()
}

// String implements [Op].
func (o Opaque) String() string {
	if o.Placed {
		return o.Name
	}
	return "host " + o.Name
}

func tf32(on bool) string {
	if on {
		return " tf32"
	}
	return ""
}

// letter is BLAS's for a transposition.
func letter(transposed bool) string {
	if transposed {
		return "T"
	}
	return "N"
}

func rectified(name string, relu bool) string {
	if relu {
		name = "relu-" + name
	}
	return name + " "
}

// Rounded returns which result of an operation is its first one in BF16, 0 for none.
func Rounded(op Op) int {
	switch o, _ := op.(LSTM); {
	case o.Precision != BF16:
		return 0
	case o.Grad:
		return 1
	}
	return 2
}

func (o Attention) name(name string) string {
	if o.Causal {
		name += " causal"
	}
	if o.Appended {
		name += " appended"
	}
	if o.Window > 0 {
		name += fmt.Sprintf(" window %d", o.Window)
	}
	if o.Starts {
		name += " from starts"
	}
	if o.Mask {
		name += " masked"
	}
	return name
}

// Hiding returns the operation, of attention and of its gradient, and which of its operands are the
// mask, and the lengths or the starts: -1 for none.
func Hiding(op Op) (o Attention, mask, counts int) {
	at := 3
	switch op := op.(type) {
	case Attention:
		o = op
	case AttentionGrad:
		o, at = Attention(op), 6
	}
	mask, counts = -1, -1
	if o.Mask {
		mask = at
		at++
	}
	if o.Lengths || o.Starts {
		counts = at
	}
	return o, mask, counts
}

// String returns the sizes: "3x3 pad 1,1 stride 1,1".
func (w Window) String() string {
	s := fmt.Sprintf("%dx%d pad %d,%d stride %d,%d", w.H, w.W, w.PadH, w.PadW, w.StrideH, w.StrideW)
	if w.MoreH != 0 || w.MoreW != 0 {
		s += fmt.Sprintf(" pad behind %d,%d", w.PadH+w.MoreH, w.PadW+w.MoreW)
	}
	if w.DilationH > 1 || w.DilationW > 1 {
		s += fmt.Sprintf(" dilation %d,%d", w.DilationH, w.DilationW)
	}
	return s
}

// Compares reports whether a function compares its operands.
func Compares(op fuse.Op) bool { return op >= fuse.Less && op <= fuse.NotEqual }
