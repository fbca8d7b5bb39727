package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/terms"
	"github.com/euryale-ml/euryale/rendezvous"
)

// WithDataParallel makes the ranks of a communicator train together. Each RunAll exchanges the
// gradients of the learnables of [WithSolver] in the buckets of autograd.DataParallel, and the
// solver applies the results: this replaces Sync. The bits are the same as with Sync and the
// solver's Step after a run without it. It takes the options of package autograd except WithPartial
// and WithUnused.
//
// The gradient of an embedding table is complete only at the end of the backward pass. If the table
// has at least as many rows as all ranks look up in a step, they exchange only these rows of the
// gradient: an all-gather, beside the updates of other learnables, and a sum in rank order. If an
// output layer shares the table, its term is exchanged at the beginning of the backward pass. So
// the gradient of the table is added up in another order than by Sync. It is exchanged like any
// other if ranks look up different numbers of rows, and with [Accumulate], [WithTree],
// [WithShards], compressions that keep residuals, or autograd.WithParts. Rows are not compressed.
//
// New is collective: every rank makes the machine, from a graph that differs only in the batch, and
// the learnables get the values of rank 0. RunAll is collective, too. Ranks that are goroutines
// must not hold the lock of euryale.Run meanwhile. The machine runs on the communicator's device or
// on the host. Close it before the communicator.
//
// With autograd.WithCompression(half.Wrap(backend.BF16)) the step that computes a gradient rounds
// it, and buckets are not cast: see [autograd.Buckets.Halve].
//
// A gradient that no other operation reads is computed in its bucket. The all-reduce of a bucket
// starts as soon as its gradients are computed, on its own queue, and only the updates of its
// learnables wait for it. On a device that records graphs the all-reduce is part of the graph. Some
// communicators cannot be recorded: hierarchical ones, and sparse compressions. Their all-reduces
// run between graphs, bitwise identically. [Keep] returns the gradient of this rank alone.
//
// A graph of package layers says in which way its gradients are right: give New the option of
// layers.Builder.Training in place of this one.
//
// New returns an error on all ranks if one of them cannot make its machine, or ErrMismatch if ranks
// differ in learnables, solvers, settings of these or operations between exchanges. An error in the
// middle of RunAll is final, since other ranks may have made a part of the step. A communicator's
// error names rank and collective. From then on RunAll, Pull and the solver's State return the
// error, and the machine's learnables are lost. On a device, Close leaves their host tensors as
// last pulled; on the host, they may have taken half a step. Load a checkpoint, with a new
// communicator.
func WithDataParallel(comm backend.Communicator, options ...autograd.Option) Option {
	return func(m *Machine) {
		if m.parallel != nil {
			m.refuse("WithDataParallel", "it is given twice (Training of a layers.Builder has "+
				"it, too): give one of them, with the options of both")
		}
		m.parallel = &parallel{comm: comm, options: options}
		m.refuseNil("WithDataParallel", "options", options)
	}
}

// parallel is the part of a machine that trains with other ranks.
type parallel struct {
	comm     backend.Communicator
	options  []autograd.Option
	data     *autograd.DataParallel // nil until New has connected
	exchange *autograd.Buckets
	failed   error // what has ended the machine; data has it, too, and may be locked by a Save
}

// localRanks returns how many ranks share this machine's cores: as the communicator says, else as
// the launcher's variables do.
func (p *parallel) localRanks() int {
	if p != nil && p.comm.Capabilities().LocalRanks > 0 {
		return p.comm.Capabilities().LocalRanks
	}
	job, _ := rendezvous.ReadEnv(env.Lookup(os.Environ())) // Init says where these are wrong
	return job.LocalSize
}

// DataParallel returns the autograd.DataParallel that exchanges the gradients, for its Check, Hash,
// Save and Load. These pull the learnables first; with [WithShards] Save and Load pull this rank's
// shards. Without [WithDataParallel] it has one rank, autograd.Solo, and the learnables of
// [WithSolver]; pass Solo to WithDataParallel for options such as WithFrozen. It is nil without
// WithSolver, and while a learnable has no value. Close closes it.
func (m *Machine) DataParallel() *autograd.DataParallel {
	p := m.parallel
	if p == nil {
		p = m.aloneWith()
	}
	if p == nil {
		return nil
	}
	return p.data
}

