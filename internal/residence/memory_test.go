package residence

import (
	"fmt"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// far is the Engine of tensors that the host cannot reach.
type far struct{ tensor.StdEng }

func (far) AllocAccessible() bool { return false }

func TestElementsAreInRowOrder(t *testing.T) {
	view := func(v tensor.View, err error) *tensor.Dense {
		require.NoError(t, err)
		return v.(*tensor.Dense)
	}
	matrix := tensor.New(tensor.WithShape(2, 3), tensor.WithBacking([]float64{1, 2, 3, 4, 5, 6}))
	turned := matrix.Clone().(*tensor.Dense)
	require.NoError(t, turned.T())
	for what, test := range map[string]struct {
		v      any
		want   []float64
		copied bool
	}{
		"a matrix":            {matrix, []float64{1, 2, 3, 4, 5, 6}, false},
		"a row":               {view(matrix.Slice(tensor.S(1))), []float64{4, 5, 6}, false},
		"a column":            {view(matrix.Slice(nil, tensor.S(1))), []float64{2, 5}, true},
		"a transposed matrix": {turned, []float64{1, 4, 2, 5, 3, 6}, true},
		"columns of a transposed": {view(turned.Slice(nil, tensor.S(1, 2))), []float64{4, 5, 6},
			false},
		"column-major": {tensor.New(tensor.WithShape(2, 2),
			tensor.AsFortran([]float64{1, 2, 3, 4})), []float64{1, 2, 3, 4}, true},
		"a scalar": {gorgonia.NewF64(7), []float64{7}, false},
	} {
		memory, err := Memory(test.v, backend.F64)
		require.That(t, err == nil, "%s: %v", what, err)
		got, err := Elements(test.v, backend.F64)
		if err != nil || !slices.Equal(backend.View[float64](got), test.want) ||
			(got.Addr() != memory.Addr()) != test.copied {
			t.Errorf("%s: %v (%v), want %v, copied: %v", what, backend.View[float64](got), err,
				test.want, test.copied)
		}
	}
}

func TestValuesWithoutMemoryHereAreRefused(t *testing.T) {
	distant := tensor.New(tensor.WithShape(2), tensor.WithBacking([]float64{1, 2}))
	tensor.WithEngine(far{})(distant)
	require.Fails(t, "Elements", require.Err(Elements(distant, backend.F64)),
		backend.ErrUnsupported, "memory of a device")
	require.Fails(t, "Elements", require.Err(Elements("a string", backend.F64)),
		backend.ErrArgument)
	require.Report(t, Within(6, []int{2, 3}, []int{3, 1}))
	for _, strides := range [][]int{{4, 1}, {3}} {
		require.Fails(t, fmt.Sprintf("strides %v", strides), Within(6, []int{2, 3}, strides),
			backend.ErrArgument)
	}
}
