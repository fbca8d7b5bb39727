package vm

import (
	"errors"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// TestADoubtIsReported: a machine that runs the plain plan says why.
func TestADoubtIsReported(t *testing.T) {
	var said []string
	m := &Machine{
		graph: gorgonia.NewGraph(), plan: &plan.Plan{Doubt: errors.New(
			"step 3 reads the wrong value")},
		notice: func(text string) { said = append(said, text) },
	}
	if m.warn(); len(said) != 1 || !strings.Contains(said[0], "step 3 reads the wrong value") {
		t.Errorf("%q", said)
	}
}
