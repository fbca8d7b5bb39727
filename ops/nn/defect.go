package nn

import (
	"fmt"
	"reflect"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/stock"
)

// Defect is a node of a graph whose operation Gorgonia v0.9.18 computes wrongly.
type Defect struct {
	Node    *gorgonia.Node
	What    string // is wrong: "its gradient is divided by p, not by 1-p"
	Instead string // what to use: "nn.Dropout"
	// Tape says that Gorgonia's own machines are wrong, and that a machine of package vm is right.
	// Where it is false, the graph itself is wrong, on every machine.
	Tape bool
}

// String returns "Dropout{training=true}(): its gradient is divided by p, not by 1-p: use
// nn.Dropout".
func (d Defect) String() string {
	if d.Node.Op() == nil {
		return fmt.Sprintf("%s: %s: use %s", stock.Label(d.Node), d.What, d.Instead)
	}
	return fmt.Sprintf("%v: %s: use %s", d.Node.Op(), d.What, d.Instead)
}

// Defects returns the nodes of a graph whose value is wrong, or whose gradient is wrong and was
// asked for with gorgonia.Grad. A machine that compiles a graph can warn of them; so can a program,
// before it runs one.
//
// It knows the defects in docs/ops.md, with these exceptions. A merged node looks like any other,
// so it reports slices only if their bounds can collide with others, and SoftMax, LogSoftMax and
// norms only if they are read more than once. The functions AveragePool1D, KeepDims and Unconcat
// leave no trace of what they were meant to be. Operations that fail when they run report
// themselves.
func Defects(g *gorgonia.ExprGraph) []Defect {
	if g == nil {
		return nil
	}
	s := newSurvey(g)
	var found []Defect
	for _, n := range s.nodes {
		found = append(found, s.node(n)...)
	}
	return append(append(found, s.gradTwice()...), s.overwritten()...)
}

// node returns the defects of one node that its operation and its readers show.
func (s *survey) node(n *gorgonia.Node) (found []Defect) {
	x := suspect{n, stock.Struct(n.Op()), stock.Operands(n), s}
	for _, r := range s.rules[stock.Name(n.Op())] { // none for operations of other packages
		if what := r.wrong(x); what != "" {
			found = append(found, Defect{n, what, r.instead, r.tape})
		}
	}
	return found
}

// suspect is a node with an operation of Gorgonia.
type suspect struct {
	node *gorgonia.Node
	op   reflect.Value // its struct
	x    gorgonia.Nodes
	in   *survey
}

// int returns a field of the operation; Gorgonia exports none of them.
func (s suspect) int(name string) int { return int(s.op.FieldByName(name).Int()) }

func (s suspect) ints(name string) (list []int) {
	for f, i := s.op.FieldByName(name), 0; i < f.Len(); i++ {
		list = append(list, int(f.Index(i).Int()))
	}
	return list
}

// differentiated reports whether the gradient of the first operand was asked for.
func (s suspect) differentiated() bool { return len(s.x) > 0 && s.x[0].Deriv() != nil }

// rule is one defect.
type rule struct {
	of      string // the name of the operation's type
	instead string
	tape    bool                   // Defect.Tape
	wrong   func(s suspect) string // what is wrong with the node, "" if nothing is
}

