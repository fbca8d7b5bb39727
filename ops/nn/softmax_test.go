package nn

import (
	"math"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/ops"
)

func softmaxer(axis int) builder {
	return one(func(x *gorgonia.Node) (*gorgonia.Node, error) { return SoftMax(axis, x) })
}

func logSoftmaxer(axis int) builder {
	return one(func(x *gorgonia.Node) (*gorgonia.Node, error) { return LogSoftMax(axis, x) })
}

func TestSoftMax(t *testing.T) {
	ln3 := math.Log(3)
	for _, test := range []struct {
		x    operand
		axis int
		want operand
	}{
		{of([]int{2}, 0, ln3), 0, of([]int{2}, 0.25, 0.75)},
		{of([]int{1, 2}, 0, ln3), 1, of([]int{1, 2}, 0.25, 0.75)},
		{of([]int{2, 1}, 0, ln3), 0, of([]int{2, 1}, 0.25, 0.75)},
		{of([]int{2, 1}, 0, ln3), 1, of([]int{2, 1}, 1, 1)}, // where Gorgonia's is wrong
		{of([]int{2, 2}, 0, 5, ln3, 5), 0, of([]int{2, 2}, 0.25, 0.5, 0.75, 0.5)},
		{of([]int{2}, 2000, 2000+ln3), -1, of([]int{2}, 0.25, 0.75)}, // exp overflows
	} {
		checkForward(t, []operand{test.x}, softmaxer(test.axis), test.want, 2e-5)
		for i, y := range test.want.data {
			test.want.data[i] = math.Log(y)
		}
		checkForward(t, []operand{test.x}, logSoftmaxer(test.axis), test.want, 1e-4)
	}
	for axis := range 3 {
		checkGradient(t, []operand{normal(1, 2, 3, 4)}, softmaxer(axis))
		checkGradient(t, []operand{normal(1, 2, 3, 4)}, logSoftmaxer(axis))
	}
	checkGradient(t, []operand{normal(2, 5)}, softmaxer(0))
	checkGradient(t, []operand{normal(3, 4, 1)}, softmaxer(1))
}

// Log of our SoftMax is not Gorgonia's, which changes the SoftMax.
func TestSoftMaxIsNotChanged(t *testing.T) {
	checkDistinct(t, []operand{normal(4, 3, 3)}, softmaxer(0), softmaxer(1), logSoftmaxer(0),
		logSoftmaxer(1))
	checkForward(t, []operand{of([]int{1, 2}, 0, math.Log(3))},
		one(func(x *gorgonia.Node) (*gorgonia.Node, error) {
			s, err := SoftMax(1, x)
			if err == nil {
				_, err = gorgonia.Log(s)
			}
			return s, err
		}), of([]int{1, 2}, 0.25, 0.75), 1e-6)
	_, err := SoftMax(0, gorgonia.NewScalar(gorgonia.NewGraph(), gorgonia.Float64))
	checkRefused(t, err, ops.ErrShape, "nn: SoftMax: bad shape: axis 0 is out of range: x has "+
		"shape ()")
}
