package observe

import (
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/gpu/nvml"
)

// gpu is the device of a rank, as NVML knows it. A nil gpu has no state.
type gpu struct {
	bus   string
	mu    sync.Mutex
	nvml  library // nil after it is closed
	last  nvml.State
	known bool
	asked time.Time
}

// library is an [nvml.Library].
type library interface {
	State(pciBusID string) (nvml.State, error)
	Close() error
}

// askTime is how old a state may be. The driver takes milliseconds to answer, and may meanwhile
// block other calls of the process.
const askTime = 500 * time.Millisecond

// openGPU returns nil without NVML, and for other devices.
func openGPU(d backend.Device) *gpu {
	if onBus, ok := d.(interface{ PCIBusID() string }); ok {
		if opened, err := openNVML(); err == nil {
			return &gpu{bus: onBus.PCIBusID(), nvml: opened}
		}
	}
	return nil
}

func (g *gpu) state() (nvml.State, bool) {
	if g == nil {
		return nvml.State{}, false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if now := time.Now(); g.nvml != nil && now.Sub(g.asked) >= askTime {
		var err error
		g.last, err = g.nvml.State(g.bus)
		g.known, g.asked = err == nil, now
	}
	return g.last, g.known
}

// throttled returns for how long the device's clock has been throttled so far.
func (g *gpu) throttled() time.Duration {
	s, _ := g.state()
	return s.Throttled
}

func (g *gpu) close() {
	if g != nil {
		g.mu.Lock()
		defer g.mu.Unlock()
		_ = g.nvml.Close() // it must not be used any more, whatever Close returns
		g.nvml, g.known = nil, false
	}
}
