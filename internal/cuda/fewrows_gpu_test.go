//go:build gpu

package cuda

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/kernels"
	gpukernels "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// decoding is a device with memory that is larger than its second-level cache, of random numbers.
type decoding struct {
	*testing.B
	queue     *Queue
	products  *Products
	memory    backend.Buffer // of bf16
	x, y      backend.Buffer
	workspace backend.Buffer
	timer     *bench.Timer
}

func openDecoding(b *testing.B, nbytes int) *decoding {
	d := openDevice(b, 0)
	q, p := openProducts(b, d, true)
	s := &decoding{B: b, queue: q, products: p}
	s.memory = allocate(b, d, nbytes).As(backend.BF16)
	s.x, s.y = allocate(b, d, 16<<20).As(backend.BF16), allocate(b, d, 16<<20)
	s.workspace = allocate(b, d, gpukernels.FewRowsWorkspace)
	part := min(nbytes/2, 8<<20)
	numbers, r := make([]float32, part), rand.New(rand.NewPCG(1, 2))
	for i := range numbers {
		numbers[i] = r.Float32() - 0.5
	}
	halves := backend.Of(make([]float32, (part+1)/2)).As(backend.BF16).Slice(0, part)
	ok(b, kernels.Host{}.Cast(halves, backend.Of(numbers)))
	for at := 0; at < nbytes/2; at += part {
		n := min(part, nbytes/2-at)
		ok(b, q.Move(s.memory.Slice(at, at+n), halves.Slice(0, n)))
	}
	n := min(s.x.Len(), s.memory.Len())
	ok(b, q.Copy(s.x.Slice(0, n), s.memory.Slice(0, n)))
	ok(b, q.Zero(s.workspace))
	s.timer = must[*bench.Timer](b)(bench.NewTimer(q))
	return s
}

// parts are how many pieces of n elements there are to take turns in: more than the cache holds.
func (s *decoding) parts(n int) int { return max(min(s.memory.Len()/n, (240<<20)/(2*n)+1), 1) }

// us returns the median time of a call in microseconds: of a graph of calls in turn.
func (s *decoding) us(turns int, call func(turn int) error) float64 {
	s.Helper()
	calls := turns
	if !testing.Short() {
		calls = max(turns, 8)
	}
	ok(s, call(0)) // loads what is loaded on first use
	g := must[*backend.Graph](s)(s.queue.Capture(func() error {
		for i := range calls {
			if err := call(i % turns); err != nil {
				return err
			}
		}
		return nil
	}))
	var all []float64
	for i := range 6 {
		ok(s, s.timer.Start())
		must[backend.Work](s)(g.Launch(nil))
		ok(s, s.timer.Stop())
		e := must[backend.Event](s)(s.queue.Record())
		ok(s, e.Join(context.Background()))
		if took := must[time.Duration](s)(s.timer.Elapsed()); i > 0 {
			all = append(all, took.Seconds()*1e6/float64(calls))
		}
	}
	ok(s, g.Close())
	return bench.Median(all)
}

// fewRowsWay is how a kernel is called.
type fewRowsWay struct {
	columns, blocks int
	early           uint64
}

func (w fewRowsWay) String() string { return fmt.Sprintf("%d/%d/%d", w.columns, w.blocks, w.early) }

var fewRowsWays = []fewRowsWay{{64, 528, 0}, {64, 528, 1}, {64, 528, 2}, {64, 528, 3},
	{64, 264, 3}, {16, 528, 0}, {16, 528, 1}, {16, 528, 3}, {16, 264, 3}}

// BenchmarkFewRowsOnGPU prints the microseconds of a product of a few rows by transposed weights of
// bf16 that come from memory, K by N: by cuBLAS, by each of our kernels (columns of a tile/blocks
// at a time/early: 1 lets the next kernel start, 2 asks for memory before the kernels before have
// ended), the best of these and its part of 4.8 TB/s. "in turn" is a product and a small loop in
// turn.
func BenchmarkFewRowsOnGPU(b *testing.B) {
	const bandwidth = 4.8e12
	shapes := [][2]int{{4096, 4096}, {4096, 6144}, {4096, 14336}, {4096, 28672}, {14336, 4096},
		{4096, 128256}, {2048, 2048}, {2048, 3072}, {2048, 8192}, {8192, 2048}, {2048, 128256},
		{768, 768}, {768, 2304}, {768, 3072}, {3072, 768}, {768, 50257}}
	memory, rows := 5<<29, []int{1, 4, 8, 16}
	if testing.Short() {
		shapes, memory, rows = [][2]int{{64, 72}}, 1<<20, []int{3}
	}
	s := openDecoding(b, memory)
	loop := s.small()
	fmt.Printf("a fill of 1 KiB: %.2f us, a small loop: %.2f us\n", s.us(1, func(int) error {
		return s.queue.Fill(s.y.Slice(0, 1024), 0)
	}), s.us(1, func(int) error { return loop() }))
	for _, inTurn := range []bool{false, true} {
		fmt.Printf("%-28s %9s", fmt.Sprintf("in turn=%v", inTurn), "cuBLAS")
		for _, w := range fewRowsWays {
			fmt.Printf(" %9s", w)
		}
		fmt.Println()
		for _, shape := range shapes {
			for _, m := range rows {
				if inTurn && m != 1 && m != 16 {
					continue
				}
				p := kernels.Product{M: m, K: shape[0], N: shape[1], Alpha: 1}
				p.A = kernels.Matrix{Buffer: s.x, Pitch: p.K}
				p.B = kernels.Matrix{Pitch: p.K, Transposed: true}
				p.C = kernels.Matrix{Buffer: s.y.As(backend.F32), Pitch: p.N}
				n := p.K * p.N
				turns := s.parts(n)
				by := func(f func(p kernels.Product) error) float64 {
					return s.us(turns, func(turn int) error {
						p.B.Buffer = s.memory.Slice(turn*n, (turn+1)*n)
						if err := f(p); err != nil || !inTurn {
							return err
						}
						return loop()
					})
				}
				fmt.Printf("%-28s %9.2f", fmt.Sprintf("%2d x %5d x %6d", m, p.K, p.N),
					by(s.products.Multiply))
				best, name := 0.0, ""
				for _, w := range fewRowsWays {
					took := by(func(p kernels.Product) error {
						return s.queue.arithmetic.FewRowsAs(p, s.workspace, w.columns, w.blocks,
							w.early)
					})
					fmt.Printf(" %9.2f", took)
					if best == 0 || took < best {
						best, name = took, w.String()
					}
				}
				fmt.Printf("  %s %.2f\n", name, float64(2*n)/(best*1e-6)/bandwidth)
			}
		}
	}
}

