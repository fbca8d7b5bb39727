package vm

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/stock"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/internal/vm/proof"
	"github.com/euryale-ml/euryale/internal/vm/read"
	"github.com/euryale-ml/euryale/internal/workers"
)

// Machine runs a graph. It is not safe for concurrent use; machines of different graphs may
// run at the same time, and those that share tensors may not.
type Machine struct {
	refusals
	graph     *gorgonia.ExprGraph
	device    backend.Device // nil for the host
	keep      []*gorgonia.Node
	training  bool
	precision Precision // as the device has it
	asked     Precision
	notice    func(text string)
	solver    *solving    // nil without WithSolver
	carried   carriedOver // of WithState
	frozen    gorgonia.Nodes
	anyTable  bool      // ranks exchange rows of small tables, too
	compared  compared  // with what the device has
	parallel  *parallel // nil without WithDataParallel and WithElastic
	elastic   *elastic  // nil without WithElastic
	alone     *parallel // without it, what the machine saves and loads by; nil before
	clipping  *clipping // nil without ClipNorm
	micro     micro     // of a step of the solver
	shards    Shards    // of WithShards
	synced    bool      // batch norms are of the batches of all ranks
	closed    bool
	averaged  bool          // learnables have averages as their values
	byDo      time.Duration // see HostTime

	nodes    int // of the graph, when New read it
	derived  int // variables that had a gradient then
	read     *read.Graph
	limits   plan.Limits // of planning
	ranks    int         // of Summarize
	plan     *plan.Plan
	plans    map[planKey]*plan.Plan // what was planned since
	exec     *exec.Executor
	behind   runtime.Cleanup // closes exec if nobody closes the machine
	inputs   inputs
	outputs  outputs
	norms    norms
	changing constants
	hoists   []*hoisted
}

// planKey is what plans of a machine depend on besides its options.
type planKey struct {
	lower.Accumulation
	division string // of learnables: see mirrored
}

var _ gorgonia.VM = (*Machine)(nil)

// Option changes what New makes.
type Option func(*Machine)

// Keep gives a value after each run to nodes that would otherwise have none. Variables have one
// anyway.
func Keep(nodes ...*gorgonia.Node) Option {
	return func(m *Machine) {
		m.keep = append(m.keep, nodes...)
		m.refuseNil("Keep", "nodes", nodes)
	}
}

// Eval makes a machine for evaluation: before each run it switches operations that behave
// differently in training (gorgonia.TrainModeOp) to evaluation. Machines without it switch them to
// training. New returns ErrArgument with [WithSolver]: an evaluation trains nothing.
func Eval() Option { return func(m *Machine) { m.training = false } }

// New returns a machine for a graph, on a device; nil is the host. Build the graph first, with its
// gradients.
//
// Errors: a graph that Gorgonia cannot sort, a version of Gorgonia other than v0.9.18, a dtype that
// is not supported, a kept node of another graph, ErrUnsupported if the device's queues run no
// loops of package kernels/fuse or multiply no matrices, and the device's error if it has too
// little memory.
func New(g *gorgonia.ExprGraph, device backend.Device, options ...Option) (*Machine, error) {
	m := given("New", g, toStandardError, options)
	if device != nil && device.Name() != "host" {
		m.device = device
	}
	train := m.train
	if m.elastic != nil {
		train = m.elastic.start
	}
	m.precision = m.asked.on(m.device, m.notice)
	if err := train(errors.Join(m.refused, m.hold(), m.checkSync(),
		m.shards.check(m.parallel == nil, m.elastic != nil))); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	m.nodes, m.derived = len(m.graph.AllNodes()), derived(m.read.Inputs)
	m.warn()
	return m, nil
}

// given returns a machine with what a function was given. It has read nothing yet.
func given(function string, g *gorgonia.ExprGraph, notice func(string), options []Option) *Machine {
	m := &Machine{graph: g, training: true, notice: notice, limits: plan.Standard(),
		compared: compared{much: muchCompared}}
	m.refuseNil(function, "g", g)
	m.refuseNil(function, "options", options)
	for _, o := range options {
		if o != nil {
			o(m)
		}
	}
	m.precision = m.asked
	return m
}

// train makes the machine ready, to train with the ranks of its communicator if it has one.
func (m *Machine) train(problem error) error {
	err := m.connect(problem)
	if err == nil {
		err = m.agree(m.prepare())
	}
	if err == nil {
		err = m.parallel.compare(slices.DeleteFunc(slices.Clone(m.read.Inputs), m.ofFile))
	}
	return err
}

