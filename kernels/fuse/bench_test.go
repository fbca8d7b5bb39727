package fuse_test

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/fusetest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// chain is one computation, as a program and as a graph of Gorgonia.
type chain struct {
	fused func(p *fuse.Program, x fuse.Value) fuse.Value
	graph func(x *gorgonia.Node) *gorgonia.Node
}

func reluChain() chain {
	return chain{
		func(p *fuse.Program, x fuse.Value) fuse.Value {
			return p.Do(fuse.Relu, p.Do(fuse.Add, p.Do(fuse.Mul, x, p.Const(backend.F32, 2)),
				p.Const(backend.F32, 1)))
		},
		func(x *gorgonia.Node) *gorgonia.Node {
			two, one := gorgonia.NewConstant(float32(2)), gorgonia.NewConstant(float32(1))
			return gorgonia.Must(gorgonia.Rectify(gorgonia.Must(gorgonia.Add(gorgonia.Must(
				gorgonia.Mul(x, two)), one))))
		},
	}
}

func tanhChain() chain {
	return chain{
		func(p *fuse.Program, x fuse.Value) fuse.Value {
			return p.Do(fuse.Sub, p.Do(fuse.Square, p.Do(fuse.Tanh, x)), x)
		},
		func(x *gorgonia.Node) *gorgonia.Node {
			return gorgonia.Must(
				gorgonia.Sub(gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Tanh(x)))), x))
		},
	}
}

func expChain() chain {
	return chain{
		func(p *fuse.Program, x fuse.Value) fuse.Value { return p.Do(fuse.Exp, x) },
		func(x *gorgonia.Node) *gorgonia.Node { return gorgonia.Must(gorgonia.Exp(x)) },
	}
}

// BenchmarkHost runs chains on the host beside the tape machine of Gorgonia: rows of 1024
// columns of F32, in bytes of the result.
func BenchmarkHost(b *testing.B) {
	x := make([]float32, 256*1024)
	for i := range x {
		x[i] = float32(i%17) - 8
	}
	for name, c := range map[string]chain{"exp": expChain(), "relu(2x+1)": reluChain(),
		"tanh(x)^2-x": tanhChain()} {
		b.Run(name+"/fused", func(b *testing.B) {
			p := &fuse.Program{Shape: []int{len(x) / 1024, 1024}}
			p.Store(c.fused(p, p.Load(backend.F32, 1024, 1)), backend.F32, 1024, 1)
			benchmarkLoop(b, p, x, len(x))
		})
		b.Run(name+"/gorgonia", func(b *testing.B) { benchmarkGraph(b, x, c) })
	}
	for name, reduced := range map[string][]bool{"sum of rows": {false, true},
		"sum of columns": {true, false}} {
		b.Run(name, func(b *testing.B) {
			p := &fuse.Program{Shape: []int{len(x) / 1024, 1024}, Reduced: reduced}
			strides := map[bool][]int{true: {1, 0}, false: {0, 1}}[reduced[1]]
			p.Fold(backend.Sum, p.Load(backend.F32, 1024, 1), backend.F32, strides...)
			benchmarkLoop(b, p, x, 1024)
		})
	}
}

// benchmarkLoop runs a program from x to n elements.
func benchmarkLoop(b *testing.B, p *fuse.Program, x []float32, n int) {
	loop := require.Value(fuse.Host(p, nil))(b)
	dst, src := []backend.Buffer{backend.Of(make([]float32, n))}, []backend.Buffer{backend.Of(x)}
	b.SetBytes(int64(4 * len(x)))
	for b.Loop() {
		require.NoError(b, loop.Run(dst, src, backend.Buffer{}))
	}
}

func benchmarkGraph(b *testing.B, x []float32, c chain) {
	g := gorgonia.NewGraph()
	c.graph(gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(len(x)/1024, 1024),
		gorgonia.WithValue(tensor.New(tensor.WithShape(len(x)/1024, 1024), tensor.WithBacking(x)))))
	machine := gorgonia.NewTapeMachine(g)
	defer machine.Close()
	b.SetBytes(int64(4 * len(x)))
	for b.Loop() {
		require.NoError(b, machine.RunAll())
		machine.Reset()
	}
}

