// Package terms writes into a graph on what terms its ranks can train it, so that a machine does as
// they say, or refuses. Package layers writes them, and package vm reads them.
package terms

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// NoRow is the padding that package layers gives nn.Embedding on a rank that does not have the row,
// so that all ranks have the same operations. Users cannot give it.
const NoRow = math.MinInt

// Terms are what the gradients of a graph are, as its builder knows them.
type Terms struct {
	Layout string // of the ranks, for messages
	// Data are the ranks that add up gradients, Tensor those that shard weights.
	Data, Tensor backend.Communicator
	Replicas     int // of a batch, among the ranks of Data
	// Moves makes Tensor another communicator, nil where it is one for good. Any number of ranks
	// may add up gradients then.
	Moves func(tensor backend.Communicator)
	// Batches is of how many batches the loss is a share of the mean, 0 if only the program knows.
	Batches int
	// Sum says that the gradients of the ranks of Data are terms of a sum.
	Sum bool
	// Sharded are the names of learnables of which a rank of Tensor has a part.
	Sharded map[string]int
	// Parts are the names of all variables of which a rank of Tensor has a part.
	Parts map[string]bool
	// Counted are the targets of the loss whose number the ranks of Data count in each run, and
	// Table is a table whose rows they exchange before and after each run: "" for none.
	Counted, Table string
}

// Use is how a graph is trained.
type Use struct {
	Comm  backend.Communicator // whose ranks exchange gradients, nil for none
	Parts backend.Communicator // whose ranks have the other parts of learnables, nil for none
	// Runs make a step on a rank, 0 for as many as the loss is made for. Weight is the factor of
	// one rank's gradient of one run.
	Runs   int
	Weight float64
	Tree   int    // micro-batches of a tree on all ranks, 0 without a tree
	Option string // makes several runs a step
	// Elastic ranks may be lost and replaced; Clips says that the norm of all gradients is bounded.
	// Tiles says that the logits are computed in tiles.
	Elastic, Clips, Tiles bool
}

// prefix names the option that makes several runs a step.
func (u Use) prefix() string {
	if u.Option == "" {
		return ""
	}
	return u.Option + ": "
}

// training is what keeps all terms of a graph of package layers.
const training = "give vm.New what Training of the layers.Builder returns"

// Check returns why the gradients would be wrong.
func (t *Terms) Check(u Use) error {
	ranks, size, replicas := t.Data.Size(), 1, t.Replicas
	// any ranks may have such graphs
	alone := t.Moves != nil || ranks == 1 && t.Tensor.Size() == 1
	if u.Comm != nil {
		size = u.Comm.Size()
	}
	if alone {
		replicas = size
	}
	several := u.Runs > 1 || u.Tree > 0
	switch {
	case !alone && u.Elastic:
		return fmt.Errorf("%w: %sranks may be lost, and the graph is of a layers.Layout of %s: "+
			"build it on one of autograd.Solo, or of layers.NewElasticLayout", backend.ErrArgument,
			u.prefix(), t.Layout)
	case t.Tensor.Size() > 1 && u.Tiles:
		return fmt.Errorf("%w: WithLossTiles: the ranks of a layers.Layout of %s shard the "+
			"logits and exchange sums of all rows: leave the tiles out, or use 1 tensor rank",
			backend.ErrUnsupported, t.Layout)
	case t.Counted != "" && ranks > 1 && u.Tiles:
		return fmt.Errorf("%w: WithLossTiles: ranks count the targets %s that are not "+
			"Tokens.Padding, and a tile must not wait for them: leave one of them out",
			backend.ErrUnsupported, t.Counted)
	case t.Table != "" && u.Clips:
		return fmt.Errorf("%w: ClipNorm: the norm would lack the gradients of the rows of the "+
			"layers.Table %s, which Step applies: leave one of them out", backend.ErrArgument,
			t.Table)
	case !alone && !same(u.Comm, t.Data):
		return fmt.Errorf("%w: the graph is of a layers.Layout of %s, and the ranks of its Data "+
			"must add up the gradients: %s, in place of WithDataParallel", backend.ErrArgument,
			t.Layout, training)
	case t.Tensor.Size() > 1 && len(t.Sharded) > 0 && !same(u.Parts, t.Tensor):
		return fmt.Errorf("%w: the ranks of a layers.Layout of %s have parts of learnables (%s), "+
			"and without autograd.WithParts ClipNorm, Hash and checkpoints would take them for "+
			"the whole: %s, in place of WithDataParallel", backend.ErrArgument, t.Layout,
			slices.Min(slices.Collect(maps.Keys(t.Sharded))), training)
	case several && t.Table != "":
		return fmt.Errorf("%w: %sseveral runs are one step, and ranks exchange rows of the "+
			"layers.Table %s before and after each run: leave one of them out", backend.ErrArgument,
			u.prefix(), t.Table)
	case t.Counted != "" && several:
		advice := "leave one of them out"
		if u.Tree == 0 {
			advice = "call Builder.Batches before the loss, and Tokens.Count before each run"
		}
		return fmt.Errorf("%w: %sseveral runs are one step, and the loss divides by the number "+
			"of targets %s of one run that are not Tokens.Padding: the runs of a step would have "+
			"wrong weights: %s", backend.ErrArgument, u.prefix(), t.Counted, advice)
	case t.Counted != "" && size != ranks:
		return fmt.Errorf("%w: the loss divides by the number of targets %s that are not "+
			"Tokens.Padding on %d ranks, and WithDataParallel has %d: use a layers.Layout of all "+
			"of them", backend.ErrArgument, t.Counted, ranks, size)
	case u.Tree > 0 && ranks > t.Replicas:
		return fmt.Errorf("%w: %sa rank runs whole micro-batches, and the ranks of a "+
			"layers.Layout of %s shard sequences: use a layout of 1 sequence rank, or leave out "+
			"the tree", backend.ErrArgument, u.prefix(), t.Layout)
	}
	if u.Runs == 0 {
		u.Runs = t.Batches / replicas
	}
	return t.weigh(u, float64(replicas*max(1, u.Runs)))
}

