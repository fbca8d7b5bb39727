package vm

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
)

// changing is a constant of the plan whose tensor may change between runs.
type changing struct {
	buffer int // of the plan
	memory backend.Buffer
}

// bindConstant binds constant number index of the graph to a buffer of the plan.
func (m *Machine) bindConstant(index, buffer int) error {
	memory, err := dense(m.read.Constants[index])
	if err != nil {
		return fmt.Errorf("vm: a constant: %w", err)
	}
	m.exec.Bind(buffer, memory)
	if slices.Contains(m.read.Changing, index) {
		m.changing = append(m.changing, changing{buffer, memory})
	}
	return nil
}

// draw gives the dropouts of a run their step, and batch norms the present averages. It returns an
// error if a dropout already ran at the step.
func (m *Machine) draw() error {
	for _, mask := range m.read.Masks {
		if err := mask.Draw(); err != nil {
			return fmt.Errorf("vm: Dropout #%d: %w", mask.Op, err)
		}
	}
	for _, r := range m.read.Randoms {
		r.State[0], r.State[1] = int64(r.Step()), int64(r.First())
	}
	for _, c := range m.changing {
		m.exec.Bind(c.buffer, c.memory)
	}
	return nil
}
