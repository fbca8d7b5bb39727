package nn

import (
	"fmt"
	"reflect"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
)

// Grad is gorgonia.Grad for a graph of several losses, whose nodes may have gradients already: the
// losses of a GAN, or a penalty on a gradient. After an earlier call, gorgonia.Grad takes the
// gradients of that call and silently returns wrong ones.
//
//	dx, err := nn.Grad(loss, x)                  // or gorgonia.Grad
//	penalty := gorgonia.Sum(gorgonia.Square(dx[0]))
//	dp, err := nn.Grad(penalty, x)
//
// A variable that had no gradient gets the new one as its Deriv, for solvers. One that had a
// gradient keeps that one: use the nodes that Grad returns. Computed nodes keep their Deriv.
//
// Cost: that of gorgonia.Grad, and two walks over the graph.
// Errors: ErrArgument if a node is nil, or comes from an unknown version of Gorgonia; those of
// gorgonia.Grad, such as an operation of a gradient that has no gradient itself.
func Grad(cost *gorgonia.Node, by ...*gorgonia.Node) (gorgonia.Nodes, error) {
	if err := backend.Given("nn: Grad", "cost", cost, "by", by); err != nil {
		return nil, err
	}
	if derivOf(cost) == nil {
		return nil, fmt.Errorf("nn: Grad: %w: cost is a node of another Gorgonia than v0.9.18",
			backend.ErrArgument)
	}
	before := map[*gorgonia.Node]*gorgonia.Node{}
	nodes := append(gorgonia.Nodes(nil), cost.Graph().AllNodes()...)
	for _, n := range nodes {
		before[n] = n.Deriv()
		*derivOf(n) = nil
	}
	grads, err := gorgonia.Grad(cost, by...)
	for _, n := range nodes {
		if n.Op() != nil || before[n] != nil || err != nil {
			*derivOf(n) = before[n]
		}
	}
	if err != nil {
		return nil, fmt.Errorf("nn: Grad: %w", err)
	}
	return grads, nil
}

// derivOf returns where a node has its gradient, nil if the version of Gorgonia is not known.
func derivOf(n *gorgonia.Node) **gorgonia.Node {
	f := reflect.ValueOf(n).Elem().FieldByName("deriv")
	if !f.IsValid() || f.Type() != reflect.TypeFor[*gorgonia.Node]() {
		return nil
	}
	return (**gorgonia.Node)(f.Addr().UnsafePointer())
}
