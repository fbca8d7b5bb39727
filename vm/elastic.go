package vm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/internal/terms"
	"github.com/euryale-ml/euryale/internal/vm/exec"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/lower"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/internal/vm/proof"
)

// WithElastic makes the machine train on ranks that may be lost and replaced (autograd.Elastic),
// with the bits of a training that loses none. It replaces [WithDataParallel] and [WithTree]: a
// step is n micro-batches, and their gradients are exchanged during the backward pass. It takes the
// same options as WithDataParallel. New waits until the job has admitted this process.
//
//	job, err := euryale.JoinElastic(ctx)
//	...                                       // the graph, for one micro-batch
//	m, err := vm.New(g, nil, vm.WithSolver(solver, learnables...), vm.WithElastic(ctx, job, 8))
//	for e := m.Elastic(); e.Next() < steps; {
//		loss, err := e.Step(func(micro int) (float64, error) {
//			feed(e.Next(), micro)             // micro-batch of the step
//			if err := m.RunAll(); err != nil {
//				return 0, err
//			}
//			return loss(), nil
//		})
//	}
//	err = m.Close()
//
// The function passed to Step runs the machine, once for each micro-batch. Step itself applies the
// gradients, once all ranks have them, and updates the running statistics of batch norms. Closing
// the machine, or its Elastic, ends this process's part in the job.
//
// The machine runs on the device of the job's communicators: give New a nil device. On a GPU,
// parameters and the solver's state stay there when a rank is lost, and Close copies them to the
// host. A process has the same GPU in all generations; a new process takes a free GPU.
//
// If ranks are lost, a rank has more micro-batches, and needs memory for more sums of gradients. If
// these do not fit into [WithMemory], the rank goes on with the least memory that planning finds,
// and says so ([Notice]).
//
// [WithShards] has ranks shard the solver's state, and the learnables, each part with a copy on
// another rank. With a graph of layers.NewElasticLayout ranks on hosts shard the weights, each part
// with a copy on every other replica.
//
// Cost: a plan for each share of the micro-batches that this rank has had. In each generation of
// several ranks, rank 0 copies the parameters from its GPU and all others get them; with shards all
// ranks copy theirs, and the solver's state.
//
// New returns autograd.ErrFinished for a process that nobody needed; the errors of the job: the
// other ranks have given up on this process, too few are alive, or none alive has the parameters;
// and ErrArgument for a device.
func WithElastic(ctx context.Context, job autograd.Job, n int, options ...autograd.Option) Option {
	return func(m *Machine) {
		m.once("WithElastic")
		m.refuseNil("WithElastic", "ctx", ctx)
		m.refuseNil("WithElastic", "job", job)
		m.refuseNil("WithElastic", "options", options)
		m.elastic = &elastic{machine: m, ctx: ctx, job: job, options: options, n: n}
		m.micro.Tree, m.micro.All, m.micro.Apart = true, n, true
	}
}

// Elastic returns the elastic training of a machine with [WithElastic], nil without it. Close
// closes it.
func (m *Machine) Elastic() *autograd.Elastic {
	if m.elastic == nil {
		return nil
	}
	return m.elastic.training
}

// elastic is the additional state of a machine with WithElastic. It implements the autograd.Steps
// of its training.
type elastic struct {
	machine  *Machine
	ctx      context.Context
	job      autograd.Job
	options  []autograd.Option
	n        int
	training *autograd.Elastic // nil until New has connected
	stepping bool              // in Reduce
	placed   bool              // on a device
	kept     *exec.Kept        // on the device, from Leave to the end of Enter
	alone    bool              // a step is applied, and its parameters are not spread
	said     int               // bytes of the shards, or replicas
}

// start connects the machine, unless it has a problem. It closes the job if it fails.
func (e *elastic) start(problem error) (err error) {
	if err = e.refuse(problem); err != nil {
		if e.job != nil {
			err = errors.Join(err, e.job.Close(false), e.job.Release(nil))
		}
		return err
	}
	e.training, err = autograd.NewElastic(e.ctx, e.job, e.machine.Solver(), e.n, e)
	return err
}

