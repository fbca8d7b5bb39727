package vm_test

import (
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/vm"
)

// Two slices with one defect are reported once, with what to use instead; a graph without
// defects is silent.
func TestWrongOperationsAreReportedOnce(t *testing.T) {
	for _, start := range []int{0, 255} {
		m := &model{g: gorgonia.NewGraph()}
		x := m.variable("x", tensor.Float64, 300)
		must(gorgonia.Slice(x, gorgonia.S(start, start+4)))
		must(gorgonia.Slice(x, gorgonia.S(start, start+5)))
		var said []string
		machine, err := vm.New(m.g, nil, vm.Notice(func(text string) { said = append(said, text) }))
		if err != nil {
			t.Fatal(err)
		}
		machine.Close()
		switch {
		case start == 0 && len(said) > 0:
			t.Errorf("slices that are right: %q", said)
		case start > 0 && (len(said) != 1 || !strings.Contains(said[0], "T[255:259:1...]: it is merged") || !strings.Contains(said[0], "use nn.Slice or nn.Split")):
			t.Errorf("slices beyond 255: %q, want one report that names nn.Slice", said)
		}
	}
}

// A training in a process of a larger job, without WithDataParallel, is reported.
func TestTrainingAloneIsReported(t *testing.T) {
	for name, value := range map[string]string{"RANK": "1", "WORLD_SIZE": "4", "EURYALE_JOB": "test"} {
		t.Setenv(name, value)
	}
	var said []string
	m := mlp(t, tensor.Float32)
	machine(t, m.g, vm.Notice(func(text string) { said = append(said, text) }))
	if len(said) > 0 {
		t.Errorf("a machine that does not train said %q", said)
	}
	machine(t, m.g, vm.WithSolver(&autograd.SGD{Rate: 0.1}, m.params...), vm.Notice(func(text string) { said = append(said, text) }))
	if len(said) != 1 || !strings.Contains(said[0], "rank 1 of 4 trains on its own") {
		t.Errorf("said %q", said)
	}
}
