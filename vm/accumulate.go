package vm

import (
	"fmt"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
)

// Accumulate makes n runs one step of the solver, for batches whose activations do not fit into
// memory. Each RunAll adds the gradients of a micro-batch to the earlier ones; every n-th exchanges
// the sum ([WithDataParallel]) and applies it. For the mean over all samples, divide the loss by n
// in the graph.
//
// Between the first run of a step and its last, a step is in progress. Save and Load of
// [Machine.DataParallel] then return ErrArgument on all ranks. So does a RunAll after SetRate or
// another change of the solver's settings. None of them changes anything. Close returns
// ErrArgument, too, but closes the machine: the sums so far are lost.
//
// Cost: a pass over the gradients in each run, and memory for the sums: the memory of the buckets
// with [WithDataParallel]. An error of a run discards the sums: the next run begins the step anew.
// An error in giving nodes their values, after the run, discards nothing: the run counts, and if it
// was the last one of a step, the step is made.
//
// New returns ErrArgument if n is not positive, and without [WithSolver].
func Accumulate(n int) Option {
	return func(m *Machine) {
		m.once("Accumulate")
		m.micro.Runs, m.micro.accumulated = n, true
	}
}

// WithTree makes training give bitwise identical results on any number of ranks: a step of the
// solver is n micro-batches, whichever ranks run them, and their gradients are added in a fixed
// tree (backend.Tree) and divided by n, so let the loss of a micro-batch be the mean over its
// samples. A rank runs consecutive micro-batches, as autograd.TreeShare says, with a RunAll for
// each. A single rank, or a machine without [WithDataParallel], runs all n. The last RunAll
// exchanges and applies the gradients.
//
//	first, share, err := autograd.TreeShare(8, comm.Rank(), comm.Size())
//	... // a graph for batch/8 samples, with their mean as loss
//	m, err := vm.New(g, nil, vm.WithSolver(solver, learnables...),
//		vm.WithDataParallel(comm), vm.WithTree(8))
//	for i := range share {
//		feed(first + i) // a micro-batch
//		err = m.RunAll()
//		losses[i] = loss()
//	}
//	loss, err := autograd.TreeMean(comm, losses)
//
// [ClipNorm] takes the norm of the sum, added up parameter by parameter. The last run updates the
// running statistics of batch norms with the statistics of all micro-batches, in their order. For
// dropout, Seek the random numbers to the first sample of each micro-batch. The bits are the same
// on processors of one kind: the results of a micro-batch do not depend on the rank's number of
// cores, but may differ between levels of vector instructions, and between hosts and GPUs.
//
// [Accumulate] says what a step in progress refuses.
//
// Cost: that of [Accumulate], and memory for log2(n/P)-1 further sums of each gradient. If n/P is
// not a power of two, ranks exchange up to 2*log2(n) sums of each gradient, which take memory, too.
// Batch norms add two all-gathers of their statistics in each step.
//
// New returns ErrArgument for numbers that TreeShare refuses, with [Accumulate], and without
// [WithSolver]; ErrUnsupported if the communicator does not add in a tree.
func WithTree(n int) Option {
	return func(m *Machine) {
		m.once("WithTree")
		m.micro.Tree, m.micro.All = true, n
	}
}

// Runs returns how many runs make a step of the solver ([Accumulate], [WithTree]), and the weight
// of one rank's gradient of one run in the gradient that the solver gets: 1/P for the mean over P
// ranks, 1 for a sum, and 1/n with WithTree of n micro-batches.
func (m *Machine) Runs() (n int, weight float64) {
	n = max(1, m.micro.Runs)
	if m.parallel != nil && m.parallel.exchange != nil {
		return n, m.parallel.exchange.Weight()
	}
	return n, m.micro.scale(nil)
}

// MicroBatches returns which of all micro-batches of a step this rank runs: n of them, from number
// first on.
func (m *Machine) MicroBatches() (first, n, all int) {
	if m.micro.Tree {
		return m.micro.First, m.micro.Runs, m.micro.All
	}
	rank, ranks := m.parallel.among()
	n = max(1, m.micro.Runs)
	return rank * n, n, ranks * n
}

// micro is a machine's position among the micro-batches of a step.
type micro struct {
	lower.Accumulation
	done        int   // runs
	most        int   // of the runs of a step, on any rank of a tree
	accumulated bool  // by Accumulate
	kinds       []int // of the runs of a step
}

// kind returns the kind of the next run.
func (b *micro) kind() int {
	if len(b.kinds) == 0 {
		return 0
	}
	return b.kinds[b.done]
}

// idle returns how many idle runs come before the next run: in the last one all ranks exchange.
func (b *micro) idle() int {
	if !b.Idles || b.done > 0 {
		return 0
	}
	return b.most - b.Runs
}

// last reports whether the next run ends a step.
func (b *micro) last() bool { return b.done >= b.Runs-1 }

// endRun counts a run, or begins again after an error. Apart, Apply ends the step.
func (b *micro) endRun(err error) {
	if b.done++; err != nil || b.done >= b.Runs && !b.Apart {
		b.done = 0
	}
}

// between returns an error in the middle of a step.
func (b *micro) between() error {
	if b.done == 0 {
		return nil
	}
	return autograd.StepInProgress(b.done, b.Runs)
}

// option names the option by which several runs are one step, "" if there is none.
func (b *micro) option() string {
	switch {
	case b.Apart:
		return "WithElastic"
	case b.Tree:
		return "WithTree"
	case b.accumulated:
		return "Accumulate"
	}
	return ""
}

// share finds out how many micro-batches a step has on a rank, if there is a solver.
func (b *micro) share(solver bool, rank, ranks int) (err error) {
	switch {
	case !b.accumulated && !b.Tree:
		return nil
	case b.accumulated && b.Tree:
		err = fmt.Errorf("%w: with Accumulate, too: %s says how many micro-batches a step has, so "+
			"leave Accumulate out", backend.ErrArgument, b.option())
	case !solver:
		err = fmt.Errorf("%w: no solver applies the gradients: use WithSolver, too",
			backend.ErrArgument)
	case b.Tree:
		b.First, b.Runs, err = autograd.TreeShare(b.All, rank, ranks)
		b.most = (b.All + ranks - 1) / ranks
	case b.Runs < 1:
		err = fmt.Errorf("%w: %d micro-batches: there must be at least 1", backend.ErrArgument,
			b.Runs)
	}
	if err == nil {
		_, b.kinds = b.Sums()
		if n := b.Kinds(); n > ir.MaxKinds {
			err = fmt.Errorf("%w: %d of %d micro-batches from number %d on: they are too many "+
				"branches of the tree: take a power of two for each rank", backend.ErrArgument,
				b.Runs, b.All, b.First)
		}
	}
	if err != nil {
		return fmt.Errorf("vm: %s: %w", b.option(), err)
	}
	return nil
}

// among returns this rank's number among the ranks that train together, and how many these are.
func (p *parallel) among() (rank, ranks int) {
	if p == nil || p.comm == nil {
		return 0, 1
	}
	return p.comm.Rank(), p.comm.Size()
}

// scale is the factor by which updates multiply the sum of all gradients, which ranks may have
// exchanged. In a tree ranks do not divide.
func (b *micro) scale(over *parallel) float64 {
	switch {
	case over != nil:
		return over.exchange.Scale()
	case !b.Tree:
		return 1
	}
	return 1 / float64(b.All)
}