// gelu is x/2 * (1 + erf(x/sqrt 2)) of n elements.
func gelu(n int) *fuse.Program {
	p := &fuse.Program{Shape: []int{n}}
	x := p.Load(backend.F32, 1)
	y := p.Do(fuse.Erf, p.Do(fuse.Mul, x, p.Const(backend.F32, 0.70710678)))
	p.Store(p.Do(fuse.Mul, p.Do(fuse.Mul, x, p.Const(backend.F32, 0.5)),
		p.Do(fuse.Add, y, p.Const(backend.F32, 1))), backend.F32, 1)
	return p
}

// adam is an update of n parameters, over which it writes, and over what it keeps.
func adam(n int) *fuse.Program {
	p := &fuse.Program{Shape: []int{n}}
	w, g, m, v, rate := p.Load(backend.F32, 1), p.Load(backend.F32, 1), p.Load(backend.F32, 1),
		p.Load(backend.F32, 1), p.Load(backend.F32, 0)
	c := func(x float64) fuse.Value { return p.Const(backend.F32, x) }
	m = p.Do(fuse.Add, p.Do(fuse.Mul, m, c(0.9)), p.Do(fuse.Mul, g, c(0.1)))
	v = p.Do(fuse.Add, p.Do(fuse.Mul, v, c(0.999)), p.Do(fuse.Mul, p.Do(fuse.Square, g), c(0.001)))
	step := p.Do(fuse.Div, p.Do(fuse.Mul, m, rate), p.Do(fuse.Add, p.Do(fuse.Sqrt, v), c(1e-8)))
	p.Store(p.Do(fuse.Sub, w, step), backend.F32, 1)
	p.Store(m, backend.F32, 1)
	p.Store(v, backend.F32, 1)
	return p
}

// BenchmarkLayers runs loops of a small GPT on one core: bench/peers/layers_torch.py runs the same.
func BenchmarkLayers(b *testing.B) {
	bias := &fuse.Program{Shape: []int{768, 512}, Reduced: []bool{true, false}}
	bias.Fold(backend.Sum, bias.Load(backend.F32, 512, 1), backend.F32, 0, 1)
	// [batch, position, head, channel] to [batch, head, position, channel]
	heads := &fuse.Program{Shape: []int{12, 4, 64, 32}}
	heads.Store(heads.Load(backend.F32, 64*4*32, 32, 4*32, 1), backend.F32, 4*64*32, 64*32, 32, 1)
	transpose := &fuse.Program{Shape: []int{768, 512}}
	transpose.Store(transpose.Load(backend.F32, 1, 768), backend.F32, 512, 1)
	exp := &fuse.Program{Shape: []int{768 * 512}}
	exp.Store(exp.Do(fuse.Exp, exp.Load(backend.F32, 1)), backend.F32, 1)
	for _, c := range []struct {
		name string
		p    *fuse.Program
	}{
		{"exp", exp}, {"softmax", fusetest.SoftMax(backend.F32, 768, 65)}, {"layernorm",
			fusetest.LayerNorm(backend.F32, 768, 128)},
		{"layernormgrad", fusetest.LayerNormGrad(backend.F32, 768, 128)}, {"crossentropy",
			fusetest.CrossEntropy(backend.F32, 768, 65)},
		{"gelu", gelu(768 * 512)}, {"adam", adam(200000)}, {"bias", bias}, {"heads", heads},
		{"transpose", transpose},
	} {
		b.Run(c.name, func(b *testing.B) {
			var outputs []fuse.Operand
			for _, o := range c.p.Outputs {
				outputs = append(outputs, o.Operand)
			}
			dst, src := buffers(outputs, c.p.Shape), buffers(c.p.Inputs, c.p.Shape)
			if c.name == "adam" {
				src[0], src[2], src[3] = dst[0], dst[1], dst[2]
			}
			loop := require.Value(fuse.Host(c.p, nil))(b)
			for b.Loop() {
				require.NoError(b, loop.Run(dst, src, backend.Buffer{}))
			}
		})
	}
}
