package fit_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// TestTheMappingTravelsWithTheModel: a validation or a resumed training of samples whose numbers
// stand for other things is refused; the checkpoint has the mapping for the next reader.
func TestTheMappingTravelsWithTheModel(t *testing.T) {
	dir := t.TempDir()
	read := func(text string, known ...data.Mapping) fit.Set {
		path := filepath.Join(dir, "a.csv")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		s, _, err := data.CSV(path, "kind", known...)
		require.NoError(t, err)
		return s
	}
	g := G.NewGraph()
	x := G.NewMatrix(g, G.Float64, G.WithShape(2, 1), G.WithName("x"), G.WithInit(G.Zeroes()))
	y := G.NewVector(g, tensor.Int, G.WithShape(2), G.WithName("y"), G.WithInit(G.Zeroes()))
	w := G.NewMatrix(g, G.Float64, G.WithShape(1, 3), G.WithName("w"), G.WithInit(G.Zeroes()))
	scores := G.Must(G.Mul(x, w))
	loss := G.Must(nn.CrossEntropy(nn.NoLabel, scores, y))
	require.NoError(t, require.Err(G.Grad(loss, w)))
	m := require.Value(vm.New(g, nil, vm.WithSolver(&solver.SGD{Rate: 1}, w)))(t)
	defer m.Close()
	eval, err := vm.New(g, nil, vm.Eval(), vm.Keep(scores))
	require.NoError(t, err)
	defer eval.Close()
	const others = "a,kind\n1,cat\n2,owl\n"
	samples := read("a,kind\n1,cat\n2,dog\n3,owl\n4,owl\n")
	kept := filepath.Join(dir, "kept")
	run := func(s, held fit.Set, epochs int) error {
		inputs := G.Nodes{x, y}
		_, err := fit.Run(t.Context(), m, fit.Data{Set: s, Inputs: inputs, Loss: loss},
			fit.Epochs(epochs), fit.Checkpoint(kept, 0),
			fit.Validate(eval, fit.Data{Set: held, Inputs: inputs}, fit.Accuracy(scores, y)))
		return err
	}
	err = run(samples, read(others), 1)
	require.Fails(t, "a validation with other classes", err, backend.ErrArgument,
		`the samples of Validate: bad argument: the classes are ["cat" "owl"], and not`)
	require.NoError(t, run(samples, read(others, data.MappingOf(samples)), 1))
	known, err := fit.ReadMapping(kept)
	require.Check(t, err == nil && slices.Equal(known.Classes, []string{"cat", "dog", "owl"}) &&
		slices.Equal(known.Columns, []string{"a"}), "the checkpoint has %+v, %v", known, err)
	other := read("a,kind\n1,cat\n2,dog\n3,eel\n4,owl\n")
	require.Fails(t, "a training that resumes with other classes", run(other, other, 2),
		backend.ErrArgument, "fit.ReadMapping")
	require.NoError(t, run(read("a,kind\n1,cat\n2,dog\n3,owl\n4,owl\n", known), samples, 2))
}
