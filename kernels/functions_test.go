package kernels

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/euryale-ml/euryale/backend"
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
	for _, op := range backend.UnaryOps() {
		if !op.Rounded() {
			continue
		}
		worst, at := 0.0, 0.0
		for _, x := range xs {
			x = float64(float32(x))
			got, want := float32(rounded32[op-backend.Exp](x)), rounded[op-backend.Exp](x)
			if off := unitsOff(got, want); off > worst {
				worst, at = off, x
			}
		}
		if worst > 1 {
			t.Errorf("%v(%v) is off by %.2f units of the last place", op, at, worst)
		}
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

// unitsOff returns how far a float32 is from an exact result, in units of its last place.
func unitsOff(got float32, want float64) float64 {
	if rounded := float32(want); got == rounded || got != got && rounded != rounded {
		return 0
	}
	unit := 0x1p-149
	if e := math.Ilogb(want); want != 0 && e > -126 {
		unit = math.Ldexp(1, e-23)
	}
	return math.Abs(float64(got)-want) / unit
}