// refusals are the arguments that New and its options refuse: New says so on all ranks.
type refusals struct {
	refused error
	given   []string // options that may be given once
}

// refuse notes an argument, and why it cannot be.
func (r *refusals) refuse(function, why string, args ...any) {
	r.refused = errors.Join(r.refused, fmt.Errorf("vm: %s: %w: %s", function, backend.ErrArgument,
		fmt.Sprintf(why, args...)))
}

// refuseNil refuses an argument that is nil.
func (r *refusals) refuseNil(function, name string, argument any) {
	r.refused = errors.Join(r.refused, backend.Given("vm."+function, name, argument))
}

// once notes an option of which the last one alone would count.
func (r *refusals) once(option string) {
	if slices.Contains(r.given, option) {
		r.refuse(option, "it is given twice: leave one of them out")
	}
	r.given = append(r.given, option)
}

// unread returns an error if the graph's nodes differ from those that New has read. A machine for
// evaluation may be made before gorgonia.Grad, whose nodes it does not need.
func (m *Machine) unread() error {
	nodes := m.graph.AllNodes()
	if len(nodes) == m.nodes {
		return nil
	}
	if now := derived(m.read.Inputs); !m.training && now > m.derived {
		m.nodes, m.derived = len(nodes), now
		return nil
	}
	return fmt.Errorf("vm: %w: the graph had %d nodes when New read it and has %d, the last of "+
		"them %v: the machine would not compute them: build the whole graph, with "+
		"gorgonia.Grad and gorgonia.Read, before the first machine",
		backend.ErrArgument, m.nodes, len(nodes), nodes[len(nodes)-1])
}

// derived returns how many variables have a gradient.
func derived(variables gorgonia.Nodes) (n int) {
	for _, in := range variables {
		if in.Deriv() != nil {
			n++
		}
	}
	return n
}

// prepare reads the graph, unless that was done, plans it and makes the plan ready to run.
func (m *Machine) prepare() error {
	if err := m.makePlan(); err != nil {
		return err
	}
	m.keepFrozen()
	return errors.Join(m.writePlan(), m.compile())
}

// makePlan reads the graph, unless that was done, and plans it.
func (m *Machine) makePlan() error {
	if m.read == nil {
		if err := m.readGraph(); err != nil {
			return err
		}
	}
	solver, err := m.updates()
	if err != nil {
		return err
	}
	if err := cmp.Or(m.checkTerms(), m.freeze()); err != nil {
		return err
	}
	carried, err := m.carried.updates(m.read, m.solver != nil)
	if err != nil {
		return err
	}
	key := planKey{m.micro.Accumulation, m.solver.division()}
	if m.plan = m.plans[key]; m.plan == nil {
		solver.Updates = append(solver.Updates, carried...)
		m.plan, err = m.limits.New(proof.Verify, &m.read.Program, solver)
		if m.elastic != nil && errors.Is(err, plan.ErrTooSmall) {
			m.plan, err = m.elastic.least(err, solver)
		}
		if err != nil {
			return fmt.Errorf("vm: %w", err)
		}
		m.plans[key] = m.plan
	}
	if m.plan.Doubt != nil && testing.Testing() {
		return fmt.Errorf("vm: the plan could not be proven: %w", m.plan.Doubt)
	}
	return nil
}

// readGraph makes a program of the graph.
func (m *Machine) readGraph() error {
	var changed []*gorgonia.Node
	for _, c := range m.carried {
		changed = append(changed, c.variable)
	}
	var ranks read.Norms // none with WithTree, where average exchanges what batch norms find
	if m.parallel != nil && !m.micro.Tree {
		ranks = read.Norms{Comm: m.parallel.comm, Sync: m.synced}
	}
	r, err := read.New(m.graph, m.training, ranks, recurs(m.device), changed...)
	if err != nil {
		return err
	}
	if m.synced && len(r.Statistics) == 0 {
		why := "the graph has no gorgonia.BatchNorm"
		return fmt.Errorf("vm: SyncBatchNorm: %w: %s", backend.ErrArgument, why)
	}
	m.read, m.outputs, m.plans = r, outputs{}, map[planKey]*plan.Plan{}
	r.Program.Precision = m.precision.ofProgram()
	r.Program.ChannelsLast = channelsLast(m.device, m.precision, &r.Program)
	r.Program.Stacks = stacks(m.device)
	placeOps(m.read, m.device)
	for _, n := range slices.Concat(m.carried.without(m.solver.without(r.Shown)), m.keep) {
		if err := m.outputs.show(r, n); err != nil {
			return err
		}
	}
	for _, t := range r.Reads {
		if err := m.outputs.target(r, t); err != nil {
			return err
		}
	}
	if err := m.norms.find(r); err != nil {
		return err
	}
	m.outputs.hidden = slices.DeleteFunc(slices.Clone(r.Computed), func(n *gorgonia.Node) bool {
		return slices.ContainsFunc(m.outputs.shown, func(s shown) bool { return s.node == n })
	})
	return nil
}

