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
	if p.Stacks {
		q = prune(stack(q, p.Frozen))
	}
	if p.ChannelsLast {
		q = prune(channelsLast(q))
	}
	return q
}

// Run returns the program of a run of a training as plans need it: with the gradients of updates as
// its last results, and what lookups add to some of them behind these.
func Run(p *ir.Program, tiles int, updates ...Update) (*ir.Program, error) {
	var gradients []ir.ID
	for _, u := range updates {
		gradients = append(gradients, u.Gradient)
	}
	p, err := splitLookups(Program(p, gradients...), updates)
	if err == nil {
		err = p.Check()
	}
	if err == nil && tiles > 1 {
		p, err = Tile(p, tiles)
	}
	if err != nil {
		return nil, err
	}
	return fullyShard(roundExchanged(p, updates), updates)
}
