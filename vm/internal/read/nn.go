package read

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm/internal/ir"
)

// ours adds the value of an operation of package nn. Norms, activations and pools are made of
// operations that planning fuses, and forward and backward pass share what they both need.
func (b *builder) ours(o *nn.Op) ir.ID {
	if y, ok := o.Program(primitives{b}, valuesOf(b.args)...); ok {
		return ir.ID(y)
	}
	spec := o.Spec
	switch s := spec.(type) {
	case nn.CrossEntropySpec:
		return b.crossEntropy(s.Ignore)
	case nn.CrossEntropyGradSpec:
		return b.crossEntropyGrad(s.Ignore)
	case nn.ByIndicesSpec:
		return b.gather(b.args[0], b.args[1], s.Axis)
	case nn.ByIndicesGradSpec:
		return b.gatherGrad(b.args[0], b.args[1], s.Axis)
	}
	if id := b.moved(spec); id >= 0 || !b.float() {
		return id
	}
	x := b.args[0]
	switch s := spec.(type) {
	case nn.SoftMaxSpec:
		return b.add(ir.SoftMax{Axis: s.Axis, Log: s.Log}, b.shape, b.dtype, x)
	case nn.SoftMaxGradSpec:
		return b.add(ir.SoftMaxGrad{Axis: s.Axis, Log: s.Log}, b.shape, b.dtype, x, b.args[1])
	case nn.DropoutSpec:
		return b.dropout(s)
	case nn.LayerNormSpec:
		z, _ := b.normalized(x, s.Epsilon, b.last(x))
		return b.two(fuse.Add, b.two(fuse.Mul, z, b.args[1]), b.args[2])
	case nn.LayerNormGradSpec:
		return b.normalizedGrad(x, b.two(fuse.Mul, b.args[2], b.args[1]), s.Epsilon, b.last(x))
	case nn.LayerNormGainGradSpec:
		z, _ := b.normalized(x, s.Epsilon, b.last(x))
		return b.sumRows(b.two(fuse.Mul, b.args[1], z))
	case nn.LayerNormBiasGradSpec:
		return b.sumRows(x)
	case nn.NormSpec:
		return b.norm(s)
	case nn.NormGradSpec:
		return b.normGrad(s)
	}
	return b.products(spec)
}

// moved adds the value of an operation that moves elements of any dtype.
func (b *builder) moved(spec nn.Spec) ir.ID {
	x := b.args[0]
	switch s := spec.(type) {
	case nn.SliceSpec:
		return b.add(ir.Slice{Axis: s.Axis, Start: s.Start, Step: s.Step}, b.shape, b.dtype, x)
	case nn.UnsliceSpec:
		return b.add(ir.Unslice{Axis: s.Axis, Start: s.Start, Step: s.Step}, b.shape, b.dtype, x)
	case nn.ConcatSpec:
		if len(b.args) == 1 {
			return x
		}
		return b.add(ir.Concat{Axis: s.Axis}, b.shape, b.dtype, b.args...)
	}
	return none
}

// local is an operation of package ops that may give part of its operand, from index start of an axis on, and
// communicate nothing.
type local interface {
	Local() (axis, start int, ok bool)
}

func (b *builder) local(o local) ir.ID {
	axis, start, ok := o.Local()
	switch x := b.args[0]; {
	case !ok:
		return none
	case b.of(x).Shape == b.shape:
		return x
	default:
		return b.add(ir.Slice{Axis: axis, Start: start, Step: 1}, b.shape, b.dtype, x)
	}
}

// gather takes the elements of an axis of x that indices name: the axis becomes those of indices.
func (b *builder) gather(x, indices ir.ID, axis int) ir.ID {
	shape := b.of(x).Shape
	if !b.of(x).DType.Float() || axis >= shape.Len() {
		return none
	}
	n := b.of(indices).Shape.Size()
	return b.add(ir.Gather{Axis: axis}, shape.With(axis, n), b.dtype, x, b.reshape(indices, ir.Of(n)))
}

// gatherGrad is the gradient of gather by x, which has the shape of the node.
func (b *builder) gatherGrad(dy, indices ir.ID, axis int) ir.ID {
	if !b.of(dy).DType.Float() || axis >= b.shape.Len() {
		return none
	}
	n := b.of(indices).Shape.Size()
	if dy = b.reshape(dy, b.shape.With(axis, n)); dy < 0 {
		return none
	}
	return b.add(ir.GatherGrad{Axis: axis}, b.shape, b.dtype, dy, b.reshape(indices, ir.Of(n)))
}

// products adds products and pools.
func (b *builder) products(spec nn.Spec) ir.ID {
	x := b.args[0]
	switch s := spec.(type) {
	case nn.BatchedMatMulSpec:
		return b.matMul(ir.MatMul{TransA: s.TransA, TransB: s.TransB}, x, b.args[1])
	case nn.AttentionSpec:
		return b.attention(s)
	case nn.AttentionGradSpec:
		return b.attentionGrad(s)
	case nn.OuterProdSpec:
		m, n := b.shape.At(0), b.shape.At(1)
		return b.matMul(ir.MatMul{}, b.reshape(x, ir.Of(m, 1)), b.reshape(b.args[1], ir.Of(1, n)))
	case nn.MatVecSpec:
		n := b.of(b.args[1]).Shape.Size()
		return b.matMul(ir.MatMul{TransA: s.Trans}, x, b.reshape(b.args[1], ir.Of(n, 1)))
	case nn.AvgPool2DSpec:
		return b.averagePool(x, s)
	case nn.AvgPool2DGradSpec:
		return b.averagePoolGrad(x, s.Pool)
	}
	return none
}

