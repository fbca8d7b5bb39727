package vm_test

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/ops/nn"
)

// result is a result alone.
func result(n node, err error) (nodes, error) { return nodes{n}, err }

// basicKinds are operators of logic, indices, reductions and norms.
var basicKinds = onnxKinds{
	"And": onnxPair(nn.And),
	"Or":  onnxPair(nn.Or),
	"Xor": onnxPair(nn.Xor),
	"Not": func(c *onnxCase) (nodes, error) { return result(nn.Not(c.nodes[0])) },
	"Where": func(c *onnxCase) (nodes, error) {
		return result(nn.Where(c.nodes[0], c.nodes[1], c.nodes[2]))
	},
	"Cast": func(c *onnxCase) (nodes, error) {
		to := map[string]tensor.Dtype{"float32": tensor.Float32, "float64": tensor.Float64,
			"int32": tensor.Int32, "int64": tensor.Int, "bool": tensor.Bool}[c.Out[0].DType]
		return result(nn.Cast(to, c.nodes[0]))
	},
	"ArgMax": func(c *onnxCase) (nodes, error) {
		return result(nn.ArgMax(c.int("axis", 0), c.int("keepdims", 1) != 0, c.nodes[0]))
	},
	"ArgMin": func(c *onnxCase) (nodes, error) {
		return result(nn.ArgMin(c.int("axis", 0), c.int("keepdims", 1) != 0, c.nodes[0]))
	},
	"TopK":            onnxTopK,
	"ReduceMin":       onnxReduce(nn.ReduceMin),
	"ReduceMax":       onnxReduce(nn.ReduceMax),
	"ReduceProd":      onnxReduce(nn.ReduceProd),
	"ReduceLogSumExp": onnxReduce(nn.LogSumExp),
	"CumSum": func(c *onnxCase) (nodes, error) {
		axis := c.int("axis", 0)
		if given := c.ints(1); given != nil {
			axis = given[0]
		}
		o := nn.CumSumOptions{Exclusive: c.int("exclusive", 0) != 0,
			Reverse: c.int("reverse", 0) != 0}
		return result(nn.CumSum(axis, o, c.nodes[0]))
	},
	"GatherElements": func(c *onnxCase) (nodes, error) {
		return result(nn.GatherElements(c.int("axis", 0), c.nodes[0], c.nodes[1]))
	},
	"RMSNormalization": func(c *onnxCase) (nodes, error) {
		return result(nn.RMSNorm(c.number("epsilon", 1e-5), c.nodes[0], c.nodes[1]))
	},
	"SwiGLU":          onnxPair(nn.SwiGLU),
	"RotaryEmbedding": onnxRotary,
	"SoftmaxCrossEntropyLoss": func(c *onnxCase) (nodes, error) {
		x := c.nodes[0] // [batch, classes, ...]
		axes := []int{0}
		for axis := 2; axis < x.Dims(); axis++ {
			axes = append(axes, axis)
		}
		return onnxLoss(c, transpose(x, append(axes, 1)...))
	},
	"CrossEntropy": func(c *onnxCase) (nodes, error) { return onnxLoss(c, c.nodes[0]) },
}

func onnxPair(f func(x, y node) (node, error)) func(c *onnxCase) (nodes, error) {
	return func(c *onnxCase) (nodes, error) { return result(f(c.nodes[0], c.nodes[1])) }
}

func onnxReduce(f func([]int, bool, node) (node, error)) func(c *onnxCase) (nodes, error) {
	return func(c *onnxCase) (nodes, error) {
		axes := append(c.list("axes"), c.ints(1)...)
		return result(f(axes, c.int("keepdims", 1) != 0, c.nodes[0]))
	}
}

func onnxTopK(c *onnxCase) (nodes, error) {
	x, k := c.nodes[0], c.int("k", 0)
	if given := c.ints(1); given != nil {
		k = given[0]
	}
	least := c.int("largest", 1) == 0
	if least {
		x = neg(x)
	}
	values, indices, err := nn.TopK(c.int("axis", -1), k, x)
	switch {
	case err != nil:
		return nil, err
	case least:
		values = neg(values)
	case len(c.Out) == 1:
		return nodes{values}, nil
	}
	return nodes{values, indices}, nil
}

// onnxRotary takes the rows of the angles that ONNX's positions name, or makes the angles of
// torch's.
func onnxRotary(c *onnxCase) (nodes, error) {
	x, o := c.nodes[0], nn.RotaryOptions{Interleaved: c.int("interleaved", 0) != 0}
	var tables [2]node
	if first := c.int("positions", 0); first > 0 {
		cos, sin, err := nn.RotaryAngles(x.Dtype(), 10000, first, x.Shape()[2], x.Shape()[3])
		if err != nil {
			return nil, err
		}
		for i, table := range []*tensor.Dense{cos, sin} {
			tables[i] = gorgonia.NodeFromAny(c.graph, table, gorgonia.WithName(fmt.Sprint("t", i)))
		}
		return result(nn.Rotary(o, x, tables[0], tables[1]))
	}
	for i, table := range c.nodes[1:3] {
		if len(c.nodes) > 3 {
			table = must(nn.ByIndices(0, table, c.nodes[3]))
		}
		s := table.Shape() // [batch, positions, pairs], of all heads
		tables[i] = reshape(table, tensor.Shape{s[0], 1, s[1], s[2]})
	}
	return result(nn.Rotary(o, x, tables[0], tables[1]))
}

func onnxLoss(c *onnxCase, logits node) (nodes, error) {
	ignore := c.int("ignore_index", nn.NoLabel)
	o := nn.CrossEntropyOptions{Ignore: ignore, IgnoreFirst: ignore == 0,
		Smoothing: c.number("smoothing", 0), Reduction: map[string]nn.Reduction{
			"sum": nn.SumOfRows, "none": nn.EachRow}[fmt.Sprint(c.Attrs["reduction"])]}
	if len(c.nodes) > 2 {
		o.Weights = c.nodes[2]
	}
	return result(nn.CrossEntropyWith(o, logits, c.nodes[1]))
}