// compile makes the plan ready to run.
func (m *Machine) compile() (err error) {
	calls, err := newCalls(m.read, m.device, &m.byDo)
	if err != nil {
		return err
	}
	calls.over, calls.sharded = m.parallel, m.solver.shards()
	var device exec.Device
	if m.device == nil {
		device = exec.OnHost(workers.Share(m.parallel.localRanks()))
	} else if device, err = exec.On(m.device); err != nil {
		return err
	}
	var buckets exec.Buckets
	if m.parallel != nil {
		buckets = m.parallel.exchange
	}
	if m.exec, err = exec.New(m.plan, device, calls, buckets); err != nil {
		return err
	}
	m.behind = exec.CloseBehind(m, m.exec)
	m.inputs, m.changing, m.hoists = nil, nil, nil
	for i, b := range m.plan.Buffers {
		switch b.Kind {
		case plan.Input:
			n := m.read.Inputs[b.Index]
			m.inputs = append(m.inputs, input{n, n.Shape(), i, b.Written, m.solver.shardOf(n)})
		case plan.State, plan.Setting:
			m.solver.bindBuffer(i, b, m.read.Inputs)
		case plan.Constant:
			if b.Computed() {
				m.hoists = append(m.hoists, m.hoisted(i, m.plan.HoistedBy(b.Index)))
				continue
			}
			if err := m.changing.bind(m.exec, m.read, b.Index, i); err != nil {
				return err
			}
		}
	}
	_ = m.bind() // as far as there are values: RunAll says what is missing
	return m.exec.Place()
}

// bind gives the plan the values of variables and the solver's state for them.
func (m *Machine) bind() error {
	if err := m.inputs.bind(m.exec); err != nil {
		return err
	}
	for _, h := range m.hoists {
		if err := h.compute(m.exec); err != nil {
			return err
		}
	}
	return m.solver.bind(m.exec)
}

// RunAll computes the graph with the present values of its variables. The section Values of the
// package comment says which values it leaves; after an error, computed nodes have no value.
//
// Errors: a variable without a value, or with one of another shape or dtype; ErrArgument if nodes
// were added to the graph after New, other than by gorgonia.Grad after a machine of [Eval]; those
// of operations that run by Do, with the node; with [WithDataParallel] those of the communicator,
// after which a machine cannot run again.
func (m *Machine) RunAll() error {
	return m.runBy(func() error { return m.exec.Run(m.micro.kind()) })
}

// checkLabels returns an error if a variable has a label out of range: later there would be a loss
// of NaN, which does not say why.
func checkLabels(all []read.Labels) error {
	for _, l := range all {
		v, ok := l.Variable.Value().(*tensor.Dense)
		if !ok || v.RequiresIterator() {
			continue
		}
		integers, err := integersOf(v)
		if err == nil {
			err = l.Op.CheckIndices(l.Op.Labels(), integers)
		}
		if err != nil {
			return fmt.Errorf("vm: %s: %w", stock.Label(l.Variable), err)
		}
	}
	return nil
}

// integersOf returns the numbers of a tensor, none of a dtype that is neither Int nor floats.
func integersOf(v *tensor.Dense) ([]int, error) {
	switch v.Dtype() {
	case tensor.Int:
		return v.Ints(), nil // not Data, which allocates
	case tensor.Float32:
		return wholeNumbers(v.Float32s())
	case tensor.Float64:
		return wholeNumbers(v.Float64s())
	}
	return nil, nil
}

func wholeNumbers[T float32 | float64](numbers []T) ([]int, error) {
	integers := make([]int, len(numbers))
	for i, x := range numbers {
		if integers[i] = int(x); T(integers[i]) != x {
			return nil, fmt.Errorf("%w: label %d is %v, and no integer", backend.ErrArgument, i, x)
		}
	}
	return integers, nil
}

