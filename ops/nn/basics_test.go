package nn

import (
	"math"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops"
)

func reducedBy(f func([]int, bool, *gorgonia.Node) (*gorgonia.Node, error), keep bool,
	axes ...int) builder {
	return one(func(x *gorgonia.Node) (*gorgonia.Node, error) { return f(axes, keep, x) })
}

func cumulated(axis int, o CumSumOptions) builder {
	return one(func(x *gorgonia.Node) (*gorgonia.Node, error) { return CumSum(axis, o, x) })
}

func three(f func(a, b, c *gorgonia.Node) (*gorgonia.Node, error)) builder {
	return func(x gorgonia.Nodes) (*gorgonia.Node, error) { return f(x[0], x[1], x[2]) }
}

func rms(epsilon float64) builder {
	return two(func(x, gain *gorgonia.Node) (*gorgonia.Node, error) {
		return RMSNorm(epsilon, x, gain)
	})
}

func rotated(interleaved bool) builder {
	return three(func(x, cos, sin *gorgonia.Node) (*gorgonia.Node, error) {
		return Rotary(RotaryOptions{Interleaved: interleaved}, x, cos, sin)
	})
}

func filled(number float64) builder {
	return two(func(x, mask *gorgonia.Node) (*gorgonia.Node, error) {
		return MaskedFill(x, mask, number)
	})
}

func TestWhereChoosesWhatIsNotFinite(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	c := of([]int{2, 2}, 1, 0, nan, 0.25)
	checkForward(t, []operand{c, of([]int{2}, 1, 2), of(nil, inf)}, three(Where),
		of([]int{2, 2}, 1, inf, 1, 2), 0)
	checkForward(t, []operand{of([]int{2}, nan, 1), of([]int{2}, 1, 0)}, filled(-1),
		of([]int{2}, -1, 1), 0)
	masked := one(func(x *gorgonia.Node) (*gorgonia.Node, error) {
		return MaskedFill(x, of([]int{2}, 1, 0).node(x.Graph(), "mask", tensor.Float64), -1)
	})
	checkGradient(t, []operand{normal(1, 3, 2)}, masked)
	checkGradient(t, []operand{normal(1, 3, 1), normal(2, 2)},
		two(func(x, y *gorgonia.Node) (*gorgonia.Node, error) {
			return Where(gorgonia.Must(gorgonia.Gt(x, x.Graph().Constant(gorgonia.NewF64(0)),
				false)), x, y)
		}))
	checkDistinct(t, []operand{count(2), of([]int{2}, 1, 0)}, filled(0), filled(1), two(And),
		two(Or), two(Xor), one(Not))
}

// Comparisons of Gorgonia give Bool, or 1 and 0: logic takes both, and gives the same.
func TestLogicOfBoolsAndOfNumbers(t *testing.T) {
	for _, same := range []bool{false, true} {
		g, _, y := graph(t, tensor.Float32, []operand{of([]int{4}, 1, 2, 3, 4)},
			one(func(x *gorgonia.Node) (*gorgonia.Node, error) {
				two := x.Graph().Constant(gorgonia.NewF32(2))
				three := x.Graph().Constant(gorgonia.NewF32(3))
				between, err := And(gorgonia.Must(gorgonia.Gte(x, two, same)),
					gorgonia.Must(gorgonia.Lte(x, three, same)))
				if err != nil {
					return nil, err
				}
				if between, err = Not(between); err != nil {
					return nil, err
				}
				return Cast(tensor.Float32, between)
			}))
		var v gorgonia.Value
		gorgonia.Read(y, &v)
		runAll(t, gorgonia.NewTapeMachine(g))
		if got := numbers(t, v); got[0] != 1 || got[1] != 0 || got[2] != 0 || got[3] != 1 {
			t.Errorf("of the same dtype %v: %v", same, got)
		}
	}
}