func rules() []rule {
	const logs = "gorgonia.Log and a division by math.Ln2"
	const roots = "gorgonia.Inverse of gorgonia.Sqrt"
	const copies = "a copy of the operand for each norm, such as its sum with 0"
	const affine = "variables of one number per channel: a scale of ones and a bias of zeros"
	const exps = "gorgonia.Log of gorgonia.Sum of gorgonia.Exp"
	const matrix = "gorgonia.Mul, or gorgonia.Sum of gorgonia.HadamardProd"
	const two = "a Reshape to three axes before it, or two reductions"
	return []rule{
		{"elemUnaryOp", logs, false,
			wrongGradient("log2", "its gradient is multiplied by ln 2, not divided")},
		{"elemUnaryOp", roots, false, wrongGradient("invSqrt", "its gradient is wrong")},
		{"elemUnaryOp", exps, false, wrongLogSumExp},
		{"elemBinOp", "nn.Norm", false, wrongNorm},
		{"linAlgBinOp", "nn.OuterProd", false, wrongOuterProd},
		{"sumOp", two, true, wrongReduction},
		{"maxOp", two, true, wrongReduction},
		{"sliceOp", "nn.Slice or nn.Split", false, wrongSlice},
		{"tensordotOp", matrix, true, wrongTensordot},
		{"atOp", "gorgonia.Slice", false, wrongAt},
		{"softmaxOp", "nn.SoftMax or nn.LogSoftMax with an axis", false, wrongSoftMax},
		{"softmaxOp", "nn.SoftMax and nn.LogSoftMax", false, mergedSoftMax},
		{"BatchNormOp", copies, false, mergedNorm("momentum or epsilon")},
		{"BatchNormOp", affine, false, randomNorm},
		{"GroupNormOp", copies, false, mergedNorm("epsilon")},
		{"GroupNormOp", "package vm", true, wrongGroupNorm},
		{"sparsemaxOp", "Sparsemax between two gorgonia.Transpose", false, wrongSparsemax},
		{"dropoutDiffOp", "nn.Dropout", false, wrongDropout},
		{"avgPoolOp", "nn.AvgPool2D", true, wrongAvgPool},
		{"avgPoolOp", "nn.AvgPool2D", true, unevenAvgPool},
		{"avgPoolDiffOp", "nn.AvgPool2D", true, wrongAvgPoolGradient},
		{"maxPoolOp", "nn.MaxPool2D", true, wrongMaxPool},
		{"byIndicesOp", "nn.ByIndices", true, wrongByIndices},
		{"byIndicesOpDiffOp", "nn.ByIndices", true, wrongByIndicesGradient},
		{"ctcLossDiffOp", "gorgonia.ReductionSum", false, wrongCTC},
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
		return "it is merged with slices of the same operand whose bounds differ by multiples of " +
			"256"
	case bounds.Step() > 1 && (bounds.End()-bounds.Start())%bounds.Step() != 0:
		return "its last element is missing, because the step does not divide the length"
	}
	return ""
}

func wrongTensordot(s suspect) string {
	if s.op.FieldByName("aAxes").Len() == s.int("aDims") &&
		s.op.FieldByName("bAxes").Len() == s.int("bDims") {
		return "its value has shape (1), not that of a number"
	}
	return ""
}

func wrongSoftMax(s suspect) string {
	if shape := s.node.Shape(); len(shape) == 2 && shape[1] == 1 && shape[0] > 1 &&
		s.int("axis") == -1 {
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
		return fmt.Sprintf("the gradient of a dropout with probability %v is divided by it, not "+
			"by %.6g", p, 1-p)
	}
	return ""
}

func wrongAt(suspect) string {
	return "it has no gradient, and in Gorgonia's machines the shape of its operand"
}

// wrongOuterProd is for gradients, which multiply the operands by matrices of another shape.
func wrongOuterProd(s suspect) string {
	const outerProd = 3
	if s.op.FieldByName("āBinaryOperator").Uint() == outerProd && s.node.Deriv() != nil {
		return "its gradient is wrong, or fails"
	}
	return ""
}

// wrongReduction follows Gorgonia's tensors, which reduce one axis after the other: along a middle
// axis they skip the wrong number of elements behind each block, unless there is one block or the
// axis has length 2.
func wrongReduction(s suspect) string {
	shape, along := s.x[0].Shape().Clone(), s.ints("along")
	slices.Sort(along)
	if len(along) == 0 || len(along) == len(shape) {
		return ""
	}
	for gone, axis := range along {
		at := axis - gone
		middle := at > 0 && at < len(shape)-1
		if middle && shape[at] != 2 && tensor.Shape(shape[1:at]).TotalSize() > 1 {
			return fmt.Sprintf("Gorgonia's machines reduce axis %d of shape %v wrongly", axis,
				s.x[0].Shape())
		}
		shape = slices.Delete(shape, at, at+1)
	}
	return ""
}

