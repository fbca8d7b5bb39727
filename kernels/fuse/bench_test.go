package fuse_test

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
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
			return p.Do(fuse.Relu, p.Do(fuse.Add, p.Do(fuse.Mul, x, p.Const(backend.F32, 2)), p.Const(backend.F32, 1)))
		},
		func(x *gorgonia.Node) *gorgonia.Node {
			two, one := gorgonia.NewConstant(float32(2)), gorgonia.NewConstant(float32(1))
			return gorgonia.Must(gorgonia.Rectify(gorgonia.Must(gorgonia.Add(gorgonia.Must(gorgonia.Mul(x, two)), one))))
		},
	}
}

func tanhChain() chain {
	return chain{
		func(p *fuse.Program, x fuse.Value) fuse.Value {
			return p.Do(fuse.Sub, p.Do(fuse.Square, p.Do(fuse.Tanh, x)), x)
		},
		func(x *gorgonia.Node) *gorgonia.Node {
			return gorgonia.Must(gorgonia.Sub(gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Tanh(x)))), x))
		},
	}
}

// BenchmarkHost runs chains on the host beside the tape machine of Gorgonia: rows of 1024
// columns of F32, in bytes of the result.
func BenchmarkHost(b *testing.B) {
	x := make([]float32, 256*1024)
	for i := range x {
		x[i] = float32(i%17) - 8
	}
	for name, c := range map[string]chain{"relu(2x+1)": reluChain(), "tanh(x)^2-x": tanhChain()} {
		b.Run(name+"/fused", func(b *testing.B) {
			p := &fuse.Program{Shape: []int{len(x) / 1024, 1024}}
			p.Store(c.fused(p, p.Load(backend.F32, 1024, 1)), backend.F32, 1024, 1)
			benchmarkLoop(b, p, x, len(x))
		})
		b.Run(name+"/gorgonia", func(b *testing.B) { benchmarkGraph(b, x, c) })
	}
	for name, reduced := range map[string][]bool{"sum of rows": {false, true}, "sum of columns": {true, false}} {
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
	loop, err := fuse.Host(p, nil)
	if err != nil {
		b.Fatal(err)
	}
	dst, src := []backend.Buffer{backend.Of(make([]float32, n))}, []backend.Buffer{backend.Of(x)}
	b.SetBytes(int64(4 * len(x)))
	for b.Loop() {
		if err := loop.Run(dst, src, backend.Buffer{}); err != nil {
			b.Fatal(err)
		}
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
		if err := machine.RunAll(); err != nil {
			b.Fatal(err)
		}
		machine.Reset()
	}
}
