package autograd

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// seat is a rank among others, of which samplers ask no more.
// batches returns the global batches of an epoch, put together from all ranks.
func batches(t *testing.T, n, batch, size, epoch int, seed uint64, fill bool) [][]int {
	t.Helper()
	var whole [][]int
	for r := range size {
		s := require.Value(newSampler(r, size, n, batch, seed))(t)
		if fill {
			s = s.Fill()
		}
		shards := s.Epoch(epoch)
		if len(shards) != s.Steps() {
			t.Fatalf("%d steps, want %d", len(shards), s.Steps())
		}
		if whole == nil {
			whole = make([][]int, s.Steps())
		}
		for i, shard := range shards {
			if len(shard) != s.Local() {
				t.Fatalf("rank %d has %d samples, want %d", r, len(shard), s.Local())
			}
			whole[i] = append(whole[i], shard...)
		}
	}
	return whole
}

func TestSamplerBatchesDoNotDependOnRanks(t *testing.T) {
	for _, fill := range []bool{false, true} {
		want := batches(t, 103, 12, 1, 3, 42, fill)
		for _, size := range []int{2, 3, 4, 6, 12} {
			got := batches(t, 103, 12, size, 3, 42, fill)
			require.Check(t, slices.EqualFunc(got, want, slices.Equal[[]int]),
				"fill %v: %d ranks have other batches than 1", fill, size)
		}
	}
}

func TestSamplerSeesEverySampleOnce(t *testing.T) {
	for _, tt := range []struct {
		n, batch int
		fill     bool
		steps    int
		seen     int // different samples
	}{
		{96, 12, false, 8, 96},
		{103, 12, false, 8, 96},
		{103, 12, true, 9, 103},
		{12, 12, true, 1, 12},
	} {
		got := batches(t, tt.n, tt.batch, 2, 0, 1, tt.fill)
		require.Check(t, len(got) == tt.steps, "%+v: %d steps", tt, len(got))
		count := make([]int, tt.n)
		seen := 0
		for _, b := range got {
			for _, i := range b {
				if count[i]++; count[i] == 1 {
					seen++
				}
			}
		}
		require.Check(t, seen == tt.seen, "%+v: %d samples seen", tt, seen)
		require.Check(t, tt.fill || slices.Max(count) == 1, "%+v: a sample was seen twice", tt)
	}
}

func TestSamplerShuffles(t *testing.T) {
	base := batches(t, 100, 10, 1, 0, 1, false)
	require.Check(t, slices.EqualFunc(base, batches(t, 100, 10, 1, 0, 1, false),
		slices.Equal[[]int]), "the same seed and epoch give other batches")
	for _, other := range [][2]int{{1, 1}, {0, 2}} {
		if slices.EqualFunc(base, batches(t, 100, 10, 1, other[0], uint64(other[1]), false),
			slices.Equal[[]int]) {
			t.Errorf("epoch %d of seed %d is epoch 0 of seed 1", other[0], other[1])
		}
	}
	// A release of Go must not change what a seed means.
	got, want := permutation(8, 1, 2), []int{5, 4, 2, 7, 1, 0, 3, 6}
	require.Check(t, slices.Equal(got, want), "permutation %v, want %v", got, want)
}

func TestSamplerArguments(t *testing.T) {
	for _, tt := range [][3]int{{10, 4, 3}, {10, 0, 1}, {10, 12, 2}} {
		require.Fails(t, fmt.Sprintf("NewSampler%v", tt),
			require.Err(newSampler(0, tt[2], tt[0], tt[1], 0)), backend.ErrArgument)
	}
}

// Ranks whose samplers have other seeds, samples or batches, or whose evaluations have other
// shares, are told on all ranks.
func TestSharesAreComparedAmongRanks(t *testing.T) {
	for want, f := range map[string]func(r rank, differ int) error{
		"the seed is 1 on rank 0, but the seed is 2 on rank 1": func(r rank, differ int) error {
			_, err := NewSampler(r.comm, 100, 8, uint64(1+differ))
			return err
		},
		"the batch is 8 on rank 0, but the batch is 10 on rank 1": func(r rank, differ int) error {
			_, err := NewSampler(r.comm, 100, 8+2*differ, 1)
			return err
		},
		"the sampler has 100 samples on rank 0, but": func(r rank, differ int) error {
			_, err := NewSampler(r.comm, 100+differ, 8, 1)
			return err
		},
		"a share has up to 4 on rank 0, but": func(r rank, differ int) error {
			_, err := Evaluation(r.comm, 100, 4+differ)
			return err
		},
	} {
		for differ := range 2 {
			errs := each(t, 2, func(r rank) error { return f(r, differ*r.comm.Rank()) })
			for i, err := range errs {
				require.Check(t, differ != 0 || err == nil, "alike, rank %d: %v", i, err)
				require.Check(t, differ != 1 || errors.Is(err, backend.ErrMismatch) &&
					strings.Contains(err.Error(), want), "rank %d: %v, want %q", i, err, want)
			}
		}
	}
}

// TestSamplerRestHasEachSampleOnce: in the batches of Epoch, and the last one shared out in order.
func TestSamplerRestHasEachSampleOnce(t *testing.T) {
	for _, n := range []int{12, 13, 17, 23} {
		want := permutation(n, 7, 3)
		for _, size := range []int{1, 2, 3, 4, 6} {
			steps := make([][]int, (n+11)/12)
			for r := range size {
				s := require.Value(newSampler(r, size, n, 12, 7))(t)
				epoch := s.Rest().Epoch(3)
				require.That(t, len(epoch) == len(steps) && s.Rest().Steps() == len(steps),
					"%d samples have %d steps", n, len(epoch))
				for i, share := range epoch {
					steps[i] = append(steps[i], share...)
				}
			}
			require.Slices(t, fmt.Sprintf("%d samples on %d ranks", n, size),
				slices.Concat(steps...), want)
		}
	}
}

// Where ranks do not divide the micro-batches, they have the batches of one rank, each its share.
func TestTreeSamplersDivideMicroBatches(t *testing.T) {
	var want [][]int
	for P := 1; P <= 5; P++ {
		shares := make([][][]int, P) // by rank
		all(t, P, func(r rank) error {
			s := testranks.Must(NewTreeSampler(r.comm, 50, 12, 6, 3))
			shares[r.comm.Rank()] = s.Epoch(1)
			if _, share, _ := TreeShare(6, r.comm.Rank(), P); s.Local() != 2*share {
				return fmt.Errorf("%d samples for %d micro-batches of 2", s.Local(), share)
			}
			return nil
		})
		for step := range shares[0] {
			var batch []int
			for r := range shares {
				batch = append(batch, shares[r][step]...)
			}
			if P == 1 {
				want = append(want, batch)
			} else if !slices.Equal(batch, want[step]) {
				t.Errorf("%d ranks have the batch %v, one has %v", P, batch, want[step])
			}
		}
	}
	all(t, 2, func(r rank) error {
		for _, c := range [][2]int{{12, 5}, {12, 1}, {60, 6}} {
			if _, err := NewTreeSampler(r.comm, 50, c[0], c[1], 3); !errors.Is(err,
				backend.ErrArgument) {
				return fmt.Errorf("a batch of %d in %d micro-batches: %v", c[0], c[1], err)
			}
		}
		return nil
	})
}