// runBy is RunAll with a function that starts the steps.
func (m *Machine) runBy(start func() error) error {
	defer runtime.KeepAlive(m)
	if m.parallel != nil {
		defer m.parallel.endOnPanic()
	}
	if m.closed {
		return errors.New("vm: RunAll of a closed machine: make another one")
	}
	if m.averaged {
		return fmt.Errorf("vm: %w: inside Averaged, where a step would train the averages: run "+
			"another machine, of vm.Eval", backend.ErrArgument)
	}
	if err := cmp.Or(m.parallel.err(), m.elastic.outside(), m.unread()); err != nil {
		return err
	}
	if m.read.Changed() {
		if err := m.micro.between(); err != nil {
			return fmt.Errorf("vm: gorgonia.UnsafeLet has given an operation another slice: %w",
				err)
		}
		if err := errors.Join(m.free(), m.readGraph()); err != nil {
			return err
		}
		if err := m.prepare(); err != nil {
			return err
		}
	}
	if m.parallel != nil {
		m.parallel.exchange.Begin()
	}
	for _, op := range m.read.Modes {
		if err := setTraining(op, m.training); err != nil {
			return fmt.Errorf("vm: %v: %w", op, err)
		}
	}
	err := m.run(start)
	if err != nil {
		clearValues(m.graph, m.read.Computed, m.read.Computed)
	}
	return err
}

func (m *Machine) run(start func() error) error {
	if err := m.bind(); err != nil {
		return err
	}
	if err := draw(m.read); err != nil {
		return err
	}
	m.changing.rebind(m.exec)
	if err := m.solver.bindStep(m.exec, &m.micro); err != nil {
		return err
	}
	last, err := m.micro.last(), checkLabels(m.read.Labels)
	for range m.micro.idle() {
		if err == nil {
			err = m.exec.Run(ir.Idle)
		}
	}
	if err == nil {
		err = errors.Join(start(), m.exec.Fetch())
	}
	m.micro.endRun(err)
	cmp.Or(m.parallel, m.alone).accumulated(m.micro)
	if err != nil {
		m.norms.clearNorms()
		return m.parallel.fail(err)
	}
	if rank, _ := m.parallel.among(); rank == 0 {
		m.compared.warn(m.exec.Compared(), m.notice)
	}
	if last && !m.micro.Apart {
		if err := m.stepped(); err != nil {
			return err
		}
	}
	clearValues(m.graph, m.read.Computed, m.outputs.hidden)
	return errors.Join(m.outputs.publish(m.exec),
		m.norms.average(m.exec, last, m.micro, m.parallel))
}

// stepped counts a step that was applied.
func (m *Machine) stepped() error {
	if err := m.clipping.measure(m.exec, len(m.plan.Results)-1); err != nil {
		return err
	}
	m.solver.countStep()
	cmp.Or(m.parallel, m.alone).applied()
	return m.inputs.leave(m.exec)
}

// ofFile reports whether a variable is frozen and of 16 bits, such as what lies in a file: it may
// be gigabytes, and to compare it takes longer than to read it.
func (m *Machine) ofFile(n *gorgonia.Node) bool {
	return slices.Contains(m.frozen, n) && residence.Half(n.Dtype())
}

// StepTime is how long a step of the plan took.
type StepTime struct {
	Op   string // what it computes, as the plan prints it
	Node string // of the graph, the last one that it computes
	Time time.Duration
	// Bytes is the size of its operands and results: what it must read and write, unless it reads
	// parts of an operand.
	Bytes int
}

// Profile is a RunAll whose steps run one by one. It returns their times in the order of the plan,
// by the device's clock if it has one. In RunAll itself steps may take less: on GPUs it launches
// many of them as one graph. Call Profile after a few runs, when kernels are compiled.
//
// Errors: those of RunAll.
func (m *Machine) Profile() (times []StepTime, err error) {
	elapsed, err := m.profile(func(ir.Op) bool { return true })
	for i, t := range elapsed {
		s := m.plan.Steps[i]
		times = append(times, StepTime{s.Op.String(), s.Name, t, s.Bytes()})
	}
	return times, err
}

// profile is RunAll with steps one by one. It returns the times of the steps that timed selects.
func (m *Machine) profile(timed func(ir.Op) bool) (elapsed []time.Duration, err error) {
	err = m.runBy(func() (err error) {
		elapsed, err = m.exec.Profile(m.micro.kind(), timed)
		return err
	})
	return elapsed, err
}

// Reset does nothing: RunAll always begins at the beginning. It is part of gorgonia.VM.
func (m *Machine) Reset() {}

