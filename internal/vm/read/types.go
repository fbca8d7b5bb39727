package read

import (
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Types are the types of operations of Gorgonia v0.9.18 that become typed operations, by name.
var Types = map[string]Type{
	"readOp": {Fields: []string{"into *gorgonia.Value"}},

	"elemUnaryOp": {
		Fields: []string{"ʘUnaryOperator gorgonia.ʘUnaryOperator", "argTensor bool",
			"numericResult bool"},
		build: (*builder).unary,
	},
	"elemBinOp": {
		Fields: []string{"ʘBinaryOperator gorgonia.ʘBinaryOperator", "arg0 hm.Type", "arg1 hm.Type",
			"retSame bool"},
		build: (*builder).binary,
	},
	"minBetween": {build: func(b *builder) ir.ID { return b.pointwise(fuse.Minimum, b.dtype) }},
	"maxBetween": {build: func(b *builder) ir.ID { return b.pointwise(fuse.Maximum, b.dtype) }},
	"dtConvOp": {
		Fields: []string{"inshape tensor.Shape", "from tensor.Dtype", "to tensor.Dtype"},
		build: func(b *builder) ir.ID {
			return b.cast(program.Cast(&b.Builder, b.dtype, b.args[0]))
		},
	},

	"linAlgBinOp": {
		Fields: []string{"āBinaryOperator gorgonia.āBinaryOperator", "transA bool", "transB bool"},
		floats: true,
		build:  (*builder).product,
	},
	"tensordotOp": {
		Fields: []string{"aAxes []int", "bAxes []int", "aDims int", "bDims int", "retDims int"},
		floats: true,
		build:  (*builder).tensordot,
	},

	"sumOp": {
		Fields: []string{"along gorgonia.axes", "d int", "inputShape tensor.Shape"},
		build:  func(b *builder) ir.ID { return b.reduce(backend.Sum) },
	},
	"maxOp": {
		Fields: []string{"along gorgonia.axes", "d int"},
		build:  func(b *builder) ir.ID { return b.reduce(backend.Max) },
	},
	"sizeOp": {Fields: []string{"axis int", "d int", "val int"}, build: (*builder).size},
	"repeatOp": {Fields: []string{"along int", "inputShape tensor.Shape"},
		build: (*builder).repeat},

	"reshapeOp": {
		Fields: []string{"from tensor.Shape", "to tensor.Shape"},
		build:  func(b *builder) ir.ID { return b.reshape(b.args[0], b.shape) },
	},
	"transposeOp": {
		Fields: []string{"pattern []int", "d int"},
		build:  func(b *builder) ir.ID { return b.Permute(b.args[0], b.ints("pattern")...) },
	},
	"atOp": {Fields: []string{"coordinates gorgonia.coordinates", "d int"},
		build: (*builder).at},
	"diagFlatOp": {build: (*builder).diagonal},
	"sliceOp": {Fields: []string{"Slice tensor.Slice", "along int", "a int", "d int"},
		build: (*builder).slice},
	"sliceIncrOp": {Fields: []string{"sliceOp *gorgonia.sliceOp"}, build: (*builder).unslice},
	"concatOp": {Fields: []string{"axis int", "d int", "children int"},
		build: (*builder).concat},
	"byIndicesOp": {Fields: []string{"axis int"}, build: func(b *builder) ir.ID {
		return b.gatherAxis(b.args[0], b.args[1], b.int("axis"))
	}},
	"byIndicesOpDiffOp": {Fields: []string{"byIndicesOp *gorgonia.byIndicesOp"},
		build: func(b *builder) ir.ID {
			return b.gatherGrad(b.args[1], b.args[2], b.int("axis"))
		}},

	"softmaxOp": {
		Fields: []string{"shape tensor.Shape", "axis int", "isLog bool"},
		floats: true,
		build:  (*builder).softmax,
	},
	"softmaxDiffOp": {Fields: []string{"softmaxOp *gorgonia.softmaxOp"},
		build: (*builder).softmaxGrad},

	"im2colOp": {
		Fields: im2colFields,
		floats: true,
		build:  (*builder).im2col,
	},
	"col2imOp": {
		floats: true,
		Fields: []string{"unpaddedB int", "unpaddedC int", "unpaddedH int", "unpaddedW int",
			"im2colOp gorgonia.im2colOp"},
		build: func(b *builder) ir.ID {
			return b.Add(ir.Col2Im{Window: b.window()}, b.shape, b.dtype, b.args[0])
		},
	},
	"maxPoolOp": {Fields: poolFields, floats: true, build: func(b *builder) ir.ID {
		return b.Add(ir.MaxPool{Window: b.poolWindow()}, b.shape, b.dtype, b.args[0])
	}},
	"maxPoolDiffOp": {Fields: []string{"maxPoolOp gorgonia.maxPoolOp"}, floats: true,
		build: func(b *builder) ir.ID {
			return b.Add(ir.MaxPoolGrad{Window: b.poolWindow()}, b.shape, b.dtype, b.args[0],
				b.args[2])
		}},
	"avgPoolOp": {Fields: poolFields, floats: true, build: (*builder).stockAveragePool},
	"avgPoolDiffOp": {
		Fields: []string{"avgPoolOp gorgonia.avgPoolOp"},
		floats: true,
		build:  (*builder).stockAveragePoolGrad,
	},
	"BatchNormOp": {Fields: batchNormFields, floats: true, build: (*builder).batchNorm},
	"batchnormDiffOp": {Fields: []string{"BatchNormOp *gorgonia.BatchNormOp"},
		build: (*builder).batchNormGrad},
	"GroupNormOp": {
		floats: true,
		Fields: []string{"numGroups int", "numChannels int", "epsilon float64",
			"mean *tensor.Dense", "rstd *tensor.Dense"},
		build: (*builder).groupNorm,
	},
	"groupNormDiffOp": {Fields: []string{"GroupNormOp *gorgonia.GroupNormOp"},
		build: (*builder).groupNormGrad},
	"globalAveragePoolOp": {floats: true, build: (*builder).globalAverage},
	"upsampleOp":          {Fields: []string{"stride int"}, build: (*builder).upsample},
	"upsampleDiffOp": {Fields: []string{"upsampleOp gorgonia.upsampleOp"},
		build: (*builder).upsampleGrad},
}

var (
	im2colFields = []string{"h int", "w int", "padH int", "padW int", "strideH int", "strideW int",
		"dilationH int", "dilationW int"}
	poolFields = []string{
		"unpaddedB int", "unpaddedC int", "unpaddedH int", "unpaddedW int", "h int", "w int",
		"padNorth int", "padWest int", "padSouth int", "padEast int", "explicitPadding bool",
		"strideH int", "strideW int", "mask tensor.Tensor",
	}
	batchNormFields = []string{
		"momentum float64", "epsilon float64", "dims int", "runningMean *tensor.Dense",
		"runningVariance *tensor.Dense",
		"saveMean *tensor.Dense", "saveVariance *tensor.Dense", "alpha *tensor.Dense",
		"beta *tensor.Dense", "training bool",
	}
)

// unaryFuncs are the functions by the names that Gorgonia prints.
var unaryFuncs = map[string]fuse.Op{
	"abs": fuse.Abs, "sign": fuse.Sign, "ceil": fuse.Ceil, "floor": fuse.Floor, "sin": fuse.Sin,
	"cos": fuse.Cos,
	"exp": fuse.Exp, "ln": fuse.Log, "log2": fuse.Log2, "neg": fuse.Neg, "square": fuse.Square,
	"sqrt": fuse.Sqrt,
	"inv":  fuse.Inv, "invSqrt": fuse.InvSqrt, "cube": fuse.Cube, "tanh": fuse.Tanh,
	"sigmoid": fuse.Sigmoid,
	"log1p":   fuse.Log1p, "expm1": fuse.Expm1, "softplus": fuse.Softplus,
}

// binaryFuncs are the functions by the names that Gorgonia prints.
var binaryFuncs = map[string]fuse.Op{
	"+": fuse.Add, "-": fuse.Sub, "⊙": fuse.Mul, "÷": fuse.Div, "^": fuse.Pow,
	"<": fuse.Less, ">": fuse.Greater, "<=": fuse.LessEqual, ">=": fuse.GreaterEqual,
	"==": fuse.Equal, "!=": fuse.NotEqual,
}

func (b *builder) unary() ir.ID {
	f, ok := unaryFuncs[b.node.Op().String()]
	if !ok || !b.float() {
		return none
	}
	return b.Add(ir.Unary{Op: f}, b.of(b.args[0]).Shape, b.dtype, b.args[0])
}

// binary adds a function of two operands.
func (b *builder) binary() ir.ID {
	name, _, _ := strings.Cut(b.node.Op().String(), " ") // "+ false": retSame follows
	f, ok := binaryFuncs[name]
	if !ok {
		return none
	}
	if b.problem = b.undefined(f); b.problem != nil {
		return none
	}
	for _, meant := range []func(fuse.Op) ir.ID{b.rectified, b.ofPower} {
		if id := meant(f); id >= 0 {
			return id
		}
	}
	dtype := b.dtype
	if ir.Compares(f) && !b.bool("retSame") {
		dtype, b.dtype = backend.U8, b.of(b.args[0]).DType
	}
	id := b.pointwise(f, dtype)
	b.dtype = dtype
	return id
}

// undefined returns why Gorgonia's Do of other dtypes than floats does not compute a function of
// two operands, nil if it does.
func (b *builder) undefined(f fuse.Op) error {
	const convert = "convert them by gorgonia.ConvType"
	x, y := b.nodes[0], b.nodes[1]
	only := ""
	switch {
	case b.of(b.args[0]).DType.Float():
		return nil
	case x.Dtype() == tensor.Bool && f != fuse.Equal && f != fuse.NotEqual:
		only = "numbers only: " + convert
	case x.IsScalar() != y.IsScalar():
		only = "Float32 and Float64 only where one operand is a tensor and one a number: " +
			"make both tensors of one shape, or " + convert
	case f == fuse.Pow:
		only = "Float32 and Float64 only: " + convert
	default:
		return nil
	}
	return fmt.Errorf("%s: Gorgonia computes it for %s", stock.Operation(b.node), only)
}

// pointwise adds a function of two operands, of which one may be a number.
func (b *builder) pointwise(f fuse.Op, dtype backend.DType) ir.ID {
	if !b.float() {
		return none
	}
	x, y := b.expand(b.args[0], b.shape), b.expand(b.args[1], b.shape)
	if x < 0 || y < 0 {
		return none
	}
	return b.Add(ir.Binary{Op: f}, b.shape, dtype, x, y)
}

// The values of Gorgonia's āBinaryOperator.
const (
	matMul = iota
	matVecMul
	vecDot
	outerProd
	batchedMatMul
)

func (b *builder) product() ir.ID {
	if !b.float() {
		return none
	}
	op := ir.MatMul{TransA: b.bool("transA"), TransB: b.bool("transB")}
	x, y := b.args[0], b.args[1]
	m, n := b.of(x).Shape.Size(), b.of(y).Shape.Size()
	switch b.op.FieldByName("āBinaryOperator").Uint() {
	case matMul, batchedMatMul:
	case matVecMul:
		y, op.TransB = b.reshape(y, ir.Of(n, 1)), false
	case vecDot:
		x, y, op = b.reshape(x, ir.Of(1, m)), b.reshape(y, ir.Of(n, 1)), ir.MatMul{}
	case outerProd:
		x, y, op = b.reshape(x, ir.Of(m, 1)), b.reshape(y, ir.Of(1, n)), ir.MatMul{}
	default:
		return none
	}
	return b.matMul(op, x, y)
}

func (b *builder) matMul(op ir.MatMul, x, y ir.ID) ir.ID {
	shape, err := ir.Product(b.of(x).Shape, b.of(y).Shape, op)
	if err != nil {
		return none
	}
	return b.Add(op, shape, b.of(x).DType, x, y)
}

// tensordot moves the axes that are summed over together, and multiplies matrices.
func (b *builder) tensordot() ir.ID {
	if !b.float() {
		return none
	}
	aAxes, bAxes := b.ints("aAxes"), b.ints("bAxes")
	x, inner := b.matrix(b.args[0], aAxes, false)
	y, _ := b.matrix(b.args[1], bAxes, true)
	if inner == 0 {
		return none
	}
	return b.matMul(ir.MatMul{}, x, y)
}

// matrix returns x as a matrix, of which the axes that are summed over are the columns, or
// the rows if first; inner is their number.
func (b *builder) matrix(x ir.ID, summed []int, first bool) (id ir.ID, inner int) {
	shape := b.of(x).Shape
	var free []int
	rows, inner := 1, 1
	for axis := range shape.Len() {
		if slices.Contains(summed, axis) {
			inner *= shape.At(axis)
		} else {
			free = append(free, axis)
			rows *= shape.At(axis)
		}
	}
	if first {
		return b.reshape(b.Permute(x, slices.Concat(summed, free)...), ir.Of(inner, rows)), inner
	}
	return b.reshape(b.Permute(x, slices.Concat(free, summed)...), ir.Of(rows, inner)), inner
}

func (b *builder) reduce(f backend.ReduceOp) ir.ID {
	x := b.of(b.args[0])
	if !b.float() {
		return none
	}
	along := b.ints("along")
	slices.Sort(along)
	along = slices.Compact(along)
	if len(along) == 0 {
		for i := range x.Shape.Len() {
			along = append(along, i)
		}
	}
	return b.reduceAxes(f, b.args[0], along...)
}

func (b *builder) reduceAxes(f backend.ReduceOp, x ir.ID, axes ...int) ir.ID {
	shape, err := ir.Reduced(b.of(x).Shape, ir.Of(axes...))
	if err != nil {
		return none
	}
	if len(axes) == 0 {
		return x
	}
	return b.Add(ir.Reduce{Op: f, Axes: ir.Of(axes...)}, shape, b.of(x).DType, x)
}

func (b *builder) size() ir.ID {
	x, size := b.of(b.args[0]).Shape, 1
	if axis := b.int("axis"); x.Len() > 0 {
		if axis >= x.Len() {
			return none
		}
		size = x.At(axis)
	}
	return b.Add(ir.ScalarOf(float64(size)), ir.Dims{}, b.dtype)
}

// repeat repeats each element of an axis. Its second operand, how often, follows from the
// shapes.
func (b *builder) repeat() ir.ID {
	x := b.of(b.args[0])
	if x.Shape.Size() == 1 {
		return b.expand(b.args[0], b.shape)
	}
	along, shape := b.int("along"), x.Shape
	for shape.Len() <= along { // a vector gets the axis
		shape = shape.Insert(shape.Len(), 1)
	}
	if shape.Len() != b.shape.Len() || shape.With(along, 0) != b.shape.With(along, 0) ||
		shape.Len() == ir.MaxDims {
		return none
	}
	n, m := shape.At(along), b.shape.At(along)
	if n == 0 || m%n != 0 {
		return none
	}
	id := b.reshape(b.args[0], shape)
	if n == 1 {
		return b.broadcast(id, b.shape)
	}
	id = b.reshape(id, shape.Insert(along+1, 1))
	return b.reshape(b.broadcast(id, shape.Insert(along+1, m/n)), b.shape)
}

// sliceState is the slice that an operation had when it was read.
type sliceState struct {
	op interface {
		Start() int
		End() int
		Step() int
	}
	start, end, step int
}

func (s sliceState) changed() bool {
	return s.op.Start() != s.start || s.op.End() != s.end || s.op.Step() != s.step
}

// rangeOf returns the slice of a sliceOp or sliceIncrOp along an axis of length n: where it
// starts, its step, and how many elements it takes.
func (b *builder) rangeOf(n int) (start, step, count int) {
	op, ok := b.node.Op().(interface {
		Start() int
		End() int
		Step() int
	})
	if !ok || b.op.FieldByName("Slice").IsNil() {
		return 0, 1, n
	}
	s := sliceState{op, op.Start(), op.End(), op.Step()}
	b.slices = append(b.slices, s)
	if s.end <= s.start {
		return 0, 1, n
	}
	step = max(s.step, 1)
	return s.start, step, (min(s.end, n) - s.start + step - 1) / step
}

func (b *builder) slice() ir.ID {
	x := b.of(b.args[0])
	axis := b.int("along")
	if axis >= x.Shape.Len() {
		return none
	}
	start, step, n := b.rangeOf(x.Shape.At(axis))
	if n < 0 {
		return none
	}
	return b.Add(ir.Slice{Axis: axis, Start: start, Step: step}, x.Shape.With(axis, n), x.DType,
		b.args[0])
}

// at is one element: a slice along every axis.
func (b *builder) at() ir.ID {
	x := b.args[0]
	coordinates := b.ints("coordinates")
	if len(coordinates) != b.of(x).Shape.Len() {
		return none
	}
	for axis, i := range coordinates {
		v := b.of(x)
		if i < 0 || i >= v.Shape.At(axis) {
			return none // its Do says what is wrong
		}
		x = b.Add(ir.Slice{Axis: axis, Start: i, Step: 1}, v.Shape.With(axis, 1), v.DType, x)
	}
	return x
}

// diagonal puts the elements of x where a matrix, as a vector of its rows, has its diagonal.
func (b *builder) diagonal() ir.ID {
	n := b.of(b.args[0]).Shape.Size()
	if !b.float() || b.shape != ir.Of(n, n) {
		return none
	}
	return b.Add(ir.Unslice{Axis: 0, Start: 0, Step: n + 1}, ir.Of(n*n), b.dtype,
		b.reshape(b.args[0], ir.Of(n)))
}

// unslice is the gradient of slice. Its first operand only tells the shape.
func (b *builder) unslice() ir.ID {
	axis := b.int("along")
	if !b.float() || axis >= b.shape.Len() {
		return none
	}
	start, step, n := b.rangeOf(b.shape.At(axis))
	dy := b.expand(b.args[1], b.shape.With(axis, n))
	if dy < 0 {
		return none
	}
	return b.Add(ir.Unslice{Axis: axis, Start: start, Step: step}, b.shape, b.dtype, dy)
}

func (b *builder) concat() ir.ID {
	if len(b.args) == 1 {
		return b.args[0]
	}
	for _, a := range b.args {
		if b.of(a).Shape.Len() != b.shape.Len() {
			return none
		}
	}
	return b.Add(ir.Concat{Axis: b.int("axis")}, b.shape, b.dtype, b.args...)
}

// softmaxAxis returns the axis of a softmax, as its forward pass finds it. (Gorgonia's own
// backward pass takes another one for column vectors.)
func (b *builder) softmaxAxis() int {
	s := b.nodes[0].Shape()
	switch axis := b.int("axis"); {
	case axis >= 0:
		return axis
	case s.IsColVec() || s.IsVector() && !s.IsRowVec():
		return 0
	default:
		return s.Dims() - 1
	}
}

func (b *builder) softmax() ir.ID {
	if axis := b.softmaxAxis(); b.float() && axis >= 0 && axis < b.shape.Len() {
		return program.SoftMax(&b.Builder, b.args[0], axis, b.bool("isLog"))
	}
	return none
}

func (b *builder) softmaxGrad() ir.ID {
	y, dy := b.reshape(b.args[1], b.shape), b.reshape(b.args[2], b.shape)
	if axis := b.softmaxAxis(); b.float() && y >= 0 && dy >= 0 && axis >= 0 &&
		axis < b.shape.Len() {
		return program.SoftMaxGrad(&b.Builder, y, dy, axis, b.bool("isLog"))
	}
	return none
}

func (b *builder) window() ir.Window {
	return ir.Window{
		H: b.int("h"), W: b.int("w"), PadH: b.int("padH"), PadW: b.int("padW"),
		StrideH: b.int("strideH"), StrideW: b.int("strideW"),
		DilationH: b.int("dilationH"), DilationW: b.int("dilationW"),
	}
}

func (b *builder) im2col() ir.ID {
	if !b.float() {
		return none
	}
	return b.Add(ir.Im2Col{Window: b.window()}, b.shape, b.dtype, b.args[0])
}

// poolWindow returns the window of a pooling, which begins at the padding north and west, as the
// caller wrote. (With padding for four sides, Gorgonia begins at the padding of the other sides.)
func (b *builder) poolWindow() ir.Window {
	return ir.Window{
		H: b.int("h"), W: b.int("w"), PadH: b.int("padNorth"), PadW: b.int("padWest"),
		StrideH: b.int("strideH"), StrideW: b.int("strideW"), DilationH: 1, DilationW: 1,
	}
}

func (b *builder) globalAverage() ir.ID {
	x := b.of(b.args[0])
	if !b.float() || x.Shape.Len() != 4 {
		return none
	}
	sum := b.reshape(b.reduceAxes(backend.Sum, b.args[0], 2, 3), b.shape)
	n := b.Add(ir.ScalarOf(float64(x.Shape.At(2)*x.Shape.At(3))), ir.Dims{}, b.dtype)
	return b.Add(ir.Binary{Op: fuse.Div}, b.shape, b.dtype, sum, b.expand(n, b.shape))
}

// upsample repeats each pixel in both directions.
func (b *builder) upsample() ir.ID {
	x, n := b.of(b.args[0]).Shape, b.int("stride")+1
	cells := x.Insert(3, 1).Insert(5, 1)
	return b.broadcast(b.reshape(b.args[0], cells), cells.With(3, n).With(5, n))
}

func (b *builder) upsampleGrad() ir.ID {
	if !b.float() {
		return none
	}
	x, n := b.shape, b.int("stride")+1
	return b.reduceAxes(backend.Sum, b.reshape(b.args[2], x.Insert(3, n).Insert(5, n)), 3, 5)
}
