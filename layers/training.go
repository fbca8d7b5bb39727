package layers

import (
	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/internal/terms"
	"github.com/euryale-ml/euryale/vm"
)

// Training is what a machine needs to train the graph on the layout's ranks, as one option:
//
//	machine, err := vm.New(b.Graph(), device, vm.WithSolver(solver, learnables...), b.Training())
//
// It is vm.WithDataParallel with l.Data, with the sum or the mean of gradients that the loss needs
// ([Builder.Grad]), the parts of learnables that the Tensor group shards (autograd.WithParts), the
// tables (autograd.WithTables, and vm.Keep of their gradients) and further options; vm.Accumulate
// if a step has several batches ([Builder.Batches]); and vm.WithFrozen of what is not learnt. Call
// vm.New after [Builder.Grad].
//
// The graph says what it needs: vm.New returns an ErrArgument, which says what is missing, if it is
// to train it in another way. A graph of a layout that shards nothing may be trained by
// vm.WithDataParallel, vm.WithTree and vm.WithElastic of any ranks.
func (b *Builder) Training(options ...autograd.Option) vm.Option {
	return func(m *vm.Machine) {
		if b.layout == nil { // NewBuilder has returned an error: there is no gradient
			return
		}
		var data []autograd.Option
		if b.sums {
			data = append(data, autograd.WithSum())
		}
		if parts := b.Sharded(); len(parts) > 0 {
			data = append(data, autograd.WithParts(b.layout.Comm(Tensor), parts))
		}
		for _, t := range b.tables {
			data = append(data, autograd.WithTables(t))
			vm.Keep(t.Gradients()...)(m)
		}
		vm.WithDataParallel(b.layout.Data, append(data, options...)...)(m)
		vm.WithFrozen(b.frozen...)(m)
		if n := b.batches / b.layout.DP; n > 1 {
			vm.Accumulate(n)(m)
		}
	}
}

// says returns what the graph says of the layout, and of its training.
func (b *Builder) says() *terms.Terms {
	if b.terms == nil {
		l := b.layout
		b.terms = &terms.Terms{Layout: l.String(), Data: l.Data, Tensor: l.groups[Tensor],
			Replicas: l.DP, Parts: map[string]bool{}}
		if l.seat != nil {
			b.terms.Moves = l.seat.move
		}
		terms.Write(b.graph, b.terms)
	}
	return b.terms
}

// write says in the graph what its training needs.
func (b *Builder) write(loss Node) {
	t := b.says()
	t.Sharded, t.Counted = b.Sharded(), b.counted
	if b.shares {
		t.Batches = b.batches
	}
	if len(b.inputs) > 0 { // Step of a table adds up what ranks have
		t.Table = b.tables[0].name
	}
	t.Sum = b.shares || loss.place[Sequence] == Partial || t.Table != "" || b.layout.SP > 1
	b.sums = t.Sum && (!b.mean || b.layout.SP > 1 || t.Table != "")
}
