package nn

import (
	"fmt"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// BenchmarkDo is how long Do takes, of results and of gradients, on operands of float32.
func BenchmarkDo(b *testing.B) {
	for _, test := range []struct {
		name    string
		in      []operand
		build   builder
		forward bool // without gradients
	}{
		{"gelu 1024x768", []operand{normal(1, 1024, 768)}, one(GELU), false},
		{"gelu tanh 1024x768", []operand{normal(1, 1024, 768)}, one(GELUTanh), false},
		{"softmax 1024x768", []operand{normal(1, 1024, 768)}, softmaxer(1), false},
		{"log softmax 64x50257", []operand{normal(1, 64, 50257)}, logSoftmaxer(1), false},
		{"softmax of columns 1024x768", []operand{normal(1, 1024, 768)}, softmaxer(0), false},
		{"layer norm 1024x768", []operand{normal(1, 1024, 768), normal(2, 768), normal(3, 768)}, normed(1e-5), false},
		{"layer norm 512x2048", []operand{normal(1, 512, 2048), normal(2, 2048), normal(3, 2048)}, normed(1e-5), false},
		{"cross-entropy 1024x50257", []operand{normal(1, 1024, 50257), labelled(1024, 50257)}, crossed, false},
		{"cross-entropy 1024x10", []operand{normal(1, 1024, 10), labelled(1024, 10)}, crossed, false},
		{"norm 1024x768", []operand{normal(1, 1024, 768)}, pNorm(2, 1), false},
		{"norm of columns 1024x768", []operand{normal(1, 1024, 768)}, pNorm(3, 0), false},
		{"dropout 1024x768", []operand{normal(1, 1024, 768)}, dropper(0.1, NewRandom(1)), true},
		{"embedding 8192x768", []operand{normal(1, 8192, 768), labelled(1024, 8192)}, two(Embedding), false},
		{"slice 1024x768", []operand{normal(1, 1024, 768)}, slicer(1, 256, 512, 1), false},
		{"concat 1024x768", []operand{normal(1, 1024, 384), normal(2, 1024, 384)}, concatenated(1), false},
		{"products 8x128x128", []operand{normal(1, 8, 128, 128), normal(2, 8, 128, 128)}, multiplied(false, true), false},
		{"outer 768x768", []operand{normal(1, 768), normal(2, 768)}, two(OuterProd), false},
		{"attention 2x4x128x64", []operand{normal(1, 2, 4, 128, 64), normal(2, 2, 4, 128, 64), normal(3, 2, 4, 128, 64)}, attended(AttentionOptions{Causal: true}), false},
		{"pool 16x16x28x28", []operand{normal(1, 16, 16, 28, 28)}, averaged(2, 0, 2), false},
		{"pool padded 16x16x28x28", []operand{normal(1, 16, 16, 28, 28)}, averaged(3, 1, 1), false},
		{"global pool 16x64x28x28", []operand{normal(1, 16, 64, 28, 28)}, one(GlobalAvgPool2D), false},
		{"small gelu 4x4", []operand{normal(1, 4, 4)}, one(GELU), false},
		{"small cross-entropy 4x4", []operand{normal(1, 4, 4), labelled(4, 4)}, crossed, false},
	} {
		g := gorgonia.NewGraph()
		var x gorgonia.Nodes
		var values []gorgonia.Value
		for i, o := range test.in {
			x = append(x, o.node(g, fmt.Sprint("x", i), tensor.Float32))
			values = append(values, x[i].Value())
		}
		y, err := test.build(x)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(test.name, func(b *testing.B) { benchmarkDo(b, y.Op().(*Op), values) })
		if !test.forward {
			benchmarkGradients(b, test.name, y.Op().(*Op), values)
		}
	}
}

func crossed(x gorgonia.Nodes) (*gorgonia.Node, error) { return CrossEntropy(NoLabel, x[0], x[1]) }

// labelled makes labels of n classes.
func labelled(rows, n int) operand {
	x := operand{shape: []int{rows}, ints: make([]int, rows)}
	for i := range x.ints {
		x.ints[i] = i * 7919 % n
	}
	return x
}

func benchmarkDo(b *testing.B, o *Op, values []gorgonia.Value) {
	for range b.N {
		if d, ok := o.spec.(dropoutSpec); ok {
			d.Mask.Random.Next(0)
		}
		if _, err := o.Do(values...); err != nil {
			b.Fatal(err)
		}
	}
}

func benchmarkGradients(b *testing.B, name string, o *Op, values []gorgonia.Value) {
	y, err := o.Do(values...)
	if err != nil {
		b.Fatal(err)
	}
	back, gradients, err := o.backward()
	if err != nil {
		b.Fatal(err)
	}
	for i, g := range gradients {
		if back[i] != nil {
			x := choose(g.of, values, y, y)
			b.Run(fmt.Sprint(name, ", gradient ", i), func(b *testing.B) { benchmarkDo(b, back[i], x) })
		}
	}
}
