package vm_test

import (
	"fmt"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// gpt is a GPT whose variables have no values.
type gpt struct{ vocabulary, batch, context, width, heads, layers int }

func (s gpt) model() *model {
	m := &model{g: gorgonia.NewGraph()}
	variable := func(dt tensor.Dtype, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(m.g, dt, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(fmt.Sprint("v", len(m.g.AllNodes()))))
	}
	learn := func(shape ...int) *gorgonia.Node {
		n := variable(tensor.Float32, shape...)
		m.params = append(m.params, n)
		return n
	}
	rows := s.batch * s.context
	linear := func(x *gorgonia.Node, in, out int) *gorgonia.Node {
		return must(gorgonia.BroadcastAdd(must(gorgonia.Mul(x, learn(in, out))), learn(1, out), nil, []byte{0}))
	}
	norm := func(x *gorgonia.Node) *gorgonia.Node {
		return must(nn.LayerNorm(1e-5, x, learn(s.width), learn(s.width)))
	}
	tokens, positions := learn(s.vocabulary, s.width), learn(1, s.context, s.width)
	x := must(nn.Embedding(tokens, variable(tensor.Int, rows)))
	x = must(gorgonia.Reshape(x, tensor.Shape{s.batch, s.context, s.width}))
	x = must(gorgonia.BroadcastAdd(x, positions, nil, []byte{0}))
	x = must(gorgonia.Reshape(x, tensor.Shape{rows, s.width}))
	for range s.layers {
		qkv := linear(norm(x), s.width, 3*s.width)
		part := func(k int) *gorgonia.Node {
			y := must(nn.Slice(1, k*s.width, (k+1)*s.width, 1, qkv))
			y = must(gorgonia.Reshape(y, tensor.Shape{s.batch, s.context, s.heads, s.width / s.heads}))
			return must(gorgonia.Transpose(y, 0, 2, 1, 3))
		}
		y := must(nn.Attention(part(0), part(1), part(2), nn.AttentionOptions{Causal: true}))
		y = must(gorgonia.Reshape(must(gorgonia.Transpose(y, 0, 2, 1, 3)), tensor.Shape{rows, s.width}))
		x = must(gorgonia.Add(x, linear(y, s.width, s.width)))
		h := must(nn.GELUTanh(linear(norm(x), s.width, 4*s.width)))
		x = must(gorgonia.Add(x, linear(h, 4*s.width, s.width)))
	}
	logits := must(nn.BatchedMatMul(false, true, norm(x), tokens))
	loss := must(nn.CrossEntropy(nn.NoLabel, logits, variable(tensor.Int, rows)))
	if _, err := gorgonia.Grad(loss, m.params...); err != nil {
		panic(err)
	}
	return m
}

func TestScratch(t *testing.T) {
	m := gpt{50304, 16, 1024, 768, 12, 12}.model()
	machine, err := vm.New(m.g, nil, vm.WithPrecision(vm.BF16), vm.WithSolver(&autograd.AdamW{Rate: 1e-3}, m.params...))
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		fmt.Println(machine.Planning())
	}
	for gib := 10.0; gib > 3; gib -= .35 {
		b := time.Now()
		budget, err := machine.PlanWithin(int(gib * (1 << 30)))
		fmt.Println(gib, budget, err, time.Since(b))
	}
	b := time.Now()
	budget, err := machine.PlanWithin(-1)
	fmt.Println(budget, err, time.Since(b))
}

func BenchmarkScratch(b *testing.B) {
	m := gpt{50304, 16, 1024, 768, 12, 12}.model()
	machine, err := vm.New(m.g, nil, vm.WithPrecision(vm.BF16), vm.WithSolver(&autograd.AdamW{Rate: 1e-3}, m.params...))
	if err != nil {
		b.Fatal(err)
	}
	for _, gib := range []float64{0, 8.5, 8.25, 7.5, 6.5, 5.45} {
		b.Run(fmt.Sprint(gib), func(b *testing.B) {
			for b.Loop() {
				machine.PlanWithin(int(gib * (1 << 30)))
			}
		})
	}
}
