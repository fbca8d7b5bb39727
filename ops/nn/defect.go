package nn

import (
	"fmt"
	"reflect"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Defect is a node of a graph whose operation Gorgonia v0.9.18 computes wrongly.
type Defect struct {
	Node    *gorgonia.Node
	What    string // is wrong: "its gradient is divided by p, not by 1-p"
	Instead string // what to use: "nn.Dropout"
}

// String returns "Dropout{training=true}(): its gradient is divided by p, not by 1-p: use nn.Dropout".
func (d Defect) String() string { return fmt.Sprintf("%v: %s: use %s", d.Node.Op(), d.What, d.Instead) }

// Defects returns the nodes of a graph whose value is wrong, or whose gradient is wrong and was
// asked for with gorgonia.Grad. A machine that compiles a graph can warn of them; so can a program,
// before it runs one.
//
// It knows what docs/ops.md finds, with these exceptions. It cannot see that nodes were merged: a
// merged node looks like any other, so it reports slices only if their bounds can collide with
// others. LogSumExp and AveragePool1D are made of operations that are right. Operations that fail
// when they run report themselves.
func Defects(g *gorgonia.ExprGraph) []Defect {
	var found []Defect
	if g == nil {
		return nil
	}
	for _, n := range g.AllNodes() {
		op := structOf(n.Op())
		if !op.IsValid() || op.Type().PkgPath() != "gorgonia.org/gorgonia" {
			continue
		}
		s := suspect{n, op, operandsOf(n)}
		for _, r := range rules() {
			if r.of != op.Type().Name() {
				continue
			}
			if what := r.wrong(s); what != "" {
				found = append(found, Defect{n, what, r.instead})
			}
		}
	}
	return found
}

// structOf returns the struct of an operation, which may be behind a pointer.
func structOf(op gorgonia.Op) reflect.Value {
	v := reflect.ValueOf(op)
	if v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	if v.Kind() != reflect.Struct {
		return reflect.Value{}
	}
	return v
}

// operandsOf returns the operands of a node. It does not use ExprGraph.From, which gives those of
// another node once gorgonia.Log has replaced log(1 - sigmoid) somewhere in the graph.
func operandsOf(n *gorgonia.Node) gorgonia.Nodes {
	f := reflect.ValueOf(n).Elem().FieldByName("children")
	if !f.IsValid() || f.Type() != reflect.TypeFor[gorgonia.Nodes]() {
		return nil
	}
	return *(*gorgonia.Nodes)(f.Addr().UnsafePointer())
}

// suspect is a node with an operation of Gorgonia.
type suspect struct {
	node *gorgonia.Node
	op   reflect.Value // its struct
	x    gorgonia.Nodes
}

// int returns a field of the operation; Gorgonia exports none of them.
func (s suspect) int(name string) int { return int(s.op.FieldByName(name).Int()) }

// differentiated reports whether the gradient of the first operand was asked for.
func (s suspect) differentiated() bool { return len(s.x) > 0 && s.x[0].Deriv() != nil }

// rule is one defect.
type rule struct {
	of      string // the name of the operation's type
	instead string
	wrong   func(s suspect) string // what is wrong with the node, "" if nothing is
}

func rules() []rule {
	return []rule{
		{"elemUnaryOp", "gorgonia.Log and a division by math.Ln2", wrongGradient("log2", "its gradient is multiplied by ln 2, not divided")},
		{"elemUnaryOp", "gorgonia.Inverse of gorgonia.Sqrt", wrongGradient("invSqrt", "its gradient is wrong")},
		{"elemBinOp", "nn.Norm", wrongNorm},
		{"sliceOp", "nn.Slice or nn.Split", wrongSlice},
		{"tensordotOp", "gorgonia.Mul, or gorgonia.Sum of gorgonia.HadamardProd", wrongTensordot},
		{"atOp", "gorgonia.Slice", func(suspect) string { return "it has the shape of its operand, and no gradient" }},
		{"softmaxOp", "nn.SoftMax or nn.LogSoftMax with an axis", wrongSoftMax},
		{"sparsemaxOp", "Sparsemax between two gorgonia.Transpose", wrongSparsemax},
		{"dropoutDiffOp", "nn.Dropout", wrongDropout},
		{"avgPoolOp", "nn.AvgPool2D", wrongAvgPool},
		{"avgPoolDiffOp", "nn.AvgPool2D", func(suspect) string { return "the gradient of an average pool is wrong" }},
		{"maxPoolOp", "equal padding on both sides", wrongMaxPool},
		{"byIndicesOp", "nn.ByIndices", wrongByIndices},
		{"byIndicesOpDiffOp", "nn.ByIndices", wrongByIndicesGradient},
		{"ctcLossDiffOp", "gorgonia.ReductionSum", wrongCTC},
	}
}

// wrongGradient is for a function of one element.
func wrongGradient(function, what string) func(s suspect) string {
	return func(s suspect) string {
		if s.node.Op().String() == function && s.differentiated() {
			return what
		}
		return ""
	}
}

func wrongSlice(s suspect) string {
	bounds, ok := s.node.Op().(tensor.Slice)
	const distinct = 256 // the hash keeps the last byte of a bound
	switch {
	case !ok || s.op.FieldByName("Slice").IsNil():
		return ""
	case bounds.End() >= distinct:
		return "it is merged with slices of the same operand whose bounds differ by multiples of 256"
	case bounds.Step() > 1 && (bounds.End()-bounds.Start())%bounds.Step() != 0:
		return "its last element is missing, because the step does not divide the length"
	}
	return ""
}

func wrongTensordot(s suspect) string {
	if s.op.FieldByName("aAxes").Len() == s.int("aDims") && s.op.FieldByName("bAxes").Len() == s.int("bDims") {
		return "its value has shape (1), not that of a number"
	}
	return ""
}

func wrongSoftMax(s suspect) string {
	if shape := s.node.Shape(); len(shape) == 2 && shape[1] == 1 && shape[0] > 1 && s.int("axis") == -1 {
		return fmt.Sprintf("of shape %v it normalises the first axis, not the last", shape)
	}
	return ""
}

func wrongSparsemax(s suspect) string {
	if axis := s.int("axis"); axis != -1 && axis != len(s.node.Shape())-1 {
		return fmt.Sprintf("along axis %d it is wrong; it is right along the last one", axis)
	}
	return ""
}

func wrongDropout(s suspect) string {
	if p := s.op.FieldByName("probability").Float(); p != 0.5 {
		return fmt.Sprintf("the gradient of a dropout with probability %v is divided by it, not by %.6g", p, 1-p)
	}
	return ""
}

func wrongAvgPool(s suspect) string {
	padded := s.int("padNorth") != 0 || s.int("padSouth") != 0 || s.int("padWest") != 0 || s.int("padEast") != 0
	if padded || s.int("h") != s.int("strideH") || s.int("w") != s.int("strideW") {
		return "its value is wrong if windows overlap, leave gaps, or are padded"
	}
	return ""
}

func wrongMaxPool(s suspect) string {
	if s.int("padNorth") != s.int("padSouth") || s.int("padWest") != s.int("padEast") {
		return "its value is wrong if the padding differs between sides"
	}
	return ""
}

func wrongByIndices(s suspect) string {
	if axis := s.int("axis"); axis > 0 && len(s.node.Shape()) > 2 {
		return fmt.Sprintf("its value is wrong along axis %d of shape %v", axis, s.node.Shape())
	}
	return ""
}

func wrongByIndicesGradient(s suspect) string {
	if s.int("axis") > 0 || len(s.node.Shape()) == 1 {
		return "its gradient is wrong except along axis 0 of a matrix"
	}
	return ""
}

func wrongCTC(s suspect) string {
	if gorgonia.Reduction(s.op.FieldByName("reduction").Uint()) == gorgonia.ReductionMean {
		return "with ReductionMean its gradient is not divided by lengths and batch"
	}
	return ""
}
