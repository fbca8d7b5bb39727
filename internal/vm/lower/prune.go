package lower

import "github.com/euryale-ml/euryale/internal/vm/ir"

// prune drops the values that neither a result nor an effect depends on.
func prune(p *ir.Program) *ir.Program {
	q, _ := pruned(p)
	return q
}

// pruned is prune, and says what becomes of each value; what goes has no meaning.
func pruned(p *ir.Program) (*ir.Program, []ir.ID) {
	wanted := make([]bool, len(p.Values))
	for _, r := range p.Results {
		wanted[r] = true
	}
	for i := len(p.Values) - 1; i >= 0; i-- {
		v := p.Values[i]
		wanted[i] = wanted[i] || ir.Effect(v.Op)
		if wanted[i] {
			for _, a := range v.Args {
				wanted[a] = true
			}
		}
	}
	q := &ir.Program{Values: make([]ir.Value, 0, len(p.Values))}
	to := make([]ir.ID, len(p.Values))
	for i, v := range p.Values {
		if !wanted[i] {
			continue
		}
		v.Args = mapped(v.Args, to)
		to[i] = q.Add(v)
	}
	q.Results = mapped(p.Results, to)
	return q, to
}
