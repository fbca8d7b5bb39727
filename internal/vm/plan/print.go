package plan

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/euryale-ml/euryale/internal/vm/ir"
)

// Counts returns how many steps are loops of more than one operation, how many operations they
// have taken together, and how many steps run by their Do on the host.
func (p *Plan) Counts() (loops, fused, host int) {
	for _, s := range p.Steps {
		switch op := s.Op.(type) {
		case Loop:
			if op.Count > 1 {
				loops, fused = loops+1, fused+op.Count
			}
		case ir.Opaque:
			if !op.Placed {
				host++
			}
		}
	}
	return loops, fused, host
}

// String returns the plan as text: a line for each step with its results and operands, and the
// counts.
func (p *Plan) String() string {
	var b strings.Builder
	for i, s := range p.Steps {
		var dsts, args []string
		for _, d := range s.Dsts {
			dsts = append(dsts, p.Text(d))
		}
		for _, a := range s.Args {
			args = append(args, p.Text(a))
		}
		then := ""
		if s.Epilogue {
			then = "epilogue "
		}
		more := ""
		if s.Until > 0 {
			more = fmt.Sprintf(", until step %d", s.Until)
		}
		if s.Rematerialized {
			more += ", rematerialized"
		}
		fmt.Fprintf(&b, "%4d  %s = %s%v of %s  # %s%s%s\n", i, strings.Join(dsts, ", "), then, s.Op,
			strings.Join(args, ", "), s.Name, beside(s.Op), more)
	}
	if p.Budget.Limit > 0 {
		fmt.Fprintf(&b, "%d steps rematerialized: %v\n", p.Budget.Rematerialized, p.Budget)
	}
	loops, fused, host := p.Counts()
	fmt.Fprintf(&b, "steps=%d loops=%d fused=%d arena_bytes=%d host_ops=%d\n", len(p.Steps), loops,
		fused, p.ArenaBytes, host)
	return b.String()
}

// beside says what an exchange runs beside.
func beside(op ir.Op) string {
	send, ok := op.(Send)
	switch {
	case !ok:
		return ""
	case send.Products == 0:
		return ", exposed"
	case send.Products == 1:
		return " beside 1 product"
	}
	return fmt.Sprintf(" beside %d products", send.Products)
}

// Text returns where a value lies and its shape: "@1024 f32(2,3)", with strides unless it is
// in row-major order.
func (p *Plan) Text(r Ref) string {
	where := ""
	b := p.Buffers[r.Buffer]
	switch b.Kind {
	case Arena:
		where = fmt.Sprintf("@%d", b.Offset+r.Offset*r.DType.Size())
	case Input:
		where = cmp.Or(b.Name, fmt.Sprintf("input%d", b.Index))
	case Constant:
		where = fmt.Sprintf("constant%d", b.Index)
		if b.Frozen {
			where = cmp.Or(b.Name, where) + ", once,"
		}
	case Scalar:
		where = "scalar"
	case State:
		where = b.Name
	case Setting:
		where = fmt.Sprintf("setting%d", b.Index)
	case Gradient:
		where = fmt.Sprintf("gradient%d", b.Index)
		if b.Vector > 0 {
			where += fmt.Sprintf(".%d", b.Vector)
		}
	case FullBucket:
		where = fmt.Sprintf("bucket%d", b.Index-1)
	case OwnShard:
		where = fmt.Sprintf("shard%d", b.Index)
	case Unsharded:
		where = fmt.Sprintf("shards%d", b.Index)
	case PartialSum:
		where = fmt.Sprintf("sum%d.%d", b.Index, b.Vector)
	}
	if r.Offset > 0 && (b.Kind == Input || b.Kind == Constant) {
		where += fmt.Sprintf("+%d", r.Offset)
	}
	text := fmt.Sprintf("%s %v%v", where, r.DType, r.Shape)
	if !r.Dense() {
		text += "/" + r.Strides.String()
	}
	return text
}
