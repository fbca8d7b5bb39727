package fuse

import (
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// The most operands and instructions of a program: operands are parameters of a kernel, and the
// host keeps a block for each instruction.
const (
	maxOperands = 64
	maxCode     = 1024
)

// Check says what is wrong with a program: ErrArgument, with the instruction or operand.
func (p *Program) Check() error {
	if err := p.checkShape(); err != nil {
		return err
	}
	for k, in := range p.Inputs {
		if err := p.checkOperand(in); err != nil {
			return fmt.Errorf("input %d: %w", k, err)
		}
	}
	for k, strides := range p.Indices {
		if len(strides) != len(p.Shape) {
			return fmt.Errorf("%w: index %d has %d strides for %d axes", backend.ErrArgument, k,
				len(strides), len(p.Shape))
		}
	}
	for k, c := range p.Code {
		if err := p.checkInstr(k, c); err != nil {
			return fmt.Errorf("instruction %d, %v: %w", k, c.Op, err)
		}
	}
	r := rowsOf(p)
	for k, out := range p.Outputs {
		if err := p.checkOutput(out, r); err != nil {
			return fmt.Errorf("output %d: %w", k, err)
		}
	}
	return nil
}

func (p *Program) checkShape() error {
	switch n := len(p.Inputs) + len(p.Outputs); {
	case len(p.Shape) > backend.MaxAxes:
		return fmt.Errorf("%w: a loop of %d axes: there may be %d", backend.ErrArgument,
			len(p.Shape), backend.MaxAxes)
	case p.Reduced != nil && len(p.Reduced) != len(p.Shape):
		return fmt.Errorf("%w: Reduced speaks of %d axes, the loop has %d", backend.ErrArgument,
			len(p.Reduced), len(p.Shape))
	case len(p.Outputs) == 0 || n > maxOperands || len(p.Code) > maxCode:
		return fmt.Errorf("%w: a program of %d inputs, %d outputs and %d instructions: there "+
			"must be an output, and may be %d operands and %d instructions",
			backend.ErrArgument, len(p.Inputs), len(p.Outputs), len(p.Code), maxOperands, maxCode)
	}
	size := 1
	for _, extent := range p.Shape {
		if extent < 1 || size > math.MaxInt/extent {
			return fmt.Errorf("%w: a loop of shape %v", backend.ErrArgument, p.Shape)
		}
		size *= extent
	}
	return nil
}

func (p *Program) checkOperand(o Operand) error {
	if !o.DType.Valid() || len(o.Strides) != len(p.Shape) {
		return fmt.Errorf("%w: %v with strides %v in a loop of shape %v", backend.ErrArgument,
			o.DType, o.Strides, p.Shape)
	}
	last := 0
	for k, stride := range o.Strides {
		if stride < 0 || stride > (math.MaxInt/8-last)/p.Shape[k] {
			return fmt.Errorf("%w: strides %v in a loop of shape %v", backend.ErrArgument,
				o.Strides, p.Shape)
		}
		last += stride * (p.Shape[k] - 1)
	}
	return nil
}

func (p *Program) checkInstr(k int, c Instr) error {
	if !c.Op.Gives(c.Type) {
		return fmt.Errorf("%w: no %v of %v, or the wrong number of operands", backend.ErrArgument,
			c.Op, c.Type)
	}
	switch {
	case c.Op == Load && (c.Args[0] < 0 || c.Args[0] >= len(p.Inputs) ||
		Type(p.Inputs[c.Args[0]].DType) != c.Type):
		return fmt.Errorf("%w: of input %d as %v", backend.ErrArgument, c.Args[0], c.Type)
	case c.Op.FoldsRows() && len(p.Shape) == 0:
		return fmt.Errorf("%w: a loop of one element has no rows", backend.ErrArgument)
	case c.Op == Index && (c.Args[0] < 0 || c.Args[0] >= len(p.Indices)):
		return fmt.Errorf("%w: index %d of %d", backend.ErrArgument, c.Args[0], len(p.Indices))
	}
	for i, x := range c.Args[:c.Op.Operands()] {
		if x < 0 || x >= k {
			return fmt.Errorf("%w: operand %d is value %d, which is not computed before",
				backend.ErrArgument, i, x)
		}
		if want := c.operandType(i); want != 0 && p.Code[x].Type != want {
			return fmt.Errorf("%w: operand %d is %v, want %v", backend.ErrArgument, i,
				p.Code[x].Type, want)
		}
	}
	return nil
}

// operandType returns the type that operand i must have, 0 for any.
func (c Instr) operandType(i int) backend.DType {
	switch {
	case c.Op == Cast || c.Op == Where && i == 0:
		return 0
	case c.Op == Uniform:
		return backend.I64
	}
	return c.Type
}

// checkOutput takes what is known of rows, nil if the program folds none.
func (p *Program) checkOutput(o Output, r *rows) error {
	if err := p.checkOperand(o.Operand); err != nil {
		return err
	}
	if p.typeOf(o.Value) != Type(o.DType) {
		return fmt.Errorf("%w: value %d is %v, which %v does not store: cast it",
			backend.ErrArgument, o.Value, p.typeOf(o.Value), o.DType)
	}
	if o.Folded && (o.Op > backend.Max || r != nil && !p.foldsColumns()) {
		return fmt.Errorf("%w: folded by %v; a program that folds rows has other folds only "+
			"along all other axes, of rows of at most %d elements",
			backend.ErrArgument, o.Op, MaxFoldedRow)
	}
	for k, stride := range o.Strides {
		folds := o.Folded && p.reduces(k)
		if r != nil && k == len(p.Shape)-1 && r.alike[o.Value] && !o.Folded {
			continue // one element for each row, or for each element of it
		}
		if folds && stride != 0 || !folds && stride == 0 && p.Shape[k] > 1 {
			return fmt.Errorf("%w: stride %d along axis %d: it must be 0 where an output is "+
				"folded, and only there", backend.ErrArgument, stride, k)
		}
	}
	return nil
}

// reduces reports whether folded outputs are folded along axis k.
func (p *Program) reduces(k int) bool { return p.Reduced != nil && p.Reduced[k] }

// MaxFoldedRow is how long rows may be if outputs are folded across them: a device keeps the folded
// elements of a row in registers.
const MaxFoldedRow = mostThreads

// foldsColumns reports whether folded outputs are folded along all axes but the last one, which is
// not too long.
func (p *Program) foldsColumns() bool {
	last := len(p.Shape) - 1
	for k := range p.Shape {
		if p.reduces(k) != (k < last) {
			return false
		}
	}
	return p.Shape[last] <= MaxFoldedRow
}

// CheckBuffers says which buffer of a run does not fit: ErrArgument. All must be memory of a
// device, or of the host. Every [Loop] calls it.
func (p *Program) CheckBuffers(dst, src []backend.Buffer, device bool) error {
	if len(dst) != len(p.Outputs) || len(src) != len(p.Inputs) {
		return fmt.Errorf("%w: a program of %d outputs and %d inputs runs with %d and %d",
			backend.ErrArgument,
			len(p.Outputs), len(p.Inputs), len(dst), len(src))
	}
	for k := range dst {
		if !p.fits(p.Outputs[k].Operand, dst[k], device) {
			return p.misfit("output", k, p.Outputs[k].Operand, dst[k], device)
		}
	}
	for k := range src {
		if !p.fits(p.Inputs[k], src[k], device) {
			return p.misfit("input", k, p.Inputs[k], src[k], device)
		}
	}
	return nil
}

// fits reports whether a buffer can be an operand.
func (p *Program) fits(o Operand, b backend.Buffer, device bool) bool {
	return b.DType() == o.DType && b.Len() >= p.reach(o) && b.Device() == device
}

// reach returns how many elements an operand must have.
func (p *Program) reach(o Operand) int {
	last := 0
	for k, stride := range o.Strides {
		last += stride * (p.Shape[k] - 1)
	}
	return last + 1
}

func (p *Program) misfit(what string, k int, o Operand, b backend.Buffer, device bool) error {
	place := map[bool]string{false: "host", true: "device"}
	return fmt.Errorf("%w: %s %d is %d %v of %s memory, want at least %d %v of %s memory",
		backend.ErrArgument, what, k,
		b.Len(), b.DType(), place[b.Device()], p.reach(o), o.DType, place[device])
}
