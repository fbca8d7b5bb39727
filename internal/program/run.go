package program

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/internal/vm/proof"
)

// Plan is the plan of a program with one result.
type Plan struct {
	plan   *plan.Plan
	in     []Tensor
	out    Tensor
	result int // the buffer that whoever runs the plan gives for the result, -1 for none
}

// New plans a program, of a name. build gets a value for each operand, and returns the result,
// which has the elements of out in row-major order.
//
// Errors: backend.ErrArgument if a program is not one, or out does not fit it.
func New(name string, in []Tensor, out Tensor,
	build func(b *Builder, x ...Value) Value) (*Plan, error) {
	p := &ir.Program{}
	b := &Builder{To: p, Name: name}
	var x []Value
	for i, t := range in {
		x = append(x, b.Add(ir.Input{Index: i}, ir.Of(t.Shape...), t.DType))
	}
	p.Results = []Value{b.Reshape(build(b, x...), out.Shape...)}
	if err := p.Check(); err != nil {
		return nil, fmt.Errorf("%w: %w", backend.ErrArgument, err)
	}
	planned, err := plan.Standard().New(proof.Verify, p, lower.Solver{})
	if err != nil {
		return nil, err
	}
	planned, result := planned.Given()
	return &Plan{planned, in, out, result}, nil
}

// Host runs a plan on host memory, on the calling goroutine. One run may be under way at a time.
type Host struct {
	*Plan
	exec *exec.Executor
}

// Host makes the plan ready to run.
func (p *Plan) Host() (*Host, error) {
	e, err := exec.New(p.plan, exec.Host{}, nil, nil)
	return &Host{p, e}, err
}

// Operands returns the number of operands.
func (p *Plan) Operands() int { return len(p.in) }

// Run computes the result, dst, from operands. All are in row-major order, and what New was told.
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
	for i := range h.plan.Buffers {
		if b := &h.plan.Buffers[i]; b.Kind == plan.Input {
			h.exec.Bind(i, src[b.Index])
		}
	}
	if h.result >= 0 {
		h.exec.Bind(h.result, dst)
	}
	if err := h.exec.Run(0); err != nil || h.result >= 0 {
		return err
	}
	return h.exec.Result(0, dst)
}

// fits returns what is wrong with memory for a tensor.
func (t Tensor) fits(b backend.Buffer) error {
	n := 1
	for _, length := range t.Shape {
		n *= length
	}
	if b.DType() == t.DType && b.Len() == n {
		return nil
	}
	return fmt.Errorf("%w: it has %d %v, want %v %v",
		backend.ErrArgument, b.Len(), b.DType(), t.Shape, t.DType)
}
