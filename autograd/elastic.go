package autograd

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/autograd/internal/checkpoint"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/elastic"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Job provides the communicators of an elastic training: euryale.JoinElastic returns one.
type Job interface {
	// Next returns the communicator of the next generation of ranks. Before they connect it calls
	// leave, which releases the communicator of the previous generation: drivers may free its
	// memory only once kernels have ended, and kernels of the next generation wait for all ranks.
	Next(ctx context.Context, leave func(elastic.View) error) (backend.Communicator, elastic.View,
		error)
	Job() *elastic.Job
	// Release closes a communicator of Next, unless it is nil, and after Close also the devices.
	Release(comm backend.Communicator) error
	// Close ends this process's part in the job; done says whether it has done its last step.
	// Release follows.
	Close(done bool) error
}

// Elastic trains a model on ranks that may be lost and replaced, with the bits of a training that
// loses none. A machine of vm.WithElastic has one. docs/elastic.md says how it works.
type Elastic struct {
	// After is called after each step by all ranks that have done it, before replacements are
	// admitted: only here can ranks call DataParallel().Save together. If a rank is lost meanwhile,
	// After fails; the training reports that and goes on. A rank because of which it fails again
	// and again is left out. Ranks that lose one while they exchange what they have updated, with
	// vm.WithShards, do not call it for that step. All other errors are final. Set it before the
	// first step on all ranks, replacements included.
	After func() error

	ctx    context.Context
	job    Job
	solver solver.Solver
	micros int // of a step
	steps  Steps

	comm         backend.Communicator // of the present generation, nil before
	data         backend.Communicator // of those with this rank's part of the model
	left         error                // what went wrong as this rank left the one before
	view         elastic.View
	dp           *DataParallel
	first, share int                // micro-batches of this rank
	step         int                // of the job that comes next; history.Steps: of the training
	loss         float64            // of the step before, or of that step where it is reduced
	reduced      bool               // that step is, and not applied
	applying     bool               // it has begun to be applied, which must not happen twice
	between      bool               // no call is under way or has failed, nor panicked
	history      checkpoint.History // of all generations
	closed       bool
	failed       error // final
	ended        error // of a step after the last one
	turn         Turn  // under way
	began        bool  // Step was called
	retires      error // of Retire
	ends         bool
	defers       bool // to retire, since no other rank has what this one has
	holds        holding
	mirrors      *mirrors
	mirroring    []elastic.ID // the members whose these are

	progress any             // of Share, nil before
	handed   json.RawMessage // the progress of rank 0, as this process came

	mu         sync.Mutex // of comm, too, for other goroutines
	recoveries int
	recovering time.Duration
}

// ErrFinished is wrapped by the error of NewElastic if the others have done the last step: nobody
// needed this process, and the program should end.
var ErrFinished = elastic.ErrFinished

// Steps carries out the steps of an [Elastic], as a machine of package vm does. Reduce and Apply
// are the two halves of a step: between them the model has not changed.
type Steps interface {
	// Leave ends the use of the communicator of the last Enter, which closes next. The model stays
	// where it is or, if last is set because no Enter follows, moves to the host.
	Leave(last bool) error
	// Enter makes this process exchange gradients with other ranks, and gives it the model of rank
	// 0, or of the ranks that have parts of it, without the solver's state. It discards what Reduce
	// has left. It is collective.
	// Where ranks shard the solver's state, the option has each shard on several ranks.
	// Where ranks have parts of the model, comm has the ranks with this rank's part, and tensor
	// those of its replica; tensor is nil elsewhere.
	Enter(comm, tensor backend.Communicator, mirrors Option) (*DataParallel, error)
	// Reduce runs the n micro-batches of this rank, and combines the gradients of all.
	Reduce(n int, run func(i int) error) error
	// Apply gives the solver the gradients. It exchanges nothing.
	Apply() error
	// Spread gives all ranks what others have applied, where each applies a part. It is collective,
	// and returns once all have it.
	Spread() error
}

