package vm_test

import (
	"fmt"
	"maps"
	"math"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// twoMatrices is a graph of c = a b.
func twoMatrices() (m *model, c node) {
	m = &model{g: gorgonia.NewGraph()}
	return m, mul(m.variable("a", tensor.Float32, 5, 33), m.variable("b", tensor.Float32, 33, 4))
}

// values runs a machine once and returns the values of a node.
func values(t *testing.T, m *model, n node, device backend.Device, options ...vm.Option) []float64 {
	t.Helper()
	once(t, m, device, append(options, vm.Keep(n))...)
	return floats(t, n.Value())
}

// once runs a model once.
func once(t *testing.T, m *model, device backend.Device, options ...vm.Option) {
	t.Helper()
	machine := machineOn(t, device, m.g, options...)
	run(t, machine)
	require.Report(t, machine.Close())
}

// Operands of a product in bf16 are rounded, and the sum and the result are not.
func TestProductOfBF16RoundsOperandsAlone(t *testing.T) {
	for name, device := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		m, c := twoMatrices()
		got := values(t, m, c, device, vm.WithPrecision(vm.BF16))
		a, b := rounded(ramp(tensor.Float32, 5, 33)), rounded(ramp(tensor.Float32, 33, 4))
		for i := range 5 {
			for j := range 4 {
				want := 0.0
				for k := range 33 {
					want += a[i*33+k] * b[k*4+j]
				}
				if x := got[i*4+j]; math.Abs(x-want) > 1e-5 {
					t.Errorf("%s: c[%d,%d] is %v, want %v", name, i, j, x, want)
				}
			}
		}
	}
}

// Numbers that bf16 does not tell apart are compared in f32: 256 and 257, here.
func TestLargestOfAProductInBF16IsThatOfAllDigits(t *testing.T) {
	for name, device := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		m := &model{g: gorgonia.NewGraph()}
		matrix := func(name string, rows, columns int, x ...float32) node {
			return gorgonia.NewMatrix(m.g, tensor.Float32, gorgonia.WithName(name),
				gorgonia.WithShape(rows, columns), gorgonia.WithValue(tensor.New(
					tensor.WithShape(rows, columns), tensor.WithBacking(x))))
		}
		product := mul(matrix("a", 1, 2, 1, 1), matrix("b", 2, 3, 256, 256, 256, 0, 1, 0))
		place := must(nn.ArgMax(1, false, add(product, product)))
		once(t, m, device, vm.WithPrecision(vm.BF16))
		got := place.Value().Data()
		require.Check(t, fmt.Sprint(got) == "[1]", "%s: %v, want 1", name, got)
	}
}

// rounded returns the elements as bf16 has them.
func rounded(x *tensor.Dense) []float64 {
	var all []float64
	for _, v := range x.Data().([]float32) {
		bits := math.Float32bits(v)
		bits += 0x7fff + bits>>16&1 // half to even
		all = append(all, float64(math.Float32frombits(bits&^0xffff)))
	}
	return all
}

// The host has no faster products than those of f32.
func TestTF32OnTheHostIsF32(t *testing.T) {
	m, c := twoMatrices()
	want := values(t, m, c, nil)
	for i, x := range values(t, m, c, nil, vm.WithPrecision(vm.TF32)) {
		if x != want[i] {
			t.Errorf("element %d is %v, want %v", i, x, want[i])
		}
	}
}

// Training in bf16 gives the same on the host and on a device, which add products up in different
// orders, and gradients near those of f32.
func TestTrainsInBF16(t *testing.T) {
	for name, build := range withAttention() {
		exact, host, device := build(t, tensor.Float32), build(t, tensor.Float32),
			build(t, tensor.Float32)
		once(t, exact, nil)
		once(t, host, nil, vm.WithPrecision(vm.BF16))
		once(t, device, fake(t), vm.WithPrecision(vm.BF16))
		for i, p := range exact.params {
			got := floats(t, gradient(t, host.params[i]))
			near(t, name+" on a device, "+p.Name(), floats(t, gradient(t, device.params[i])), got,
				orders)
			near(t, name+" in bf16, "+p.Name(), got, floats(t, gradient(t, p)), roundings)
		}
	}
}

