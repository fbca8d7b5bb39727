package lower

import "github.com/euryale-ml/euryale/internal/vm/ir"

// Program returns a program that was read from a graph as plans need it: simplified, in the
// precision that it asks for, and with channels last if it does. Gradients are its last results.
func Program(p *ir.Program, gradients ...ir.ID) *ir.Program {
	q := &ir.Program{Values: p.Values, Results: append(p.Results[:len(p.Results):len(p.Results)],
		gradients...)}
	q = prune(mergeReductions(prune(simplify(q))))
	q = prune(images(join(q)))
	q = prune(precise(q, p.Precision))
	if p.ChannelsLast {
		q = prune(channelsLast(q))
	}
	return q
}