// small returns a loop over a row, such as a model has between products.
func (s *decoding) small() func() error {
	const n = 4096
	p := &fuse.Program{Shape: []int{n}}
	x := p.Load(backend.F32, 1)
	p.Store(p.Do(fuse.Mul, x, p.Do(fuse.Sigmoid, x)), backend.BF16, 1)
	loop := must[fuse.Loop](s)(s.queue.Fuse(p))
	src := []backend.Buffer{s.y.As(backend.F32).Slice(0, n)}
	dst := []backend.Buffer{s.x.Slice(s.x.Len()-n, s.x.Len())}
	return func() error { return loop.Run(dst, src, backend.Buffer{}) }
}

// BenchmarkFewQueriesOnGPU prints the microseconds of attention of one query to keys and values of
// bf16 that come from memory: by the kernel for many queries, and by that for few, with as many
// parts of the keys, and the best one's part of 4.8 TB/s.
func BenchmarkFewQueriesOnGPU(b *testing.B) {
	const bandwidth = 4.8e12
	parts := []int{4, 8, 16, 32}
	cases := [][5]int{{1, 32, 8, 4096, 128}, {1, 32, 8, 1024, 128}, {1, 32, 8, 128, 128},
		{16, 32, 8, 4096, 128}, {16, 32, 8, 1024, 128}, {1, 32, 8, 4096, 64}, {1, 32, 8, 512, 64},
		{16, 32, 8, 1024, 64}, {1, 12, 12, 320, 64}, {16, 12, 12, 320, 64}, {1, 12, 12, 1024, 64},
		{16, 12, 12, 1024, 64}}
	memory := 1 << 30
	if testing.Short() {
		cases, memory = [][5]int{{2, 4, 2, 100, 64}}, 1<<20
	}
	s := openDecoding(b, memory)
	fmt.Printf("%-44s %9s", "batch, heads, heads of keys, keys, elements", "many")
	for _, n := range parts {
		fmt.Printf(" %9d", n)
	}
	fmt.Println()
	for _, c := range cases {
		a := kernels.Attention{Batch: c[0], Heads: c[1], Queries: 1, Keys: c[3], Size: c[4],
			Group: c[1] / c[2], Scale: 0.1}
		n := c[0] * c[3] * c[2] * c[4] // of the keys
		width := c[1] * c[4]
		a.Q = kernels.HeadRows{Buffer: s.x, Batch: width, Head: c[4], Row: width}
		a.Y = a.Q
		a.Y.Buffer = s.y.As(backend.BF16)
		a.LSE = s.y.As(backend.F32).Slice(2<<20, 2<<20+c[0]*c[1])
		by := func(f func(kernels.Attention) error) float64 {
			return s.us(s.parts(2*n), func(turn int) error {
				a.K = kernels.HeadRows{Buffer: s.memory.Slice(2*turn*n, (2*turn+1)*n),
					Batch: c[3] * c[2] * c[4], Head: c[4], Row: c[2] * c[4]}
				a.V = a.K
				a.V.Buffer = s.memory.Slice((2*turn+1)*n, (2*turn+2)*n)
				return f(a)
			})
		}
		fmt.Printf("%-44s %9.2f", strings.Trim(fmt.Sprint(c), "[]"),
			by(s.queue.arithmetic.Kernels.Attention))
		best := 0.0
		for _, n := range parts {
			took := by(func(a kernels.Attention) error {
				return s.queue.arithmetic.FewQueriesIn(a, s.workspace, n)
			})
			fmt.Printf(" %9.2f", took)
			if best == 0 || took < best {
				best = took
			}
		}
		fmt.Printf("  %.2f\n", float64(4*n)/(best*1e-6)/bandwidth)
	}
}
