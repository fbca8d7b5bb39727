package hierarchy

import (
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/rendezvous"
)

func TestNilArgumentsAreErrors(t *testing.T) {
	comm := reference.New("test", 1, time.Minute)[0]
	const values = "it takes values alone"
	nilargs.Check(t, map[string]nilargs.Use{
		"New": {F: New, Args: []any{t.Context(), &rendezvous.World{}, comm,
			Grid(1, 1), Options{}}},
	}, map[string]string{"Discover": values, "Fit": values, "Grid": values, "Measured": values,
		"NewPlan": values})
}
