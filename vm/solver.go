package vm

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
)

// WithSolver makes each RunAll end with a step of a solver. It replaces
// solver.Step(gorgonia.NodesToValueGrads(learnables)): a loop for each learnable updates it and the
// solver's state for it, in place. A GPU runs the loops of all learnables at once. The bits are the
// same as with the solver's Step after a run without it. SetRate before a RunAll sets the rate of
// its step.
//
// On a device, learnables and the solver's state stay there. [Machine.Pull] copies learnables to
// their host tensors; the solver's State fetches the state, and Save and Load of
// [Machine.DataParallel] fetch both. gorgonia.Let with another tensor, and SetState, take effect in
// the next RunAll. Write into a learnable's own tensor only between Pull and the next RunAll: what
// the host writes at other times is lost. Gradients have no value on the host unless their nodes
// are passed to [Keep].
//
// If ranks exchange gradients, also use [WithDataParallel], or call the solver after autograd's
// Sync: otherwise each rank trains for itself.
//
// Several WithSolver are parameter groups, each with its solver: different rates and decays, or
// different solvers. They become solver.Groups, with all learnables in the order in which they
// were added to the graph; [Machine.Solver] returns them, for Save and Load:
//
//	m, err := vm.New(g, device,
//		vm.WithSolver(&solver.AdamW{Rate: 1e-3, WeightDecay: 0.1}, weights...),
//		vm.WithSolver(&solver.AdamW{Rate: 1e-3}, biases...))
//	err = m.DataParallel().Save(dir, m.Solver(), progress)
//
// Machines for several shapes of a batch may share a solver, for learnables with the same tensors
// in the same order.
//
// A solver of your own is a solver.Custom: vm.WithSolver(newLion(1e-4), learnables...).
//
// New returns an error for a learnable without a gradient, ErrUnsupported for solvers of other
// packages and for learnables with autograd's Hook, and ErrArgument, with names, if there are no
// learnables, if one is given twice, and if two are nodes of one tensor. A variable that has a
// gradient but no solver is reported ([Notice]), unless something reads the gradient.
func WithSolver(s solver.Solver, learnables ...*gorgonia.Node) Option {
	return func(m *Machine) {
		if m.solver == nil {
			m.solver = &solving{}
		}
		m.solver.groups = append(m.solver.groups, solver.Group{Solver: s, Params: learnables})
	}
}

// Solver returns the solver of [WithSolver], or the solver.Groups of several; nil without.
func (m *Machine) Solver() solver.Solver {
	if m.solver == nil {
		return nil
	}
	return m.solver.solver
}

// solving is the solver in a machine. All methods may be called on nil: there is none.
type solving struct {
	groups     []solver.Group // of the options, or of solver.Groups
	solver     solver.Solver  // of all groups
	learnables gorgonia.Nodes
	limit      float64 // of the gradients' norm, 0 for none
	fusion     *solver.Fusion
	states     []state
	settings   []setting
	// the memory of the learnables in the last run, nil if it was refused
	params []backend.Buffer
	tables []lower.Table // by learnable: whose rows ranks exchange; nil for none
	sharding

	kept    []backend.Buffer // what vectors are like, in the last run
	numbers []float64        // the settings at the beginning of a step
	steps   int              // that were applied
}

// state is a vector that the solver keeps.
type state struct {
	buffer            int // of the plan
	learnable, vector int
}

// setting is a number of a step.
type setting struct {
	buffer, index int
	memory        backend.Buffer // one element
}

// hold takes the solver for this machine.
func (m *Machine) hold() error {
	s := m.solver
	rank, ranks := m.parallel.among()
	limit, err := m.clipping.check(s != nil)
	if err = errors.Join(err, m.micro.share(s != nil, rank, ranks)); s == nil || err != nil {
		return err
	}
	if !m.training {
		return fmt.Errorf("vm: WithSolver: %w: with Eval, too: an evaluation trains nothing, "+
			"so leave one of the two out", backend.ErrArgument)
	}
	s.limit = limit
	if err := s.group(); err != nil {
		return fmt.Errorf("vm: WithSolver: %w", err)
	}
	s.fusion, err = solver.Fuse(s.solver, m.pullState)
	if err == nil {
		err = s.fusion.Of(labels(s.learnables))
	}
	if err != nil {
		return fmt.Errorf("vm: WithSolver: %w", err)
	}
	return nil
}

