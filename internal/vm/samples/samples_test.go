package samples_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/graphs"
	"github.com/euryale-ml/euryale/internal/vm/interpret"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/read"
	"github.com/euryale-ml/euryale/internal/vm/samples"
)

// TestOtherSamplesChangeNothing: in random graphs, forward and backward, the elements that are said
// to be of one sample, or of none, stay as they are when another sample's row changes.
func TestOtherSamplesChangeNothing(t *testing.T) {
	found := map[samples.Kind]int{}
	seeds := 1500
	if testing.Short() {
		seeds = 300
	}
	for seed := range seeds {
		r := rand.New(rand.NewPCG(uint64(seed), 5))
		g := graphs.Draw(graphs.Needs{}, 3+r.IntN(15), r.IntN)
		b := require.Value(g.Build(graphs.Needs{}))(t)
		program, err := read.New(b.Graph, true, read.Norms{}, nil)
		if err != nil {
			continue // a batch norm of one value
		}
		check(t, seed, r, program, found)
	}
	t.Log(found)
	for _, kind := range []samples.Kind{samples.Free, samples.Rows, samples.Mixed} {
		require.Check(t, found[kind] >= seeds, "%d values are of kind %d", found[kind], kind)
	}
}

// check changes the row of a sample in variables that have one for each.
func check(t *testing.T, seed int, r *rand.Rand, g *read.Graph, found map[samples.Kind]int) {
	given, batch := map[ir.ID]samples.Value{}, 0
	var inputs, others []interpret.Array
	sample := r.IntN(60)
	for _, n := range g.Inputs {
		id, _ := g.Value(n)
		v := g.Program.Values[id]
		x := make([]float64, v.Shape.Size())
		for k := range x {
			if x[k] = float64(r.IntN(2)); v.DType.Float() {
				x[k] = r.NormFloat64()
			}
		}
		inputs, others = append(inputs, interpret.Of(v.Shape, x)), append(others,
			interpret.Of(v.Shape, slices.Clone(x)))
		if v.Shape.Len() == 0 || batch > 0 && v.Shape.At(0) != batch || r.IntN(4) == 0 {
			continue
		}
		batch = v.Shape.At(0)
		given[id] = samples.Batch(v.Shape, 0, false)
		inner := given[id].Inner
		row := others[len(others)-1].Data[sample%batch*inner:][:inner]
		for k := range row {
			if v.DType.Float() {
				row[k].Value = r.NormFloat64()
			} else {
				row[k].Value = 1 - row[k].Value
			}
		}
	}
	if batch == 0 {
		return
	}
	values := samples.Of(&g.Program, batch, given, func(int) bool { return true })
	of, errOf := run(g, inputs)
	other, errOther := run(g, others)
	if errOf != nil || errOther != nil {
		return // an operation that is run by its Do
	}
	for i, v := range values {
		found[v.Kind]++
		for f, x := range of[i].Data {
			mine := v.Kind == samples.Mixed || v.Kind == samples.Rows &&
				f/v.Inner%batch == sample%batch
			if y := other[i].Data[f].Value; !mine && x.Value != y && x.Value == x.Value {
				t.Errorf("seed %d: value %d, %v of %v, is %+v of batch %d: element %d changes "+
					"from %v to %v", seed, i, g.Program.Values[i].Op, g.Program.Values[i].Shape,
					v, batch, f, x.Value, y)
				return
			}
		}
	}
}

func run(g *read.Graph, inputs []interpret.Array) ([]interpret.Array, error) {
	outside := interpret.Outside{Inputs: inputs}
	outside.Opaque = func(ir.Value, []interpret.Array) (interpret.Array, error) {
		return interpret.Array{}, errors.New("opaque")
	}
	for _, c := range g.Constants {
		x := numbers(c)
		outside.Constants = append(outside.Constants, interpret.Of(ir.Of(c.Shape()...), x))
	}
	return interpret.Program(&g.Program, outside)
}

func numbers(v gorgonia.Value) (all []float64) {
	switch x := v.Data().(type) {
	case float32:
		return []float64{float64(x)}
	case float64:
		return []float64{x}
	case int:
		return []float64{float64(x)}
	case []float64:
		return slices.Clone(x)
	case []float32:
		for _, x := range x {
			all = append(all, float64(x))
		}
	case []int:
		for _, x := range x {
			all = append(all, float64(x))
		}
	}
	return all
}
