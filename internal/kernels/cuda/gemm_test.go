package cuda

import (
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// productTypes are the dtypes of operands and results.
var productTypes = [][2]backend.DType{
	{backend.F32, backend.F32}, {backend.F64, backend.F64}, {backend.F16, backend.F16},
	{backend.BF16, backend.BF16}, {backend.F16, backend.F32}, {backend.BF16, backend.F32},
}

// integers fills a buffer with integers whose sums of products are exact, and need most of the bits
// of their dtype.
func (b *bench) integers(o operand) {
	most := map[backend.DType]int{backend.F64: 1 << 20, backend.F32: 1 << 7, backend.F16: 2,
		backend.BF16: 2}[o.host.DType()]
	numbers := make([]float64, o.host.Len())
	for i := range numbers {
		numbers[i] = float64(b.rnd.IntN(2*most+1) - most)
	}
	if err := b.host.Cast(o.host, backend.Of(numbers)); err != nil {
		b.t.Fatal(err)
	}
}

// matrix returns batch matrices of integers, both on the host and on the device.
func (b *bench) matrix(d backend.DType, batch, rows, columns, more int, transposed bool) (host,
	device kernels.Matrix, o operand) {
	if transposed {
		rows, columns = columns, rows
	}
	host = kernels.Matrix{Pitch: columns + more, Stride: rows*(columns+more) + more,
		Transposed: transposed}
	device = host
	o = b.alloc(d, batch*host.Stride, more)
	b.integers(o)
	host.Buffer, device.Buffer = o.host, o.device
	return host, device, o
}

func testGemm(t *testing.T, m machine) {
	b := newBench(t, m, 16)
	shapes := [][4]int{{1, 1, 1, 1}, {1, 5, 3, 2}, {1, 33, 31, 17}, {3, 32, 64, 8}, {2, 65, 129, 9},
		{1, 130, 70, 40}, {1, 7, 5, 0}, {1, 0, 5, 3}}
	if _, slow := m.(*emulator); !slow {
		shapes = append(shapes, [4]int{1, 1500, 1300, 300}, [4]int{4, 1024, 1024, 64},
			[4]int{40000, 3, 2, 5})
	}
	for _, types := range productTypes {
		for _, shape := range shapes {
			for flags := range 4 {
				for _, more := range []int{0, 1, 8} {
					if flags != 0 && more == 8 {
						continue
					}
					b.reset(uint64(flags))
					b.multiply(types[0], types[1], shape, flags, more, float64(more%2))
				}
			}
		}
	}
	// Large tiles, of which the emulator computes few.
	for _, d := range []backend.DType{backend.F32, backend.F64} {
		b.reset(1)
		b.multiply(d, d, [4]int{enoughTiles, 20, 30, 11}, 1, 0, 2)
	}
}

func (b *bench) multiply(in, out backend.DType, shape [4]int, flags, more int, beta float64) {
	b.t.Helper()
	p := kernels.Product{Batch: shape[0], M: shape[1], N: shape[2], K: shape[3], Alpha: 0.5,
		Beta: beta}
	q := p
	var c operand
	p.A, q.A, _ = b.matrix(in, p.Batch, p.M, p.K, more, flags&1 != 0)
	p.B, q.B, _ = b.matrix(in, p.Batch, p.K, p.N, more, flags&2 != 0)
	p.C, q.C, c = b.matrix(out, p.Batch, p.M, p.N, more, false)
	name := fmt.Sprintf("gemm of %v %v to %v, transposed %02b, pitch + %d, beta %v", shape, in, out,
		flags, more, beta)
	b.run(name, c, func() error { return b.device.Multiply(q) }, func() error {
		return b.host.Multiply(p)
	})
}