// roundings is how far gradients in bf16 may be from those in f32, in parts of the largest one:
// some roundings of 2^-9 each.
const roundings = 0.03

// orders is how far gradients in bf16 may be apart whose sums of f32 were added up in different
// orders: a little of roundings, since few sums are then rounded to another number of bf16.
const orders = 1e-4

// near compares gradients, up to parts of the largest element.
func near(t *testing.T, what string, got, want []float64, tolerance float64) {
	t.Helper()
	most := 0.0
	for _, x := range want {
		most = max(most, math.Abs(x))
	}
	for k := range want {
		if !(math.Abs(got[k]-want[k]) <= tolerance*most) {
			t.Fatalf("%s: element %d is %v, want %v", what, k, got[k], want[k])
		}
	}
}

// withAttention are the models, and one with attention.
func withAttention() map[string]func(testing.TB, tensor.Dtype) *model {
	all := maps.Clone(models)
	delete(all, "batch level")
	all["attention"], all["parts"], all["masked attention"] = attending, parts, masked
	all["lstm"] = gated
	return all
}

// gated is an LSTM.
func gated(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	x := m.variable("x", dt, 5, 2, 4)
	h, c := m.variable("h", dt, 1, 2, 8), m.variable("c", dt, 1, 2, 8)
	m.params = nodes{m.variable("w", dt, 32, 4), m.variable("u", dt, 32, 8),
		m.variable("b", dt, 32), m.variable("a", dt, 32)}
	y, _, _, err := nn.LSTM(nn.RecurrentOptions{}, x, h, c, m.params[0], m.params[1], m.params[2],
		m.params[3])
	m.grad(t, mean(square(must(y, err))))
	return m
}

// parts has attention of slices of a product, whose gradient is a concatenation, and a product of a
// concatenation of a product and a learnable.
func parts(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	x, w := m.variable("x", dt, 6, 4), m.variable("w", dt, 4, 24)
	beside, last := m.variable("beside", dt, 6, 3), m.variable("last", dt, 11, 5)
	m.params = nodes{w, beside, last}
	qkv := mul(x, w)
	heads := func(k int) node {
		y := reshape(must(nn.Slice(1, 8*k, 8*k+8, 1, qkv)), tensor.Shape{1, 6, 2, 4})
		return transpose(y, 0, 2, 1, 3)
	}
	y := must(nn.Attention(heads(0), heads(1), heads(2), nn.AttentionOptions{Causal: true}))
	y = reshape(transpose(y, 0, 2, 1, 3), tensor.Shape{6, 8})
	y = mul(must(nn.Concat(1, y, beside)), last)
	m.grad(t, mean(square(y)))
	return m
}

// attending has attention of learnables, whose results and gradients are wanted, and of products.
func attending(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	q, k, v, w := m.variable("q", dt, 2, 2, 3, 4), m.variable("k", dt, 2, 2, 3, 4),
		m.variable("v", dt, 2, 2, 3, 4), m.variable("w", dt, 2, 2, 4, 4)
	m.params = nodes{q, k, v, w}
	y := must(nn.Attention(q, k, v, nn.AttentionOptions{Causal: true}))
	again := must(nn.BatchedMatMul(false, false, y, w))
	again = must(nn.Attention(again, k, again, nn.AttentionOptions{}))
	m.grad(t, mean(square(add(y, again))))
	return m
}

