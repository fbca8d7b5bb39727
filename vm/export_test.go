package vm

import (
	"time"

	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/internal/vm/proof"
)

// WithLimits makes a machine plan within other limits.
func WithLimits(l plan.Limits) Option { return func(m *Machine) { m.limits = l } }

// WithMuch makes a machine say so where each run compares as many bytes.
func WithMuch(bytes int) Option { return func(m *Machine) { m.compared.much = bytes } }

// Planning plans a machine's program again. It returns how long that takes, and how long of it the
// proof. The machine runs no more.
func (m *Machine) Planning() (whole, proving time.Duration, err error) {
	solver, err := m.updates()
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	p, err := m.limits.New(proof.Verify, &m.read.Program, solver)
	if err != nil {
		return 0, 0, err
	}
	whole, began = time.Since(began), time.Now()
	err = proof.Verify(p)
	return whole, time.Since(began), err
}

// WithLeastMemory makes a machine plan with as little memory as planning finds.
func WithLeastMemory() Option { return func(m *Machine) { m.limits.Memory = -1 } }

// WithAnyTable makes ranks exchange rows of small tables, too, and more of them than these have.
func WithAnyTable() Option { return func(m *Machine) { m.anyTable = true } }
