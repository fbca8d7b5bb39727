package tcp

import (
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestExplainSaysWhatRuns(t *testing.T) {
	sum := backend.Collective{Kind: backend.AllReduce}
	asked := backend.Collective{Kind: backend.Reduce, Algorithm: backend.TwoShot}
	for _, test := range []struct {
		what          backend.Collective
		nbytes, ranks int
		want          string
	}{
		{sum, pairBytes, 2, "one-shot, by its size"},
		{sum, pairBytes + 4, 2, "two-shot, by its size"},
		{sum, oneShotBytes / 4, 5, "one-shot, by its size\n  one-shot   up to 16384 bytes"},
		{sum, oneShotBytes/4 + 4, 5, "two-shot, by its size"},
		{asked, 4, 3, "two-shot, as the call asks for"},
		{asked, 4, 3, "sends the root the sums"},
		{sum, 4, 1, "a copy"},
		{backend.Collective{Kind: backend.ReduceScatter}, 1 << 20, 3, "adds them in rank order"},
		{backend.Collective{Kind: backend.Broadcast}, oneShotBytes, 3, "whole, by its size"},
		{backend.Collective{Kind: backend.Broadcast}, oneShotBytes + 4, 3, "in parts, by its size"},
		{backend.Collective{Kind: backend.Broadcast}, 1 << 20, 2,
			"whole, because there are two ranks"},
		{backend.Collective{Kind: backend.AllToAll}, 1 << 20, 3, "direct, the only algorithm"},
	} {
		text, err := Explain(test.what, backend.F32, test.nbytes, test.ranks)
		if err != nil || !strings.Contains(text, test.want) || !strings.HasSuffix(text, "\n") {
			t.Errorf("%v of %d bytes among %d: %q, %v, want %q", test.what, test.nbytes, test.ranks,
				text, err, test.want)
		}
	}
	require.Fails(t, "Explain", require.Err(Explain(sum, backend.F32, -1, 2)), backend.ErrArgument)
}
