package vm

import (
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/read"
)

// constants of the plan are bound in each run if their tensors may change between runs.
type constants []constant

type constant struct {
	buffer int // of the plan
	memory backend.Buffer
}

// bind binds constant number index of a graph to a buffer of the plan.
func (c *constants) bind(e *exec.Executor, g *read.Graph, index, buffer int) error {
	memory, err := dense(g.Constants[index])
	if err != nil {
		return fmt.Errorf("vm: a constant: %w", err)
	}
	e.Bind(buffer, memory)
	if slices.Contains(g.Changing, index) {
		*c = append(*c, constant{buffer, memory})
	}
	return nil
}

// rebind gives a run what the tensors have now, such as the averages of batch norms.
func (c constants) rebind(e *exec.Executor) {
	for _, of := range c {
		e.Bind(of.buffer, of.memory)
	}
}

// draw gives the dropouts of a run their step. It returns an error if one already ran at the step.
func draw(g *read.Graph) error {
	for _, mask := range g.Masks {
		if err := mask.Draw(); err != nil {
			return fmt.Errorf("vm: Dropout #%d: %w", mask.Op, err)
		}
	}
	for _, r := range g.Randoms {
		r.State[0], r.State[1] = int64(r.Step()), int64(r.First())
	}
	return nil
}
