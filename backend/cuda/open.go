//go:build !gpu

package cuda

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/gpu/driver"
)

// Device is one GPU. There is none in a program built without tag gpu: Open says
// so.
type Device struct{ backend.Device }

// Available returns why no GPU can be used: this program was built without tag
// gpu.
func Available() error { return driver.Available() }

// Open fails with what Available returns.
func Open(int) (*Device, error) { return nil, Available() }

// Devices fails with what Available returns.
func Devices() ([]*Device, error) { return nil, Available() }

// Close does nothing.
func (*Device) Close() error { return nil }
