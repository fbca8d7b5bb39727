package exec

import (
	"fmt"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/gonum"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/workers"
	"github.com/euryale-ml/euryale/kernels"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Host is the host as a Device. It runs everything on the calling goroutine and the workers that the
// kernels have.
type Host struct{ arithmetic }

type arithmetic = kernels.Host

var _ Device = Host{}

// OnHost returns the host as a Device with so many workers.
func OnHost(n int) Host { return Host{arithmetic{Workers: workers.New(n)}} }

// Host implements [Device].
func (Host) Host() bool { return true }

// Alloc implements [Device].
func (Host) Alloc(nbytes int) (backend.Buffer, error) {
	return backend.Of(make([]float64, (nbytes+7)/8)).As(backend.U8).Slice(0, nbytes), nil
}

// Free implements [Device]: memory goes when nobody refers to it.
func (Host) Free(backend.Buffer) error { return nil }

// Copies implements [Device].
func (Host) Copies() *residence.Copies { return nil }

// AllocHost implements [Device].
func (h Host) AllocHost(nbytes int) (backend.Buffer, error) { return h.Alloc(nbytes) }

// FreeHost implements [Device].
func (Host) FreeHost(backend.Buffer) error { return nil }

// Capture implements [Device].
func (Host) Capture(func() error) (*backend.Graph, error) {
	return nil, fmt.Errorf("vm: %w: the host records no graphs", backend.ErrUnsupported)
}

// Fuse implements [Device].
func (Host) Fuse(p *fuse.Program) (fuse.Loop, error) { return fuse.Host(p) }

// Main implements [Device].
func (Host) Main() backend.Queue { return nil }

// Join implements [Device].
func (Host) Join() error { return nil }

// Close implements [Device]. It ends the workers.
func (h Host) Close() error {
	h.Workers.Close()
	return nil
}

// Multiply implements [Device] by the BLAS of package tensor, so that products have the bits
// that they have on Gorgonia's machines; of BF16 with plain loops.
func (h Host) Multiply(p kernels.Product) error {
	switch d := p.A.Buffer.DType(); d {
	case backend.BF16:
		return h.arithmetic.Multiply(p)
	case backend.F32:
		multiply(gonum.Implementation{}.Sgemm, &p)
	case backend.F64:
		multiply(gonum.Implementation{}.Dgemm, &p)
	default:
		return fmt.Errorf("vm: %w: products of %v", backend.ErrUnsupported, d)
	}
	return nil
}

type float interface{ float32 | float64 }

// gemm is c = alpha op(a) op(b) + beta c, row-major, as BLAS has it.
type gemm[T float] func(tA, tB blas.Transpose, m, n, k int, alpha T, a []T, lda int, b []T, ldb int, beta T, c []T, ldc int)

func multiply[T float](gemm gemm[T], p *kernels.Product) {
	a, b, c := backend.View[T](p.A.Buffer), backend.View[T](p.B.Buffer), backend.View[T](p.C.Buffer)
	for i := range max(p.Batch, 1) {
		gemm(trans(p.A), trans(p.B), p.M, p.N, p.K, T(p.Alpha), a[i*p.A.Stride:], p.A.Pitch, b[i*p.B.Stride:], p.B.Pitch,
			T(p.Beta), c[i*p.C.Stride:], p.C.Pitch)
	}
}

func trans(m kernels.Matrix) blas.Transpose {
	if m.Transposed {
		return blas.Trans
	}
	return blas.NoTrans
}
