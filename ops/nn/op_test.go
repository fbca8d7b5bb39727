package nn

import (
	"slices"
	"sync"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestAnOperationRunsOnSeveralGoroutines: each run has memory of its own.
func TestAnOperationRunsOnSeveralGoroutines(t *testing.T) {
	_, x, y := graph(t, tensor.Float64, []operand{normal(1, 40, 300)}, softmaxer(0))
	op := y.Op()
	want := require.Value(op.Do(x[0].Value()))(t)
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 20 {
				got, err := op.Do(x[0].Value())
				require.Check(t, err == nil && slices.Equal(numbers(t, got), numbers(t, want)),
					"another result, or %v", err)
			}
		})
	}
	group.Wait()
}
