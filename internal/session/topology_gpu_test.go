//go:build gpu

package session

import "github.com/euryale-ml/euryale/backend/cuda"

// What Init asks devices for, GPUs can tell.
var _ interface {
	Model() string
	PCIBusID() string
} = (*cuda.Device)(nil)
