package kernels

import (
	"fmt"
	"math"
	"os"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels/simd"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/workers"
)

// productTypes are what a product may be of: operands and results.
var productTypes = [][2]backend.DType{
	{backend.F64, backend.F64}, {backend.F32, backend.F32}, {backend.F16, backend.F16},
	{backend.BF16, backend.BF16}, {backend.F16, backend.F32}, {backend.BF16, backend.F32},
}

// productShapes are batches of M x N x K: without a step, smaller than a tile, with edges of tiles
// and panels, several blocks of rows, of columns and of K, few rows and few columns.
func productShapes() [][4]int {
	shapes := [][4]int{
		{1, 1, 1, 1}, {1, 3, 5, 2}, {2, 4, 65, 3}, {2, 3, 4, 0}, {3, 13, 33, 17}, {1, 1, 259, 40},
		{1, 25, 1, 70}, {1, 29, 47, 360}, {5, 8, 8, 8}, {1, 3, 70, 75},
	}
	if os.Getenv("EURYALE_FULL") != "" {
		shapes = append(shapes, [][4]int{{1, 500, 40, 3}, {1, 3, 700, 5}, {1, 12, 32, 700},
			{1, 300, 400, 50}, {40, 20, 20, 20}, {1, 31, 512, 512}}...)
	}
	return shapes
}

func TestMultiplyIsTheTripleLoop(t *testing.T) {
	for _, level := range simd.Levels() {
		for _, types := range productTypes {
			for _, shape := range productShapes() {
				for flags := range 8 {
					m := newMultiplied(t, types, shape, flags&1 != 0, flags&2 != 0)
					m.Beta = float64(flags >> 2 * 2)
					if err := m.check(level, nil); err != nil {
						t.Fatalf("%v: %v of %v, transposed %02b, beta %v: %v", level, shape, types,
							flags&3, m.Beta, err)
					}
				}
			}
		}
	}
}

// multiplied is a product of small integers, and what it should be: C with guards around it.
type multiplied struct {
	Product
	a, b, c []float64
}

// newMultiplied returns a product. If there is a batch, all of it has the same B.
func newMultiplied(t *testing.T, types [2]backend.DType, shape [4]int, transposeA,
	transposeB bool) *multiplied {
	t.Helper()
	batch, M, N, K := shape[0], shape[1], shape[2], shape[3]
	m := &multiplied{Product: Product{Batch: batch, M: M, N: N, K: K, Alpha: 0.5}}
	m.A, m.a = matrixOf(t, types[0], batch, M, K, 2, 1, transposeA)
	m.B, m.b = matrixOf(t, types[0], 1, K, N, 1, 3, transposeB)
	m.C, m.c = matrixOf(t, types[1], batch, M, N, 3, 5, false)
	m.B.Stride = 0
	return m
}

// check multiplies, with NaN in a C that is not read, and compares everything in memory.
func (m *multiplied) check(level simd.Level, pool *workers.Pool) error {
	before, err := wideCopy(m.C.Buffer)
	if err != nil {
		return err
	}
	want := slices.Clone(before)
	for i := range m.c {
		n, r, col := i/(m.M*m.N), i/m.N%m.M, i%m.N
		at := n*m.C.Stride + r*m.C.Pitch + col
		want[at] *= m.Beta
		for k := range m.K {
			want[at] += m.Alpha * m.a[(n*m.M+r)*m.K+k] * m.b[k*m.N+col]
		}
		if m.Beta == 0 {
			before[at] = math.NaN()
		}
	}
	if err := (Host{}).Cast(m.C.Buffer, backend.Of(want)); err != nil { // rounded once
		return err
	}
	if want, err = wideCopy(m.C.Buffer); err != nil {
		return err
	}
	if err := (Host{}).Cast(m.C.Buffer, backend.Of(before)); err != nil {
		return err
	}
	if err := (Host{Workers: pool}).multiply(m.Product, level); err != nil {
		return err
	}
	got, err := wideCopy(m.C.Buffer)
	if err != nil {
		return err
	}
	for i := range want {
		if got[i] != want[i] {
			return fmt.Errorf("element %d of memory is %v, want %v", i, got[i], want[i])
		}
	}
	return nil
}

// wideCopy returns the elements of a buffer.
func wideCopy(b backend.Buffer) ([]float64, error) {
	numbers := make([]float64, b.Len())
	return numbers, Host{}.Cast(backend.Of(numbers), b)
}

// FuzzMultiply compares products of any shape, which workers compute, with the loop.
func FuzzMultiply(f *testing.F) {
	f.Add(uint16(13), uint16(37), uint16(50), uint8(2), uint8(0x35))
	f.Add(uint16(1), uint16(300), uint16(9), uint8(1), uint8(0x0a))
	f.Fuzz(func(t *testing.T, M, N, K uint16, batch, flags uint8) {
		shape := [4]int{int(batch%4) + 1, int(M%150) + 1, int(N%350) + 1, int(K % 400)}
		m := newMultiplied(t, productTypes[int(flags>>4)%len(productTypes)], shape, flags&1 != 0,
			flags&2 != 0)
		if flags&4 != 0 {
			m.Beta = -1
		}
		pool := workers.New(2)
		defer pool.Close()
		for _, level := range simd.Levels() {
			if err := m.check(level, pool); err != nil {
				t.Fatalf("%v: %v, flags %#x: %v", level, shape, flags, err)
			}
		}
	})
}

