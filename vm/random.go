package vm

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm/internal/read"
)

// random is the memory from which dropouts of a plan read the step and the first sample.
type random struct {
	read.Random
	buffer int // of the plan
	memory backend.Buffer
}

// placeRandom notes the buffer of a constant if it is that of random numbers.
func (m *Machine) placeRandom(constant, buffer int, memory backend.Buffer) {
	for _, r := range m.read.Randoms {
		if r.Constant == constant {
			m.randoms = append(m.randoms, random{r, buffer, memory})
		}
	}
}

// draw gives the dropouts of a run their step. It returns an error if one already ran at it.
func (m *Machine) draw() error {
	for _, mask := range m.read.Masks {
		if err := mask.Draw(); err != nil {
			return fmt.Errorf("vm: Dropout #%d: %w", mask.Op, err)
		}
	}
	for _, r := range m.randoms {
		state := backend.View[int64](r.memory)
		state[0], state[1] = int64(r.Step()), int64(r.First())
		m.exec.Bind(r.buffer, r.memory)
	}
	return nil
}