func TestCastBetweenDTypes(t *testing.T) {
	through := func(to tensor.Dtype) builder {
		return one(func(x *gorgonia.Node) (*gorgonia.Node, error) {
			y, err := Cast(to, x)
			if err != nil {
				return nil, err
			}
			return Cast(x.Dtype(), y)
		})
	}
	x := of([]int{5}, -1.5, -0.5, 0, 0.5, 2.75)
	for to, want := range map[tensor.Dtype][]float64{
		tensor.Int: {-1, 0, 0, 0, 2}, tensor.Int32: {-1, 0, 0, 0, 2},
		tensor.Int64: {-1, 0, 0, 0, 2},
		tensor.Bool:  {1, 1, 0, 1, 1}, tensor.Float32: x.data, tensor.Float64: x.data,
	} {
		checkForward(t, []operand{x}, through(to), of([]int{5}, want...), 0)
	}
	checkGradient(t, []operand{normal(1, 3)}, through(tensor.Float64))
	g := gorgonia.NewGraph()
	_, err := Cast(tensor.Complex64, count(2).node(g, "x", tensor.Float64))
	checkRefused(t, err, ops.ErrDType, "to complex64")
}

func TestReductions(t *testing.T) {
	inf := math.Inf(1)
	x := of([]int{2, 3}, 1, -2, 3, 4, 0, 6)
	checkForward(t, []operand{x}, reducedBy(ReduceMin, false, 1), of([]int{2}, -2, 0), 0)
	checkForward(t, []operand{x}, reducedBy(ReduceMax, true, 0), of([]int{1, 3}, 4, 0, 6), 0)
	checkForward(t, []operand{x}, reducedBy(ReduceProd, false, -1), of([]int{2}, -6, 0), 0)
	checkForward(t, []operand{x}, reducedBy(ReduceProd, false), of(nil, 0), 0)
	checkForward(t, []operand{of([]int{3, 2}, 1e4, 1e4, -inf, -inf, inf, 0)},
		reducedBy(LogSumExp, false, 1), of([]int{3}, 1e4+math.Ln2, -inf, inf), 1e-3)
	for _, zeros := range [][]float64{{0, 2, 3}, {0, 0, 3}, {1, 2, 3}} {
		checkGradient(t, []operand{of([]int{1, 3}, zeros...)}, reducedBy(ReduceProd, false, 1))
	}
	checkGradient(t, []operand{normal(1, 2, 3, 2)}, reducedBy(ReduceProd, false, 0, 2))
	checkGradient(t, []operand{normal(1, 2, 3, 2)}, reducedBy(LogSumExp, true, 1))
	checkGradient(t, []operand{normal(1, 2, 3)}, reducedBy(ReduceMin, false, 0))
	checkGradient(t, []operand{normal(1, 2, 3)}, cumulated(1, CumSumOptions{true, false}))
	checkDistinct(t, []operand{x}, reducedBy(ReduceMin, false, 1), reducedBy(ReduceMax, false, 1),
		reducedBy(ReduceMin, true, 1), reducedBy(ReduceMin, false, 0),
		cumulated(0, CumSumOptions{}), cumulated(0, CumSumOptions{Reverse: true}))
	g := gorgonia.NewGraph()
	_, err := ReduceMin([]int{1, -1}, false, x.node(g, "x", tensor.Float64))
	checkRefused(t, err, ops.ErrShape, "axis 1 occurs twice")
	_, err = ReduceProd([]int{2}, false, x.node(g, "x", tensor.Float64))
	checkRefused(t, err, ops.ErrShape, "axis 2 is out of range")
}

// Integers are added up as integers, and are counted as such.
func TestCumSumOfIntegers(t *testing.T) {
	g := gorgonia.NewGraph()
	x := indices([]int{2, 3}, 1, 2, 3, 4, 5, 6).node(g, "x", tensor.Int)
	y := require.Value(CumSum(1, CumSumOptions{Reverse: true}, x))(t)
	for range 3 {
		v := require.Value(y.Op().Do(x.Value()))(t)
		got := v.Data().([]int)
		require.Check(t, got[0] == 6 && got[2] == 3 && got[3] == 15 && got[5] == 6, "%v", got)
	}
}

