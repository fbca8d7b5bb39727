//go:build gpu

package cuda

/*
#cgo LDFLAGS: -ldl
#cgo noescape euryale_cublas_multiply
#cgo nocallback euryale_cublas_multiply
#include <stdlib.h>
#include "cublas_gpu.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"math"
	"os"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/kernels"
	gpukernels "github.com/euryale-ml/euryale/internal/kernels/cuda"
)

// workspaceBytes is the memory that cuBLAS gets for intermediate results: what NVIDIA recommends
// for Hopper, and PyTorch takes. It is taken once, so that products can be captured in graphs and
// give bitwise identical results in every run.
const workspaceBytes = 32 << 20

// Products multiplies matrices on a queue: by cuBLAS where it is installed, otherwise by kernels of
// package internal/kernels/cuda, and in any case by these where up to 16 rows are multiplied by a
// matrix of bf16, once they are ready: see [Products.Prepare]. It is not for several goroutines at
// once.
//
// cuBLAS is looked for on the library path, in CUDA_HOME, and where pip puts NVIDIA's wheels.
// EURYALE_CUBLAS names its file or its folder; EURYALE_CUBLAS=off does without.
type Products struct {
	queue     *Queue
	blas      *C.struct_euryale_cublas // nil: kernels of ours
	handle    C.euryale_blas_handle
	workspace backend.Buffer
	version   int
	missing   error
}

// NewProducts opens cuBLAS for a queue, which takes 32 MiB of the device. Do it before other ranks
// wait for this one: it loads code onto the device. Without cuBLAS it succeeds, too: see
// [Products.Library].
func (q *Queue) NewProducts() (*Products, error) {
	p := &Products{queue: q}
	if env.CUBLAS.Off(os.Getenv) {
		p.missing = errors.New("EURYALE_CUBLAS=off")
		return p, nil
	}
	if p.blas, p.missing = openCUBLAS(); p.missing != nil {
		return p, nil
	}
	if err := q.device.on("open cuBLAS", p.create); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// openCUBLAS opens the first cuBLAS that can be opened, the newest first.
func openCUBLAS() (*C.struct_euryale_cublas, error) {
	l := (*C.struct_euryale_cublas)(C.calloc(1, C.sizeof_struct_euryale_cublas))
	var all []error
	for path := range cuBLAS().Places() {
		text := C.CString(path)
		why := C.euryale_cublas_open(l, text)
		C.free(unsafe.Pointer(text))
		switch {
		case why != nil:
			all = append(all, errors.New(C.GoString(why)))
		case l.missing != nil:
			all = append(all, fmt.Errorf("%s lacks %s: the oldest cuBLAS that works is 11.0", path,
				C.GoString(l.missing)))
			C.euryale_cublas_close(l)
		default:
			return l, nil
		}
	}
	C.free(unsafe.Pointer(l))
	return nil, fmt.Errorf("cuBLAS was not found: install it (%s), or name libcublas.so in "+
		"EURYALE_CUBLAS: %w", cuBLAS().Install, errors.Join(all...))
}

// create makes the handle.
func (p *Products) create() (err error) {
	if p.workspace, err = p.queue.Alloc(workspaceBytes); err != nil {
		return err
	}
	code := C.euryale_cublas_create(p.blas, &p.handle, C.uintptr_t(p.queue.Stream()),
		C.uintptr_t(p.workspace.Addr()), workspaceBytes)
	if err := blasError("create", code); err != nil {
		return err
	}
	var version C.int
	err = blasError("version", C.euryale_cublas_version(p.blas, p.handle, &version))
	p.version = int(version)
	return err
}

// blasError is a result of cuBLAS as an error.
func blasError(doing string, code C.int) error {
	if code == 0 {
		return nil
	}
	names := map[C.int]string{1: "not initialized", 3: "out of memory", 7: "invalid value",
		8: "the device is too old", 11: "access to memory failed", 13: "execution failed",
		14: "internal error", 15: "not supported"}
	return fmt.Errorf("cuBLAS: %s: %s (status %d)", doing, names[code], code)
}

// Library says what multiplies: "cuBLAS 13.0.2", or "kernels of Euryale" and why there is no
// cuBLAS.
func (p *Products) Library() string {
	if p.blas == nil {
		return fmt.Sprintf("kernels of Euryale: %v", p.missing)
	}
	return fmt.Sprintf("cuBLAS %d.%d.%d", p.version/10000, p.version/100%100, p.version%100)
}

// The numbers of cudaDataType and cublasComputeType.
var blasTypes = [...]C.int{backend.F32: 0, backend.F64: 1, backend.F16: 2, backend.BF16: 14}

const (
	computeF32  = 68
	computeF64  = 70
	computeTF32 = 77
)

// Multiply computes a product, in the order of the queue.
//
// Errors: those of [kernels.Check].
func (p *Products) Multiply(x kernels.Product) error {
	if err := p.queue.usable(); err != nil {
		return err
	}
	if p.queue.workspace.Len() > 0 && gpukernels.FitsFewRows(&x) &&
		(p.blas == nil || gpukernels.PrefersFewRows(&x)) {
		return p.queue.arithmetic.FewRows(x, p.queue.workspace)
	}
	if p.blas == nil || x.K == 0 || !fitsBLAS(x) {
		return p.queue.arithmetic.Multiply(x)
	}
	if err := (kernels.Check{Device: true}).Multiply(x); err != nil || x.Empty() {
		return err
	}
	in := x.A.Buffer.DType()
	g := C.struct_euryale_gemm{
		m: C.int(x.M), n: C.int(x.N), k: C.int(x.K), batch: C.int(max(x.Batch, 1)),
		a: C.uintptr_t(x.A.Buffer.Addr()), b: C.uintptr_t(x.B.Buffer.Addr()), c: C.uintptr_t(
			x.C.Buffer.Addr()),
		lda: C.int(x.A.Pitch), ldb: C.int(x.B.Pitch), ldc: C.int(x.C.Pitch),
		stride_a: C.longlong(x.A.Stride), stride_b: C.longlong(x.B.Stride), stride_c: C.longlong(
			x.C.Stride),
		transposed_a: flag(x.A.Transposed), transposed_b: flag(x.B.Transposed),
		in: blasTypes[in], out: blasTypes[x.C.Buffer.DType()], compute: computeF32,
		alpha: C.double(x.Alpha), beta: C.double(x.Beta),
	}
	switch {
	case in == backend.F64:
		g.compute = computeF64
	case in == backend.F32 && x.TF32:
		g.compute = computeTF32
	}
	defer p.queue.launcher.Forget() // cuBLAS may use programmatic dependent launch
	return p.queue.device.on("multiply", func() error {
		return blasError(fmt.Sprintf("product of %d x [%d,%d] by [%d,%d] %v", max(x.Batch, 1), x.M,
			x.K, x.K, x.N, in),
			C.euryale_cublas_multiply(p.blas, p.handle, &g))
	})
}

// Prepare loads what products need, so that the first one can be captured.
func (p *Products) Prepare() error {
	families := []string{gpukernels.FewRowProducts}
	if p.blas == nil {
		families = append(families, gpukernels.Products)
	}
	if err := p.queue.device.Prepare(families...); err != nil {
		return err
	}
	return p.queue.allocWorkspace()
}

// fitsBLAS reports whether all sizes are within the 31 bits that cuBLAS takes.
func fitsBLAS(x kernels.Product) bool {
	return max(x.Batch, x.M, x.N, x.K, x.A.Pitch, x.B.Pitch, x.C.Pitch) <= math.MaxInt32
}

func flag(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

// Close waits for the queue and frees what cuBLAS has.
func (p *Products) Close() error {
	if p.blas == nil {
		return nil
	}
	err := p.queue.device.on("close cuBLAS", func() error {
		var errs []error
		if p.handle != nil {
			errs = append(errs, p.queue.drain(),
				blasError("destroy", C.euryale_cublas_destroy(p.blas, p.handle)))
		}
		if p.workspace.Len() > 0 {
			errs = append(errs, p.queue.Free(p.workspace))
		}
		return errors.Join(errs...)
	})
	// the library itself stays: to close it is to unload code from every device
	C.free(unsafe.Pointer(p.blas))
	p.blas = nil
	return err
}
