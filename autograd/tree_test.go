package autograd

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestTreeShare(t *testing.T) {
	for _, c := range []struct{ n, rank, ranks, first, share int }{{8, 0, 1, 0, 8}, {8, 1, 2, 4, 4},
		{8, 7, 8, 7, 1}, {8, 0, 3, 0, 3}, {8, 1, 3, 3, 3}, {8, 2, 3, 6, 2}, {5, 2, 3, 4, 1}} {
		first, share, err := TreeShare(c.n, c.rank, c.ranks)
		require.Check(t, first == c.first && share == c.share && err == nil,
			"%d micro-batches on rank %d of %d: %d from %d on (%v), want %d from %d on", c.n,
			c.rank, c.ranks, share, first, err, c.share, c.first)
	}
	for _, c := range []struct{ n, rank, ranks int }{{0, 0, 1}, {2, 0, 3}, {8, 3, 3}, {8, -1, 3}} {
		if _, _, err := TreeShare(c.n, c.rank, c.ranks); !errors.Is(err, backend.ErrArgument) {
			t.Errorf("%d micro-batches on rank %d of %d: %v", c.n, c.rank, c.ranks, err)
		}
	}
}

// inTree adds numbers level by level.
func inTree[T float32 | float64](xs []T) T {
	for len(xs) > 1 {
		var sums []T
		for pair := range slices.Chunk(xs, 2) {
			sum := pair[0]
			for _, x := range pair[1:] {
				sum += x
			}
			sums = append(sums, sum)
		}
		xs = sums
	}
	return xs[0]
}

func TestTreeMeanDependsOnNoRanks(t *testing.T) {
	const n = 12
	numbers := make([]float64, n)
	for i := range numbers {
		numbers[i] = math.Sin(float64(i)) * math.Exp2(float64(i%5*12))
	}
	want := inTree(numbers) / n
	if inOrder := func() (sum float64) {
		for _, x := range numbers {
			sum += x
		}
		return sum / n
	}(); inOrder == want {
		t.Error("the order does not matter: this test shows nothing")
	}
	for _, P := range []int{1, 2, 3, 5} {
		all(t, P, func(r rank) error {
			first, share, _ := TreeShare(n, r.comm.Rank(), P)
			got, err := TreeMean(r.comm, numbers[first:first+share])
			if got != want {
				err = errors.Join(err, fmt.Errorf("%d ranks have a mean of %v, want %v", P, got,
					want))
			}
			return err
		})
	}
	all(t, 1, func(r rank) error {
		if _, err := TreeMean(r.comm, nil); !errors.Is(err, backend.ErrArgument) {
			return fmt.Errorf("the mean of nothing: %v", err)
		}
		return nil
	})
}

// TestSyncRefusesATree: machines run its micro-batches.
func TestSyncRefusesATree(t *testing.T) {
	for _, hooks := range []string{"none", "all"} {
		for i, err := range each(t, 2, func(r rank) error {
			return r.teachHooked(hooks, heavyBall(), func(l *lesson) error { return l.step(0) },
				WithTree(4))
		}) {
			const want = "WithTree: unsupported: Sync makes a step of one run: use " +
				"vm.WithTree, with vm.WithSolver and vm.WithDataParallel"
			require.Fails(t, fmt.Sprintf("hooks %s, rank %d", hooks, i), err,
				backend.ErrUnsupported, want)
		}
	}
}
