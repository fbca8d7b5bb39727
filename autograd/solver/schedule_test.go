package solver

import (
	"math"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestClipNormRefusesWhatItCannotClip(t *testing.T) {
	for want, tt := range map[string]struct {
		limit float64
		dw    float32
	}{
		"a limit of 0: it must be positive":   {0, 1},
		"a limit of NaN: it must be positive": {math.NaN(), 1},
		"parameter 1 makes the norm NaN":      {1, float32(math.NaN())},
		"parameter 1 makes the norm +Inf":     {1, float32(math.Inf(-1))},
	} {
		grads := []float32{3, 4}
		_, err := ClipNorm([]gorgonia.ValueGrad{pair{grads, grads},
			pair{grads, []float32{tt.dw, 1}}}, tt.limit)
		require.Fails(t, "ClipNorm", err, backend.ErrArgument, want)
		require.Check(t, slices.Equal(grads, []float32{3, 4}), "%s: gradients are now %v", want,
			grads)
	}
}

// TestACosineKeepsItsBits: π times the step is divided by the steps, so that a training that is
// continued has the rates of one that has begun under an earlier version.
func TestACosineKeepsItsBits(t *testing.T) {
	rate := Cosine(1, 0, 100)
	for step := range 100 {
		require.Equal(t, "the rate", rate(step), (1+math.Cos(math.Pi*float64(step)/100))/2)
	}
}

func TestSchedules(t *testing.T) {
	rate := Warmup(2, nil)(0)
	require.Check(t, math.IsNaN(rate), "without a schedule the rate is %v", rate)
	for _, tt := range []struct {
		name     string
		schedule Schedule
		want     []float64 // from step 0
	}{
		{"constant", Constant(0.5), []float64{0.5, 0.5, 0.5}},
		{"cosine", Cosine(4, 0, 4), []float64{4, 2 + math.Sqrt2, 2, 2 - math.Sqrt2, 0, 0}},
		{"cosine to a rate", Cosine(3, 1, 2), []float64{3, 2, 1, 1}},
		{"cosine of no steps", Cosine(3, 1, 0), []float64{1, 1}},
		{"step decay", StepDecay(8, 0.5, 2), []float64{8, 8, 4, 4, 2}},
		{"warm-up", Warmup(4, Constant(1)), []float64{0.25, 0.5, 0.75, 1, 1}},
		{"no warm-up", Warmup(0, Constant(1)), []float64{1}},
		// as PyTorch's OneCycleLR(max_lr=0.5, total_steps=10) and (max_lr=1, total_steps=4)
		{"one cycle", OneCycle(0.5, 10), []float64{0.02, 0.26, 0.5, 0.47524231600673683,
			0.40587282697488153, 0.30563101096814466, 0.19437098903185537, 0.09412917302511849,
			0.024759683993263143, 2e-06, 2e-06}},
		{"one short cycle", OneCycle(1, 4), []float64{0.04, 0.811745653949763,
			0.28306099820869923, 4e-06}},
		{"one cycle of a step", OneCycle(1, 1), []float64{4e-06}},
		{"composed", Warmup(2, StepDecay(8, 0.5, 1)), []float64{4, 8, 8, 4, 2}},
	} {
		for step, want := range tt.want {
			if got := tt.schedule(step); math.Abs(got-want) > 1e-15 {
				t.Errorf("%s: step %d has the rate %v, want %v", tt.name, step, got, want)
			}
		}
	}
}
