package fuse_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/fusetest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/workers"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// largePrograms are of several parts each.
func largePrograms() map[string]*fuse.Program {
	all := map[string]*fuse.Program{
		"softmax": fusetest.SoftMax(backend.F32, 9000, 65), "layer norm": fusetest.LayerNorm(
			backend.F32, 1500, 513),
		"layer norm gradient": fusetest.LayerNormGrad(backend.F64, 800, 128),
		"cross-entropy":       fusetest.CrossEntropy(backend.BF16, 1000, 65),
	}
	for name, reduced := range map[string][]bool{
		"rows": {false, false, true}, "columns": {true, true, false}, "all": {true, true, true},
		"outer and inner": {true, false, true}, "middle": {false, true, false},
	} {
		for _, inner := range []int{33, 600} { // gathered, and read where it lies
			p := &fuse.Program{Shape: []int{40, 50, inner}, Reduced: reduced}
			x, transposed := p.Load(backend.F32, 50*inner, inner, 1),
				p.Load(backend.F32, inner, 40*inner, 1)
			y := p.Do(fuse.Tanh,
				p.Do(fuse.Add, x, p.Do(fuse.Mul, transposed, p.Load(backend.F32, 0, 0, 1))))
			p.Store(y, backend.F16, 50*inner, inner, 1)
			for _, op := range []backend.ReduceOp{backend.Sum, backend.Avg, backend.Max,
				backend.Min} {
				p.Fold(op, y, backend.F32, keptStrides(p)...)
			}
			p.Fold(backend.Sum, p.Cast(backend.I32, p.Do(fuse.Mul, y, p.Const(backend.F32, 100))),
				backend.I32, keptStrides(p)...)
			all[fmt.Sprint(name, inner)] = p
		}
	}
	return all
}

// keptStrides are the strides of a row-major tensor of the axes that are not folded.
func keptStrides(p *fuse.Program) []int {
	strides, at := make([]int, len(p.Shape)), 1
	for k := len(p.Shape) - 1; k >= 0; k-- {
		if !p.Reduced[k] {
			strides[k] = at
			at *= p.Shape[k]
		}
	}
	return strides
}

// buffers returns memory for operands, with the same numbers each time.
func buffers(operands []fuse.Operand, shape []int) []backend.Buffer {
	var all []backend.Buffer
	for _, o := range operands {
		n := 1
		for k, s := range o.Strides {
			n += s * (shape[k] - 1)
		}
		b := backend.Of(make([]float64, n)).As(o.DType).Slice(0, n)
		switch o.DType {
		case backend.F32:
			for i := range n {
				backend.View[float32](b)[i] = float32(i*7919%2003)/500 - 2
			}
		case backend.F64:
			for i := range n {
				backend.View[float64](b)[i] = float64(i*7919%2003)/500 - 2
			}
		case backend.BF16:
			for i := range n {
				backend.View[backend.BFloat16](b)[i] = backend.BFloat16(0x3f80 + i*7919%203)
			}
		}
		all = append(all, b)
	}
	return all
}

func TestWorkersDoNotChangeBits(t *testing.T) {
	pool := workers.New(3)
	defer pool.Close()
	for name, p := range largePrograms() {
		var outputs []fuse.Operand
		for _, o := range p.Outputs {
			outputs = append(outputs, o.Operand)
		}
		src := buffers(p.Inputs, p.Shape)
		var want []backend.Buffer
		for _, workers := range []*workers.Pool{nil, pool} {
			loop, err := fuse.Host(p, workers)
			require.That(t, err == nil, "%s: %v", name, err)
			dst := buffers(outputs, p.Shape)
			if n := testing.AllocsPerRun(1, func() {
				err = loop.Run(dst, src, backend.Buffer{})
			}); err != nil || n > 0 {
				t.Fatalf("%s: %v allocations, %v", name, n, err)
			}
			if want == nil {
				want = dst
				continue
			}
			for k := range dst {
				require.Check(t, bytes.Equal(dst[k].Bytes(), want[k].Bytes()),
					"%s: output %d has other bits with workers", name, k)
			}
		}
	}
}

