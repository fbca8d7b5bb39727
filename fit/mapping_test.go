package fit_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// TestTablesThatDifferBetweenRanksAreRefused, wherever they do, and others are not.
func TestTablesThatDifferBetweenRanksAreRefused(t *testing.T) {
	for at, want := range map[int]string{-1: "",
		0:  "the first sample of rank 1 is not that of rank 0: give all ranks the same files",
		47: "a sample from 45 to 47 of rank 1 is not that of rank 0"} {
		dir := t.TempDir()
		err := euryale.Run(t.Context(), 2, func(comm backend.Communicator,
			build sync.Locker) error {
			text := "x0,x1,y\n"
			for i := range 48 {
				text += fmt.Sprintf("%d,%d,1\n", i%3, map[bool]int{true: comm.Rank()}[i == at])
			}
			path := filepath.Join(dir, fmt.Sprint(comm.Rank(), ".csv"))
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				return err
			}
			s, _, err := data.CSV(path, "y")
			if err == nil {
				_, _, err = fitLinear(t.Context(), comm, build, 4, s, nil)
			}
			return err
		})
		if want == "" {
			require.NoError(t, err)
		} else {
			require.Fails(t, fmt.Sprint("sample ", at), err, backend.ErrArgument, want)
		}
	}
}

// TestATableOfOtherColumnsThanTheInputIsRefused before the first step, naming both.
func TestATableOfOtherColumnsThanTheInputIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.csv")
	require.NoError(t, os.WriteFile(path, []byte("a,b,y\n1,u,1\n2,v,0\n"), 0o600))
	s, _, err := data.CSV(path, "y")
	require.NoError(t, err)
	_, _, err = fitLinear(t.Context(), autograd.Solo(), &sync.Mutex{}, 2, s, nil)
	require.Fails(t, "3 columns", err, backend.ErrArgument, `the input x takes 2 numbers of a `+
		`sample, and the table has 3 columns: ["a" "b=u" "b=v"]`)
}

// TestAColumnMoreThanTheCheckpointHadIsNamed, rather than the sizes that follow from it.
func TestAColumnMoreThanTheCheckpointHadIsNamed(t *testing.T) {
	dir := t.TempDir()
	train := func(table string) error {
		path := filepath.Join(dir, "a.csv")
		require.NoError(t, os.WriteFile(path, []byte(table), 0o600))
		s, _, err := data.CSV(path, "kind")
		require.NoError(t, err)
		g, columns := G.NewGraph(), len(data.MappingOf(s).Columns)
		x := G.NewMatrix(g, G.Float64, G.WithShape(2, columns), G.WithName("x"))
		y := G.NewVector(g, tensor.Int, G.WithShape(2), G.WithName("y"), G.WithInit(G.Zeroes()))
		w := G.NewMatrix(g, G.Float64, G.WithShape(columns, 2), G.WithName("w"),
			G.WithInit(G.Zeroes()))
		loss := G.Must(nn.CrossEntropy(nn.NoLabel, G.Must(G.Mul(x, w)), y))
		require.NoError(t, require.Err(G.Grad(loss, w)))
		m := require.Value(vm.New(g, nil, vm.WithSolver(&solver.SGD{Rate: 1}, w)))(t)
		defer m.Close()
		_, err = fit.Run(t.Context(), m, fit.Data{Set: s, Inputs: G.Nodes{x, y}, Loss: loss},
			fit.Epochs(1), fit.Checkpoint(filepath.Join(dir, "kept"), 0))
		return err
	}
	require.NoError(t, train("a,kind\n1,cat\n2,dog\n"))
	require.Fails(t, "another table", train("a,b,kind\n1,5,cat\n2,6,dog\n"), backend.ErrArgument,
		`is of other samples: bad argument: the columns are ["a" "b"], and not ["a"]: `)
}

// TestProgressSaysWhatOneMustKnow: which columns should be scaled, and why a training that
// is started again does nothing.
func TestProgressSaysWhatOneMustKnow(t *testing.T) {
	path, kept := filepath.Join(t.TempDir(), "a.csv"), filepath.Join(t.TempDir(), "kept")
	require.NoError(t, os.WriteFile(path, []byte("age,income,y\n20,5000,1\n30,1000,0\n"), 0o600))
	train := func(epochs int, scale bool) string {
		var out strings.Builder
		s, _, err := data.CSV(path, "y")
		require.NoError(t, err)
		if scale {
			s = require.Value(data.Standardize(s))(t)
		}
		_, _, err = fitLinear(t.Context(), autograd.Solo(), &sync.Mutex{}, 2, s, nil,
			fit.Epochs(epochs), fit.Progress(&out), fit.Checkpoint(kept, 0))
		if scale {
			require.NoError(t, err)
		}
		return out.String()
	}
	says := func(got string, want ...string) {
		t.Helper()
		for _, part := range want {
			require.Check(t, strings.Contains(got, part), "it says %q, without %q", got, part)
		}
		require.Equal(t, "lines of "+got, strings.Count(got, "\n"), len(want))
	}
	says(strings.SplitAfter(train(1, false), "\n")[0], `: "income" (5e+03): scale them by`)
	require.NoError(t, os.RemoveAll(kept))
	says(train(2, true), "epoch 1/2: ", "epoch 2/2: ")
	says(train(2, true), "kept is already finished, at step 2, in epoch 2: give more epochs, or")
}

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
