package vm

import (
	"errors"
	"fmt"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm/internal/exec"
	"github.com/euryale-ml/euryale/vm/internal/read"
)

// call is an operation that runs by its Do. Its operands are host tensors of its own, so that
// an operation may keep them until its next run, as with other machines.
type call struct {
	read.Opaque
	values []gorgonia.Value
	memory []backend.Buffer
}

var _ exec.Opaque = (*call)(nil)

func newCall(o read.Opaque) (*call, error) {
	c := &call{Opaque: o}
	for _, n := range o.Args {
		v, memory, err := newValue(n)
		if err != nil {
			return nil, fmt.Errorf("vm: operand %v of %v: %w", n, o.Node, err)
		}
		c.values, c.memory = append(c.values, v), append(c.memory, memory)
	}
	return c, nil
}

// Arg implements [exec.Opaque].
func (c *call) Arg(i int) backend.Buffer { return c.memory[i] }

// Call implements [exec.Opaque].
func (c *call) Call() (backend.Buffer, error) {
	v, err := c.Op.Do(c.values...)
	if err != nil {
		return backend.Buffer{}, err
	}
	if v == nil {
		return backend.Buffer{}, errors.New("its Do gives no value")
	}
	return dense(v)
}
