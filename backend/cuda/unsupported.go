package cuda

import (
	"fmt"
	"reflect"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// runs are Gorgonia's operations that an engine runs, by the name of their type, with
// the condition on a node (nil: none). Operations that are not listed were not tried.
var runs = map[string]func(*gorgonia.ExprGraph, *gorgonia.Node) bool{
	"elemBinOp":      numeric,
	"elemUnaryOp":    known,
	"readOp":         ofScalars,
	"repeatOp":       nil,
	"sumOp":          nil,
	"maxOp":          nil,
	"reshapeOp":      nil,
	"transposeOp":    nil,
	"sizeOp":         nil,
	"minBetween":     nil,
	"maxBetween":     nil,
	"constantScalar": nil,
	"constantTensor": nil,
	"letOp":          nil,
}

// advice says what to do instead of frequent operations.
var advice = map[string]string{
	"linAlgBinOp": "matrix products are not computed on the device yet",
	"sliceOp":     "slices are read by the host: use an operation that splits, or reshape and sum",
	"sliceIncrOp": "the gradient of a slice is computed by the host",
	"atOp":        "single elements are read by the host: sum the tensor instead",
	"concatOp":    "the gradient of a concatenation is made of slices, which the host computes: use AllGather, or one larger tensor",
	"softmaxOp":   "build it from Exp, Sum, and HadamardDiv",
	"readOp":      "Read keeps a tensor across runs, whose memory ends with each: take the node's Value() after RunAll, and ToHost",
	"dropoutOp":   "multiply by a mask that was made with ToDevice",
	"randomOp":    "make random tensors on the host and move them with ToDevice",
	"im2colOp":    "convolutions are computed by the host",
	"maxPoolOp":   "pooling is computed by the host",
	"BatchNormOp": "build it from Mean, Square and Sqrt",
	"elemBinOp":   "a comparison gives booleans, which are not for the device: pass retSame = true",
	"elemUnaryOp": "there is no such function on the device",
	"byIndicesOp": "multiply by a one-hot tensor",
	"dtConvOp":    "convert the tensor before ToDevice",
	"diagFlatOp":  "build the tensor on the host and move it with ToDevice",
	"tensordotOp": "matrix products are not computed on the device yet",
}

// refusal returns why a node cannot run, "" if it can.
func refusal(g *gorgonia.ExprGraph, n *gorgonia.Node) string {
	op := n.Op()
	if op == nil || n.IsScalar() && ofScalars(g, n) {
		return ""
	}
	t := reflect.TypeOf(op)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.PkgPath() != "gorgonia.org/gorgonia" {
		return ""
	}
	holds, listed := runs[t.Name()]
	if listed && (holds == nil || holds(g, n)) {
		return ""
	}
	if text := advice[t.Name()]; text != "" {
		return text
	}
	return "what runs on the device is element-wise arithmetic, comparisons, Sum, Mean, Max, Reshape, Transpose and broadcasts"
}

// ofScalars reports whether the operands are all scalars. Those are Go values,
// not tensors.
func ofScalars(g *gorgonia.ExprGraph, n *gorgonia.Node) bool {
	operands := g.From(n.ID())
	for operands != nil && operands.Next() {
		if x, ok := operands.Node().(*gorgonia.Node); !ok || !x.IsScalar() {
			return false
		}
	}
	return true
}

// numeric reports whether the result is of numbers.
func numeric(_ *gorgonia.ExprGraph, n *gorgonia.Node) bool { return n.Dtype() != tensor.Bool }

// known reports whether the engine has the function of one element.
func known(_ *gorgonia.ExprGraph, n *gorgonia.Node) bool {
	name := fmt.Sprint(n.Op())
	return name != "sin" && name != "cos"
}

// unsupported returns the error of an operation that the engine lacks.
func unsupported(operation, instead string) error {
	return fmt.Errorf("cuda: %s: %w: %s", operation, backend.ErrUnsupported, instead)
}

// MatMul is not offered yet.
func (e *Engine) MatMul(_, _, _ tensor.Tensor) error {
	return unsupported("matrix product", advice["linAlgBinOp"])
}

// MatVecMul is not offered yet.
func (e *Engine) MatVecMul(_, _, _ tensor.Tensor) error {
	return unsupported("matrix-vector product", advice["linAlgBinOp"])
}

// Outer is not offered yet.
func (e *Engine) Outer(_, _, _ tensor.Tensor) error {
	return unsupported("outer product", advice["linAlgBinOp"])
}

// SoftMax is not offered yet.
func (e *Engine) SoftMax(tensor.Tensor, int, ...tensor.FuncOpt) (tensor.Tensor, error) {
	return nil, unsupported("softmax", advice["softmaxOp"])
}

// SoftMaxB is not offered yet.
func (e *Engine) SoftMaxB(_, _ tensor.Tensor, _ int, _ ...tensor.FuncOpt) (tensor.Tensor, error) {
	return nil, unsupported("gradient of softmax", advice["softmaxOp"])
}

// LogSoftMax is not offered yet.
func (e *Engine) LogSoftMax(tensor.Tensor, int, ...tensor.FuncOpt) (tensor.Tensor, error) {
	return nil, unsupported("log-softmax", advice["softmaxOp"])
}

// LogSoftMaxB is not offered yet.
func (e *Engine) LogSoftMaxB(_, _ tensor.Tensor, _ int, _ ...tensor.FuncOpt) (tensor.Tensor, error) {
	return nil, unsupported("gradient of log-softmax", advice["softmaxOp"])
}
