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

// Ordinal returns 0.
func (*Device) Ordinal() int { return 0 }

// Bind fails with what Available returns.
func (*Device) Bind() (unbind func(), err error) { return nil, Available() }

// Holds returns false.
func (*Device) Holds(uintptr) bool { return false }

// Close does nothing.
func (*Device) Close() error { return nil }
