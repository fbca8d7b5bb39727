package vm_test

import (
	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/ops/nn"
)

// result is a result alone.
func result(n *gorgonia.Node, err error) (gorgonia.Nodes, error) { return gorgonia.Nodes{n}, err }

// basicKinds are operators of logic, indices, reductions and norms.
var basicKinds = onnxKinds{
	"ArgMax": func(c *onnxCase) (gorgonia.Nodes, error) {
		return result(nn.ArgMax(c.int("axis", 0), c.int("keepdims", 1) != 0, c.nodes[0]))
	},
	"ArgMin": func(c *onnxCase) (gorgonia.Nodes, error) {
		return result(nn.ArgMin(c.int("axis", 0), c.int("keepdims", 1) != 0, c.nodes[0]))
	},
	"TopK": func(c *onnxCase) (gorgonia.Nodes, error) {
		x := c.nodes[0]
		if c.int("largest", 1) == 0 {
			x = must(gorgonia.Neg(x))
		}
		values, indices, err := nn.TopK(c.int("axis", -1), c.ints(1)[0], x)
		if c.int("largest", 1) == 0 && err == nil {
			values = must(gorgonia.Neg(values))
		}
		return gorgonia.Nodes{values, indices}, err
	},
	"GatherElements": func(c *onnxCase) (gorgonia.Nodes, error) {
		return result(nn.GatherElements(c.int("axis", 0), c.nodes[0], c.nodes[1]))
	},
}
