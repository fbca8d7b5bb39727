package layers_test

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/layers"
)

// TestLayoutsThatDifferAreRefused: on every rank, also where each rank's numbers fit alone, and
// where one rank's do not.
func TestLayoutsThatDifferAreRefused(t *testing.T) {
	for want, of := range map[string]func(rank int) [3]int{
		"1 x 1 x 4 (data x sequence x tensor), and rank 2 one of 2": func(rank int) [3]int {
			return map[bool][3]int{false: {0, 1, 4}, true: {0, 1, 2}}[rank == 2]
		},
		"and rank 3 one of 0 x 1 x 8": func(rank int) [3]int {
			return map[bool][3]int{false: {4, 1, 1}, true: {0, 1, 8}}[rank == 3]
		},
		"a layout of 3 x 1 x 1": func(int) [3]int { return [3]int{3, 1, 1} },
		"a layout of 4 x -1 x":  func(int) [3]int { return [3]int{4, -1, -1} },
	} {
		require.NoError(t, euryale.Run(t.Context(), 4, func(comm backend.Communicator,
			_ sync.Locker) error {
			n := of(comm.Rank())
			_, err := layers.NewLayout(comm, n[0], n[1], n[2])
			require.Check(t, err != nil && strings.Contains(err.Error(), want) && (errors.Is(err,
				backend.ErrArgument) || errors.Is(err, backend.ErrMismatch)),
				"rank %d: want %q, got %v", comm.Rank(), want, err)
			return nil
		}))
	}
}
