package vm_test

import (
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// selfAttention is causal attention of a linear layer, and a linear layer of it, for sequences
// longer than a kernel's tile.
func selfAttention(t testing.TB) *model {
	const batch, n, heads, size = 2, 70, 2, 8
	const width = heads * size
	m := &model{g: gorgonia.NewGraph()}
	x := m.variable("x", tensor.Float32, batch*n, width)
	linear := func(x node, name string) node {
		w := m.variable(name, tensor.Float32, width, width)
		m.params = append(m.params, w)
		return mul(x, w)
	}
	head := func(name string) node {
		y := reshape(linear(x, name), tensor.Shape{batch, n, heads, size})
		return transpose(y, 0, 2, 1, 3)
	}
	y := must(nn.Attention(head("q"), head("k"), head("v"), nn.AttentionOptions{Causal: true}))
	y = reshape(transpose(y, 0, 2, 1, 3), tensor.Shape{batch * n, width})
	m.grad(t, mean(square(linear(y, "o"))))
	return m
}

// TestAttentionOfBF16: heads are read and written as they lie, without copies, and gradients equal
// those in f32 except for rounding.
func TestAttentionOfBF16(t *testing.T) { attentionOfBF16(t, devices) }

func attentionOfBF16(t *testing.T, devices map[string]func(testing.TB) backend.Device) {
	wide := selfAttention(t)
	run(t, machine(t, wide.g))
	for where, device := range devices {
		m := selfAttention(t)
		half := machineOn(t, device(t), m.g, vm.WithPrecision(vm.BF16))
		run(t, half)
		if text := half.Plan().String(); strings.Contains(text, "loop copy") ||
			!strings.Contains(text, "attention-grad causal of @") {
			t.Errorf("%s: heads are copied in\n%s", where, text)
		}
		for i, p := range m.params {
			near(t, where+": "+p.Name(), floats(t, gradient(t, p)),
				floats(t, gradient(t, wide.params[i])), roundings)
		}
	}
}