// group makes one solver of all groups, and refuses learnables that it would update twice.
func (s *solving) group() (err error) {
	var all gorgonia.Nodes
	for _, g := range s.groups {
		all = append(all, g.Params...)
	}
	if len(all) == 0 {
		return fmt.Errorf("%w: no learnables", backend.ErrArgument)
	}
	if err := backend.Given("", "learnables", all); err != nil {
		return err
	}
	values := make([]backend.Buffer, len(all))
	for i, n := range all {
		if slices.Index(all, n) != i {
			return fmt.Errorf("%w: the learnable %s is given twice: each step would update it "+
				"twice", backend.ErrArgument, stock.Label(n))
		}
		if residence.Half(n.Dtype()) {
			return fmt.Errorf("%w: %s is %v: a solver changes Float32 and Float64 only, and "+
				"16-bit floats stay as they are", backend.ErrUnsupported, stock.Label(n), n.Dtype())
		}
		if v := n.Value(); v != nil {
			values[i], _ = dense(v) // RunAll says what is wrong with a value
		}
	}
	if err := untied(all, values); err != nil {
		return err
	}
	s.solver, s.learnables = s.groups[0].Solver, all
	if len(s.groups) > 1 {
		slices.SortFunc(all, func(a, b *gorgonia.Node) int { return cmp.Compare(a.ID(), b.ID()) })
		s.solver, err = solver.NewGroups(all, s.groups...)
		return err
	}
	if groups, ok := s.solver.(*solver.Groups); ok {
		if !slices.Equal(groups.Params(), all) {
			return fmt.Errorf("%w: the learnables are not the parameters of the "+
				"solver.Groups, in their order", backend.ErrArgument)
		}
		s.groups = groups.List()
	}
	return nil
}

// untied returns an error if two learnables have the same memory.
func untied(learnables gorgonia.Nodes, values []backend.Buffer) error {
	if i, k, tied := residence.Overlap(values); tied {
		return fmt.Errorf("%w: the learnables %s and %s are one tensor, which each step would "+
			"update twice: use one node in both places", backend.ErrArgument,
			stock.Label(learnables[i]), stock.Label(learnables[k]))
	}
	return nil
}

// release gives the solver back.
func (s *solving) release() {
	if s != nil && s.fusion != nil {
		s.fusion.Release()
		s.fusion = nil
	}
}

// updates returns those of the learnables, for planning.
func (m *Machine) updates() (of lower.Solver, err error) {
	s := m.solver
	if s == nil || s.fusion == nil {
		return of, nil
	}
	s.states, s.settings = nil, nil
	buckets, err := m.buckets()
	if err == nil {
		err = m.shard(buckets)
	}
	if err != nil {
		return of, err
	}
	parts, divided := m.parallel.parts()
	half := m.parallel != nil && m.shards == 0 && !m.micro.Tree && !m.micro.Several() &&
		m.parallel.exchange.Halve()
	of = lower.Solver{Updates: make([]lower.Update, len(s.learnables)), Limit: s.limit,
		Accumulation: m.micro.Accumulation, Scale: m.micro.scale(m.parallel),
		Parts: parts != nil || s.limit > 0 && s.parts != nil && !s.on}
	for i, n := range s.learnables {
		input := slices.Index(m.read.Inputs, n)
		if input < 0 {
			return of, fmt.Errorf("vm: WithSolver: %s is not a variable of the machine's graph",
				stock.Label(n))
		}
		if autograd.Hooked(n) {
			return of, fmt.Errorf("vm: WithSolver: %w: ranks exchange the gradient of %s "+
				"(autograd's Hook), and the run would not wait for it: use the learnable itself "+
				"and WithDataParallel, or call the solver's Step after Sync",
				backend.ErrUnsupported, stock.Label(n))
		}
		gradient, ok := m.read.Value(n.Deriv())
		if !ok {
			return of, fmt.Errorf("vm: WithSolver: %s has no gradient: give it to gorgonia.Grad, "+
				"before vm.New", stock.Label(n))
		}
		lookups := s.lookups(m.parallel, m.ranks, i)
		if lookups != nil && lookups.Alone {
			buckets[i] = 0
		}
		of.Updates[i] = lower.Update{Input: input, Gradient: gradient, Kept: s.fusion.Kept(i),
			Bucket: buckets[i], Rule: s.fusion.Update(i), Shard: s.shard(i),
			Lookups:   lookups,
			Uncounted: parts != nil && !divided[i] && parts.Rank() > 0}
		if half && buckets[i] > 0 { // some buckets stay F32
			of.Updates[i].Half = m.parallel.exchange.Slot(i, 0).DType() == backend.BF16
		}
	}
	return of, nil
}