// Pull copies variables, all of the graph if none are given, from the machine's device to their
// host tensors, if [WithSolver] or [WithState] of this machine, or of another that shares the
// tensors, has changed them there. The host may then read and write them until the next RunAll,
// which uploads them. Pull costs a copy of these variables, and the upload another one. Unchanged
// variables are not copied. If ranks shard the learnables ([WithShards]), Pull is collective and
// gathers them. Until Pull, tensors of floats are marked on the host by NaNs, as the first and the
// last element, and machines elsewhere, autograd and models refuse them.
//
// Errors: a node that is not a variable of the graph; those of the device.
func (m *Machine) Pull(nodes ...*gorgonia.Node) error {
	if err := backend.Given("vm: Pull", "nodes", nodes); err != nil {
		return err
	}
	for _, n := range nodes {
		if !slices.Contains(m.read.Inputs, n) {
			return fmt.Errorf("vm: Pull of %s, which is not a variable of the machine's graph",
				stock.Label(n))
		}
	}
	return m.pull(func(in input) bool { return len(nodes) == 0 || slices.Contains(nodes, in.node) })
}

// pull is Pull of the variables that are wanted.
func (m *Machine) pull(wanted func(input) bool) error {
	if m.exec == nil {
		return nil // Close has pulled all
	}
	if err := m.pullOwn(wanted); err != nil {
		return err
	}
	return m.solver.gatherShards(m.parallel, wanted)
}

// pullOwn is pull of this rank's part of them.
func (m *Machine) pullOwn(wanted func(input) bool) error {
	defer runtime.KeepAlive(m)
	if m.exec == nil {
		return nil // Close has pulled all
	}
	if err := m.lost(); err != nil {
		return err
	}
	m.solver.reread(m.inputs, wanted)
	return m.exec.Pull(m.inputs.buffers(wanted)...)
}

// Close frees a machine at once. The garbage collector frees one that is dropped without Close, if
// its solver is dropped, too. Its memory on a device is freed when the next machine is made there,
// or the device is closed.
//
// Close pulls the variables that the machine changes and the solver's state, unless an exchange
// with other ranks has ended the machine, and frees the machine's memory. If ranks shard the
// learnables ([WithShards]), Close is collective. Values that the last run has left stay as they
// are. In the middle of a step ([Accumulate]) Close also returns an ErrArgument.
func (m *Machine) Close() error { return m.close(m.free) }

// Discard is Close without the pull: it is collective only where Close is for a SaveAsync. On a
// device it copies nothing to the host, where variables and the solver's state keep the values of
// the last pull: it is for a model that has been saved from there, or that nobody wants. With
// [WithElastic] it is Close.
func (m *Machine) Discard() error {
	return m.close(func() error {
		if m.exec == nil {
			return nil
		}
		return m.closeExec((*exec.Executor).Close)
	})
}

func (m *Machine) close(free func() error) error {
	m.closed = true
	err := errors.Join(m.Elastic().Close(), free())
	if m.parallel == nil { // else the buckets know
		err = errors.Join(m.unfinished(), err)
	}
	m.solver.release()
	return errors.Join(err, cmp.Or(m.parallel, m.alone).close())
}

// unfinished returns an error in the middle of a step, once.
func (m *Machine) unfinished() error {
	err := m.micro.between()
	if m.micro.done = 0; err != nil {
		return fmt.Errorf("vm: close: %w", err)
	}
	return nil
}

// free pulls what the plan writes and gives the executor's memory back.
func (m *Machine) free() error { return m.freeBy(m.pull) }

func (m *Machine) freeBy(pull func(wanted func(input) bool) error) error {
	if m.exec == nil {
		return nil
	}
	var err error
	if m.lost() == nil {
		err = errors.Join(pull(func(in input) bool { return in.written }), m.pullState())
	}
	return errors.Join(err, m.closeExec((*exec.Executor).Close))
}

// closeExec gives the executor's memory back, with one of its methods.
func (m *Machine) closeExec(by func(*exec.Executor) error) error {
	cmp.Or(m.parallel, m.alone).copied()
	m.behind.Stop()
	err := by(m.exec)
	m.exec = nil
	return err
}

// lost returns the error that lost the model, or nil. With WithElastic a separate run applies each
// step, so no exchange has changed the model.
func (m *Machine) lost() error {
	if m.elastic != nil {
		return nil
	}
	return m.parallel.err()
}

// Plan returns what the machine does in a run. Print it.
func (m *Machine) Plan() fmt.Stringer { return m.plan }
