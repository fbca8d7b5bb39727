package sparse

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

func TestSentIsWhatThisRankHasSent(t *testing.T) {
	const n = 3000
	for _, how := range []Selection{Threshold(0.1), TopK(0.01), TopK(0.9)} {
		everywhere(t, 2, wrap(asIs, how), func(c *Communicator) error {
			a, b := c.NewState(), c.NewState()
			if a == b || a < firstOwn {
				return fmt.Errorf("states %d and %d", a, b)
			}
			x, y, sent := normals(n, c.Rank(), 0), make([]float32, n), make([]float32, n)
			like := backend.Of(x)
			if c.Device().Name() != "host" {
				like = backend.OnDevice(backend.F32, 8, n)
			}
			if s := c.Sent(a, like); s.Len() > 0 {
				return fmt.Errorf("before the first call: %v", s)
			}
			of := backend.Collective{Kind: backend.AllReduce, Op: backend.Sum, State: a}
			testranks.NoError(run(c, of, backend.Of(y), backend.Of(x)))
			testranks.NoError(move(c, backend.Of(sent), c.Sent(a, like)))
			want := masked(x, 0.1)
			if how.density > 0 {
				want = largest(x, topK(how.density, n))
			}
			if err := same(sent, want); err != nil {
				return fmt.Errorf("%v: %w", how, err)
			}
			if s := c.Sent(b, like); s.Len() > 0 {
				return fmt.Errorf("of another state: %v", s)
			}
			return nil
		})
	}
}
