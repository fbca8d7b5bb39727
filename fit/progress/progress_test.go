package progress_test

import (
	"io"
	"maps"
	"os"
	"strings"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/progress"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestABarShowsOnATerminalOnly: the launcher says that there is one.
func TestABarShowsOnATerminalOnly(t *testing.T) {
	weights := map[string]*tensor.Dense{"w": tensor.New(tensor.WithBacking(make([]float32, 5000)))}
	for terminal, want := range map[string]bool{"1": true, "": false} {
		t.Setenv("EURYALE_TERMINAL", terminal)
		r, w, err := os.Pipe()
		require.NoError(t, err)
		stderr := os.Stderr
		os.Stderr = w
		bar := progress.Bar()
		for step := 1; step <= 6; step++ {
			s := fit.StepLoss{Step: step, InEpoch: (step-1)%3 + 1, PerEpoch: 3}
			require.Report(t, bar(s))
		}
		taken := maps.Collect(progress.Tensors("writing x", maps.All(weights)))
		os.Stderr = stderr
		require.Report(t, w.Close())
		require.Equal(t, "tensors", len(taken), 1)
		text, err := io.ReadAll(r)
		for _, what := range []string{"epoch 2", "writing x"} {
			if got := strings.Contains(string(text), what); err != nil || got != want {
				t.Errorf("terminal %q: %v, it shows %q", terminal, err, text)
			}
		}
	}
}
