package vm_test

import (
	"runtime"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// decoder is an embedding, a block of a transformer, and the cross-entropy.
func decoder(t testing.TB, dt tensor.Dtype) *model {
	const batch, context, heads, size, words = 2, 8, 2, 4, 11
	const width, rows = heads * size, batch * context
	m := &model{g: gorgonia.NewGraph()}
	indices := func(name string) node {
		numbers := make([]int, rows)
		for i := range numbers {
			numbers[i] = i * 7 % words
		}
		return gorgonia.NewTensor(m.g, tensor.Int, 1, gorgonia.WithName(name),
			gorgonia.WithShape(rows), gorgonia.WithValue(tensor.New(tensor.WithBacking(numbers))))
	}
	table := m.learnable(dt, words, width)
	x := must(nn.Embedding(table, indices("x")))
	h := must(nn.LayerNorm(1e-5, x, m.learnable(dt, width), m.learnable(dt, width)))
	part := func() node {
		y := reshape(mul(h, m.learnable(dt, width, width)),
			tensor.Shape{batch, context, heads, size})
		return transpose(y, 0, 2, 1, 3)
	}
	y := must(nn.Attention(part(), part(), part(), nn.AttentionOptions{Causal: true}))
	y = reshape(transpose(y, 0, 2, 1, 3), tensor.Shape{rows, width})
	x = add(x, y)
	x = add(x, mul(must(nn.GELUTanh(mul(x, m.learnable(dt, width, 4*width)))), m.learnable(dt,
		4*width, width)))
	m.grad(t, must(nn.CrossEntropy(nn.NoLabel, must(nn.BatchedMatMul(false, true, x, table)),
		indices("labels"))))
	return m
}

// steadyModels are the models of the examples, small.
var steadyModels = map[string]func(testing.TB, tensor.Dtype) *model{
	"mlp":     layers(64, 64, 128, 10),
	"convnet": stockConvnet(4),
	"decoder": decoder,
}

// A step of training allocates nothing: no kernel, no loop, and nothing around them.
func TestStepAllocatesNothing(t *testing.T) {
	for name, build := range steadyModels {
		m := build(t, tensor.Float32)
		machine := machine(t, m.g, vm.WithSolver(&solver.Adam{Rate: 1e-3}, m.params...))
		run(t, machine)
		n := testing.AllocsPerRun(5, func() { run(t, machine) })
		require.Check(t, n == 0, "%s: %v allocations in a step", name, n)
		require.Report(t, machine.Close())
	}
}

// Nor does one of gradients alone.
func TestRunAllocatesNothing(t *testing.T) {
	for name, build := range steadyModels {
		m := build(t, tensor.Float32)
		machine := machine(t, m.g)
		run(t, machine)
		n := testing.AllocsPerRun(5, func() { run(t, machine) })
		require.Check(t, n == 0, "%s: %v allocations in a run", name, n)
		require.Report(t, machine.Close())
	}
}

// The bits do not depend on how many cores there are, and so on how many workers a machine has.
func TestSameBitsOnAnyNumberOfCores(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for name, build := range steadyModels {
		m := build(t, tensor.Float32)
		first := clones(m)
		var want [][]float32
		for cores := 1; cores <= 3; cores++ {
			runtime.GOMAXPROCS(cores)
			for i, p := range m.params {
				copy(p.Value().Data().([]float32), first[i])
			}
			machine := machine(t, m.g, vm.WithSolver(&solver.Adam{Rate: 1e-3}, m.params...))
			for range 3 {
				run(t, machine)
			}
			require.NoError(t, machine.Close())
			got := clones(m)
			if want == nil {
				want = got
			}
			require.Check(t, slices.EqualFunc(got, want, slices.Equal[[]float32]),
				"%s: %d cores give other parameters than one", name, cores)
		}
	}
}

// clones returns what the parameters are now.
func clones(m *model) (all [][]float32) {
	for _, p := range m.params {
		all = append(all, slices.Clone(p.Value().Data().([]float32)))
	}
	return all
}
