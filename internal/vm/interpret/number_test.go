package interpret

import (
	"math"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// TestWhatHasNoBoundMayBecomeNaN: a machine whose operand is NaN where this one knows no bound is
// right, whatever is computed from it, and this one's own NaN decides nothing.
func TestWhatHasNoBoundMayBecomeNaN(t *testing.T) {
	a, nan := in(backend.F32), math.NaN()
	for _, x := range []float64{0, 2, math.Inf(-1), nan} {
		open := Number{x, math.Inf(1)}
		for f := range functions {
			if y, err := a.function(f, open); err != nil || !y.Allows(nan) || !y.Allows(3) {
				t.Errorf("%v(%v) = %v, %v", f, open, y, err)
			}
		}
		for f := range comparisons {
			y, err := a.binary(f, Number{Value: 1}, open)
			require.Check(t, err == nil && y.Err == 1, "%v(1, %v) = %v, %v", f, open, y, err)
		}
	}
	if y, err := a.function(fuse.Sign, Number{Value: nan}); err != nil || !math.IsNaN(y.Value) ||
		y.Err != 0 {
		t.Errorf("the sign of NaN is %v, %v", y, err)
	}

	pool := ir.MaxPoolGrad{Window: ir.Window{H: 1, W: 2, StrideH: 1, StrideW: 2, DilationH: 1,
		DilationW: 1}}
	x := Of(ir.Of(1, 1, 1, 2), []float64{nan, 5})
	x.Data[0].Err = math.Inf(1)
	dx := a.maxPoolGrad(ir.Value{Shape: x.Shape}, pool, x, Of(ir.Of(1, 1, 1, 1), []float64{1}))
	require.Check(t, dx.Data[0].Allows(0) && dx.Data[1].Allows(1),
		"5 may be the largest beside what has no bound: %v", dx.Data)
}

// TestPaddingTimesInfinityMayBeNaN: a machine may multiply the padding, or skip it.
func TestPaddingTimesInfinityMayBeNaN(t *testing.T) {
	wide := ir.Window{H: 1, W: 2, StrideH: 1, StrideW: 1, DilationH: 1, DilationW: 1, PadW: 1}
	image, filter := Of(ir.Of(1, 1, 1, 1), []float64{3}), Of(ir.Of(1, 1, 1, 2), []float64{1, 2})
	endless := Of(filter.Shape, []float64{math.Inf(1), 2})
	for _, pass := range []kernels.Pass{kernels.Forward, kernels.FilterGradient} {
		y := in(backend.F32).convolved(ir.Value{Shape: filter.Shape},
			ir.Convolution{Window: wide, Pass: pass}, []Array{image, endless})
		require.Check(t, y.Data[0].Allows(6) && y.Data[0].Allows(math.NaN()), "%v: %v", pass,
			y.Data)
	}
	y := in(backend.F32).convolved(ir.Value{Shape: filter.Shape}, ir.Convolution{Window: wide},
		[]Array{image, filter})
	require.Check(t, y.Data[0] == (Number{Value: 6}) && y.Data[1] == (Number{Value: 3}),
		"finite ones have bounds: %v", y.Data)
}
