package backendtest

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// Bench times all-reduces of float32 on the default queue and reports
// allocations, which a good leaf does not make. The numbers are of all ranks
// together: the time of one call, the allocations of all.
func Bench(b *testing.B, o Options) {
	s := newSuite(o)
	for _, P := range s.Sizes {
		for _, n := range []int{256, 16384, 1 << 20} {
			b.Run(fmt.Sprintf("P=%d/bytes=%d", P, 4*n), func(b *testing.B) {
				require.NoError(b, s.with(P, patient, func(g *Group) error {
					return s.benchAllReduce(b, g, n)
				}))
			})
		}
	}
}

func (s *suite) benchAllReduce(b *testing.B, g *Group, n int) error {
	b.SetBytes(int64(4 * n))
	b.ReportAllocs()
	return s.each(g.Comms, func(c backend.Communicator) error {
		x := testranks.Must(c.Device().Alloc(4 * n))
		testranks.NoError(backend.Barrier(c))
		if c.Rank() == 0 {
			b.ResetTimer()
		}
		for range b.N {
			testranks.NoError(backend.Run(c, allReduce, x.As(backend.F32), x.As(backend.F32)))
		}
		return c.Device().Free(x)
	})
}