// aloneWith returns what a machine without other ranks saves and loads with, nil if there is none.
func (m *Machine) aloneWith() *parallel {
	if m.alone != nil || m.solver == nil || m.closed {
		return m.alone
	}
	if m.exec != nil && m.pullLearnables(true) != nil {
		return nil
	}
	p := &parallel{comm: autograd.Solo()}
	options := []autograd.Option{autograd.WithNotice(m.notice)}
	if m.micro.Tree { // a checkpoint says so
		options = append(options, autograd.WithTree(m.micro.All))
	}
	var err error
	if p.data, err = autograd.New(p.comm, m.solver.learnables, options...); err != nil {
		return nil
	}
	if p.exchange, err = p.data.Buckets(nil); err != nil {
		return nil
	}
	m.serve(p.exchange)
	p.accumulated(m.micro)
	for range m.solver.steps { // before the first Save
		p.applied()
	}
	m.alone = p
	return p
}

// serve tells buckets how to pull and copy what the machine has on its device.
func (m *Machine) serve(x *autograd.Buckets) {
	x.Pulls(m.pullLearnables)
	if m.solver != nil {
		x.Trains(m.solver.solver)
	}
	if m.device != nil {
		x.Copies(m.solver.fusion, m.snapshot)
	}
}

// snapshot starts copies for a SaveAsync: see [autograd.Buckets.Copies].
func (m *Machine) snapshot(memory []backend.Buffer) (func() ([]backend.Buffer, error), error) {
	if m.exec == nil {
		return nil, fmt.Errorf("vm: %w", backend.ErrClosed)
	}
	if err := m.parallel.err(); err != nil {
		return nil, err
	}
	fetch, err := m.exec.Snapshot(memory)
	return func() ([]backend.Buffer, error) {
		defer runtime.KeepAlive(m) // which frees the copies
		return fetch()
	}, err
}

// copied waits until nobody uses copies of a machine.
func (p *parallel) copied() {
	if p != nil && p.exchange != nil {
		p.exchange.Copied()
	}
}

// pullLearnables is Pull of all learnables or some, or of this rank's shards of them.
func (m *Machine) pullLearnables(whole bool, some ...*gorgonia.Node) error {
	learnable := func(in input) bool {
		return slices.Contains(m.solver.learnables, in.node) &&
			(some == nil || slices.Contains(some, in.node))
	}
	if !whole {
		return m.pullOwn(learnable)
	}
	return m.pull(learnable)
}

// connect makes the buckets, unless a rank has a problem.
func (m *Machine) connect(problem error) error {
	p := m.parallel
	switch {
	case p == nil:
		return problem
	case p.comm == nil:
		return errors.Join(problem, backend.Given("vm.WithDataParallel", "comm", p.comm))
	case m.solver == nil:
		problem = errors.Join(problem,
			fmt.Errorf("vm: WithDataParallel: %w: no solver applies the gradients: use "+
				"WithSolver, too", backend.ErrArgument))
	}
	var apart gorgonia.Nodes
	var tables []autograd.Option
	var rows string
	if problem == nil {
		apart, problem = m.apart()
	}
	// on a device, unless the machine is on the host: then ranks copy whole buckets there
	if placed := m.device != nil || p.comm.Device().Name() == "host"; problem == nil && placed {
		tables, rows, problem = m.findTables(p.comm.Size())
	}
	err := p.agree(rows, problem)
	if problem == nil && errors.Is(err, backend.ErrMismatch) { // ranks have other batches
		tables, m.solver.tables, err = nil, nil, nil
	}
	if err == nil {
		options := slices.Concat([]autograd.Option{autograd.WithNotice(m.notice),
			autograd.WithApart(apart...)}, tables, p.options)
		if m.micro.Tree {
			options = append(options, autograd.WithTree(m.micro.All))
		}
		p.data, err = autograd.New(p.comm, m.solver.learnables, options...)
		if err != nil && m.elastic != nil {
			err = fmt.Errorf("vm: WithElastic: %w", err)
		}
	}
	return err
}

// agree returns an error on all ranks unless their descriptions are equal and none has a problem.
func (p *parallel) agree(description string, problem error) error {
	return autograd.Agree(backend.Label(p.comm, backend.ForMachine), description, problem)
}

