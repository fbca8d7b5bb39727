package lower_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/vm/graphs"
	"github.com/euryale-ml/euryale/internal/vm/interpret"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/read"
)

// TestPassesKeepResults: each pass that changes no digits, or only the order of sums, leaves the
// losses and gradients of random graphs what they are, as far as an interpreter can tell.
func TestPassesKeepResults(t *testing.T) {
	passes := []func(p *ir.Program) *ir.Program{
		func(p *ir.Program) *ir.Program { return lower.Program(p) },
		lower.InShape,
		func(p *ir.Program) *ir.Program { // with a loop for each value
			loops := make([]*lower.Loop, len(p.Values))
			for i, v := range p.Values {
				if ir.Elementwise(v.Op) {
					loops[i] = &lower.Loop{Shape: v.Shape, Values: []ir.ID{ir.ID(i)}}
				}
			}
			p, _ = lower.Rematerialize(p, loops, 0, 24)
			return p
		},
	}
	changed := make([]int, len(passes))
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 7))
		g, inputs := drawn(r)
		if g == nil {
			continue
		}
		p := &g.Program
		want, err := results(p, interpret.Outside{Inputs: inputs})
		if err != nil {
			continue // an operation that is run by its Do
		}
		for i, pass := range passes {
			before := len(p.Values)
			if p = pass(p); len(p.Values) != before {
				changed[i]++
			}
			got, err := results(p, interpret.Outside{Inputs: inputs})
			if err = errors.Join(err, p.Check()); err != nil {
				t.Fatalf("seed %d, pass %d: %v", seed, i, err)
			}
			for k, x := range got {
				if y := want[k]; math.Abs(x.Value-y.Value) > x.Err+y.Err {
					t.Fatalf("seed %d, pass %d: number %d of the results is %v, was %v", seed, i,
						k, x, y)
				}
			}
		}
	}
	if t.Log(changed); slices.Min(changed) < 10 {
		t.Errorf("passes change %v programs", changed)
	}
}

// drawn returns a random graph with gradients, nil if it has none or is not read, and its inputs,
// of zeros and ones.
func drawn(r *rand.Rand) (g *read.Graph, inputs []interpret.Array) {
	defer func() { _ = recover() }() // Gorgonia's, of graphs that it cannot differentiate
	b, err := graphs.Draw(graphs.Needs{}, 3+r.IntN(15), r.IntN).Build(graphs.Needs{})
	if err != nil {
		return nil, nil
	}
	learnables := b.Learnables()
	if _, err := gorgonia.Grad(b.Loss(), learnables...); err != nil {
		return nil, nil
	}
	x, err := read.New(b.Graph, true, read.Norms{}, nil)
	if err != nil || len(x.Constants) > 0 {
		return nil, nil
	}
	wanted := gorgonia.Nodes{b.Loss()}
	for _, n := range learnables {
		wanted = append(wanted, n.Deriv())
	}
	for _, n := range wanted {
		id, _ := x.Value(n)
		x.Program.Results = append(x.Program.Results, id)
	}
	for _, n := range x.Inputs {
		id, _ := x.Value(n)
		shape := x.Program.Values[id].Shape
		all := make([]float64, shape.Size())
		for k := range all {
			all[k] = float64(r.IntN(2))
		}
		inputs = append(inputs, interpret.Of(shape, all))
	}
	return x, inputs
}

// results returns the elements of a program's results.
func results(p *ir.Program, outside interpret.Outside) (all []interpret.Number, err error) {
	outside.Opaque = func(ir.Value, []interpret.Array) (interpret.Array, error) {
		return interpret.Array{}, errors.New("opaque")
	}
	values, err := interpret.Program(p, outside)
	if err != nil {
		return nil, err
	}
	for _, r := range p.Results {
		all = append(all, values[r].Data...)
	}
	return all, nil
}
