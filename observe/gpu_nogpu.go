//go:build !gpu

package observe

import (
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/gpu/nvml"
)

type gpu struct{}

func openGPU(backend.Device) *gpu              { return nil }
func (g *gpu) state() (s nvml.State, has bool) { return s, false }
func (g *gpu) throttled() func() time.Duration { return nil }
func (g *gpu) close()                          {}
