package main

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Any number of ranks trains the same model: masks of dropout follow from the image's place in
// the batch.
func TestRanksTrainTheModelOfOne(t *testing.T) {
	last := func(ranks int) (accuracy, loss float64) {
		t.Helper()
		var out bytes.Buffer
		err := euryale.Run(context.Background(), ranks, func(comm backend.Communicator,
			build sync.Locker) error {
			return train(comm, build, "cpu", 2, 48, 0.004, &out)
		})
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		if _, scanned := fmt.Sscanf(lines[len(lines)-1], "accuracy=%g loss=%g", &accuracy,
			&loss); err != nil || scanned != nil {
			t.Fatalf("%d ranks: %v, and printed\n%s", ranks, err, out.String())
		}
		return accuracy, loss
	}
	accuracy, loss := last(1)
	require.Check(t, !(accuracy < 0.7), "one rank: accuracy %g after two epochs", accuracy)
	if _, two := last(2); two < 0.98*loss || two > 1.02*loss {
		t.Errorf("loss %g of one rank, %g of two", loss, two)
	}
}

func TestADeviceThatIsNotThereIsAnError(t *testing.T) {
	err := euryale.Run(context.Background(), 1, func(comm backend.Communicator,
		build sync.Locker) error {
		return train(comm, build, "gpu", 1, 48, 0.002, new(bytes.Buffer))
	})
	require.Check(t, err != nil && strings.Contains(err.Error(), "has no GPU"), "%v", err)
}
