package fit_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// rates are the rates of epochs.
func rates(r *fit.Result) (all []float64) {
	for _, e := range r.Epochs {
		all = append(all, e.Rate*64)
	}
	return all
}

// TestTheRateFallsOnAPlateau: after each two epochs in a row that were not better, for all ranks,
// also on resuming after any epoch.
func TestTheRateFallsOnAPlateau(t *testing.T) {
	scores := []float64{1, 2, 2, 1, 3, 1, 1, 1, 1, 1}
	want := []float64{1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125}
	over := errors.New("over")
	for P := 1; P <= 4; P++ {
		for stop := 1; stop <= len(scores); stop += 3 {
			dir := t.TempDir()
			train := func(from, until int) (*fit.Result, error) {
				return scoredBy(t, P, scores, from, fit.Checkpoint(dir, 1),
					fit.Schedule(solver.Constant(1./64)), fit.ReduceOnPlateau(0.5, 2),
					fit.OnStep(func(s fit.StepLoss) error {
						return map[bool]error{true: over}[s.Step == until]
					}))
			}
			_, err := train(0, 2*stop+1) // in the epoch that follows
			require.Check(t, (err == nil) == (stop == len(scores)), "it stops with %v", err)
			r, err := train(stop, 0)
			require.Check(t, err == nil && slices.Equal(rates(r), want),
				"%d ranks, resumed after epoch %d: %v, rates %v", P, stop, err, rates(r))
		}
	}
}

// TestTheBestEpochIsRestored: the model is the one of a training that ends there, whether this one
// stops early, has all its epochs, or is started again after its end. With more epochs it resumes
// from its last one.
func TestTheBestEpochIsRestored(t *testing.T) {
	scores := []float64{1, 4, 3, 5, 2, 5, 1, 9, 1}
	params := func(P int, scores []float64, from int, options ...fit.Option) string {
		return require.Value(scoredBy(t, P, scores, from, options...))(t).Params
	}
	for P := 1; P <= 4; P++ {
		dir := t.TempDir()
		keep, restore := fit.Checkpoint(dir, 0, autograd.KeepLast(1)), fit.RestoreBest()
		best := params(P, scores[:4], 0)
		for what, got := range map[string]string{
			"of all epochs": params(P, scores[:6], 0, keep, restore),
			"once more":     params(P, scores[:6], 6, keep, restore),
			"early":         params(P, scores, 6, keep, restore, fit.EarlyStop(3)),
		} {
			require.Equal(t, fmt.Sprintf("%d ranks, %s", P, what), got, best)
		}
		require.Equal(t, "with more epochs", params(P, scores, 7, keep, restore),
			params(P, scores[:8], 0))
		r := require.Value(scoredBy(t, P, scores[:6], 8, keep, restore))(t)
		require.Check(t, strings.HasSuffix(r.Best, "step-00000016"), "the best is %s", r.Best)
		require.Equal(t, "the last is the best", params(P, scores[:4], 0, restore,
			fit.Checkpoint(t.TempDir(), 0)), best)
		require.NoError(t, os.RemoveAll(r.Best))
		require.Fails(t, "without the best", require.Err(scoredBy(t, P, scores, 9, keep, restore)),
			fs.ErrNotExist, "the best epoch, 8, is not in "+dir)
	}
}

// TestPairsThatCannotBeAreNamed: each of them alone is right.
func TestPairsThatCannotBeAreNamed(t *testing.T) {
	kept, rate := fit.Checkpoint(t.TempDir(), 0), fit.Schedule(solver.Constant(1./64))
	for _, c := range []struct {
		options []fit.Option
		says    []string
	}{
		{[]fit.Option{fit.RestoreBest()}, []string{"fit.RestoreBest", "fit.Checkpoint"}},
		{[]fit.Option{fit.ReduceOnPlateau(0.5, 2)}, []string{"fit.ReduceOnPlateau",
			"fit.Schedule"}},
		{[]fit.Option{rate, fit.ReduceOnPlateau(0.5, 2), fit.EarlyStop(2)},
			[]string{"fit.EarlyStop(2)", "fit.ReduceOnPlateau(0.5, 2)"}},
		{[]fit.Option{rate, fit.ReduceOnPlateau(1, 2)}, []string{"between 0 and 1"}},
		{[]fit.Option{rate, fit.ReduceOnPlateau(0.5, 0)}, []string{"1 or more"}},
		{[]fit.Option{fit.MLflow("localhost", "", nil)}, []string{"fit.MLflow", "http://"}},
		{[]fit.Option{fit.TensorBoard("/dev/null/x")}, []string{"fit.TensorBoard"}},
		{[]fit.Option{rate, fit.ReduceOnPlateau(0.5, 2), fit.EarlyStop(3), kept,
			fit.RestoreBest(), fit.TensorBoard(""), fit.MLflow("", "", nil)}, nil},
	} {
		for P := 1; P <= 2; P++ {
			_, err := scoredBy(t, P, []float64{1}, 0, c.options...)
			require.Check(t, err == nil || c.says != nil, "%v", err)
			if c.says != nil {
				says(t, fmt.Sprint(c.says), err, c.says...)
			}
		}
	}
}
