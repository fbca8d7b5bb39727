//go:build !gpu

package cuda

import (
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

// theGPU returns nil: the engine's tests run on guarded memory.
func theGPU(testing.TB) backend.Device { return nil }
