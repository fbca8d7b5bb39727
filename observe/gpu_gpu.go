//go:build gpu

package observe

import "github.com/euryale-ml/euryale/internal/gpu/nvml"

func openNVML() (library, error) { return nvml.Open() }
