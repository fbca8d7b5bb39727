package simd

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// The functions of float32 are right up to one unit in the last place, at all magnitudes.
func TestFunctionsOfFloat32AreAccurate(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	xs := []float64{0, math.Copysign(0, -1), 1, -1, math.Inf(1), math.Inf(-1), math.NaN(),
		math.MaxFloat32, 0x1p-149, -0x1p-149, 88.72284, 88.7229, -103.9, -87.4}
	for range 200000 {
		xs = append(xs, math.Ldexp(2*r.Float64()-1, r.IntN(40)-30), r.NormFloat64()*20,
			math.Ldexp(r.Float64(), r.IntN(270)-148))
	}
	for op := Exp; op <= Softplus; op++ {
		double, single := rounded(op)
		worst, at := 0.0, 0.0
		for _, x := range xs {
			x = float64(float32(x))
			got, want := float32(single(x)), double(x)
			if off := unitsOff(got, want); off > worst {
				worst, at = off, x
			}
		}
		require.Check(t, worst <= 1, "%v(%v) is off by %.2f units of the last place", op, at, worst)
	}
	for i, x := range xs {
		x, y := math.Abs(float64(float32(x))), float64(float32(r.NormFloat64()*10))
		if i%8 == 0 {
			y = float64(i%16) - 4
		}
		if off := unitsOff(float32(pow32(x, y)), math.Pow(x, y)); off > 1 {
			t.Fatalf("pow(%v, %v) is off by %.2f units of the last place", x, y, off)
		}
	}
}