// wrongLogSumExp finds gorgonia.LogSumExp, which is made of operations that are right: the
// logarithm of Sum(Exp(x - m)) + m, where m is the largest x.
func wrongLogSumExp(s suspect) string {
	sum := s.x[0]
	if s.node.Op().String() != "ln" || !adds(sum) {
		return ""
	}
	parts := stock.Operands(sum)
	most := parts[1]
	if stock.Name(parts[0].Op()) != "sumOp" || stock.Name(most.Op()) != "maxOp" {
		return ""
	}
	exp := stock.Operands(parts[0])[0]
	if stock.Name(exp.Op()) != "elemUnaryOp" || exp.Op().String() != "exp" {
		return ""
	}
	less := stock.Operands(stock.Operands(exp)[0])
	if len(less) == 2 && less[1] == most && less[0] == stock.Operands(most)[0] {
		return "gorgonia.LogSumExp adds the largest element before the logarithm, not behind it"
	}
	return ""
}

// mergedSoftMax cannot know whether the readers of a node want the softmax or its logarithm.
func mergedSoftMax(s suspect) string {
	if n := s.in.uses(s.node); n > 1 {
		return fmt.Sprintf("it is read %d times, and Gorgonia merges SoftMax, LogSoftMax and "+
			"Log(SoftMax) of one operand: readers of one of them may get another", n)
	}
	return ""
}

// mergedNorm is for norms, whose nodes have one reader each: the product with the scale.
func mergedNorm(differ string) func(s suspect) string {
	return func(s suspect) string {
		if n := s.in.uses(s.node); n > 1 {
			return fmt.Sprintf("it is %d norms of one operand, which Gorgonia has merged: the "+
				"later ones get the %s of the first", n, differ)
		}
		return ""
	}
}

// randomNorm finds a batch norm whose scale or bias was nil, by the variable that Gorgonia has
// made.
func randomNorm(s suspect) string {
	of := func(suffix string) bool {
		return slices.ContainsFunc(s.in.nodes, func(n *gorgonia.Node) bool {
			return n.Op() == nil && n.Name() == s.x[0].Name()+suffix && n.Shape().Eq(s.node.Shape())
		})
	}
	for _, made := range []struct{ suffix, name string }{{"_γ", "scale"}, {"_β", "bias"}} {
		if of(made.suffix) {
			return "its " + made.name + " was nil: Gorgonia makes a random one, with a number " +
				"for each element of each sample"
		}
	}
	return ""
}

// wrongGroupNorm knows from how many elements on Gorgonia adds up the moments of more than two
// blocks.
func wrongGroupNorm(s suspect) string {
	const most = 263
	shape := s.x[0].Shape()
	if n := s.int("numGroups"); n > 0 && len(shape) > 1 && shape.TotalSize()/(shape[0]*n) > most {
		return fmt.Sprintf("Gorgonia's machines normalise groups of %d and more elements wrongly",
			most+1)
	}
	return ""
}

// wrongAvgPool knows that Gorgonia divides by the width of the image.
func wrongAvgPool(s suspect) string {
	if s.int("h")*s.int("w") != s.int("unpaddedW") && !s.uneven() {
		return "Gorgonia's machines divide by the width of the image, not by the size of the window"
	}
	return ""
}

func wrongAvgPoolGradient(suspect) string { return "the gradient of an average pool is wrong" }

func unevenAvgPool(s suspect) string {
	if s.uneven() {
		return "its value is wrong if the padding differs between sides"
	}
	return ""
}

// uneven reports whether the padding of a pool differs between sides.
func (s suspect) uneven() bool {
	return s.int("padNorth") != s.int("padSouth") || s.int("padWest") != s.int("padEast")
}

func wrongMaxPool(s suspect) string {
	if s.uneven() {
		return "Gorgonia's machines begin with the padding of the other side"
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