// agree returns an error on all ranks unless all have a plan with the same exchanges.
func (m *Machine) agree(problem error) error {
	if m.parallel == nil || m.parallel.comm.Size() == 1 {
		return problem
	}
	var common strings.Builder
	if problem == nil {
		for _, g := range m.solver.groups {
			// the solver refuses values that JSON has no number for
			settings, _ := json.Marshal(g.Solver)
			if m.elastic != nil { // a replacement's rate is set before its first step
				settings = nil
			}
			fmt.Fprintf(&common, "the solver is a %T\nthe solver's settings are %s\n", g.Solver,
				settings)
			if len(m.solver.groups) > 1 {
				fmt.Fprintf(&common, "the solver's learnables are %s\n",
					strings.Join(labels(g.Params), ", "))
			}
		}
		fmt.Fprintf(&common, "the precision is %v\n", m.asked)
		fmt.Fprintf(&common, "the machine computes on a device: %v\nthe norm of gradients is "+
			"bounded by %v\n", m.device != nil, m.solver.limit)
		if m.micro.Several() || m.micro.Tree {
			fmt.Fprintf(&common, "a step has %d micro-batches\n", max(m.micro.All, m.micro.Runs))
		}
		fmt.Fprintf(&common, "what the ranks shard is %b\n", m.shards)
		if m.synced {
			for _, s := range m.read.Statistics {
				fmt.Fprintf(&common, "a batch norm over all ranks is of %d samples\n", s.Samples)
			}
		}
		for _, step := range m.plan.Common() {
			fmt.Fprintf(&common, "the plan goes on with %s\n", step)
		}
	}
	return m.parallel.agree(common.String(), problem)
}

// labels returns the names of nodes.
func labels(nodes gorgonia.Nodes) (all []string) {
	for _, n := range nodes {
		all = append(all, stock.Label(n))
	}
	return all
}

// buckets returns the number of each learnable's bucket, 0 if ranks do not exchange its gradient.
func (m *Machine) buckets() ([]int, error) {
	of := make([]int, len(m.solver.learnables))
	p := m.parallel
	if p == nil {
		for i := 0; m.ranks > 1 && i < len(of); i++ { // of Summarize
			of[i] = len(of) - i
		}
		return of, nil
	}
	if p.exchange == nil {
		var err error
		if p.exchange, err = p.data.Buckets(m.device); err != nil {
			return nil, fmt.Errorf("vm: WithDataParallel: %w", err)
		}
		m.serve(p.exchange)
	}
	if p.exchange.MicroBatches() != m.micro.All {
		return nil, fmt.Errorf("vm: WithDataParallel: %w: autograd's WithTree: the machine runs "+
			"the micro-batches, so use WithTree of this package", backend.ErrArgument)
	}
	for b, bucket := range p.exchange.Params() {
		for _, i := range bucket {
			of[i] = b + 1
		}
	}
	return of, nil
}

// parts returns the ranks that have the other parts of the learnables, nil if these are whole, and
// whether each is a part.
func (p *parallel) parts() (comm backend.Communicator, divided []bool) {
	if p == nil {
		return nil, nil
	}
	return p.exchange.Parts()
}

// err returns the error that has ended a machine, or nil.
func (p *parallel) err() error {
	if p == nil {
		return nil
	}
	return p.failed
}

// fail ends a machine whose ranks exchange gradients with the error of a run.
func (p *parallel) fail(err error) error {
	if err == nil || p == nil || p.comm.Size() == 1 {
		return err
	}
	p.failed = p.exchange.Fail(err)
	return p.failed
}

// endOnPanic ends the ranks of a machine whose run panics, in an operation of the user's, say: they
// wait for this one. The panic goes on.
func (p *parallel) endOnPanic() {
	if v := recover(); v != nil {
		p.comm.Abort(fmt.Errorf("%s panicked in RunAll: %v", backend.RankOf(p.comm), v))
		panic(v)
	}
}

// compare compares variables among ranks.
func (p *parallel) compare(variables gorgonia.Nodes) error {
	if p == nil {
		return nil
	}
	if err := p.exchange.Compare(variables); err != nil {
		return fmt.Errorf("vm: WithDataParallel: %w", err)
	}
	return nil
}

// accumulated notes how far a step of several runs is.
func (p *parallel) accumulated(b micro) {
	if p != nil && b.Several() {
		p.exchange.Accumulated(b.done, b.Runs)
	}
}

// applied notes that a step was applied.
func (p *parallel) applied() {
	if p != nil {
		p.exchange.Applied()
	}
}

// close frees the buckets.
func (p *parallel) close() error {
	if p == nil || p.data == nil {
		return nil
	}
	return p.data.Close()
}

// checkTerms refuses to train a graph in a way that makes its gradients wrong, as package layers
// says in the graph.
func (m *Machine) checkTerms() error {
	if m.solver == nil || m.ranks > 0 { // of Summarize
		return nil
	}
	use := terms.Use{Option: m.micro.option(), Tree: m.micro.All, Elastic: m.elastic != nil,
		Clips: m.clipping != nil, Tiles: m.limits.Tiles > 1}
	if use.Runs, use.Weight = m.Runs(); m.parallel != nil {
		use.Comm = m.parallel.comm
		use.Parts, _ = m.parallel.parts()
	}
	for _, t := range terms.All(m.graph) {
		if err := t.Check(use); err != nil {
			return fmt.Errorf("vm: %w", err)
		}
	}
	return nil
}
