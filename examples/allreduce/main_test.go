package main

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestSumOfTwoRanks(t *testing.T) {
	var out [2]bytes.Buffer
	require.NoError(t, euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		return run(comm, &out[comm.Rank()])
	}))
	for r := range out {
		require.Check(t, strings.HasSuffix(out[r].String(), "the sum of all is [3 30 300]\n"),
			"rank %d printed %q", r, out[r].String())
	}
}
