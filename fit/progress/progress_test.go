package progress_test

import (
	"io"
	"os"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/progress"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestABarShowsOnATerminalOnly: the launcher says that there is one.
func TestABarShowsOnATerminalOnly(t *testing.T) {
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
		os.Stderr = stderr
		require.Report(t, w.Close())
		text, err := io.ReadAll(r)
		if got := strings.Contains(string(text), "epoch 2"); err != nil || got != want {
			t.Errorf("terminal %q: %v, it shows %q", terminal, err, text)
		}
	}
}