// Products are bitwise identical with any number of workers, of numbers that sums round.
func TestMultiplyHasTheSameBitsWithAnyNumberOfWorkers(t *testing.T) {
	for _, shape := range [][4]int{{1, 100, 130, 400}, {70, 10, 20, 30}, {1, 2, 3000, 100},
		{1, 700, 3, 90}} {
		var before []float32
		for n := 1; n <= 3; n++ {
			pool := workers.New(n)
			m := newMultiplied(t, [2]backend.DType{backend.F32, backend.F32}, shape, false, true)
			for i, x := range backend.View[float32](m.A.Buffer) {
				backend.View[float32](m.A.Buffer)[i] = x / 3
			}
			err := Host{Workers: pool}.Multiply(m.Product)
			pool.Close()
			require.NoError(t, err)
			got := backend.View[float32](m.C.Buffer)
			require.Check(t, before == nil || slices.Equal(got, before),
				"%v: %d workers have other bits than %d", shape, n, n-1)
			before = got
		}
	}
}

// An element is NaN or infinite where its sum is, and no other one.
func TestMultiplyKeepsNaNAndInfWhereTheyBelong(t *testing.T) {
	for _, level := range simd.Levels() {
		for _, special := range []float32{float32(math.NaN()), float32(math.Inf(1))} {
			m := newMultiplied(t, [2]backend.DType{backend.F32, backend.F32}, [4]int{1, 14, 35, 20},
				false, false)
			a, b, c := backend.View[float32](m.A.Buffer), backend.View[float32](m.B.Buffer),
				backend.View[float32](m.C.Buffer)
			for i := range b {
				b[i] = 1
			}
			a[13*m.A.Pitch+19] = special
			require.NoError(t, (Host{}).multiply(m.Product, level))
			for i := range m.M * m.N {
				x := float64(c[i/m.N*m.C.Pitch+i%m.N])
				if finite := !math.IsNaN(x) && !math.IsInf(x, 0); finite != (i/m.N != 13) {
					t.Fatalf("%v: with %v in the last row of A, row %d has %v", level, special,
						i/m.N, x)
				}
			}
		}
	}
}

func TestMultiplyAllocatesNothing(t *testing.T) {
	pool := workers.New(2)
	defer pool.Close()
	for _, types := range productTypes {
		for flags := range 4 {
			m := newMultiplied(t, types, [4]int{3, 40, 70, 50}, flags&1 != 0, flags&2 != 0)
			if n := testing.AllocsPerRun(5, func() {
				require.NoError(t, (Host{Workers: pool}).Multiply(m.Product))
			}); n > 0 {
				t.Errorf("%v, transposed %02b: %v allocations", types, flags, n)
			}
		}
	}
}

// TestDotsAreDividedAfterWholeVectors: what is behind them takes a loop in Go three times as long.
func TestDotsAreDividedAfterWholeVectors(t *testing.T) {
	for _, level := range simd.Levels()[1:] {
		for m := 1; m <= simd.FewRows; m++ {
			p := Product{M: m, N: 2048, K: 8192, B: Matrix{Transposed: true}}
			b := blocksOf[float32, backend.BFloat16](&p, level)
			width := simd.PanelWidth[float32](level)
			require.Check(t, b.dots && b.depth%width == 0, "%v: %d rows are divided after %d steps",
				level, m, b.depth)
		}
	}
}

// BenchmarkMultiply multiplies rows by a weight, whose bytes it counts, on one core.
func BenchmarkMultiply(b *testing.B) {
	for _, shape := range [][3]int{{1, 2048, 2048}, {4, 2048, 8192}, {16, 2048, 8192},
		{512, 768, 3072}} {
		M, K, N := shape[0], shape[1], shape[2]
		for _, transposed := range []bool{false, true} {
			for _, types := range productTypes[1:] {
				p := Product{M: M, N: N, K: K, Alpha: 1,
					A: Matrix{Buffer: buffer(types[0], M*K), Pitch: K},
					B: Matrix{Buffer: buffer(types[0], K*N), Pitch: N, Transposed: transposed},
					C: Matrix{Buffer: buffer(types[1], M*N), Pitch: N}}
				if transposed {
					p.B.Pitch = K
				}
				name := fmt.Sprintf("%dx%dx%d/transposed=%v/%v-%v", M, K, N, transposed, types[0],
					types[1])
				b.Run(name, func(b *testing.B) {
					b.SetBytes(int64(K * N * types[0].Size()))
					for b.Loop() {
						require.NoError(b, Host{}.Multiply(p))
					}
				})
			}
		}
	}
}

// buffer returns n elements of d.
func buffer(d backend.DType, n int) backend.Buffer {
	return backend.Of(make([]float64, n)).As(d).Slice(0, n)
}