// An output may be the memory of an input that is read after the output is computed.
func TestOutputsOverInputs(t *testing.T) {
	const n = 5000
	p := &fuse.Program{Shape: []int{n}}
	x, y := p.Load(backend.F32, 1), p.Load(backend.F32, 1)
	sum := p.Do(fuse.Add, x, y)
	p.Store(sum, backend.F32, 1)
	p.Store(p.Do(fuse.Mul, sum, x), backend.F32, 1) // x, which the sum may have written over
	loop := require.Value(fuse.Host(p, nil))(t)
	for _, over := range []bool{false, true} {
		xs, ys, sums, products := make([]float32, n), make([]float32, n), make([]float32, n),
			make([]float32, n)
		for i := range xs {
			xs[i], ys[i] = float32(i), 1
		}
		if over {
			sums = xs
		}
		require.NoError(t, loop.Run([]backend.Buffer{backend.Of(sums), backend.Of(products)},
			[]backend.Buffer{backend.Of(xs), backend.Of(ys)}, backend.Buffer{}))
		for i := range sums {
			if want := float32(i) + 1; sums[i] != want || products[i] != want*float32(i) {
				t.Fatalf("over its input %v: element %d is %v and %v, want %v and %v", over, i,
					sums[i], products[i], want, want*float32(i))
			}
		}
	}
}

// An epilogue gives bitwise identical results by rows, in any order, where it takes them.
func TestEpiloguesByRows(t *testing.T) {
	const images, rows = 6, 40
	for _, inner := range []int{33, 600} {
		// of an operand that is the same for all rows, or for all images
		for _, positions := range []int{0, inner} {
			p := &fuse.Program{Shape: []int{images, rows, inner}}
			x := p.Do(fuse.Add, p.Load(backend.F32, rows*inner, inner, 1),
				p.Load(backend.F32, 0, positions, 1))
			p.Store(p.Do(fuse.Tanh, p.Do(fuse.Mul, x, p.Load(backend.F32, 0, 1, 0))), backend.F16,
				rows*inner, inner, 1)
			loop := require.Value(fuse.Host(p, nil))(t)
			src, want := buffers(p.Inputs, p.Shape), buffers([]fuse.Operand{p.Outputs[0].Operand},
				p.Shape)
			require.NoError(t, loop.Run(want, src, backend.Buffer{}))
			e := loop.(fuse.Epilogue)
			require.Check(t, !e.Divides(0, inner) && e.Divides(images*rows, inner),
				"rows of %d: it runs in no parts, or not in parts of rows", inner)
			got := buffers([]fuse.Operand{p.Outputs[0].Operand}, p.Shape)
			require.NoError(t, e.Bind(got, src))
			for row := images*rows - 2; row >= 0; row -= 2 {
				e.Elements(row*inner, (row+2)*inner, 0)
			}
			if err := e.Unbind(); err != nil || !bytes.Equal(got[0].Bytes(), want[0].Bytes()) {
				t.Errorf("rows of %d, positions by %d: other bits by rows, %v", inner,
					positions, err)
			}
		}
	}
	square := &fuse.Program{Shape: []int{3, 4, 5}}
	square.Store(square.Do(fuse.Add, square.Load(backend.F32, 20, 5, 1), square.Load(backend.F32, 0,
		5, 1)), backend.F32, 20, 5, 1)
	loop := require.Value(fuse.Host(square, nil))(t)
	if e := loop.(fuse.Epilogue); e.Divides(12, 5) || !e.Divides(3, 20) {
		t.Error("an operand that is the same for all images is read once for all blocks, which " +
			"begin with an image")
	}
}

// TestScatteredCopies: a copy of one run of memory to rows that lie apart, in several parts, writes
// those rows alone.
func TestScatteredCopies(t *testing.T) {
	pool := workers.New(3)
	defer pool.Close()
	for _, inner := range []int{1, 33, 600, 40_000} {
		rows, apart := 400_000/inner+1, inner+3
		p := &fuse.Program{Shape: []int{rows, inner}}
		p.Store(p.Load(backend.F32, inner, 1), backend.F32, apart, 1)
		src, dst := make([]float32, rows*inner), make([]float32, rows*apart)
		for i := range src {
			src[i] = float32(i)
		}
		for _, workers := range []*workers.Pool{nil, pool} {
			loop := require.Value(fuse.Host(p, workers))(t)
			for range 3 {
				for i := range dst {
					dst[i] = -1
				}
				require.NoError(t, loop.Run([]backend.Buffer{backend.Of(dst)},
					[]backend.Buffer{backend.Of(src)}, backend.Buffer{}))
				for i, got := range dst {
					want := float32(-1)
					if i%apart < inner {
						want = float32(i/apart*inner + i%apart)
					}
					if got != want {
						t.Fatalf("rows of %d: element %d is %v, want %v", inner, i, got, want)
					}
				}
			}
		}
	}
}
