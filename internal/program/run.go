package program

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Host runs a program on host memory, on the calling goroutine. One run may be under way at a time.
type Host struct {
	steps  []step
	in     []Tensor
	out    Tensor
	memory []backend.Buffer // by slots: operands, the result, and what is kept between steps
}

// step is one kernel.
type step struct {
	dst, src []place
	run      func(dst, src []backend.Buffer) error
	to, from []backend.Buffer // of the run under way
}

// Operands returns the number of operands.
func (h *Host) Operands() int { return len(h.in) }

// Run computes the result, dst, from operands. All are in row-major order, and what Compile was
// told.
//
// Errors: backend.ErrArgument if buffers do not fit.
func (h *Host) Run(dst backend.Buffer, src ...backend.Buffer) error {
	if len(src) != len(h.in) {
		return fmt.Errorf("%w: %d operands, want %d", backend.ErrArgument, len(src), len(h.in))
	}
	for i, x := range src {
		if x.DType() != h.in[i].DType || x.Len() != size(h.in[i].Shape) {
			return fmt.Errorf("%w: operand %d has %d %v, want %v %v", backend.ErrArgument, i, x.Len(), x.DType(), h.in[i].Shape, h.in[i].DType)
		}
	}
	if dst.DType() != h.out.DType || dst.Len() != size(h.out.Shape) {
		return fmt.Errorf("%w: the result has %d %v, want %v %v", backend.ErrArgument, dst.Len(), dst.DType(), h.out.Shape, h.out.DType)
	}
	n := copy(h.memory, src)
	h.memory[n] = dst
	defer clear(h.memory[:n+1]) // the caller's memory
	for i := range h.steps {
		s := &h.steps[i]
		h.bind(s.to, s.dst)
		h.bind(s.from, s.src)
		if err := s.run(s.to, s.from); err != nil {
			return err
		}
	}
	return nil
}

// bind finds the memory of places.
func (h *Host) bind(to []backend.Buffer, places []place) {
	for i, p := range places {
		b := h.memory[p.slot]
		n := b.Len()
		if p.dense() {
			n = p.offset + size(p.shape)
		}
		to[i] = b.Slice(p.offset, n)
	}
}
