package nn

import (
	"math"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops"
)

func pNorm(p, axis int) builder {
	return one(func(x *gorgonia.Node) (*gorgonia.Node, error) { return Norm(p, axis, x) })
}

// TestNormIsOfMagnitudes: numbers below 0 count as their magnitudes, for odd p, too.
func TestNormIsOfMagnitudes(t *testing.T) {
	x := []operand{of([]int{2, 3}, 3, -4, 0, -1, -2, -2)}
	checkForward(t, x, pNorm(1, 1), of([]int{2}, 7, 5), 0)
	checkForward(t, x, pNorm(2, -1), of([]int{2}, 5, 3), 1e-6)
	// 27 + 64 + 125 = 216
	checkForward(t, []operand{of([]int{3}, -3, 4, -5)}, pNorm(3, 0), of(nil, 6), 1e-6)
	checkForward(t, []operand{of([]int{2, 2}, 0, -1, 0, 1)}, pNorm(4, 0),
		of([]int{2}, 0, math.Pow(2, 0.25)), 1e-6)
	for p := 1; p < 5; p++ {
		checkGradient(t, []operand{normal(1, 2, 3, 2)}, pNorm(p, 1))
	}
	checkDistinct(t, x, pNorm(1, 0), pNorm(3, 0), pNorm(3, 1))
	g := gorgonia.NewGraph()
	_, err := Norm(0, 0, count(3).node(g, "x", tensor.Float64))
	checkRefused(t, err, backend.ErrArgument, "p is 0")
	_, err = Norm(2, 1, count(3).node(g, "y", tensor.Float64))
	checkRefused(t, err, ops.ErrShape, "axis 1 is out of range")
}

// TestNormsOfOddPowersAreDefects: gorgonia.Norm is reported where it sums what may be negative.
func TestNormsOfOddPowersAreDefects(t *testing.T) {
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		for p := 1; p < 6; p++ {
			g := gorgonia.NewGraph()
			x := count(2, 3).node(g, "x", dt)
			y := require.Value(gorgonia.Norm(x, 1, p))(t)
			require.NoError(t, require.Err(gorgonia.Grad(gorgonia.Must(gorgonia.Sum(y)), x)))
			found := Defects(g)
			reported := len(found) == 1 && strings.HasSuffix(found[0].String(), "use nn.Norm")
			require.Check(t, reported == (p%2 == 1) && len(found) <= 1,
				"%v, p %d: the defects are %v", dt, p, found)
		}
	}
}

// TestEqualLogitsCancel: a loss of equal logits is the logarithm of their number, however large
// they are.
func TestEqualLogitsCancel(t *testing.T) {
	loss := two(func(x, l *gorgonia.Node) (*gorgonia.Node, error) {
		return CrossEntropy(NoLabel, x, l)
	})
	for _, large := range []float64{1e3, 1e17, 1e30, -1e30} {
		in := []operand{of([]int{2, 2}, large, large, large, large), indices([]int{2}, 0, 1)}
		checkForward(t, in, loss, of(nil, math.Ln2), 1e-7)
	}
}

// TestBatchNormsOfANilScaleOrBiasAreDefects: Gorgonia makes random ones, for each element of each
// sample.
func TestBatchNormsOfANilScaleOrBiasAreDefects(t *testing.T) {
	for _, given := range [][2]bool{{true, true}, {false, true}, {true, false}, {false, false}} {
		g := gorgonia.NewGraph()
		x := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(3, 2), gorgonia.WithName("x"))
		var learned [2]*gorgonia.Node
		for i, name := range []string{"scale", "bias"} {
			if given[i] {
				learned[i] = gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(1, 2),
					gorgonia.WithName(name))
			}
		}
		if _, _, _, _, err := gorgonia.BatchNorm(x, learned[0], learned[1], 0.1, 1e-5); err != nil {
			t.Fatal(err)
		}
		found := Defects(g)
		if given[0] && given[1] {
			require.Check(t, len(found) <= 0, "with a scale and a bias: %v", found)
		} else if len(found) != 1 || !strings.Contains(found[0].What, "was nil") || found[0].Tape {
			t.Errorf("given %v: %v", given, found)
		}
	}
}