// refuse returns an error if the machine cannot train elastically.
func (e *elastic) refuse(problem error) error {
	switch m := e.machine; {
	case problem != nil:
		return problem
	case m.parallel != nil || m.micro.All != e.n:
		return fmt.Errorf("vm: WithElastic: %w: with WithDataParallel or WithTree, too: leave "+
			"them out", backend.ErrArgument)
	case m.device != nil:
		return fmt.Errorf("vm: WithElastic: %w: the machine is on %s: give New a nil device: it "+
			"runs on that of the job's communicators", backend.ErrArgument, m.device.Name())
	case m.shards != 0 && e.layout() != nil:
		return fmt.Errorf("vm: WithShards: %w: with WithElastic and a layers.NewElasticLayout, "+
			"whose ranks shard weights: leave one of them out", backend.ErrUnsupported)
	}
	return nil
}

// layout returns what the graph says if ranks have parts of the model, else nil.
func (e *elastic) layout() *terms.Terms {
	for _, t := range terms.All(e.machine.graph) {
		if t.Moves != nil {
			return t
		}
	}
	return nil
}

// Leave implements [autograd.Steps]. On a device, what steps change stays there.
func (e *elastic) Leave(last bool) (err error) {
	m := e.machine
	m.norms.clearNorms()
	m.micro.done = 0
	switch {
	case last:
		err = errors.Join(m.freeBy(m.pullOwn), e.kept.Pull(true))
	case m.exec == nil:
		return nil
	}
	var kept *exec.Kept
	if !last {
		err = m.closeExec(func(x *exec.Executor) (err error) { kept, err = x.Keep(); return err })
	}
	err = errors.Join(err, e.kept.Close())
	e.kept = kept
	if s := m.solver; e.alone && s.device {
		err = errors.Join(err, kept.Pull(true))
		for i, of := range s.parts {
			copy(s.params[i].Slice(of.From, of.To).Bytes(), s.own[i].Bytes())
		}
	}
	return err
}

// Enter implements [autograd.Steps]. It keeps plans for the next time that this rank has as many
// micro-batches.
func (e *elastic) Enter(comm, tensor backend.Communicator, mirrors autograd.Option) (
	*autograd.DataParallel, error) {
	m, of := e.machine, e.layout()
	switch {
	case (of == nil) != (tensor == nil):
		return nil, fmt.Errorf("vm: WithElastic: %w: ranks have parts of the model, as "+
			"layers.NewElasticLayout says: build the graph on its layout", backend.ErrArgument)
	case of != nil && comm.Device().Name() != "host":
		return nil, fmt.Errorf("vm: WithElastic: %w: ranks that shard weights on %s: set "+
			"EURYALE_BACKEND=host", backend.ErrUnsupported, comm.Device().Name())
	}
	if err := e.place(comm.Device()); err != nil {
		return nil, err
	}
	if comm.Rank() == 0 && comm.Size() > 1 || m.shards != 0 { // others get its parameters
		if err := e.kept.Pull(m.shards != 0); err != nil {
			return nil, err
		}
	}
	e.kept.Unmark() // all read the host's elements, on several ranks those of rank 0
	m.parallel = &parallel{comm: comm, options: e.options}
	if m.shards != 0 {
		m.parallel.options = append(slices.Clone(e.options), mirrors)
	}
	if of != nil {
		of.Moves(tensor)
		m.parallel.options = append(slices.Clone(e.options), autograd.WithParts(tensor, of.Sharded))
	}
	if err := m.train(m.micro.share(true, comm.Rank(), comm.Size())); err != nil {
		return nil, errors.Join(err, m.parallel.close())
	}
	kept := e.kept
	kept.Outdate() // until the next step, or Pull
	e.kept, e.alone = nil, false
	e.sayCopies()
	if tensor != nil && tensor.Rank() == 0 {
		e.sayReplicas(tensor.Size())
	}
	return m.parallel.data, kept.Close()
}

// sayReplicas says what a rank of a replica has, and who has a copy, if that has changed.
func (e *elastic) sayReplicas(ranks int) {
	m := e.machine
	others := m.parallel.comm.Size() - 1
	if m.parallel.comm.Rank() == 0 && e.said != 1+others {
		_, bytes := m.solver.copied()
		for _, n := range m.solver.learnables {
			bytes += int(n.Dtype().Size()) * n.Shape().TotalSize()
		}
		m.notice(fmt.Sprintf("vm: WithElastic: rank 0 of the %d of a replica keeps %d bytes of "+
			"parameters and solver's state; copies of each part on other replicas: %d", ranks,
			bytes, others))
	}
	e.said = 1 + others
}

