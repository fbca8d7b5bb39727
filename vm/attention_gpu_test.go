//go:build gpu

package vm_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
)

// TestAttentionOfBF16OnGPU is TestAttentionOfBF16 on a GPU.
func TestAttentionOfBF16OnGPU(t *testing.T) {
	attentionOfBF16(t, map[string]func(testing.TB) backend.Device{"gpu": sharing(gpu(t))})
}

// attentionBench measures attention of heads on a queue.
type attentionBench struct {
	b      *testing.B
	device *cuda.Device
	queue  *cuda.Queue
	free   []backend.Buffer
}

func (a *attentionBench) ok(err error) {
	a.b.Helper()
	if err != nil {
		a.b.Fatal(err)
	}
}

// room returns memory for n elements.
func (a *attentionBench) room(d backend.DType, n int) backend.Buffer {
	a.b.Helper()
	on, err := a.device.Alloc(n * d.Size())
	a.ok(err)
	a.free = append(a.free, on)
	return on.As(d)
}

// alloc returns n normally distributed numbers: a million of them, and again.
func (a *attentionBench) alloc(d backend.DType, n int) backend.Buffer {
	a.b.Helper()
	on := a.room(d, n)
	rnd := rand.New(rand.NewPCG(uint64(len(a.free)), 1))
	numbers := make([]float32, min(n, 1<<20))
	for i := range numbers {
		numbers[i] = float32(rnd.NormFloat64())
	}
	host := backend.Of(make([]float64, len(numbers))).As(d).Slice(0, len(numbers))
	a.ok(kernels.Host{}.Cast(host, backend.Of(numbers)))
	for at := 0; at < n; at += len(numbers) {
		size := min(len(numbers), n-at)
		a.ok(a.queue.Move(on.Slice(at, at+size), host.Slice(0, size)))
	}
	return on
}

// measure reports how many operations of the given number a call does in a second.
func (a *attentionBench) measure(name string, operations float64, f func() error) {
	a.b.Run(name, func(b *testing.B) {
		join := func() {
			e, err := a.queue.Record()
			a.ok(errors.Join(err, e.Join(context.Background())))
		}
		a.ok(f())
		join()
		b.ResetTimer()
		for range b.N {
			a.ok(f())
		}
		join()
		b.ReportMetric(operations*float64(b.N)/b.Elapsed().Seconds()/1e12, "TFLOP/s")
	})
}

// heads measures forward and backward, and the two products of the forward pass by cuBLAS, with
// scores in memory.
func (a *attentionBench) heads(d backend.DType, batch, heads, n, size int) {
	elements, rows := batch*heads*n*size, batch*heads*n
	dense := func() kernels.HeadRows {
		return kernels.HeadRows{Buffer: a.alloc(d, elements), Batch: heads * n * size,
			Head: n * size, Row: size}
	}
	p := kernels.Attention{Batch: batch, Heads: heads, Queries: n, Keys: n, Size: size,
		Scale: 1 / math.Sqrt(float64(size)),
		Q:     dense(), K: dense(), V: dense(), Y: dense(), LSE: a.alloc(backend.F32, rows)}
	g := kernels.AttentionGrad{Attention: p, DY: dense(), DQ: dense(), DK: dense(), DV: dense(),
		Sums: a.alloc(backend.F32, rows)}
	products, err := a.queue.NewProducts()
	a.ok(err)
	defer func() { a.ok(products.Close()) }()
	// Windows and documents are of a part of the positions. Operations count for each query and
	// each key that it sees.
	part, pair := n/4, 4*float64(batch*heads*size)
	starts := make([]int64, batch*n)
	for i := range starts {
		starts[i] = int64(i % n / part * part)
	}
	of := a.room(backend.I64, len(starts))
	a.ok(a.queue.Move(of, backend.Of(starts)))
	for _, kind := range []struct {
		name   string
		causal bool
		window int
		starts backend.Buffer
		pairs  int
	}{
		{"full", false, 0, backend.Buffer{}, n * n},
		{"causal", true, 0, backend.Buffer{}, n * n / 2},
		{"window", true, part, backend.Buffer{}, n*part - part*part/2},
		{"documents", true, 0, of, n * part / 2},
	} {
		name, operations := fmt.Sprintf("%v/d%d/T%d/%s", d, size, n, kind.name),
			pair*float64(kind.pairs)
		p.Causal, p.Window, p.Starts = kind.causal, kind.window, kind.starts
		g.Attention = p
		a.measure(name+"/forward", operations, func() error { return a.queue.Attention(p) })
		a.measure(name+"/backward", 2.5*operations, func() error {
			return a.queue.AttentionGrad(g)
		})
	}
	scores := a.alloc(d, rows*n)
	matrix := func(b backend.Buffer, columns int, transposed bool) kernels.Matrix {
		return kernels.Matrix{Buffer: b, Pitch: columns, Stride: n * columns,
			Transposed: transposed}
	}
	ofScores := kernels.Product{Batch: batch * heads, M: n, N: n, K: size, Alpha: 1,
		A: matrix(p.Q.Buffer, size, false), B: matrix(p.K.Buffer, size, true), C: matrix(scores, n,
			false)}
	ofValues := kernels.Product{Batch: batch * heads, M: n, N: size, K: n, Alpha: 1,
		A: matrix(scores, n, false), B: matrix(p.V.Buffer, size, false), C: matrix(p.Y.Buffer, size,
			false)}
	a.measure(fmt.Sprintf("%v/d%d/T%d/products", d, size, n), pair*float64(n*n), func() error {
		return errors.Join(products.Multiply(ofScores), products.Multiply(ofValues))
	})
	for _, b := range a.free {
		a.ok(a.device.Free(b))
	}
	a.free = nil
}

// BenchmarkAttentionOnGPU measures the kernels, with causal operations counted as half of all, and
// a graph of f32 with attention beside one with its composition by products and a softmax.
func BenchmarkAttentionOnGPU(b *testing.B) {
	d := gpu(b)
	q := require.Value(d.NewQueue())(b)
	defer q.Close()
	a := &attentionBench{b: b, device: d.(*cuda.Device), queue: q.(*cuda.Queue)}
	for _, size := range []int{64, 128} {
		for _, n := range []int{512, 1024, 4096} {
			a.heads(backend.BF16, 16, 1024/size, n, size)
		}
	}
	a.heads(backend.F32, 16, 16, 512, 64)
	for name, build := range map[string]func(q, k, v node) (node, error){
		"attention": func(q, k, v node) (node, error) {
			return nn.Attention(q, k, v, nn.AttentionOptions{})
		},
		"composition": composedAttention,
	} {
		b.Run("graph of f32/"+name, func(b *testing.B) {
			m := &model{g: gorgonia.NewGraph()}
			for _, x := range []string{"q", "k", "v"} {
				m.params = append(m.params, m.variable(x, tensor.Float32, 16, 16, 512, 64))
			}
			m.grad(b, sum(must(build(m.params[0], m.params[1], m.params[2]))))
			benchmarkStep(b, m, d)
		})
	}
}

// composedAttention is full attention by products and a softmax.
func composedAttention(q, k, v node) (node, error) {
	s, err := nn.BatchedMatMul(false, true, q, k)
	if err == nil {
		s, err = gorgonia.Mul(s, gorgonia.NewConstant(float32(0.125)))
	}
	if err == nil {
		s, err = nn.SoftMax(3, s)
	}
	if err != nil {
		return nil, err
	}
	return nn.BatchedMatMul(false, false, s, v)
}
