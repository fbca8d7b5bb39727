package fit_test

import (
	"errors"
	"fmt"
	"math"
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
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// table writes n rows of a table, with columns in an order, and reads it.
func table(t *testing.T, n int, columns []string, label string, known ...data.Mapping) fit.Set {
	t.Helper()
	var text strings.Builder
	fmt.Fprintln(&text, strings.Join(columns, ","))
	for i := range n {
		row := map[string]string{"a": fmt.Sprint(100 + i), "b": fmt.Sprint(i * i),
			"kind": []string{"cat", "dog", "owl"}[i%3]}
		for k, c := range columns {
			fmt.Fprint(&text, map[bool]string{true: ","}[k > 0], row[c])
		}
		fmt.Fprintln(&text)
	}
	path := filepath.Join(t.TempDir(), "table.csv")
	require.NoError(t, os.WriteFile(path, []byte(text.String()), 0o600))
	s, _, err := data.CSV(path, label, known...)
	require.NoError(t, err)
	return s
}

// TestAPredictionScalesAsTheTraining: another program, which has the checkpoint and a file with
// other columns, gets for each sample the scores of the model, on all ranks, whatever batches it
// has; samples that are not scaled as in the training are refused.
func TestAPredictionScalesAsTheTraining(t *testing.T) {
	dir := t.TempDir()
	samples := table(t, 12, []string{"a", "b", "kind"}, "kind")
	scaled := require.Value(data.Standardize(samples))(t)
	train := func(P, epochs int, of, held fit.Set) error {
		return euryale.Run(t.Context(), P, func(comm backend.Communicator,
			build sync.Locker) error {
			build.Lock()
			d, w, scores := classified(12 / P)
			build.Unlock()
			d.Set = of
			validated := d
			validated.Set = held
			m, err := vm.New(w.Graph(), nil, vm.WithDataParallel(comm), sgd(w))
			if err != nil {
				return err
			}
			eval, err := vm.New(w.Graph(), nil, vm.Eval(), vm.Keep(scores, d.Loss))
			if err != nil {
				return err
			}
			_, err = fit.Run(t.Context(), m, d, fit.Epochs(epochs), fit.Checkpoint(dir, 0),
				fit.Validate(eval, validated))
			return errors.Join(err, m.Close(), eval.Close())
		})
	}
	const differs = "Standardize has scaled the columns"
	require.Fails(t, "a validation", train(2, 1, scaled, samples), "Validate", differs)
	require.NoError(t, train(2, 1, scaled, scaled))
	require.Fails(t, "a training that resumes", train(1, 2, samples, samples), differs)
	require.NoError(t, train(1, 2, scaled, scaled))

	known := require.Value(fit.ReadMapping(dir))(t)
	rows := table(t, 7, []string{"b", "kind", "a"}, "", known)
	for P := 1; P <= 4; P++ {
		require.NoError(t, euryale.Run(t.Context(), P, func(comm backend.Communicator,
			build sync.Locker) error {
			build.Lock()
			d, w, scores := classified(3)
			build.Unlock()
			x := G.Nodes{d.Inputs[0]}
			m, err := vm.New(w.Graph(), nil, vm.Eval(), vm.Keep(scores))
			if err != nil {
				return err
			}
			defer m.Close()
			if err := autograd.LoadWeights(dir, G.Nodes{w}); err != nil {
				return err
			}
			all, err := fit.Predict(comm, m, fit.Data{Set: rows, Inputs: x}, scores)
			if err != nil || len(all) != rows.Len() {
				return fmt.Errorf("%d rows: %w", len(all), err)
			}
			for i, got := range all {
				want := make([]float64, 3)
				for c, value := range []float64{float64(100 + i), float64(i * i)} {
					value = (value - known.Means[c]) / known.Deviations[c]
					for k := range want {
						want[k] += value * w.Value().Data().([]float64)[3*c+k]
					}
				}
				require.Check(t, slices.EqualFunc(got, want, func(x, y float64) bool {
					return math.Abs(x-y) < 1e-12
				}), "%d ranks: the scores of row %d are %v, want %v", P, i, got, want)
			}
			_, err = fit.Predict(comm, m, fit.Data{Set: rows, Inputs: x}, w)
			require.Fails(t, "weights", err, "w, of the shape (2, 3), has no row for each of 3")
			other, err := vm.New(w.Graph(), nil, vm.Eval())
			if err != nil {
				return err
			}
			defer other.Close()
			_, err = fit.Predict(comm, other, fit.Data{Set: rows, Inputs: x}, scores)
			require.Fails(t, "scores that are not kept", err, "does not keep", "vm.Keep")
			return nil
		}))
	}
}

// classified is a graph of scores x [local, 2] w of three classes, and of their loss.
func classified(local int) (d fit.Data, w, scores *G.Node) {
	g := G.NewGraph()
	x := G.NewMatrix(g, G.Float64, G.WithShape(local, 2), G.WithName("x"), G.WithInit(G.Zeroes()))
	y := G.NewVector(g, tensor.Int, G.WithShape(local), G.WithName("y"), G.WithInit(G.Zeroes()))
	w = G.NewMatrix(g, G.Float64, G.WithShape(2, 3), G.WithName("w"), G.WithInit(G.Zeroes()))
	scores = G.Must(G.Mul(x, w))
	d = fit.Data{Inputs: G.Nodes{x, y}, Loss: G.Must(nn.CrossEntropy(nn.NoLabel, scores, y))}
	if _, err := G.Grad(d.Loss, w); err != nil {
		panic(err)
	}
	return d, w, scores
}