// sayCopies says how much of the solver's state this rank has, if that has changed.
func (e *elastic) sayCopies() {
	m := e.machine
	if m.shards == 0 || m.parallel.comm.Rank() > 0 {
		return
	}
	here, all := m.solver.copied()
	if here != e.said {
		what := "solver's state"
		if m.shards&Parameters != 0 {
			what = "parameters and the solver's state"
		}
		m.notice(fmt.Sprintf("vm: WithShards: a rank of %d keeps %d of %d bytes of the %s, of "+
			"which another one has a copy", m.parallel.comm.Size(), here, all, what))
	}
	e.said = here
}

// least makes the plan with the least memory, if a share of the micro-batches does not fit into the
// memory of WithMemory: otherwise the loss of a rank would end the training.
func (e *elastic) least(small error, solver lower.Solver) (*plan.Plan, error) {
	m := e.machine
	limits := m.limits
	limits.Memory = -1
	p, err := limits.New(proof.Verify, &m.read.Program, solver)
	if err == nil {
		m.notice(fmt.Sprintf("vm: %d of %d micro-batches do not fit, and are planned with as "+
			"little memory as possible: %v", m.micro.Runs, m.micro.All, small))
	}
	return p, err
}

// place puts the machine on the device of the communicators.
func (e *elastic) place(d backend.Device) error {
	m := e.machine
	if d.Name() == "host" {
		d = nil
	}
	switch {
	case e.placed && d != m.device:
		return fmt.Errorf("vm: WithElastic: %w: the machine is not on the device of its ranks any "+
			"more", backend.ErrUnsupported)
	case e.placed:
		return nil
	}
	e.placed, m.device, m.precision = true, d, m.asked.on(d, m.notice)
	return nil
}

// Reduce implements [autograd.Steps].
func (e *elastic) Reduce(n int, run func(i int) error) error {
	m := e.machine
	e.stepping = true
	defer func() { e.stepping = false }()
	for i := range n {
		if err := cmp.Or(run(i), m.parallel.err()); err != nil {
			return err
		}
		if m.micro.done != i+1 {
			return fmt.Errorf("vm: WithElastic: %w: micro-batch %d was run %d times: call RunAll "+
				"once in the function that Step is given", backend.ErrArgument, i, m.micro.done-i)
		}
	}
	if parts, _ := m.parallel.parts(); parts == nil {
		return nil
	}
	return m.parallel.fail(m.exec.Run(exec.Measure))
}

// Apply implements [autograd.Steps].
func (e *elastic) Apply() error {
	m := e.machine
	err := errors.Join(m.bind(), m.solver.bindStep(m.exec, &m.micro))
	if err == nil {
		err = errors.Join(m.exec.Run(ir.Apply), m.exec.Fetch())
	}
	m.micro.done = 0
	m.parallel.accumulated(m.micro)
	if err == nil {
		err = m.stepped()
	}
	if err == nil {
		m.norms.move()
		e.alone = m.solver.whole
	}
	return err
}

// Spread implements [autograd.Steps].
func (e *elastic) Spread() error {
	m := e.machine
	s, x := m.solver, m.parallel.exchange
	if !s.whole {
		return nil
	}
	var err error
	if !s.device {
		err = x.Spread(nil, nil, nil)
	} else {
		all, own := make([]int, len(s.learnables)), s.ownBuffers()
		for _, in := range m.inputs {
			if i := slices.Index(s.learnables, in.node); i >= 0 {
				all[i] = in.buffer
			}
		}
		err = x.Spread(m.exec.Main(),
			func(i int) backend.Buffer { return m.exec.Memory(own[i]) },
			func(i int) backend.Buffer { return m.exec.Memory(all[i]) })
	}
	residence.Written(s.params...)
	e.alone = err != nil
	return err
}

// outside returns an error for a run that is not a micro-batch of a step.
func (e *elastic) outside() error {
	if e == nil || e.stepping && e.machine.micro.done < e.machine.micro.Runs {
		return nil
	}
	return fmt.Errorf("vm: WithElastic: %w: RunAll outside of Elastic.Step, or twice for a "+
		"micro-batch: call it once in the function that Step is given, and evaluate on "+
		"another machine", backend.ErrArgument)
}
