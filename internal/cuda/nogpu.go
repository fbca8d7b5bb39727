//go:build !gpu

package cuda

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/gpu/driver"
)

// Device is one GPU. There is none in a program built without tag gpu: Open says
// so.
type Device struct{ backend.Device }

func available() error { return driver.Available() }

func look() (devices, version int, err error) { return 0, 0, available() }

func open(int) (*Device, error) { return nil, available() }

// Close does nothing.
func (*Device) Close() error { return nil }
