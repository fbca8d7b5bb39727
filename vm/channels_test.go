package vm_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// lastly is a device whose convolutions want channels last.
type lastly struct{ backend.Device }

func (lastly) ChannelsLast() bool { return true }

// residual has batch norms, a residual connection, a pool, a concatenation and a convolution in
// groups between its convolutions.
func residual(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	learnable := func(name string, shape ...int) node {
		w := m.variable(name, dt, shape...)
		m.params = append(m.params, w)
		return w
	}
	conv := func(name string, o nn.ConvOptions, h node, w ...int) node {
		return must(nn.Conv2D(o, h, learnable(name, w...), nil))
	}
	norm := func(name string, h node) node {
		n := h.Shape()[1]
		y, _, _, _, err := gorgonia.BatchNorm(h, learnable("gain "+name, 1, n, 1, 1),
			learnable("bias "+name, 1, n, 1, 1), 0.25, 1e-3)
		return must(y, err)
	}
	same, half := nn.ConvOptions{Pad: []int{1, 1}}, nn.ConvOptions{Stride: []int{2, 2}}
	h := relu(norm("0", conv("w0", same, m.variable("x", dt, 4, 3, 8, 8), 8, 3, 3, 3)))
	skip := h
	h = relu(norm("1", conv("w1", same, h, 8, 8, 3, 3)))
	h = relu(add(norm("2", conv("w2", same, h, 8, 8, 3, 3)), skip))
	h = must(nn.MaxPool2D([2]int{2, 2}, [2]int{}, [2]int{2, 2}, h))
	h = must(nn.Concat(1, conv("w3", half, h, 6, 8, 1, 1), conv("w4", half, h, 6, 8, 1, 1)))
	h = conv("w5", nn.ConvOptions{Groups: 2}, h, 4, 6, 1, 1)
	h = reshape(must(nn.GlobalAvgPool2D(h)), tensor.Shape{4, 4})
	m.grad(t, mean(square(h)))
	return m
}

// TestConvolutionsWithChannelsLast: gradients equal the host's up to the order of sums.
func TestConvolutionsWithChannelsLast(t *testing.T) {
	convolutionsWithChannelsLast(t, lastly{fake(t)}, 1e-4)
}

func convolutionsWithChannelsLast(t *testing.T, d backend.Device, tf32 float64) {
	for name, build := range map[string]func(testing.TB, tensor.Dtype) *model{
		"convnet": convnet, "residual": residual} {
		exact := build(t, tensor.Float32)
		once(t, exact, nil)
		for p, tolerance := range map[vm.Precision]float64{vm.TF32: tf32, vm.BF16: 2 * roundings} {
			m := build(t, tensor.Float32)
			once(t, m, d, vm.WithPrecision(p))
			for i, w := range exact.params {
				near(t, name+" in "+p.String()+", "+w.Name(), floats(t, gradient(t, m.params[i])),
					floats(t, gradient(t, w)), tolerance)
			}
		}
	}
}

// TestPlanWithChannelsLast: what is transposed is images from outside, filters and their gradients,
// and what operations read that want channels as the second axis; nothing is in F32.
func TestPlanWithChannelsLast(t *testing.T) {
	for _, p := range []vm.Precision{vm.F32, vm.TF32, vm.BF16} {
		m := residual(t, tensor.Float32)
		machine := machineOn(t, lastly{fake(t)}, m.g, vm.WithPrecision(p))
		text := machine.Plan().String()
		want := 14 // all passes of w0 to w4, but of w0 the gradient of x
		if p == vm.F32 {
			want = 0
		}
		if got := strings.Count(text, "channels last"); got != want {
			t.Errorf("%v: %d convolutions have their channels last, want %d, in\n%s", p, got,
				want, text)
		}
		images := regexp.MustCompile(`(?m)loop ([a-z]+) .*\((4,8,8,8|4,8,8,3)\)/\((192|512),`)
		var across []string
		for _, found := range images.FindAllStringSubmatch(text, -1) {
			across = append(across, found[1])
		}
		if want := "[copy copy copy]"; p != vm.F32 && fmt.Sprint(across) != want {
			t.Errorf("%v: loops over images that are transposed: %v, want %s: x, and the pool and "+
				"its gradient, in\n%s", p, across, want, text)
		}
		require.Report(t, machine.Close())
	}
}
