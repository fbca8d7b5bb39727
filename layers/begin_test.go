package layers_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops"
)

// TestLearnablesBeginWithWhatBeginHasRaced: F32 or F64, of which each rank of the Tensor group
// takes its part; other lengths and dtypes are refused.
func TestLearnablesBeginWithWhatBeginHasRaced(t *testing.T) {
	single, double := []float32{1, 2, 3, 4, 5, 6}, []float64{1, 2, 3, 4, 5, 6}
	for _, c := range []struct {
		dtype  tensor.Dtype
		values backend.Buffer
		want   error
	}{
		{tensor.Float32, backend.Of(single), nil},
		{tensor.Float64, backend.Of(single), nil},
		{tensor.Float32, backend.Of(double), nil},
		{tensor.Float64, backend.Of(double), nil},
		{tensor.Float32, backend.Of(single[:5]), ops.ErrShape},
		{tensor.Float32, backend.Of(make([]int32, 6)), backend.ErrUnsupported},
	} {
		within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 2}, func(l *layers.Layout,
			_ backend.Device, build sync.Locker) error {
			build.Lock()
			defer build.Unlock()
			b := layers.NewBuilder(gorgonia.NewGraph(), l, c.dtype, 1)
			b.Begin(func(string, []int) (backend.Buffer, int, error) { return c.values, 0, nil })
			n := b.Learn("w", layers.Constant(7), 1, 3, 2)
			if c.want != nil {
				if !errors.Is(b.Err(), c.want) {
					return fmt.Errorf("%v of %d values: %v", c.values.DType(), c.values.Len(),
						b.Err())
				}
				return nil
			}
			if b.Err() != nil {
				return b.Err()
			}
			own := float64(1 + l.Comm(layers.Tensor).Rank())
			if got := numbers(n.Value()); !slices.Equal(got, []float64{own, own + 2, own + 4}) {
				return fmt.Errorf("%v of %v: %v", c.dtype, c.values.DType(), got)
			}
			return nil
		})
	}
}
