//go:build gpu

package cuda

import (
	"os"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

// openOnce opens the device that the engine's tests share, since opening one
// compiles all kernels.
var openOnce = sync.OnceValues(func() (*Device, error) { return Open(0) })

// theGPU returns the device to run the engine's tests on where
// EURYALE_TEST_DEVICE=cuda, else nil: they run on guarded memory.
func theGPU(t testing.TB) backend.Device {
	t.Helper()
	if os.Getenv("EURYALE_TEST_DEVICE") != "cuda" {
		return nil
	}
	needGPU(t)
	d, err := openOnce()
	ok(t, err)
	return d
}
