package nn

import (
	"fmt"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// ofRandom returns what makes random operands of shapes.
func ofRandom(shapes ...[]int) func() []operand {
	return func() (all []operand) {
		for i, shape := range shapes {
			all = append(all, normal(uint64(i), shape...))
		}
		return all
	}
}

// andLabels returns what makes a random operand, and labels or indices of n things.
func andLabels(shape []int, labels, n int) func() []operand {
	return func() []operand {
		y := operand{shape: []int{labels}, ints: make([]int, labels)}
		for i := range y.ints {
			y.ints[i] = i * 7919 % n
		}
		return []operand{normal(1, shape...), y}
	}
}

// BenchmarkDo is how long Do takes, of results and of gradients, on operands of float32.
func BenchmarkDo(b *testing.B) {
	ofLabels := two(func(x, l *gorgonia.Node) (*gorgonia.Node, error) {
		return CrossEntropy(NoLabel, x, l)
	})
	matrix := ofRandom([]int{1024, 768})
	images := ofRandom([]int{16, 16, 28, 28})
	heads := []int{2, 4, 128, 64}
	for _, test := range []struct {
		name  string
		in    func() []operand
		build builder
	}{
		{"gelu 1024x768", matrix, one(GELU)},
		{"gelu tanh 1024x768", matrix, one(GELUTanh)},
		{"gelu 4x4", ofRandom([]int{4, 4}), one(GELU)},
		{"softmax 1024x768", matrix, softmaxer(1)},
		{"softmax of columns 1024x768", matrix, softmaxer(0)},
		{"log softmax 64x50257", ofRandom([]int{64, 50257}), logSoftmaxer(1)},
		{"layer norm 1024x768", ofRandom([]int{1024, 768}, []int{768}, []int{768}), normed(1e-5)},
		{"layer norm 512x2048", ofRandom([]int{512, 2048}, []int{2048}, []int{2048}), normed(1e-5)},
		{"cross-entropy 1024x50257", andLabels([]int{1024, 50257}, 1024, 50257), ofLabels},
		{"cross-entropy 1024x10", andLabels([]int{1024, 10}, 1024, 10), ofLabels},
		{"cross-entropy 4x4", andLabels([]int{4, 4}, 4, 4), ofLabels},
		{"norm 1024x768", matrix, pNorm(2, 1)},
		{"norm of columns 1024x768", matrix, pNorm(3, 0)},
		{"dropout 1024x768", matrix, dropper(0.1, NewRandom(1))},
		{"embedding 8192x768", andLabels([]int{8192, 768}, 1024, 8192), padded()},
		{"slice 1024x768", matrix, slicer(1, 256, 512, 1)},
		{"concat 1024x768", ofRandom([]int{1024, 384}, []int{1024, 384}), concatenated(1)},
		{"products 8x128x128", ofRandom([]int{8, 128, 128}, []int{8, 128, 128}),
			multiplied(false, true)},
		{"outer product 768x768", ofRandom([]int{768}, []int{768}), two(OuterProd)},
		{"attention 2x4x128x64", ofRandom(heads, heads, heads),
			attended(AttentionOptions{Causal: true})},
		{"pool 16x16x28x28", images, averaged(2, 0, 2)},
		{"depthwise convolution 16x64x28x28", ofRandom([]int{16, 64, 28, 28}, []int{64, 1, 3, 3}),
			convCase{x: make([]int, 4), o: ConvOptions{Groups: 64, Pad: []int{1, 1}}}.build()},
		{"padded pool 16x16x28x28", images, averaged(3, 1, 1)},
		{"global pool 16x64x28x28", ofRandom([]int{16, 64, 28, 28}), one(GlobalAvgPool2D)},
	} {
		b.Run(test.name, func(b *testing.B) { benchmarkDo(b, test.in(), test.build) })
	}
}

func benchmarkDo(b *testing.B, in []operand, build builder) {
	g := gorgonia.NewGraph()
	var x gorgonia.Nodes
	var values []gorgonia.Value
	for i, o := range in {
		x = append(x, o.node(g, fmt.Sprint("x", i), tensor.Float32))
		values = append(values, x[i].Value())
	}
	n, err := build(x)
	require.NoError(b, err)
	o := n.Op().(*Op)
	var y gorgonia.Value
	do := func(b *testing.B, o *Op, x []gorgonia.Value) {
		b.ResetTimer()
		for range b.N {
			if m, _ := o.Mask(); m != nil {
				m.Random.Next(0)
			}
			if y, err = o.Do(x...); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.Run("result", func(b *testing.B) { do(b, o, values) })
	back, gradients, err := o.backward()
	require.NoError(b, err)
	result := y
	for i, g := range gradients {
		if back[i] != nil && result != nil {
			x := choose(g.of, values, result, result)
			b.Run(fmt.Sprint("gradient ", i), func(b *testing.B) { do(b, back[i], x) })
		}
	}
}

// BenchmarkFirstDo is how long the first Do of an operation takes, which plans it.
func BenchmarkFirstDo(b *testing.B) {
	for _, test := range []struct {
		name  string
		in    func() []operand
		build builder
	}{
		{"gelu 4x4", ofRandom([]int{4, 4}), one(GELU)},
		{"layer norm 4x4", ofRandom([]int{4, 4}, []int{4}, []int{4}), normed(1e-5)},
		{"cross-entropy 4x4", andLabels([]int{4, 4}, 4, 4),
			two(func(x, l *gorgonia.Node) (*gorgonia.Node, error) {
				return CrossEntropy(NoLabel, x, l)
			})},
		{"convolution 1x4x8x8", ofRandom([]int{1, 4, 8, 8}, []int{4, 4, 3, 3}),
			convCase{x: make([]int, 4), o: ConvOptions{Pad: []int{1, 1}}}.build()},
		{"LSTM 32x2x16", ofRandom([]int{32, 2, 16}, []int{1, 2, 8}, []int{32, 16}, []int{32, 8},
			[]int{32}, []int{32}, []int{1, 2, 8}), func(x gorgonia.Nodes) (*gorgonia.Node, error) {
			return apply(recurrentSpec{Cell: "LSTM"}, x...)
		}},
	} {
		b.Run(test.name, func(b *testing.B) {
			g := gorgonia.NewGraph()
			var x gorgonia.Nodes
			var values []gorgonia.Value
			for i, o := range test.in() {
				x = append(x, o.node(g, fmt.Sprint("x", i), tensor.Float32))
				values = append(values, x[i].Value())
			}
			n := require.Value(test.build(x))(b)
			o := n.Op().(*Op)
			b.ReportAllocs()
			for b.Loop() {
				fresh := &Op{spec: o.spec, in: o.in, types: o.types, out: o.out, dtype: o.dtype}
				require.NoError(b, require.Err(fresh.Do(values...)))
			}
		})
	}
}
