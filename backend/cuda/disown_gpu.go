//go:build gpu

package cuda

import "github.com/euryale-ml/euryale/backend"

// Disown takes memory from Alloc out of the device's books: it is the caller's, who gives
// it to the driver, if need be after Close of the device.
func (d *Device) Disown(b backend.Buffer) error {
	return d.named("disown", d.memory.disown(b.Addr()))
}
