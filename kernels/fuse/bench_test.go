package fuse_test

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// BenchmarkHost runs chains on the host beside the tape machine of Gorgonia: rows of 1024
// columns of F32, in bytes of the result.
func BenchmarkHost(b *testing.B) {
	const rows, columns = 256, 1024
	x := make([]float32, rows*columns)
	for i := range x {
		x[i] = float32(i%17) - 8
	}
	chains := map[string]struct {
		fused func(p *fuse.Program, x fuse.Value) fuse.Value
		graph func(x *gorgonia.Node) *gorgonia.Node
	}{
		"relu(2x+1)": {
			func(p *fuse.Program, x fuse.Value) fuse.Value {
				return p.Do(fuse.Relu, p.Do(fuse.Add, p.Do(fuse.Mul, x, p.Const(backend.F32, 2)), p.Const(backend.F32, 1)))
			},
			func(x *gorgonia.Node) *gorgonia.Node {
				two, one := gorgonia.NewConstant(float32(2)), gorgonia.NewConstant(float32(1))
				return gorgonia.Must(gorgonia.Rectify(gorgonia.Must(gorgonia.Add(gorgonia.Must(gorgonia.Mul(x, two)), one))))
			},
		},
		"tanh(x)^2-x": {
			func(p *fuse.Program, x fuse.Value) fuse.Value {
				return p.Do(fuse.Sub, p.Do(fuse.Square, p.Do(fuse.Tanh, x)), x)
			},
			func(x *gorgonia.Node) *gorgonia.Node {
				return gorgonia.Must(gorgonia.Sub(gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Tanh(x)))), x))
			},
		},
	}
	for name, chain := range chains {
		b.Run(name+"/fused", func(b *testing.B) {
			p := &fuse.Program{Shape: []int{rows, columns}}
			p.Store(chain.fused(p, p.Load(backend.F32, columns, 1)), backend.F32, columns, 1)
			loop, err := fuse.Host(p)
			if err != nil {
				b.Fatal(err)
			}
			dst, src := []backend.Buffer{backend.Of(make([]float32, len(x)))}, []backend.Buffer{backend.Of(x)}
			b.SetBytes(4 * rows * columns)
			for b.Loop() {
				if err := loop.Run(dst, src, backend.Buffer{}); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(name+"/gorgonia", func(b *testing.B) {
			g := gorgonia.NewGraph()
			in := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, columns),
				gorgonia.WithValue(tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(x))))
			chain.graph(in)
			machine := gorgonia.NewTapeMachine(g)
			defer machine.Close()
			b.SetBytes(4 * rows * columns)
			for b.Loop() {
				if err := machine.RunAll(); err != nil {
					b.Fatal(err)
				}
				machine.Reset()
			}
		})
	}
	b.Run("sum of rows/fused", func(b *testing.B) { benchmarkFold(b, x, []bool{false, true}, []int{1, 0}) })
	b.Run("sum of columns/fused", func(b *testing.B) { benchmarkFold(b, x, []bool{true, false}, []int{0, 1}) })
}

func benchmarkFold(b *testing.B, x []float32, reduced []bool, strides []int) {
	p := &fuse.Program{Shape: []int{len(x) / 1024, 1024}, Reduced: reduced}
	p.Fold(backend.Sum, p.Load(backend.F32, 1024, 1), backend.F32, strides...)
	loop, err := fuse.Host(p)
	if err != nil {
		b.Fatal(err)
	}
	dst, src := []backend.Buffer{backend.Of(make([]float32, 1024))}, []backend.Buffer{backend.Of(x)}
	b.SetBytes(int64(4 * len(x)))
	for b.Loop() {
		if err := loop.Run(dst, src, backend.Buffer{}); err != nil {
			b.Fatal(err)
		}
	}
}
