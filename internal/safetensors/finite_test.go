package safetensors_test

import (
	"math"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestTheFirstElementThatIsNotFiniteIsFound in each dtype, at each place of tensors of all lengths
// around those of blocks; the largest finite numbers are none.
func TestTheFirstElementThatIsNotFiniteIsFound(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, n := range []int{0, 1, 3, 7, 8, 9, 31, 32, 33, 65} {
		test(t, n, []float64{math.MaxFloat64, -math.MaxFloat64, 5e-324},
			[]float64{nan, math.Copysign(nan, -1)}, []float64{inf, -inf})
		test(t, n, []float32{math.MaxFloat32, -math.MaxFloat32, 1e-45},
			[]float32{float32(nan), math.Float32frombits(0xff800001)},
			[]float32{float32(inf), -float32(inf)})
		test(t, n, []backend.Float16{0x7bff, 0xfbff, 1}, []backend.Float16{0x7e00, 0xfc01},
			[]backend.Float16{0x7c00, 0xfc00})
		test(t, n, []backend.BFloat16{0x7f7f, 0xff7f, 1}, []backend.BFloat16{0x7fc0, 0xff81},
			[]backend.BFloat16{0x7f80, 0xff80})
	}
	ones := []int64{-1, math.MaxInt64}
	i := safetensors.NotFinite(backend.Of(ones), false)
	require.Check(t, i == -1, "integer %d is not finite", i)
}

func test[T backend.Element](t *testing.T, n int, finite, nans, infinities []T) {
	t.Helper()
	x := make([]T, n)
	for i := range x {
		x[i] = finite[i%len(finite)]
	}
	b := backend.Of(x)
	if i := safetensors.NotFinite(b, false); i != -1 {
		t.Fatalf("%v: element %d of %d is not finite", b.DType(), i, n)
	}
	for i := range x {
		was := x[i]
		for k := range nans {
			x[i] = nans[k]
			got, only := safetensors.NotFinite(b, false), safetensors.NotFinite(b, true)
			if got != i || only != i {
				t.Errorf("%v: NaN %d of %d is found at %d and %d", b.DType(), i, n, got, only)
			}
			x[i] = infinities[k]
			got, only = safetensors.NotFinite(b, false), safetensors.NotFinite(b, true)
			if got != i || only != -1 {
				t.Errorf("%v: infinity %d of %d is found at %d and %d", b.DType(), i, n, got, only)
			}
		}
		x[i] = was
	}
}

func BenchmarkNotFinite(b *testing.B) {
	x := backend.Of(make([]float32, 1<<20))
	b.SetBytes(4 << 20)
	for b.Loop() {
		safetensors.NotFinite(x, false)
	}
}