// same reports whether a communicator has the ranks of another.
func same(a, b backend.Communicator) bool {
	if a == nil || a.Name() == b.Name() {
		return a != nil
	}
	ranks := a.Capabilities().Members
	return ranks != nil && slices.Equal(ranks, b.Capabilities().Members)
}

// Share reports whether two communicators have two ranks in common.
func Share(a, b backend.Communicator) bool {
	if a.Size() == 1 || b.Size() == 1 {
		return false
	}
	if a.Name() == b.Name() {
		return true
	}
	of, n := b.Capabilities().Members, 0
	for _, r := range a.Capabilities().Members {
		if slices.Contains(of, r) {
			n++
		}
	}
	return n > 1
}

// weigh returns an error if gradients of so many batches have wrong weights together.
func (t *Terms) weigh(u Use, batches float64) error {
	if u.Tree > 0 {
		batches = float64(u.Tree)
	}
	factor := batches * u.Weight
	switch {
	case t.Batches > 0:
		factor /= float64(t.Batches)
	case !t.Sum || u.Tree > 0:
		return nil
	default:
		factor = u.Weight
	}
	if math.Abs(factor-1) < 1e-9 {
		return nil
	}
	what := "the loss of a rank is a term of a sum over all ranks (layers.Partial)"
	if t.Batches > 0 {
		what = fmt.Sprintf("layers' CrossEntropy is a share of the mean over %d batches "+
			"(Builder.Batches)", t.Batches)
	}
	do := training + ", in place of WithDataParallel and WithSum"
	switch {
	case u.Tree > 0:
		do = "the gradients of a tree are a mean: call Builder.Batches(1) before the loss, and " +
			training
	case u.Runs > 1:
		do = fmt.Sprintf("call Builder.Batches(%v) before the loss, and %s", batches, training)
	}
	return fmt.Errorf("%w: %s%s, a step adds up gradients of %v with the weight %.4g, and so they "+
		"would be %.4g times the right ones: %s", backend.ErrArgument, u.prefix(), what, batches,
		u.Weight, factor, do)
}

// constant is the value of a constant that no node reads: a number, for Gorgonia.
type constant struct {
	*tensor.Dense
	terms *Terms
}

// Eq reports whether another constant is the same: Gorgonia merges constants that are equal.
func (c constant) Eq(other any) bool { return other == any(c) }

// Write adds the terms to a graph.
func Write(g *gorgonia.ExprGraph, t *Terms) {
	c := constant{tensor.New(tensor.WithShape(1), tensor.WithBacking([]float64{0})), t}
	g.AddNode(gorgonia.NewConstant(c, gorgonia.WithName(fmt.Sprintf("terms %p", t))))
}

// Of returns the terms that a node of a graph has, nil for any other node.
func Of(n *gorgonia.Node) *Terms {
	if c, ok := n.Value().(constant); ok {
		return c.terms
	}
	return nil
}

// All returns all terms of a graph: one for each builder of a loss.
func All(g *gorgonia.ExprGraph) (all []*Terms) {
	for _, n := range g.AllNodes() {
		if t := Of(n); t != nil {
			all = append(all, t)
		}
	}
	return all
}