// without returns the nodes that are not gradients of learnables.
func (s *solving) without(nodes []*gorgonia.Node) []*gorgonia.Node {
	if s == nil {
		return nodes
	}
	return slices.DeleteFunc(slices.Clone(nodes), func(n *gorgonia.Node) bool {
		return slices.ContainsFunc(s.learnables, func(of *gorgonia.Node) bool {
			return of.Deriv() == n
		})
	})
}

// bindBuffer notes a buffer of the plan that the solver binds.
func (s *solving) bindBuffer(buffer int, b plan.Buffer, inputs []*gorgonia.Node) {
	if b.Kind == plan.State {
		s.states = append(s.states, state{buffer, slices.Index(s.learnables, inputs[b.Index]),
			b.Vector})
		return
	}
	memory := backend.Of(make([]float64, 1))
	if b.DType == backend.F32 {
		memory = backend.Of(make([]float32, 1))
	}
	s.settings = append(s.settings, setting{buffer, b.Index, memory})
}

// bind binds what is kept for each learnable.
func (s *solving) bind(e *exec.Executor) error {
	if s == nil || s.fusion == nil {
		return nil
	}
	changed := s.params == nil
	if changed {
		s.params = make([]backend.Buffer, len(s.learnables))
	}
	for i, n := range s.learnables {
		memory, err := dense(n.Value())
		if err != nil {
			return fmt.Errorf("vm: the value of %s: %w", stock.Label(n), err)
		}
		changed = changed || memory != s.params[i]
		s.params[i] = memory
	}
	if changed {
		if err := untied(s.learnables, s.params); err != nil {
			s.params = nil // the next run checks again
			return fmt.Errorf("vm: WithSolver: %w", err)
		}
	}
	vectors, err := s.fusion.Vectors(s.ofThisRank())
	if err != nil {
		return fmt.Errorf("vm: %w", err)
	}
	for _, v := range s.states {
		if kept := vectors[v.learnable]; v.vector < len(kept) {
			e.Bind(v.buffer, kept[v.vector])
		} else {
			e.Bind(v.buffer, s.ownOf(v.learnable))
		}
	}
	return nil
}

// bindStep binds the numbers of a run's step, which are the same in all runs of a step.
func (s *solving) bindStep(e *exec.Executor, b *micro) error {
	if s == nil {
		return nil
	}
	numbers, err := s.fusion.Next()
	if err != nil {
		return fmt.Errorf("vm: %w", err)
	}
	if b.done > 0 && !slices.Equal(numbers, s.numbers) {
		return fmt.Errorf("vm: the solver has another rate, or other settings, than when the "+
			"step began: set them before its first run: %w", b.between())
	}
	s.numbers = append(s.numbers[:0], numbers...)
	for _, n := range s.settings {
		x := numbers[n.index]
		if n.memory.DType() == backend.F32 {
			backend.View[float32](n.memory)[0] = float32(x)
		} else {
			backend.View[float64](n.memory)[0] = x
		}
		e.Bind(n.buffer, n.memory)
	}
	return nil
}

// countStep counts the step of a run.
func (s *solving) countStep() {
	if s != nil {
		s.steps++
		copy(s.partial, s.fullySharded)
		s.fusion.Stepped()
	}
}

// pullState brings the solver's state to where the solver looks for it.
func (m *Machine) pullState() error {
	defer runtime.KeepAlive(m)
	if m.exec == nil || m.solver == nil {
		return nil
	}
	if err := m.lost(); err != nil {
		return err
	}
	buffers := make([]int, len(m.solver.states))
	for i, v := range m.solver.states {
		buffers[i] = v.buffer
	}
	return m.exec.Pull(buffers...)
}
