package half

import (
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestNilArgumentsAreErrors(t *testing.T) {
	comm := reference.New("test", 1, time.Minute)[0]
	nilargs.Check(t, map[string]nilargs.Use{
		"New": {F: New, Args: []any{comm, backend.F16}},
	}, map[string]string{"Wrap": "what it returns is New"})
	require.Fails(t, "Wrap of nil is no error", require.Err(Wrap(backend.F16)(nil)))
}
