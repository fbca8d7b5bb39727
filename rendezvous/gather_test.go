package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// gathererOf returns a store as one that gathers.
func gathererOf(s Store) gatherer {
	if g, ok := s.(gatherer); ok {
		return g
	}
	return oneByOne{s}
}

// Values are long enough here to come in several answers.
func TestEveryStoreGathers(t *testing.T) {
	onStores(t, func(t *testing.T, s []Store) {
		ctx := within(t, long)
		ask := func(key string, r int, members ...int) gathering {
			value := bytes.Repeat([]byte{byte(r)}, maxValue-r)
			return gathering{key: key, size: len(s), members: members, rank: r, value: value}
		}
		got := make(chan [][]byte, len(s))
		for r := range s {
			go func() {
				values, err := gathererOf(s[r]).allGather(ctx, ask("all", r))
				require.Check(t, err == nil, "rank %d: %v", r, err)
				got <- values
			}()
		}
		for range s {
			for r, v := range <-got {
				require.Check(t, bytes.Equal(v, ask("", r).value),
					"the value of rank %d has %d bytes", r, len(v))
			}
		}
		_, err := gathererOf(s[1]).allGather(ctx, ask("all", 1))
		require.Fails(t, "for the second time", err, errUsed.Error())
		short, cancel := context.WithCancel(ctx)
		cancel()
		_, err = gathererOf(s[2]).allGather(short, ask("some", 2, 2, 0))
		require.Fails(t, "without rank 0", err, context.Canceled)
		// it may have come before the end
		require.NoError(t, s[2].Set(ctx, rankKey("some", 2), nil))
		for _, r := range []int{1, 0} {
			values, err := gathererOf(s[r]).peek(ctx, ask("some", r, 2, 0))
			require.Check(t, err == nil && len(values) == 2 && values[0] != nil && values[1] == nil,
				"rank %d sees %d values, %v", r, len(values), err)
		}
		values, err := gathererOf(s[0]).allGather(ctx, ask("some", 0, 2, 0))
		require.Check(t, err == nil && len(values) == 2 && len(values[0]) == 0 &&
			len(values[1]) == maxValue, "rank 0 has %d values, %v", len(values), err)
	})
}

func TestGatheringsThatNobodySendsAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		g    gathering
		from int
	}{
		"no ranks":         {gathering{key: "k"}, 0},
		"too many ranks":   {gathering{key: "k", size: maxRanks + 1}, 0},
		"from beyond":      {gathering{key: "k", size: 2}, 2},
		"from before":      {gathering{key: "k", size: 2}, -1},
		"a long key":       {gathering{key: strings.Repeat("k", maxKey), size: 2}, 0},
		"too many members": {gathering{key: "k", size: 2, members: make([]int, maxRanks+2)}, 0},
	} {
		_, _, err := unpackGathering(c.g.pack(c.from))
		require.Check(t, err != nil, "%s: no error", name)
	}
	_, _, err := unpackGathering([]byte("garbage"))
	require.Check(t, err != nil, "garbage: no error")
}

// What all have given by then is told although ctx has ended with a cause, as where a rank leaves
// right after an all-gather.
func TestAllGatherEndsWithTheCauseUnlessAllHaveGiven(t *testing.T) {
	onWorlds(t, 2, func(t *testing.T, w []*World) {
		left := errors.New("rank 1 has left")
		ctx, cancel := context.WithCancelCause(within(t, long))
		cancel(left)
		_, err := w[0].AllGather(ctx, "k", []byte("a"))
		require.Check(t, errors.Is(err, left), "without rank 1: %v", err)
		for r, value := range []string{"a", "b"} { // that of rank 0 may have come before the end
			require.NoError(t, w[1].Store.Set(within(t, long), rankKey("k", r), []byte(value)))
		}
		v, err := w[0].AllGather(ctx, "k", []byte("a"))
		require.Check(t, err == nil && string(bytes.Join(v, nil)) == "ab",
			"all have given theirs: %q, %v", v, err)
	})
}