// NewElastic makes this process take part in an elastic training: as one of the first ranks, or in
// place of one that was lost. Programs use vm.WithElastic, whose machine carries out the steps of n
// micro-batches. NewElastic waits until the job has admitted this process. The parameters, the
// solver's state and the step are then those of the other ranks.
//
// Operations that draw from a nn.Random of the graph, or of [WithRandom], draw the numbers of the
// micro-batch: Elastic sets its step before each.
//
// Errors: [ErrFinished] for a process that nobody needed; those of the job: the other ranks have
// given up on this process, too few are alive, or none alive has the parameters; those of Enter.
func NewElastic(ctx context.Context, job Job, solver solver.Solver, n int, steps Steps) (*Elastic,
	error) {
	if err := backend.Given("autograd.NewElastic", "ctx", ctx, "job", job, "solver", solver,
		"steps", steps); err != nil {
		return nil, err
	}
	e := &Elastic{ctx: ctx, job: job, solver: solver, micros: n, steps: steps}
	if err := e.regroup(); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	e.between = true
	return e, nil
}

// Next returns the number of the next step. Steps count from 0, or from the checkpoint of Load.
func (e *Elastic) Next() int { return int(e.history.Steps) }

// Load makes a new job resume from the newest checkpoint of [DataParallel.Save] in dir. Call it
// before the first Step on all ranks, replacements included. If the job has done a step,
// replacements already have the state of the others, and Load reads nothing.
//
// Errors: fs.ErrNotExist if dir has no checkpoint, so that a program can begin training;
// ErrArgument after a Step. Others are final: those of [DataParallel.Load] and of Step.
func (e *Elastic) Load(dir string, opts ...LoadOption) error {
	if err := backend.Given("Elastic.Load", "opts", opts); err != nil {
		return err
	}
	if e.began {
		return fmt.Errorf("autograd: Elastic.Load: %w: call it before the first Step",
			backend.ErrArgument)
	}
	if e.failed != nil {
		return e.failed
	}
	if e.step > 0 {
		return nil
	}
	var absent error
	err := e.do(Turn{Exchange: func() error {
		err := e.dp.Load(dir, e.solver, nil, opts...)
		if absent = nil; errors.Is(err, fs.ErrNotExist) {
			absent, err = err, nil
		}
		return err
	}})
	return cmp.Or(err, absent)
}

// Share makes progress, a pointer to whatever else the program needs to go on, as JSON, a part of
// what replacements get from rank 0, as a checkpoint has it. In a replacement Share sets it, so
// call it before the first step on all ranks, and change the progress only in [Turn].Apply.
func (e *Elastic) Share(progress any) error {
	if err := backend.Given("Elastic.Share", "progress", progress); err != nil {
		return err
	}
	e.progress = progress
	if e.handed == nil {
		return nil
	}
	if err := json.Unmarshal(e.handed, progress); err != nil {
		return wrapped("the progress of rank 0: %w", err)
	}
	return nil
}

// Retire makes this process leave the job without a lost step, as before its host goes away: after
// a step, once another rank has the parameters, a standby that has just got them if need be. Step
// returns why then, and the others go on. Call it between steps.
func (e *Elastic) Retire(why error) { e.retires = cmp.Or(e.retires, why) }

// Ends reports whether all ranks have called Retire, and no other process is ready: the program
// saves, and ends.
func (e *Elastic) Ends() bool { return e.ends }

// Rank returns the number of this rank among the present ones, and Size how many there are, tensor
// ranks included.
func (e *Elastic) Rank() int { return e.comm.Rank() }

// Size returns how many ranks there are at present.
func (e *Elastic) Size() int { return e.comm.Size() }

