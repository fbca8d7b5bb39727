package program

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
)

// Host runs a program on host memory, on the calling goroutine. One run may be under way at a time.
type Host struct {
	steps  []kernelRun
	in     []Tensor
	out    Tensor
	memory []backend.Buffer // by slots: operands, the result, and what is kept between steps
}

// kernelRun is one kernel.
type kernelRun struct {
	dst, src []span
	run      kernel
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
		if err := h.in[i].fits(x); err != nil {
			return fmt.Errorf("operand %d: %w", i, err)
		}
	}
	if err := h.out.fits(dst); err != nil {
		return fmt.Errorf("the result: %w", err)
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

// fits returns what is wrong with memory for a tensor.
func (t Tensor) fits(b backend.Buffer) error {
	if b.DType() == t.DType && b.Len() == size(t.Shape) {
		return nil
	}
	return fmt.Errorf("%w: it has %d %v, want %v %v",
		backend.ErrArgument, b.Len(), b.DType(), t.Shape, t.DType)
}

// span are elements of the buffer of a slot.
type span struct{ slot, first, end int }

// bind finds the memory of spans.
func (h *Host) bind(to []backend.Buffer, spans []span) {
	for i, s := range spans {
		to[i] = h.memory[s.slot].Slice(s.first, s.end)
	}
}
