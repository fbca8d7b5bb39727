//go:build gpu

package session

import "github.com/euryale-ml/euryale/internal/cuda"

// What Init asks devices for, GPUs can tell.
var _ interface {
	Model() string
	PCIBusID() string
} = (*cuda.Device)(nil)
