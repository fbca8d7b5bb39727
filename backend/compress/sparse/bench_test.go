package sparse_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// BenchmarkAllReduce compares ways to reduce the same operand among ranks that are
// goroutines of this process.
func BenchmarkAllReduce(b *testing.B) {
	plain := func(c backend.Communicator) (backend.Communicator, error) { return c, nil }
	for _, way := range []struct {
		name string
		wrap func(backend.Communicator) (backend.Communicator, error)
	}{
		{"dense", plain},
		{"bf16", half.Wrap(backend.BF16)},
		{"f16", half.Wrap(backend.F16)},
		{"topk=1%", sparse.Wrap(sparse.TopK(0.01))},
		{"topk=5%", sparse.Wrap(sparse.TopK(0.05))},
		{"threshold", sparse.Wrap(sparse.Threshold(0.5), sparse.WithValues(backend.F16))},
	} {
		for _, P := range []int{2, 4} {
			b.Run(fmt.Sprintf("%s/P=%d", way.name, P), func(b *testing.B) {
				allReduce(b, way.wrap, P)
			})
		}
	}
}

func allReduce(b *testing.B, wrap func(backend.Communicator) (backend.Communicator, error), P int) {
	const n = 1 << 22
	g := require.Value(backendtest.Over(host.Backend{})(P, time.Minute))(b)
	backendtest.Each(b, g.Comms, func(inner backend.Communicator) error {
		c := testranks.Must(wrap(inner))
		memory := testranks.Must(c.Alloc(4 * n))
		y, x := memory.As(backend.F32), make([]float32, n)
		rng := rand.New(rand.NewPCG(uint64(c.Rank()), 1))
		for i := range x {
			x[i] = float32(rng.NormFloat64()) / 10
		}
		for i := range b.N + 1 {
			if i == 1 && c.Rank() == 0 { // the first call makes memory
				b.ResetTimer()
			}
			copy(backend.View[float32](y), x) // as a gradient is packed
			testranks.NoError(backend.Run(c, backend.Collective{Kind: backend.AllReduce,
				Op: backend.Avg, State: 1}, y, y))
		}
		return c.Close()
	})
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/element")
	require.Report(b, g.Close())
}