// attention is what forward and backward pass share.
func (b *builder) attention(s nn.AttentionSpec) ir.ID {
	q := b.args[0]
	return b.add(ir.Attention{Causal: s.Causal, Scale: s.Scale}, b.of(q).Shape, b.dtype, q, b.args[1], b.args[2])
}

// attentionGrad is one of the results of an operation that the gradients share.
func (b *builder) attentionGrad(s nn.AttentionGradSpec) ir.ID {
	y := b.attention(s.Forward)
	q, k := b.of(b.args[0]).Shape, b.of(b.args[1]).Shape
	lse := b.add(ir.Result{Index: 1}, q.Without(3), ir.Statistics(b.dtype), y)
	dq := b.add(ir.AttentionGrad{Causal: s.Forward.Causal, Scale: s.Forward.Scale}, q, b.dtype, b.args[0], b.args[1], b.args[2], y, lse, b.args[4])
	if s.Of == 0 {
		return dq
	}
	return b.add(ir.Result{Index: s.Of}, k, b.dtype, dq)
}

// one adds a function of one operand.
func (b *builder) one(f fuse.Op, x ir.ID) ir.ID {
	return b.add(ir.Unary{Op: f}, b.of(x).Shape, b.dtype, x)
}

// two adds a function of x and y, whose axes of length 1 are repeated to the shape of x; y may have
// fewer axes than x, which are the last ones then.
func (b *builder) two(f fuse.Op, x, y ir.ID) ir.ID {
	shape, own := b.of(x).Shape, b.of(y).Shape
	for own.Len() < shape.Len() {
		own = own.Insert(0, 1)
	}
	return b.add(ir.Binary{Op: f}, shape, b.dtype, x, b.broadcast(b.reshape(y, own), shape))
}

// with adds a function of x and a number.
func (b *builder) with(f fuse.Op, x ir.ID, number float64) ir.ID {
	return b.two(f, x, b.add(ir.ScalarOf(number), ir.Dims{}, b.dtype))
}

// sumRows adds the sum over all axes but the last.
func (b *builder) sumRows(x ir.ID) ir.ID {
	var axes []int
	for axis := range b.of(x).Shape.Len() - 1 {
		axes = append(axes, axis)
	}
	return b.reduceAxes(backend.Sum, x, axes...)
}

func poolWindowOf(s nn.AvgPool2DSpec) ir.Window {
	return ir.Window{
		H: s.Kernel[0], W: s.Kernel[1], PadH: s.Pad[0], PadW: s.Pad[1],
		StrideH: s.Stride[0], StrideW: s.Stride[1], DilationH: 1, DilationW: 1,
	}
}

// averagePool takes means of patches; if there is one window, of the image.
func (b *builder) averagePool(x ir.ID, s nn.AvgPool2DSpec) ir.ID {
	image, size := b.of(x).Shape, s.Kernel[0]*s.Kernel[1]
	if s.Pad == [2]int{} && s.Kernel == [2]int{image.At(2), image.At(3)} {
		return b.reshape(b.with(fuse.Mul, b.reduceAxes(backend.Sum, x, 2, 3), 1/float64(size)), b.shape)
	}
	channels, rows, columns := b.shape.At(1), b.shape.At(2), b.shape.At(3)
	patches := b.add(ir.Im2Col{Window: poolWindowOf(s)}, ir.Of(b.shape.At(0), rows, columns, channels*size), b.dtype, x)
	sum := b.reduceAxes(backend.Sum, b.reshape(patches, ir.Of(b.shape.At(0), rows, columns, channels, size)), 4)
	return b.permute(b.with(fuse.Mul, sum, 1/float64(size)), 0, 3, 1, 2)
}

// stockPool returns what Gorgonia's AveragePool2D means, which is nn.AvgPool2D: its own Do divides
// by the width of the image. Where the padding differs between sides it runs by its Do.
func (b *builder) stockPool() (s nn.AvgPool2DSpec, ok bool) {
	s = nn.AvgPool2DSpec{
		Kernel: [2]int{b.int("h"), b.int("w")},
		Pad:    [2]int{b.int("padNorth"), b.int("padWest")},
		Stride: [2]int{b.int("strideH"), b.int("strideW")},
	}
	return s, s.Pad == [2]int{b.int("padSouth"), b.int("padEast")}
}

func (b *builder) stockAveragePool() ir.ID {
	if s, ok := b.stockPool(); ok {
		return b.averagePool(b.args[0], s)
	}
	return none
}

func (b *builder) stockAveragePoolGrad() ir.ID {
	if s, ok := b.stockPool(); ok {
		return b.averagePoolGrad(b.args[2], s)
	}
	return none
}

// averagePoolGrad gives every pixel of a patch its share of dy.
func (b *builder) averagePoolGrad(dy ir.ID, s nn.AvgPool2DSpec) ir.ID {
	size := s.Kernel[0] * s.Kernel[1]
	share := b.with(fuse.Mul, dy, 1/float64(size))
	if s.Pad == [2]int{} && s.Kernel == [2]int{b.shape.At(2), b.shape.At(3)} {
		return b.broadcast(share, b.shape)
	}
	share = b.permute(share, 0, 2, 3, 1)
	shape := b.of(share).Shape
	patches := b.broadcast(b.reshape(share, shape.Insert(4, 1)), shape.Insert(4, size))
	patches = b.reshape(patches, shape.With(3, shape.At(3)*size))
	return b.add(ir.Col2Im{Window: poolWindowOf(s)}, b.shape, b.dtype, patches)
}
