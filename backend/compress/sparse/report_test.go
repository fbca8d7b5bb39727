package sparse

import (
	"errors"
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

func TestReportsSayWhatThisRankHasSent(t *testing.T) {
	const n = 3000
	for _, how := range []Selection{Threshold(0.1), TopK(0.01), TopK(0.9)} {
		everywhere(t, 2, wrap(asIs, how), func(c *Communicator) error {
			x := normals(n, c.Rank(), 0)
			sent, y := make([]float32, n), make([]float32, n)
			if err := reported(c, backend.Of(sent), backend.Of(y), backend.Of(x)); err != nil {
				return err
			}
			want := masked(x, 0.1)
			if how.density > 0 {
				want = largest(x, topK(how.density, n))
			}
			if err := same(sent, want); err != nil {
				return fmt.Errorf("%v: %w", how, err)
			}
			if a, b := c.NewState(), c.NewState(); a == b || a < firstOwn {
				return fmt.Errorf("states %d and %d", a, b)
			}
			c.Report(3, backend.Of(sent[1:]))
			if _, err := sum(c, backend.Sum, x); !errors.Is(err, backend.ErrArgument) {
				return fmt.Errorf("a report of another length: %v", err)
			}
			return nil
		})
	}
}

// reported runs a call with state 3, and a report.
func reported(c *Communicator, sent, dst, src backend.Buffer) error {
	if c.Device().Name() == "host" {
		c.Report(3, sent)
		return run(c, reduction(backend.Sum), dst, src)
	}
	memory, err := c.Device().Alloc(sent.NBytes())
	if err != nil {
		return err
	}
	onDevice := memory.As(sent.DType())
	c.Report(3, onDevice)
	return errors.Join(run(c, reduction(backend.Sum), dst, src), move(c, sent, onDevice), c.Device().Free(memory))
}
