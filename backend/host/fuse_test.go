package host

import (
	"context"
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

func TestQueuesRunFusedPrograms(t *testing.T) {
	own := require.Value(Device{}.NewQueue())(t)
	defer own.Close()
	p := &fuse.Program{Shape: []int{3}}
	x := p.Load(backend.F32, 1)
	p.Store(p.Do(fuse.Mul, x, x), backend.F32, 1)
	for name, q := range map[string]backend.Queue{"caller": Device{}.Default(), "own": own} {
		l := require.Value(q.(fuse.Queue).Fuse(p))(t)
		y := []float32{2, 3, 4}
		operands := []backend.Buffer{backend.Of(y)}
		for range 2 { // in order
			require.NoError(t, l.Run(operands, operands, backend.Buffer{}))
		}
		require.Fails(t, fmt.Sprintf("%s: without inputs", name),
			l.Run(operands, nil, backend.Buffer{}), backend.ErrArgument)
		e, err := q.Record()
		if err == nil {
			err = e.Join(context.Background())
		}
		require.Check(t, err == nil && y[0] == 16 && y[1] == 81 && y[2] == 256, "%s: %v, %v", name,
			y, err)
	}
}
