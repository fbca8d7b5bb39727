package solver

import (
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestNilArgumentsAreErrors(t *testing.T) {
	w := vectors(1)
	grads := []gorgonia.ValueGrad{pair{[]float32{1}, []float32{1}}}
	nilargs.Check(t, map[string]nilargs.Use{
		"ClipNorm": {F: ClipNorm, Args: []any{grads, 1.0}},
		"Fuse":     {F: Fuse, Args: []any{&SGD{Rate: 1}, func() error { return nil }}},
		"NewGroups": {F: func(params gorgonia.Nodes) error {
			_, err := NewGroups(params)
			return err
		}, Args: []any{w}},
	}, map[string]string{
		"Fuse.pull":   "nil has nothing to pull",
		"Kind":        "it names any solver, also none",
		"VectorNames": "nil is a solver of another package",
		"Warmup":      "it returns a Schedule and no error",
	})
	err := (&SGD{Rate: 1}).Step([]gorgonia.ValueGrad{nil})
	require.Fails(t, "Step of nil", err, backend.ErrArgument)
}
