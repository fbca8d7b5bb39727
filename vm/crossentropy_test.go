package vm_test

import (
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// The labels are counted and the rows added up in one loop: a pass each would take 6 % of the step
// of a small MLP on a GPU.
func TestCrossEntropyAndItsGradientAreThreeLoops(t *testing.T) {
	g := gorgonia.NewGraph()
	logits := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(64, 10),
		gorgonia.WithName("logits"))
	labels := gorgonia.NewVector(g, tensor.Int, gorgonia.WithShape(64), gorgonia.WithName("labels"))
	loss, err := nn.CrossEntropy(nn.NoLabel, logits, labels)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := gorgonia.Grad(loss, logits); err != nil {
		t.Fatal(err)
	}
	m, err := vm.New(g, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	plan := m.Plan().String()
	if !strings.Contains(plan, " loops=3 ") {
		t.Errorf("want 3 loops:\n%s", plan)
	}
}
