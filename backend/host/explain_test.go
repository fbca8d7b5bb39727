package host

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// The number of steps that a call takes tells which algorithm it used.
func TestFoundExplainSaysWhatTheHostBackendDoes(t *testing.T) {
	const P = 2
	for _, test := range []struct {
		what   backend.Collective
		nbytes int
		alloc  bool
		steps  uint64
		says   string
	}{
		{sum, oneShotBytes / P, false, 1, ": one-shot, by its size"},
		{sum, oneShotBytes/P + 4, false, 2, ": two-shot, by its size"},
		{sum, directBytes - 4, true, 2, ": two-shot, by its size"},
		{sum, directBytes, true, 3, ": direct if memory is from Alloc, else two-shot"},
		{sum, directBytes, false, 3, ": direct if memory is from Alloc, else two-shot"},
		{backend.Collective{Kind: backend.AllReduce, Algorithm: backend.OneShot}, 64 << 10, false,
			1, ": one-shot, as the call asks for"},
		{backend.Collective{Kind: backend.Reduce}, directBytes, true, 2, ": two-shot, by its size"},
	} {
		text, err := Explain(test.what, backend.F32, test.nbytes, P)
		require.Check(t, err == nil && strings.Contains(text, test.says),
			"%d bytes: %q (%v), want %q", test.nbytes, text, err, test.says)
		ranks(t, P, func(c *comm) error {
			c.spin.crowded = false // whatever the machine is
			x, err := c.Alloc(test.nbytes)
			if !test.alloc {
				x = backend.Of(make([]byte, test.nbytes))
			}
			before := c.step
			err = errors.Join(err, backend.Run(c, test.what, x.As(backend.F32), x.As(backend.F32)))
			if steps := c.step - before; err == nil && steps != test.steps {
				return fmt.Errorf("%v of %d bytes, Alloc %v: %d steps, want %d", test.what,
					test.nbytes, test.alloc, steps, test.steps)
			}
			return err
		})
	}
}

func TestExplainSaysWhatCannotBe(t *testing.T) {
	for _, ranks := range []int{0, -1} {
		require.Fails(t, fmt.Sprintf("%d ranks", ranks),
			require.Err(Explain(sum, backend.F32, 4, ranks)), backend.ErrArgument)
	}
	require.Fails(t, "Explain", require.Err(Explain(sum, backend.F32, 4, maxRanks+1)),
		backend.ErrUnsupported)
}
