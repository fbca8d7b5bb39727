package sparse

import (
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestNilArgumentsAreErrors(t *testing.T) {
	comm := reference.New("test", 1, time.Minute)[0]
	nilargs.Check(t, map[string]nilargs.Use{
		"New": {F: New, Args: []any{comm, TopK(0.5), WithStrict()}},
	}, map[string]string{"Wrap": "what it returns is New", "WithValues": "a number"})
	require.Fails(t, "Wrap of nil is no error", require.Err(Wrap(TopK(0.5))(nil)))
}
