package fuse

import (
	"fmt"
	"math"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// String returns the whole program as text, one line for the loop and one for each value and
// output. Programs of equal text are equal.
func (p *Program) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "loop %v", p.Shape)
	for k := range p.Shape {
		if p.reduces(k) {
			fmt.Fprintf(&b, " reduce %d", k)
		}
	}
	b.WriteByte('\n')
	for k, in := range p.Inputs {
		fmt.Fprintf(&b, "in%d = %v %v\n", k, in.DType, in.Strides)
	}
	for k, c := range p.Code {
		fmt.Fprintf(&b, "%%%d = %v %v%s\n", k, c.Op, c.Type, p.operands(c))
	}
	for k, out := range p.Outputs {
		fmt.Fprintf(&b, "out%d = ", k)
		if out.Folded {
			fmt.Fprintf(&b, "%v ", out.Op)
		}
		fmt.Fprintf(&b, "%%%d %v %v\n", out.Value, out.DType, out.Strides)
	}
	return b.String()
}

func (p *Program) operands(c Instr) string {
	switch c.Op {
	case Load:
		return fmt.Sprintf(" in%d", c.Args[0])
	case Index:
		if k := c.Args[0]; k >= 0 && k < len(p.Indices) {
			return fmt.Sprintf(" %v", p.Indices[k])
		}
	case Const:
		if c.Type == backend.I32 || c.Type == backend.I64 {
			return fmt.Sprintf(" %d", int64(c.Bits))
		}
		if x := math.Float64frombits(c.Bits); x == x {
			return fmt.Sprintf(" %g", x)
		}
		return fmt.Sprintf(" NaN(%x)", c.Bits)
	}
	var b strings.Builder
	for _, x := range c.Args[:c.Op.Operands()] {
		fmt.Fprintf(&b, " %%%d", x)
	}
	return b.String()
}
