package vm

import "github.com/euryale-ml/euryale/vm/internal/plan"

// WithLimits makes a machine plan within other limits.
func WithLimits(l plan.Limits) Option { return func(m *Machine) { m.limits = l } }
