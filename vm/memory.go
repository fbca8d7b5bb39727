package vm

import (
	"errors"
	"fmt"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// WithMemory bounds the memory of the machine on each rank: variables, gradients, the solver's
// state, and the values of a run. If these take more, the plan keeps fewer values for the backward
// pass: it runs steps a second time, first those that save most memory for their time. No step runs
// a third time, so this costs at most another forward pass, about a third of the time.
// [Machine.Summary] and [Machine.Plan] give the cost: "+7.4 % time for 5.43 of 5.45 GiB". The bits
// stay the same, and dropout has the same mask. Ranks may have different bounds.
//
// The bound does not cover the contexts, libraries and workspaces of a device, or other machines
// there: leave room for them.
//
// New returns ErrArgument if bytes is not positive. If it is less than the least that planning
// finds, New returns an error that says by how much, and what takes most; with [WithElastic] it
// reports this by [Notice] and goes on. No bound is refused if a smaller one is kept.
func WithMemory(bytes int) Option {
	return func(m *Machine) {
		m.once("WithMemory")
		if m.limits.Memory = bytes; bytes <= 0 {
			m.refuse("WithMemory", "%d bytes", bytes)
		}
	}
}

// WithLossTiles computes the loss of a large vocabulary in n tiles of rows, which are samples or
// the positions of all samples. Logits and their gradient are then never materialized: for each
// tile the plan computes the product with the last layer's weights, the losses, and the tile's part
// of both gradients. The largest matrix multiplication of the graph counts as the logits.
//
// On the host the loss and all gradients keep their bits, except the gradient of the last layer's
// weights, which is added up tile by tile. On a GPU other bits may differ, too, since products of
// fewer rows may be added up in another order. [WithMemory] does not choose tiles by itself: with
// any bound the bits are the same.
//
// Cost: a store and two loads of that gradient, n-1 times. Two of these gradients are in memory at
// once, in F32. Tiles save what the logits take beyond that.
//
// New returns ErrArgument if n is not positive, and ErrUnsupported if n does not divide the rows,
// or something needs all logits at once: the program reads them ([Keep]), or each rank has columns
// of them.
func WithLossTiles(n int) Option {
	return func(m *Machine) {
		m.once("WithLossTiles")
		if m.limits.Tiles = n; n <= 0 {
			m.refuse("WithLossTiles", "%d tiles", n)
		}
	}
}

// Memory is the memory that a machine takes on one rank, in bytes, by kind.
type Memory struct {
	Learnables int64 // of WithSolver
	Inputs     int64 // all other variables, and constants
	Solver     int64 // what it keeps for each learnable
	// Gradients are those that ranks exchange, and sums over several runs. All others count as
	// Values.
	Gradients int64
	Values    int64 // of a run, at its peak
	Workspace int64 // of loops and convolutions; 0 before there is a machine
	// Limit is the bound of [WithMemory], 0 for none. Rematerialized is how many steps run a second
	// time for it, and Extra an estimate of the time these take, as a share of a run without them.
	Limit          int64
	Rematerialized int
	Extra          float64
}

// Total returns the sum.
func (m Memory) Total() int64 {
	return m.Learnables + m.Inputs + m.Solver + m.Gradients + m.Values + m.Workspace
}

// String returns the sum and its parts in MiB, and what the bound costs.
func (m Memory) String() string {
	var b strings.Builder
	const mib = 1 << 20
	fmt.Fprintf(&b, "memory %.1f MiB: learnables %.1f, inputs %.1f, solver %.1f, gradients %.1f, "+
		"values %.1f, workspace %.1f", float64(m.Total())/mib, float64(m.Learnables)/mib,
		float64(m.Inputs)/mib, float64(m.Solver)/mib, float64(m.Gradients)/mib,
		float64(m.Values)/mib, float64(m.Workspace)/mib)
	if m.Limit > 0 {
		fmt.Fprintf(&b, "\n%d steps rematerialized: %v", m.Rematerialized,
			plan.Budget{Limit: int(m.Limit), Bytes: int(m.Total() - m.Workspace), Extra: m.Extra})
	}
	return b.String()
}

// Summarize returns the Summary of the machine that New would make with these options on each of
// this many ranks. It makes no machine: it only plans, needs memory only for that, and variables
// need no values. Several ranks exchange gradients; leave out [WithDataParallel]. Each learnable
// has a separate bucket. With [WithShards] it is the Summary of rank 0, which has the largest
// shards. With [WithTree] one rank runs all micro-batches.
//
// Errors: ErrArgument for less than one rank; those of New, including that of too little memory for
// [WithMemory].
func Summarize(g *gorgonia.ExprGraph, ranks int, options ...Option) (s Summary, err error) {
	m := given("Summarize", g, func(string) {}, options)
	if m.parallel, m.ranks = nil, ranks; ranks < 1 {
		m.refuse("Summarize", "%d ranks: there is at least one", ranks)
	}
	defer m.solver.release()
	if err = errors.Join(m.refused, m.hold(), m.shards.check(false, m.elastic != nil)); err == nil {
		_, _, err = m.findTables(ranks)
	}
	if err == nil {
		err = m.makePlan()
	}
	if err == nil {
		s = m.Summary()
	}
	return s, err
}

// occupied returns the memory of a plan, of a solver and of an executor, if there are such.
func occupied(p *plan.Plan, with *solving, e *exec.Executor) Memory {
	by, b := p.Occupied(), p.Budget
	s := Memory{Values: int64(by[plan.Arena]), Solver: int64(by[plan.State]),
		Gradients: int64(by[plan.Gradient] + by[plan.PartialSum] + by[plan.FullBucket]),
		Limit:     int64(b.Limit), Rematerialized: b.Rematerialized, Extra: b.Extra}
	if with != nil {
		for _, n := range with.learnables {
			own := n.Shape().TotalSize()
			if part := with.shardOf(n); part != nil {
				own = part.To - part.From
			}
			s.Learnables += int64(own) * int64(n.Dtype().Size())
		}
	}
	s.Inputs = int64(by[plan.Input]+by[plan.Constant]) - s.Learnables
	if e != nil {
		s.Workspace = int64(e.Workspace())
	}
	return s
}