func TestRMSNorm(t *testing.T) {
	// the mean of squares is 4
	checkForward(t, []operand{of([]int{1, 2}, 2, -2), of([]int{2}, 3, 5)}, rms(0),
		of([]int{1, 2}, 3, -5), 1e-6)
	checkGradient(t, []operand{normal(1, 2, 3, 4), normal(2, 4)}, rms(1e-5))
	checkGradient(t, []operand{normal(1, 2, 3, 4), normal(2, 3, 4)}, rms(0.1))
	checkDistinct(t, []operand{normal(1, 2, 3), normal(2, 3)}, rms(1e-5), rms(1e-6))
	g := gorgonia.NewGraph()
	x, v := count(2, 3).node(g, "x", tensor.Float64), count(2).node(g, "v", tensor.Float64)
	_, err := RMSNorm(1e-5, x, v)
	checkRefused(t, err, ops.ErrShape, "gain must have its last axes, not shape (2)")
	_, err = RMSNorm(-1, x, v)
	checkRefused(t, err, backend.ErrArgument, "epsilon is -1")
	_, err = SwiGLU(x, v)
	checkRefused(t, err, ops.ErrShape, "gate has shape (2, 3) and x (2)")
	checkGradient(t, []operand{normal(1, 2, 3), normal(2, 2, 3)}, two(SwiGLU))
}

// angles are cosines and sines of positions from first on.
func angles(t *testing.T, first, positions, m int) (cos, sin operand) {
	t.Helper()
	c, s, err := RotaryAngles(tensor.Float64, 10000, first, positions, m)
	require.NoError(t, err)
	shape := []int{positions, m / 2}
	return of(shape, c.Data().([]float64)...), of(shape, s.Data().([]float64)...)
}

// Scores of turned queries and keys depend on the distance of their positions alone.
func TestRotaryScoresDependOnTheDistance(t *testing.T) {
	q, k := normal(1, 1, 6), normal(2, 1, 6)
	for _, interleaved := range []bool{false, true} {
		score := func(at, behind int) float64 {
			turned := func(x operand, first int) []float64 {
				cos, sin := angles(t, first, 1, 6)
				_, y := forward(t, tensor.Float64, []operand{x, cos, sin}, rotated(interleaved))
				return y
			}
			sum := 0.0
			a, b := turned(q, at), turned(k, behind)
			for i := range a {
				sum += a[i] * b[i]
			}
			return sum
		}
		if near, far := score(5, 2), score(1005, 1002); math.Abs(near-far) > 1e-9 {
			t.Errorf("interleaved %v: %v and %v", interleaved, near, far)
		}
	}
	cos, sin := angles(t, 3, 4, 4)
	checkGradient(t, []operand{normal(1, 2, 4, 5), cos, sin}[:1], one(
		func(x *gorgonia.Node) (*gorgonia.Node, error) {
			return Rotary(RotaryOptions{}, x, cos.node(x.Graph(), "cos", tensor.Float64),
				sin.node(x.Graph(), "sin", tensor.Float64))
		}))
	checkDistinct(t, []operand{normal(1, 2, 4, 5), cos, sin}, rotated(false), rotated(true))
	g := gorgonia.NewGraph()
	_, err := Rotary(RotaryOptions{}, count(4, 3).node(g, "x", tensor.Float64),
		cos.node(g, "cos", tensor.Float64), sin.node(g, "sin", tensor.Float64))
	checkRefused(t, err, ops.ErrShape, "x has shape (4, 3)")
	_, _, err = RotaryAngles(tensor.Float64, 10000, 0, 3, 5)
	checkRefused(t, err, backend.ErrArgument, "3 positions of 5 elements")
}
