package defects

import (
	"math"
	"reflect"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/stock"
)

// rule is one defect.
type rule struct {
	what, instead string                // as in Defect; what is the format of what wrong returns
	tape          bool                  // Defect.Tape
	wrong         func(s suspect) shown // nil if the node is right
}

// shown is what a message shows of a wrong node.
type shown = []any

// when returns what a message shows of a node that is wrong.
func when(wrong bool, show ...any) shown {
	if wrong {
		return append(shown{}, show...)
	}
	return nil
}

const (
	reductions = "a Reshape to three axes before it, or two reductions"
	copies     = "a copy of the operand for each norm, such as its sum with 0"
	merged     = "it is %d norms of one operand, which Gorgonia has merged: the later ones get the "
	middle     = "Gorgonia's machines reduce axis %d of shape %v wrongly"
)

// rules are the defects, by the name of the operation's type.
var rules = map[string][]rule{
	"elemUnaryOp": {
		{"its gradient is multiplied by ln 2, not divided",
			"gorgonia.Log and a division by math.Ln2", false, derived("log2")},
		{"its gradient is wrong", "gorgonia.Inverse of gorgonia.Sqrt", false, derived("invSqrt")},
		{"gorgonia.LogSumExp adds the largest element before the logarithm, not behind it",
			"gorgonia.Log of gorgonia.Sum of gorgonia.Exp", false, wrongLogSumExp},
	},
	"elemBinOp": {{"it sums x^%v, not |x|^%[1]v: with numbers below 0 it is wrong, or NaN",
		"nn.Norm", false, wrongNorm}},
	// its gradient multiplies the operands by matrices of another shape
	"linAlgBinOp": {{"its gradient is wrong, or fails", "nn.OuterProd", false,
		func(s suspect) shown {
			const outerProd = 3
			return when(s.op.FieldByName("āBinaryOperator").Uint() == outerProd &&
				s.node.Deriv() != nil)
		}}},
	"sumOp": {{middle, reductions, true, wrongReduction}},
	"maxOp": {{middle, reductions, true, wrongReduction}},
	"sliceOp": {
		{"it is merged with slices of the same operand whose bounds differ by multiples of 256",
			"nn.Slice or nn.Split", false,
			func(s suspect) shown { // the hash keeps the last byte of a bound
				bounds := s.bounds()
				return when(bounds != nil && bounds.End() >= 256)
			}},
		{"its last element is missing, because the step does not divide the length",
			"nn.Slice or nn.Split", false, func(s suspect) shown {
				x := s.bounds()
				return when(x != nil && x.End() < 256 && x.Step() > 1 &&
					(x.End()-x.Start())%x.Step() != 0)
			}},
	},
	"tensordotOp": {{"its value has shape (1), not that of a number",
		"gorgonia.Mul, or gorgonia.Sum of gorgonia.HadamardProd", true, func(s suspect) shown {
			return when(s.op.FieldByName("aAxes").Len() == s.int("aDims") &&
				s.op.FieldByName("bAxes").Len() == s.int("bDims"))
		}}},
	"atOp": {{"it has no gradient, and in Gorgonia's machines the shape of its operand",
		"gorgonia.Slice", false, always}},
	"softmaxOp": {
		{"of shape %v it normalises the first axis, not the last",
			"nn.SoftMax or nn.LogSoftMax with an axis", false, func(s suspect) shown {
				x := s.node.Shape()
				return when(len(x) == 2 && x[1] == 1 && x[0] > 1 && s.int("axis") == -1, x)
			}},
		// nobody knows whether readers want the softmax or its logarithm
		{"it is read %d times, and Gorgonia merges SoftMax, LogSoftMax and Log(SoftMax) of one " +
			"operand: readers of one of them may get another", "nn.SoftMax and nn.LogSoftMax",
			false, readTwice},
	},
	"BatchNormOp": {
		{merged + "momentum or epsilon of the first", copies, false, readTwice},
		{"its %s was nil: Gorgonia makes a random one, with a number for each element of each " +
			"sample", "variables of one number per channel: a scale of ones and a bias of zeros",
			false, randomNorm},
	},
	"GroupNormOp": {
		{merged + "epsilon of the first", copies, false, readTwice},
		{"Gorgonia's machines normalise groups of %d and more elements wrongly", "package vm", true,
			func(s suspect) shown { // it adds up the moments of more than two blocks
				const least = 264
				x, n := s.x[0].Shape(), s.int("numGroups")
				return when(n > 0 && len(x) > 1 && x.TotalSize()/(x[0]*n) >= least, least)
			}},
	},
	"sparsemaxOp": {{"along axis %d it is wrong; it is right along the last one",
		"Sparsemax between two gorgonia.Transpose", false, func(s suspect) shown {
			axis := s.int("axis")
			return when(axis != -1 && axis != len(s.node.Shape())-1, axis)
		}}},
	"dropoutDiffOp": {{"the gradient of a dropout with probability %v is divided by it, not by " +
		"%.6g", "nn.Dropout", false, func(s suspect) shown {
		p := s.op.FieldByName("probability").Float()
		return when(p != 0.5, p, 1-p)
	}}},
	"avgPoolOp": {
		{"Gorgonia's machines divide by the width of the image, not by the size of the window",
			"nn.AvgPool2D", true, func(s suspect) shown {
				return when(s.int("h")*s.int("w") != s.int("unpaddedW") && !s.uneven())
			}},
		{"its value is wrong if the padding differs between sides", "nn.AvgPool2D", true,
			func(s suspect) shown { return when(s.uneven()) }},
	},
	"avgPoolDiffOp": {{"the gradient of an average pool is wrong", "nn.AvgPool2D", true, always}},
	"maxPoolOp": {{"Gorgonia's machines begin with the padding of the other side", "nn.MaxPool2D",
		true, func(s suspect) shown { return when(s.uneven()) }}},
	"byIndicesOp": {{"its value is wrong along axis %d of shape %v", "nn.ByIndices", true,
		func(s suspect) shown {
			axis, shape := s.int("axis"), s.node.Shape()
			return when(axis > 0 && len(shape) > 2, axis, shape)
		}}},
	"byIndicesOpDiffOp": {{"its gradient is wrong except along axis 0 of a matrix", "nn.ByIndices",
		true, func(s suspect) shown {
			return when(s.int("axis") > 0 || len(s.node.Shape()) == 1)
		}}},
	"ctcLossDiffOp": {{"with ReductionMean its gradient is not divided by lengths and batch",
		"gorgonia.ReductionSum", false, func(s suspect) shown {
			reduction := gorgonia.Reduction(s.op.FieldByName("reduction").Uint())
			return when(reduction == gorgonia.ReductionMean)
		}}},
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

// bounds returns those of a slice, nil for all elements.
func (s suspect) bounds() tensor.Slice {
	bounds, ok := s.node.Op().(tensor.Slice)
	if !ok || s.op.FieldByName("Slice").IsNil() {
		return nil
	}
	return bounds
}

// uneven reports whether the padding of a pool differs between sides.
func (s suspect) uneven() bool {
	return s.int("padNorth") != s.int("padSouth") || s.int("padWest") != s.int("padEast")
}

func always(suspect) shown { return when(true) }

// derived is for a function of one element whose gradient was asked for.
func derived(function string) func(s suspect) shown {
	return func(s suspect) shown {
		return when(s.node.Op().String() == function && len(s.x) > 0 && s.x[0].Deriv() != nil)
	}
}

// readTwice is for operations that are merged. Norms have one reader each: the product with the
// scale.
func readTwice(s suspect) shown {
	n := s.in.uses(s.node)
	return when(n > 1, n)
}

// wrongReduction follows Gorgonia's tensors, which reduce one axis after the other: along a middle
// axis they skip the wrong number of elements behind each block, unless there is one block or the
// axis has length 2.
func wrongReduction(s suspect) shown {
	shape, list := s.x[0].Shape().Clone(), s.op.FieldByName("along")
	var along []int
	for i := range list.Len() {
		along = append(along, int(list.Index(i).Int()))
	}
	slices.Sort(along)
	if len(along) == 0 || len(along) == len(shape) {
		return nil
	}
	for gone, axis := range along {
		at := axis - gone
		if at > 0 && at < len(shape)-1 && shape[at] != 2 &&
			tensor.Shape(shape[1:at]).TotalSize() > 1 {
			return when(true, axis, s.x[0].Shape())
		}
		shape = slices.Delete(shape, at, at+1)
	}
	return nil
}

// wrongLogSumExp finds gorgonia.LogSumExp, which is made of operations that are right: the
// logarithm of Sum(Exp(x - m)) + m, where m is the largest x.
func wrongLogSumExp(s suspect) shown {
	sum := s.x[0]
	if s.node.Op().String() != "ln" || !adds(sum) {
		return nil
	}
	parts := stock.Operands(sum)
	most := parts[1]
	if stock.Name(parts[0].Op()) != "sumOp" || stock.Name(most.Op()) != "maxOp" {
		return nil
	}
	exp := stock.Operands(parts[0])[0]
	if stock.Name(exp.Op()) != "elemUnaryOp" || exp.Op().String() != "exp" {
		return nil
	}
	less := stock.Operands(stock.Operands(exp)[0])
	return when(len(less) == 2 && less[1] == most && less[0] == stock.Operands(most)[0])
}

// randomNorm finds a batch norm whose scale or bias was nil, by the variable that Gorgonia has
// made.
func randomNorm(s suspect) shown {
	for _, made := range []struct{ suffix, name string }{{"_γ", "scale"}, {"_β", "bias"}} {
		if slices.ContainsFunc(s.in.nodes, func(n *gorgonia.Node) bool {
			return n.Op() == nil && n.Name() == s.x[0].Name()+made.suffix &&
				n.Shape().Eq(s.node.Shape())
		}) {
			return when(true, made.name)
		}
	}
	return nil
}

// wrongNorm finds gorgonia.Norm of odd p by its last node: pow(sum(pow(x, p)), 1/p).
func wrongNorm(s suspect) shown {
	inverse, ok := exponent(s.node)
	if !ok || stock.Name(s.x[0].Op()) != "sumOp" {
		return nil
	}
	p, ok := exponent(stock.Operands(s.x[0])[0])
	return when(ok && math.Mod(p, 2) == 1 && math.Abs(p*inverse-1) <= 1e-6, p)
}

// exponent returns the constant that a node raises to.
func exponent(n *gorgonia.Node) (float64, bool) {
	x := stock.Operands(n)
	if n.Op() == nil || len(x) != 2 || !strings.HasPrefix(n.Op().String(), "^") ||
		!stock.Struct(x[1].Op()).IsValid() || x[1].Value() == nil {
		return 0, false
	}
	switch e := x[1].Value().Data().(type) {
	case float64:
		return e, true
	case float32:
		return float64(e), true
	}
	return 0, false
}