// masked has grouped attention with a mask that a product gives, which stays f32, and with lengths,
// of learnables and of products.
func masked(t testing.TB, dt tensor.Dtype) *model {
	m := &model{g: gorgonia.NewGraph()}
	q, k, v := m.variable("q", dt, 2, 4, 3, 4), m.variable("k", dt, 2, 2, 5, 4),
		m.variable("v", dt, 2, 2, 5, 3)
	left, right := m.variable("left", dt, 3, 2), m.variable("right", dt, 2, 5)
	w := m.variable("w", dt, 2, 4, 3, 4)
	m.params = nodes{q, k, v, left, right, w}
	y := must(nn.Attention(q, k, v, nn.AttentionOptions{SoftCap: 3,
		Mask: mul(left, right), MaskGradient: true}))
	again := must(nn.BatchedMatMul(false, false, y, w))
	lengths := gorgonia.NodeFromAny(m.g, tensor.New(tensor.WithShape(2),
		tensor.WithBacking([]int{5, 2})), gorgonia.WithName("lengths"))
	again = must(nn.Attention(again, k, v, nn.AttentionOptions{KeyLengths: lengths}))
	m.grad(t, mean(square(add(y, again))))
	return m
}

// In bf16, a weight that products read twice is rounded once, what only matrix multiplications read
// lies in memory as bf16, and gradients are f32.
func TestPlanInBF16(t *testing.T) {
	m := mlp(t, tensor.Float32)
	machine := machine(t, m.g, vm.WithPrecision(vm.BF16))
	plan := machine.Plan().String()
	for _, variable := range []string{"x", "w0", "w1"} { // which the backward pass reads again
		n := strings.Count(plan, "cast of "+variable+" f32")
		require.Check(t, n == 1, "%d loops round %s, want 1, in\n%s", n, variable, plan)
	}
	for line := range strings.Lines(plan) {
		if dst, _, ok := strings.Cut(line, " = matmul TN"); ok && strings.Contains(dst, "bf16") {
			t.Errorf("a gradient is bf16: %s", line)
		}
	}
	require.Check(t, strings.Contains(plan, "bf16(16,7) = matmul NN of"),
		"no product stores bf16 in\n%s", plan)
}

// old is a device of compute capability 7.0.
type old struct{ backend.Device }

func (old) ComputeCapability() int { return 70 }

func TestOldDevicesMultiplyInF32(t *testing.T) {
	m, c := twoMatrices()
	want := values(t, m, c, nil)
	for _, p := range []vm.Precision{vm.TF32, vm.BF16} {
		var said []string
		got := values(t, m, c, old{fake(t)}, vm.WithPrecision(p), vm.Notice(func(text string) {
			said = append(said, text)
		}))
		require.Check(t, len(said) == 1 && strings.Contains(said[0], "compute capability 7.0") &&
			strings.Contains(said[0], p.String()), "%v: said %q", p, said)
		for i := range want {
			if math.Abs(got[i]-want[i]) > 1e-5 {
				t.Errorf("%v: element %d is %v, want %v", p, i, got[i], want[i])
			}
		}
	}
}

func TestUnknownPrecisionIsRefused(t *testing.T) {
	m, _ := twoMatrices()
	require.Fails(t, "vm.New", require.Err(vm.New(m.g, nil, vm.WithPrecision(7))),
		backend.ErrArgument)
}

// A profile is a run, with a time for each step of the plan.
func TestProfile(t *testing.T) {
	for name, device := range map[string]backend.Device{"host": nil, "fake": fake(t)} {
		m := mlp(t, tensor.Float32)
		machine := machineOn(t, device, m.g)
		times := require.Value(machine.Profile())(t)
		steps := strings.Count(machine.Plan().String(), "\n") - 1
		require.Check(t, len(times) == steps, "%s: %d times for %d steps", name, len(times), steps)
		for _, s := range times {
			require.Check(t, s.Time >= 0 && s.Op != "" && s.Node != "", "%s: %q of %q took %v",
				name, s.Op, s.Node, s.Time)
		}
		profiled := m.loss.Data()
		run(t, machine)
		if m.loss.Data() != profiled {
			t.Errorf("%s: the loss is %v, and %v in a profile", name, m.loss.Data(), profiled)
		}
		machine.Close()
	}
}
