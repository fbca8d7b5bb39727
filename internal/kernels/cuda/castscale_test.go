package cuda

import (
	"errors"
	"fmt"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

var (
	halves = []backend.DType{backend.F16, backend.BF16}
	wides  = []backend.DType{backend.F32, backend.F64}
)

func testWiden(t *testing.T, m machine) {
	b := newBench(t, m, 23)
	for _, from := range halves {
		for _, to := range wides {
			for _, n := range append(b.lengths(), 1<<16) {
				for _, factor := range []float64{4, 1.0 / 3} {
					b.reset(uint64(n))
					dst, src := b.alloc(to, n, n%2), b.alloc(from, n, n%3)
					if n == 1<<16 {
						everyHalf(src.host)
					}
					b.run(fmt.Sprintf("widen %d %v to %v by %v", n, from, to, factor), dst,
						func() error { return b.device.CastScale(dst.device, src.device, factor) },
						func() error { return b.host.CastScale(dst.host, src.host, factor) })
				}
			}
		}
	}
}

// widens makes every call of CastScale for n elements.
func widens(k Kernels, n int) error {
	var errs []error
	for _, from := range halves {
		for _, to := range wides {
			errs = append(errs, k.CastScale(device(to, 1<<40, n), device(from, 1<<41, n), 2))
		}
	}
	return errors.Join(errs...)
}

func TestOnlyHalvesAreWidened(t *testing.T) {
	k := New(newValidator(t))
	x, y := device(backend.F32, 1<<40, 4), device(backend.F64, 1<<41, 4)
	for name, err := range map[string]error{
		"of f32":  k.CastScale(y, x, 2),
		"to half": k.CastScale(device(backend.F16, 1<<42, 4), device(backend.F16, 1<<43, 4), 2),
		"lengths": k.CastScale(x, device(backend.F16, 1<<42, 3), 2),
		"host":    k.CastScale(x, backend.Of(make([]backend.Float16, 4)), 2),
	} {
		require.Fails(t, name, err, backend.ErrArgument)
	}
}