// Comm returns the communicator of the present ranks, which Elastic closes. Another goroutine may
// call it, for metrics.
func (e *Elastic) Comm() backend.Communicator {
	if e == nil {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.comm
}

// Recoveries returns how many steps of this process lost a rank, and the total time from these
// losses to the ends of their steps. Another goroutine may call it.
func (e *Elastic) Recoveries() (n int, took time.Duration) {
	if e == nil {
		return 0, 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.recoveries, e.recovering
}

// DataParallel returns the DataParallel of the present ranks, for Check, Hash and Save in After.
// Its Load returns an error: call the Load of Elastic.
func (e *Elastic) DataParallel() *DataParallel { return e.dp }

// Step does a step on all ranks: run is called for each micro-batch of this rank, runs the graph
// for it and returns its loss. The mean of all losses is returned, bitwise identical on all ranks.
// If a rank is lost meanwhile, the others repeat the step, and run is called again for their
// micro-batches, and for others: what it feeds the graph must depend only on the step and the
// number of the micro-batch.
//
// Errors: those of run and of the solver; those of [NewElastic]. They are final.
func (e *Elastic) Step(run func(micro int) (loss float64, err error)) (loss float64, err error) {
	if err := backend.Given("Elastic.Step", "run", run); err != nil {
		return 0, err
	}
	err = e.Do(Turn{Run: run, Apply: func(mean float64) { loss = mean }})
	return loss, err
}

// Turn is a step with what a program does beside it on all ranks, or only that.
type Turn struct {
	// Run is what [Elastic.Step] takes; nil for a turn that trains nothing, in which Exchange may
	// call DataParallel().Load.
	Run func(micro int) (loss float64, err error)
	// Exchange makes collective calls, after Run; nil for none. If a rank is lost the others repeat
	// the turn, so Exchange leaves what the program remembers to Apply.
	Exchange func() error
	// Apply is called once in each turn on each rank that has done it, and exchanges nothing; nil
	// for none. loss is the mean of Run's, the same on all ranks.
	Apply func(loss float64)
}

// Do does a turn: a step with more in it, or something else. All ranks do the same turns.
func (e *Elastic) Do(t Turn) error {
	e.began = true
	return e.do(t)
}

func (e *Elastic) do(t Turn) error {
	e.between = false
	if e.failed == nil {
		e.failed, e.turn = errPanicked, t
		e.failed = e.finish()
	}
	e.between = e.failed == nil || e.retires != nil && errors.Is(e.failed, e.retires)
	return e.failed
}

// finish does the turn, in as many tries as it takes.
func (e *Elastic) finish() error {
	var lost time.Time // when a rank was
	for before := e.step; ; {
		regroups, err := e.try()
		switch {
		case err == nil:
			if e.recovered(lost, true); !regroups {
				return nil
			}
			if e.retires == nil || e.defers {
				e.job.Job().Admits(e.view.Generation)
				return e.regroup()
			}
			_ = e.dp.saver.Close(nil) // whose locks are the next rank 0's from here on
			e.job.Job().Retires(e.view.Generation)
			if err = e.regroup(); errors.As(err, new(*elastic.StoppedError)) {
				err = e.retires
			}
			return err
		}
		if lost.IsZero() {
			lost = time.Now()
		}
		if err := e.broken(err, false); err != nil {
			return err
		}
		if err := e.regroup(); err != nil {
			return err
		}
		if e.step > before {
			e.recovered(lost, false)
			return nil
		}
	}
}

// broken ends the present generation because of an error, which may be the loss of a rank, or
// counts as one if lost is set. It returns the error if it is final.
func (e *Elastic) broken(err error, lost bool) error {
	if e.applying || !lost && !lostRank(err) {
		return err
	}
	e.comm.Abort(err) // what this rank's device has begun ends, too
	e.job.Job().Broken(e.view, err)
	return nil
}

// recovered notes that the step is done although it lost a rank, and reports it if the others have
// repeated the step.
func (e *Elastic) recovered(lost time.Time, repeated bool) {
	if lost.IsZero() {
		return
	}
	took := time.Since(lost)
	e.mu.Lock()
	e.recoveries, e.recovering = e.recoveries+1, e.recovering+took
	e.mu.Unlock()
	if !repeated {
		return
	}
	ranks, what := fmt.Sprintf("%d ranks", e.Size()), fmt.Sprint("step ", e.Next()-1)
	if e.Size() == 1 {
		ranks = "1 rank"
	}
	switch {
	case e.turn.Run == nil && e.Next() == 0:
		what = "the beginning"
	case e.turn.Run == nil:
		what = "what follows " + what
	}
	e.dp.say(fmt.Sprintf("%s was repeated by %s: it is done %.2f s after a rank was lost", what,
		ranks, took.Seconds()))
}

// errPanicked is the error of calls after one that has panicked.
var errPanicked = errors.New("autograd: a call of this elastic training has panicked")

// lostRank reports whether an error may follow from the loss of a rank.
func lostRank(err error) bool {
	return errors.As(err, new(*backend.Error)) || errors.As(err, new(*rendezvous.Failure))
}

// try does the turn on the present ranks, and reports whether replacements are to be let in after
// it, or ranks retire. A rank applies the step once it knows that all ranks have its gradients,
// because all have entered commit. By then it also has the loss.
func (e *Elastic) try() (regroups bool, err error) {
	if err = cmp.Or(e.ended, e.dp.mirrors.gone()); err == nil && e.turn.Run != nil {
		err = e.reduce()
	}
	if err == nil && e.turn.Exchange != nil {
		e.dp.elastic = e.turn.Run != nil
		err = e.turn.Exchange()
		e.dp.elastic = true
	}
	if err != nil {
		return false, err
	}
	e.reduced = true
	e.job.Job().At(elastic.Position{Step: e.step, Phase: elastic.Reduced})
	if regroups, err = e.commit(); err != nil {
		return false, err
	}
	if err = e.apply(); err == nil && e.turn.Run != nil {
		err = e.steps.Spread()
	}
	if err == nil && e.After != nil && e.turn.Run != nil {
		if err = e.After(); lostRank(err) {
			e.dp.say(fmt.Sprintf("After has failed behind step %d: %v", e.Next()-1, err))
		}
	}
	if err == nil {
		e.job.Job().Stepped(e.view.Generation)
	}
	return regroups, err
}

// reduce runs the micro-batches of this rank, and combines the gradients and losses of all.
func (e *Elastic) reduce() error {
	losses := make([]float64, e.share)
	err := e.steps.Reduce(e.share, func(i int) (err error) {
		if random := e.dp.model.random; random != nil {
			random.Seek(e.history.Steps*uint64(e.micros)+uint64(e.first+i), 0)
		}
		losses[i], err = e.turn.Run(e.first + i)
		return err
	})
	if err == nil {
		e.loss, err = TreeMean(e.data, losses)
	}
	return err
}

// commit is the barrier between the exchange of a step and its application. It reports whether
// replacements are let in, or ranks retire.
func (e *Elastic) commit() (regroups bool, err error) {
	const ( // what a rank says
		waits   = 1 << iota // there is a replacement, and room for it
		ready               // there is a replacement
		retires             // this rank retires
		stays               // this rank does not
	)
	said := byte(stays)
	if e.retires != nil {
		said = retires
	}
	for flag, holds := range map[byte]func() bool{waits: e.job.Job().Waits,
		ready: e.job.Job().Ready} {
		if holds() {
			said |= flag
		}
	}
	notes, err := group.OverComm(backend.Label(e.comm, backend.ForMean))([]byte{said})
	if err != nil {
		return false, err
	}
	said = 0
	for _, note := range notes {
		said |= note[0]
	}
	wants := func(r int) bool { return notes[r][0]&retires > 0 }
	e.ends = said&(stays|ready) == 0
	goes := said&retires > 0 && !e.ends
	switch {
	case e.view.Parts == 0:
		e.defers = !e.dp.mirrors.leaves(e.Rank(), wants)
	case said&ready == 0: // nobody to hand a part over to
		goes = goes && e.leaves(wants)
	}
	return said&waits > 0 || goes, nil
}

// leaves reports whether one of the ranks that want to may leave: another one with its part of the
// model stays, the first one where all of them want to.
func (e *Elastic) leaves(wants func(rank int) bool) bool {
	for r, at := range e.view.At {
		for o, other := range e.view.At {
			if wants(r) && other.Part == at.Part && o != r && (o < r || !wants(o)) {
				return true
			}
		}
	}
	return false
}

// apply gives the solver the gradients of the step. An error is final, whatever it is.
func (e *Elastic) apply() error {
	e.applying = true
	if e.turn.Run != nil {
		if err := e.steps.Apply(); err != nil {
			return wrapped("step %d of an elastic training: %w", e.Next(), err)
		}
		e.history.Steps++
	} else {
		e.history.Steps = e.dp.saver.Steps // of a Load
	}
	if e.step, e.reduced, e.applying = e.step+1, false, false; e.turn.Apply != nil {
		e.turn.Apply(e.loss)
	}
	e.dp.hold(e.turn.Run != nil)
	e.job.Job().At(elastic.Position{Step: e.step, Phase: elastic.Computing})
	return nil
}

// regroup makes this process a rank of the next generation, or of one after it.
func (e *Elastic) regroup() error {
	for {
		comm, view, err := e.job.Next(e.ctx, e.leaveFor)
		if err != nil {
			return err
		}
		// A replacement may be unfit: it ends, and the others go on.
		fresh := view.At[comm.Rank()].Phase == elastic.Empty
		unfit := e.left == nil && len(view.Fresh()) > 0 && !fresh
		if err = e.enter(comm, view); err == nil {
			return nil
		}
		if final := e.broken(err, unfit && !errors.As(err, new(*lostPart))); final != nil {
			return final
		}
	}
}

// leaveFor applies the step that the others have applied, and leaves the previous ranks.
func (e *Elastic) leaveFor(view elastic.View) error {
	if e.reduced && e.step < view.Next() {
		if err := e.apply(); err != nil {
			return err
		}
	}
	e.reduced = false
	e.left = errors.Join(e.left, e.steps.Leave(false))
	_ = e.leave() // of ranks that are lost
	return nil
}

// enter gets the state from a rank that has one.
func (e *Elastic) enter(comm backend.Communicator, view elastic.View) (err error) {
	e.mu.Lock()
	e.comm = comm
	e.mu.Unlock()
	e.view = view
	if err, e.left = e.left, nil; err != nil {
		return err
	}
	fresh := view.At[comm.Rank()].Phase == elastic.Empty
	switch ends := view.Ending && view.Parts > 0; {
	case ends && fresh:
		return &elastic.StoppedError{Why: elastic.Finished}
	case ends: // no step follows, and replicas may lack ranks
		e.step, e.ended = view.Next(), fmt.Errorf("autograd: elastic training: %w: a rank that "+
			"has a part of the model has left before the last step", backend.ErrClosed)
		e.job.Job().CaughtUp(view.Generation)
		return nil
	}
	tensor, err := e.split()
	if err != nil {
		return err
	}
	if e.dp, err = e.steps.Enter(e.data, tensor, withMirrors(&e.holds)); e.dp != nil {
		e.dp.saver.History, e.dp.elastic = e.history, true
	}
	if err == nil && e.dp.mirrors.gone() != nil && !view.Ending { // else no step follows
		err = e.dp.mirrors.lost
	}
	if tensor != nil && !lostRank(err) { // ranks with other parts do not wait for this one
		err = Agree(backend.Label(comm, backend.ForNew), "", err)
	}
	if err != nil {
		return e.mirrors.name(err, e.mirroring)
	}
	if e.first, e.share, err = TreeShare(e.micros, e.data.Rank(), e.data.Size()); err != nil {
		return err
	}
	if len(view.Fresh()) > 0 || e.dp.mirrors.moved() {
		if err := e.handOver(); err != nil {
			return err
		}
	}
	if view.Next() > 0 {
		e.dp.hold(false)
	}
	e.mirrors, e.mirroring = e.dp.mirrors, view.Members
	if e.step != view.Next() {
		e.step = view.Next()
		e.job.Job().At(elastic.Position{Step: e.step, Phase: elastic.Computing})
	}
	e.job.Job().CaughtUp(view.Generation)
	return nil
}

// split makes the group of the ranks with this rank's part of the model, and returns that of its
// replica, nil if all have the whole.
func (e *Elastic) split() (tensor backend.Communicator, err error) {
	e.data = e.comm
	if e.view.Parts == 0 {
		return nil, nil
	}
	rank := e.comm.Rank()
	part, replica := e.view.At[rank].Part, 0
	for _, at := range e.view.At[:rank] {
		if at.Part == part {
			replica++
		}
	}
	if e.data, err = e.comm.Split(part, rank); err == nil {
		tensor, err = e.comm.Split(replica, part)
	}
	return tensor, err
}

// handed is what rank 0 tells replacements before it sends tensors.
type handed struct {
	checkpoint.Stamp
	Tensors  []like
	Progress json.RawMessage `json:",omitempty"`
	Wrong    string          `json:",omitempty"` // with the progress
}

// like describes a tensor of a checkpoint.
type like struct {
	Name  string
	DType backend.DType
	Len   int
	Param int `json:",omitempty"` // 1 + whose vector it is, if ranks have parts of it
}

// handOver gives replacements what a checkpoint has of rank 0's solver and says of the training,
// and all ranks the parts of it that they have from now on; Enter has given them the model. Tensors
// go one by one: all of them in one piece would take two more copies, while all ranks wait.
func (e *Elastic) handOver() error {
	of := handed{Stamp: checkpoint.Stamp{Step: e.history.Steps, Training: e.history.Training,
		Best: e.history.Best}}
	fresh := e.view.At[e.comm.Rank()].Phase == elastic.Empty
	all := map[string]backend.Buffer{}
	if e.data.Rank() == 0 || e.dp.mirrors != nil && !fresh {
		if e.progress != nil {
			var err error
			if of.Progress, err = marshal(e.progress); err != nil {
				of.Wrong = err.Error()
			}
		}
		var err error
		if of.Tensors, err = e.has(all); err != nil {
			return err
		}
	}
	text, err := json.Marshal(of)
	if err != nil {
		return err
	}
	texts, err := group.FramedOver(e.data)(text)
	if err != nil {
		return err
	}
	of = handed{}
	if err := json.Unmarshal(texts[0], &of); err != nil {
		return wrapped("the training of rank 0: %w", err)
	}
	if of.Wrong != "" { // who comes ends; if rank 0 alone failed, it and the next ones would
		return wrapped("the progress of Elastic.Share on rank 0: %w", errors.New(of.Wrong))
	}
	for _, t := range of.Tensors {
		memory, has := all[t.Name]
		if t.Param > 0 {
			memory, err = e.dp.redivide(e.dp.params[t.Param-1], memory, t.DType)
		} else {
			if !has {
				memory = residence.Zeros(t.DType, t.Len)
			}
			c := backend.Collective{Kind: backend.Broadcast}
			err = group.RunOnHost(e.data, c, memory, memory)
		}
		if err != nil {
			return err
		}
		if fresh || t.Param > 0 {
			all[t.Name] = memory
		}
	}
	if fresh {
		e.history = checkpoint.History{Steps: of.Step, Training: of.Training, Best: of.Best}
		e.dp.saver.History = e.history
		e.handed = of.Progress
	} else if !e.dp.mirrors.moved() {
		return nil
	}
	state := map[string]backend.Buffer{}
	_, keyOf := e.dp.wanted(loaded{record: record{Format: namedFormat}}, e.solver)
	for name, memory := range all {
		state[keyOf(name)] = memory
	}
	return e.solver.SetState(state)
}

// has lists what this rank has of the solver's state, with the names that a checkpoint gives it.
// Vectors of which ranks have parts come last. Before the first step these are zeros, unless the
// program has given rank 0's solver whole ones.
func (e *Elastic) has(all map[string]backend.Buffer) (list []like, err error) {
	kept, err := e.solver.State()
	if err != nil {
		return nil, err
	}
	var divided []like
	if s := e.dp.mirrors; s != nil {
		vectors, whole := e.dp.vectors(e.solver), true
		for key, v := range vectors {
			part, ok := kept[key]
			whole = whole && (!ok || part.Len() == v.of.size)
		}
		for _, key := range slices.Sorted(maps.Keys(vectors)) {
			v := vectors[key]
			if part, ok := kept[key]; ok && (whole || !s.begins) {
				all[v.file] = part
				divided = append(divided, like{v.file, v.dtype, v.of.size, 1 + v.of.index})
			}
			delete(kept, key)
		}
	}
	state := map[string]stored{}
	add(state, kept)
	for _, t := range e.dp.listed(state, e.solver) {
		all[t.Name] = t.Data
		list = append(list, like{Name: t.Name, DType: t.Data.DType(), Len: t.Data.Len()})
	}
	return append(list, divided...), nil
}

// leave leaves the previous ranks, which can no longer exchange anything.
func (e *Elastic) leave() error {
	if e.dp != nil {
		e.dp.Close() // which ends a SaveAsync
		steps := e.history.Steps
		e.history = e.dp.saver.History
		e.history.Steps = steps
	}
	return e.job.Release(e.comm)
}

// Close ends this process's part in the job. The process has then done its last step, unless a call
// has returned an error or panicked. The others may finish theirs. Later calls, and calls on nil,
// do nothing.
func (e *Elastic) Close() error {
	if e == nil || e.closed {
		return nil
	}
	e.closed = true
	err := errors.Join(e.job.Close(e.between), e.steps.Leave(true), e.leave())
	e.failed = cmp.Or(e.failed, fmt.Errorf("autograd: elastic training: %w", backend.ErrClosed))
	return err
}
