package layers

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
)

// Glorot draws from a normal distribution for a learnable of a shape, with the deviation of
// gorgonia.GlorotN(1): sqrt(2 / (n + m)) for [n, m], and for [n, m, d...] sqrt(2 / ((n + m) d...)).
// Source: Glorot and Bengio, Understanding the difficulty of training deep feedforward neural
// networks, 2010.
func Glorot(shape ...int) Init {
	fan := 1 + size(shape[:min(1, len(shape))])
	if len(shape) > 1 {
		fan = (shape[0] + shape[1]) * size(shape[2:])
	}
	return Normal(math.Sqrt(2 / float64(fan)))
}

// Initialize gives variables of a graph that no [Builder] has made their first values. As in
// [Builder.Learn] the seed, a variable's name and its shape determine them: they are equal on all
// ranks, in each run and in any order. Gorgonia's own, such as gorgonia.GlorotN, take the clock,
// so that no run equals another. init chooses a distribution for a shape, such as [Glorot].
//
// Errors: [backend.ErrArgument] for a node that is no variable or has no name, for two of one name,
// and for a distribution that draws a number that is not finite;
// [ops.ErrDType] for other dtypes than Float32 and Float64.
func Initialize(seed uint64, init func(shape ...int) Init, variables ...*gorgonia.Node) error {
	err := backend.Given("layers.Initialize", "init", init, "variables", variables)
	if err != nil {
		return err
	}
	names := map[string]bool{}
	for _, n := range variables {
		name := n.Name()
		if !n.IsVar() || name == "" || names[name] {
			return fmt.Errorf("layers: Initialize: %w: a node %q of shape %v is no variable, or "+
				"has no name of its own", backend.ErrArgument, name, n.Shape())
		}
		names[name] = true
		draw, shape := init(n.Shape()...), n.Shape()
		if err := backend.Given("layers.Initialize", "init(shape)", draw); err != nil {
			return err
		}
		var values any
		switch n.Dtype() {
		case tensor.Float32:
			values, err = drawn[float32](seed, name, draw, size(shape))
		case tensor.Float64:
			values, err = drawn[float64](seed, name, draw, size(shape))
		default:
			return fmt.Errorf("layers: Initialize: %w: %q is of %v: use Float32 or Float64",
				ops.ErrDType, name, n.Dtype())
		}
		if err == nil {
			err = let(n, values)
		}
		if err != nil {
			return fmt.Errorf("layers: Initialize: %q: %w", name, err)
		}
	}
	return nil
}

// let gives a variable the values of its elements.
func let(n *gorgonia.Node, values any) error {
	if !n.IsScalar() {
		values = tensor.New(tensor.WithShape(n.Shape()...), tensor.WithBacking(values))
	} else if x, ok := values.([]float32); ok {
		values = x[0]
	} else {
		values = values.([]float64)[0]
	}
	return gorgonia.Let(n, values)
}
