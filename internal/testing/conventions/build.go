package conventions

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/ops/nn"
)

type (
	function1 func(x *gorgonia.Node) (*gorgonia.Node, error)
	function2 func(x, y *gorgonia.Node) (*gorgonia.Node, error)
)

// build applies the operation to its operands.
func (c Case) build(x gorgonia.Nodes) (*gorgonia.Node, error) {
	name, parameters, _ := strings.Cut(c.Op, " ")
	if f, ok := functions1()[name]; ok {
		return f(x[0])
	}
	if f, ok := functions2()[name]; ok {
		return f(x[0], x[1])
	}
	if f, ok := ofNodes()[name]; ok {
		return f(c, x, parameters)
	}
	switch name {
	case "nn.CrossEntropy":
		return nn.CrossEntropy(nn.NoLabel, x[0], c.integers(x[0].Graph()))
	case "nn.LayerNorm":
		g, n := x[0].Graph(), c.Shapes[0][1]
		gain, bias := make(Numbers, n), make(Numbers, n)
		for i := range gain {
			gain[i] = 1
		}
		ones, zeros := c.variable(g, "gain", tensor.Shape{n}, gain),
			c.variable(g, "bias", tensor.Shape{n}, bias)
		return nn.LayerNorm(1e-5, x[0], ones, zeros)
	case "nn.Norm":
		p, err := strconv.Atoi(parameters)
		if err != nil {
			return nil, fmt.Errorf("conventions: %s: %w", c.Op, err)
		}
		return nn.Norm(p, 1, x[0])
	case "MaxPool2D", "MaxPool2D(Rectify)":
		return pool(name, parameters, x[0])
	}
	return nil, fmt.Errorf("conventions: no operation %q", c.Op)
}

func pool(name, parameters string, x *gorgonia.Node) (*gorgonia.Node, error) {
	var kernel, pad, stride int
	if _, err := fmt.Sscan(parameters, &kernel, &pad, &stride); err != nil {
		return nil, fmt.Errorf("conventions: %s %s: %w", name, parameters, err)
	}
	if name != "MaxPool2D" {
		var err error
		if x, err = gorgonia.Rectify(x); err != nil {
			return nil, err
		}
	}
	return gorgonia.MaxPool2D(x, tensor.Shape{kernel, kernel}, []int{pad, pad},
		[]int{stride, stride})
}

// integers returns the labels or indices.
func (c Case) integers(g *gorgonia.ExprGraph) *gorgonia.Node {
	shape := c.LabelShape
	if shape == nil {
		shape = []int{len(c.Labels)}
	}
	v := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(slices.Clone(c.Labels)))
	return gorgonia.NodeFromAny(g, v, gorgonia.WithName("integers"))
}

// functions1 are the operations of one operand by name.
func functions1() map[string]function1 {
	return map[string]function1{
		"Abs": gorgonia.Abs, "Sign": gorgonia.Sign, "Ceil": gorgonia.Ceil, "Floor": gorgonia.Floor,
		"Sin": gorgonia.Sin, "Cos": gorgonia.Cos, "Exp": gorgonia.Exp, "Expm1": gorgonia.Expm1,
		"Log": gorgonia.Log, "Log1p": gorgonia.Log1p, "Neg": gorgonia.Neg,
		"Square": gorgonia.Square,
		"Cube":   gorgonia.Cube, "Sqrt": gorgonia.Sqrt, "Inverse": gorgonia.Inverse,
		"Tanh": gorgonia.Tanh, "Sigmoid": gorgonia.Sigmoid, "Softplus": gorgonia.Softplus,
		"Rectify": gorgonia.Rectify, "Mish": gorgonia.Mish,
		"LeakyRelu": func(x *gorgonia.Node) (*gorgonia.Node, error) {
			return gorgonia.LeakyRelu(x, 0.25)
		},
		"nn.GELU": nn.GELU, "nn.GELUTanh": nn.GELUTanh,
		"Sum": along1(gorgonia.Sum), "Mean": along1(gorgonia.Mean), "Max": along1(gorgonia.Max),
		"nn.SoftMax": func(x *gorgonia.Node) (*gorgonia.Node, error) { return nn.SoftMax(1, x) },
		"nn.LogSoftMax": func(x *gorgonia.Node) (*gorgonia.Node, error) {
			return nn.LogSoftMax(1, x)
		},
		"nn.GlobalAvgPool2D": nn.GlobalAvgPool2D, "nn.Not": nn.Not,
		"SoftMax": along1(gorgonia.SoftMax), "LogSoftMax": along1(gorgonia.LogSoftMax),
	}
}

// functions2 are the operations of two operands by name.
func functions2() map[string]function2 {
	return map[string]function2{
		"Add": gorgonia.Add, "Sub": gorgonia.Sub, "HadamardProd": gorgonia.HadamardProd,
		"HadamardDiv": gorgonia.HadamardDiv,
		"MaxBetween":  gorgonia.MaxBetween, "MinBetween": gorgonia.MinBetween,
		"Lt": compared(gorgonia.Lt), "Lte": compared(gorgonia.Lte), "Gt": compared(gorgonia.Gt),
		"Gte": compared(gorgonia.Gte), "Eq": compared(gorgonia.Eq), "Ne": compared(gorgonia.Ne),
		"nn.And": nn.And, "nn.Or": nn.Or, "nn.Xor": nn.Xor, "nn.SwiGLU": nn.SwiGLU,
		"Mul": gorgonia.Mul, "nn.OuterProd": nn.OuterProd,
	}
}

// along1 is an operation along axis 1.
func along1(f func(x *gorgonia.Node, axes ...int) (*gorgonia.Node, error)) function1 {
	return func(x *gorgonia.Node) (*gorgonia.Node, error) { return f(x, 1) }
}

// compared is a comparison that gives numbers.
func compared(f func(x, y *gorgonia.Node, retSame bool) (*gorgonia.Node, error)) function2 {
	return func(x, y *gorgonia.Node) (*gorgonia.Node, error) { return f(x, y, true) }
}
