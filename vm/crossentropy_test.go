package vm_test

import (
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
)

// crossEntropyPlan is the plan of a loss and its gradient, of rows of logits.
func crossEntropyPlan(t *testing.T, rows, classes int) string {
	t.Helper()
	g := gorgonia.NewGraph()
	logits := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, classes),
		gorgonia.WithName("logits"))
	labels := gorgonia.NewVector(g, tensor.Int, gorgonia.WithShape(rows),
		gorgonia.WithName("labels"))
	loss := require.Value(nn.CrossEntropy(nn.NoLabel, logits, labels))(t)
	require.NoError(t, require.Err(gorgonia.Grad(loss, logits)))
	m := machine(t, g)
	return m.Plan().String()
}

// The labels are counted and the rows added up in one loop: a pass each would take 6 % of the step
// of a small MLP on a GPU.
func TestCrossEntropyAndItsGradientAreThreeLoops(t *testing.T) {
	plan := crossEntropyPlan(t, 64, 10)
	require.Check(t, strings.Contains(plan, " loops=3 "), "want 3 loops:\n%s", plan)
}

// Stored before it is scaled, too, the gradient would take 7 % of the step of GPT-2 on a GPU, and
// 3 GB.
func TestGradientOfManyLogitsIsStoredOnce(t *testing.T) {
	const rows, classes = 16384, 64
	plan := crossEntropyPlan(t, rows, classes)
	stored := 0
	for line := range strings.Lines(plan) {
		dsts, _, _ := strings.Cut(line, " = ")
		stored += strings.Count(dsts, "f32(16384,64)")
	}
	require.Check(t, stored == 1, "%d values like the logits are stored, want 1:\n%s", stored, plan)
}
