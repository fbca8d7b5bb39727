package stock

import (
	"fmt"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// A label is the node's name, or says that a variable has none.
func TestLabelsSayThatAVariableHasNoName(t *testing.T) {
	g := gorgonia.NewGraph()
	unnamed := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(2, 3))
	named := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(2, 3), gorgonia.WithName("w"))
	sum := require.Value(gorgonia.Add(unnamed, named))(t)
	require.Equal(t, "Gorgonia calls a variable without a name", unnamed.Name(), Unnamed)
	for want, n := range map[string]*gorgonia.Node{
		"unnamed(2, 3)": unnamed, "w": named, "nil": nil, sum.Name(): sum,
	} {
		require.Equal(t, "the label", Label(n), want)
	}
}

// TestOperationsOfOthersDoNotTrain: whatever they mean by a field of that name.
func TestOperationsOfOthersDoNotTrain(t *testing.T) {
	x := gorgonia.NewTensor(gorgonia.NewGraph(), gorgonia.Float64, 4,
		gorgonia.WithShape(2, 1, 1, 1))
	_, _, _, op, err := gorgonia.BatchNorm(x, nil, nil, 0.1, 1e-3)
	require.NoError(t, err)
	for training, want := range map[gorgonia.Op]bool{op: true, nil: false,
		&struct {
			gorgonia.Op
			training bool
		}{training: true}: false} {
		require.Equal(t, fmt.Sprintf("%T trains", training), Trains(training), want)
	}
}
