package residence

import (
	"math"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

func TestElementsOfOthersAreMarked(t *testing.T) {
	for _, part := range [][2]int{{0, 2}, {1, 3}, {2, 5}, {0, 0}, {5, 5}} {
		wide, narrow := []float64{1, 2, 3, 4, 5}, []float32{1, 2, 3, 4, 5}
		bf16, f16 := make([]backend.BFloat16, 5), make([]backend.Float16, 5)
		for _, memory := range []backend.Buffer{backend.Of(wide), backend.Of(narrow),
			backend.Of(bf16), backend.Of(f16)} {
			if Present(memory) != nil {
				t.Fatalf("%v is of others", memory.DType())
			}
			LeaveToOthers(memory, part[0], part[1])
			if Present(memory) != OfOthers {
				t.Errorf("%v: all is of this rank, but %v was", memory.DType(), part)
			}
		}
		for i, x := range wide {
			if mine := i >= part[0] && i < part[1]; mine != (x == float64(i+1)) ||
				mine != !math.IsNaN(float64(narrow[i])) {
				t.Errorf("%v: element %d is %v and %v", part, i, x, narrow[i])
			}
			isNaN := bf16[i]&0x7fff > 0x7f80 && f16[i]&0x7fff > 0x7c00
			if mine := i >= part[0] && i < part[1]; mine != (bf16[i] == 0) ||
				mine != (f16[i] == 0) || mine == isNaN {
				t.Errorf("%v: element %d is %#x and %#x", part, i, bf16[i], f16[i])
			}
		}
	}
	whole := []float64{1, math.NaN()}
	if LeaveToOthers(backend.Of(whole), 0, 2); Present(backend.Of(whole)) != nil || whole[0] != 1 {
		t.Errorf("of a rank that has all there is %v", whole)
	}
}
