package vm

import (
	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// hoisted is a value that is computed when its leaves are set, not by runs.
type hoisted struct {
	*plan.Once
	buffer int
	leaves []leaf
	memory []residence.Source // of these
}

// leaf is a frozen variable or a constant.
type leaf struct {
	input
	constant gorgonia.Value
	value    gorgonia.Value // when it was computed
}

func (m *Machine) hoisted(buffer int, o *plan.Once) *hoisted {
	h := &hoisted{Once: o, buffer: buffer, memory: make([]residence.Source, len(o.Leaves))}
	for _, op := range o.Leaves {
		switch op := op.(type) {
		case ir.Input:
			n := m.read.Inputs[op.Index]
			h.leaves = append(h.leaves, leaf{input: input{node: n, shape: n.Shape()}})
		case ir.Constant:
			h.leaves = append(h.leaves, leaf{constant: m.read.Constants[op.Index]})
		}
	}
	return h
}

// compute has the value computed if a leaf is another tensor than before, or was written since.
func (h *hoisted) compute(e *exec.Executor) error {
	for i := range h.leaves {
		if err := h.leaves[i].find(e, &h.memory[i]); err != nil {
			return err
		}
	}
	return e.Compute(h.buffer, h.Once, h.memory)
}

// find finds the elements. A copy of them, where they are not in row-major order, is made once.
func (l *leaf) find(e *exec.Executor, source *residence.Source) (err error) {
	now := l.constant
	if l.node != nil {
		now = l.node.Value()
	}
	if l.value != nil && l.value == now && source.Current() {
		return nil
	}
	l.value = nil
	var elements, memory backend.Buffer
	if l.node == nil {
		elements, err = dense(now)
	} else if elements, err = l.input.memory(); err == nil {
		err = l.present(e, elements)
	}
	if err == nil {
		memory, err = memoryOf(now)
	}
	if err != nil {
		return err
	}
	*source = residence.Read(memory)
	l.value, source.Memory = now, elements
	return nil
}
