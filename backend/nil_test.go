package backend_test

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
	x := backend.Of([]float32{1})
	const forBackends = "it is for those who implement communicators, and returns no error"
	nilargs.Check(t, map[string]nilargs.Use{
		"Barrier": {F: backend.Barrier, Args: []any{comm}},
		"Run": {F: backend.Run, Args: []any{comm, backend.Collective{Kind: backend.AllReduce},
			x, x}},
		"UrgentQueue": {F: backend.UrgentQueue, Args: []any{comm.Device()}},
	}, map[string]string{
		"AbortOnPanic": forBackends, "As": "it finds none", "Digest": forBackends,
		"Finished":  "nil is success",
		"GetHeader": forBackends, "Given": "it is what says so",
		"Host":  "a call with the buffer is an error",
		"Label": forBackends, "NewGraph": forBackends, "Of": "a slice", "OnDevice": "numbers",
		"Panicked": forBackends,
		"RankOf":   forBackends, "Recorded": "nil is not recorded", "RecordedWork": forBackends,
		"Refuse": forBackends, "RefuseRows": forBackends, "RefuseTree": forBackends,
		"View":      "a buffer",
		"WithHooks": forBackends, "Wrap": forBackends,
	})
	_, ok := backend.As[backend.Wrapper](nil)
	require.Check(t, !ok, "nil wraps something")
}
