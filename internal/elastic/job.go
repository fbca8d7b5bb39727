package elastic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Register is a store that outlives the processes of a job: see rendezvous.Log.
type Register interface {
	Get(ctx context.Context, key string) ([]byte, error)
	Set(ctx context.Context, key string, value []byte) error
	CompareAndSwap(ctx context.Context, key string, old, new []byte) (current []byte, swapped bool,
		err error)
	Append(ctx context.Context, key string, i int, value []byte) (at int, err error)
	Entries(ctx context.Context, key string, i int) ([][]byte, error)
}

// record is an entry of the log in a register, in which all that processes tell each other is in
// one order. One of its fields is set.
type record struct {
	Hello   ID      `json:",omitempty"` // a replacement begins to read
	Revoked *int    `json:",omitempty"` // a generation
	Posted  *Posted `json:",omitempty"`
	Lives   *Lives  `json:",omitempty"`
	Holds   *Holds  `json:",omitempty"`
	Took    *Took   `json:",omitempty"`
	Decided *View   `json:",omitempty"`
	Dead    ID      `json:",omitempty"`
}

// logKey is of the log in the register.
const logKey = "elastic/log"

// write appends a record to the log, as entry i at the earliest, and returns its index. passes is
// given the entries from i to there, and says whether one makes the record needless.
func write(ctx context.Context, r Register, i int, entry record, passes func(text []byte) bool) (
	int, error) {
	text, err := json.Marshal(entry)
	for ; err == nil; i++ {
		var there []byte
		var done bool
		there, done, err = r.CompareAndSwap(ctx, fmt.Sprintf("%s/%d", logKey, i), nil, text)
		if done || err == nil && passes(there) {
			return i, nil
		}
	}
	return 0, unwritten(err)
}

func unwritten(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("write to the log of the elastic job: %w", err)
}

// grace is how long members that have stopped wait for the others to post where they have. A rank
// that is dead is known to be, so only one that is stopped or cut off takes as long. It counts from
// when a member hears its own post: where the register is late, so are the posts of the others.
//
// A member that lives and is busy, such as with a micro-batch, with planning or in After, is waited
// for longer: half of the time in which enough processes must be there. It says so lingerTime after
// it has heard that another one has stopped.
const (
	grace      = 2 * time.Second
	lingerTime = grace / 4
)

// sinceKey has the number of an entry from which a replacement can read the log. It is the decision
// of a generation before the present one: who decided on the present one had heard it all, so the
// deaths before are of processes that are no members.
const sinceKey = "elastic/since"

const (
	// left is the cause with which calls end once another process has ended, or has ended the
	// generation. Nobody is to blame for what they return.
	left = "a process of the group has ended, or has left it"
	// maxWhy bounds the text of a Blame, in bytes.
	maxWhy = 500
)

// StoppedError is why a process takes no part in its job any more.
type StoppedError struct {
	ID        ID
	Why       Reason
	Unreached []ID  // those that it could not reach
	Had       []ID  // those that had a part of the model that is lost
	Last      error // of its calls, nil for none
}

// Error says why, and what to do.
func (e *StoppedError) Error() string {
	why := map[Reason]string{
		Finished:   ErrFinished.Error(),
		LeftBehind: "the others go on without it: it was stopped, or cut off, for too long",
		Failing:    "the members of the job fail in each try of a step",
		Retired:    "it was told to end, and the others go on",
		Surplus: "too few others are left for another replica of the model: the process that " +
			"takes its place waits for more",
		TooFew: "too few processes are alive, and no others have come in time: start more " +
			"(--standby), or lower --min-ranks",
		StateLost: "all processes that had the parameters have died: start the job again from " +
			"its last checkpoint",
	}
	text := why[e.Why]
	if len(e.Had) > 0 {
		text = strings.Replace(text, "that had the parameters", "that had one part of the "+
			"parameters ("+names(e.Had)+")", 1)
	}
	if e.Why == LeftBehind && (len(e.Unreached) > 0 ||
		e.Last != nil && !strings.Contains(e.Last.Error(), left)) {
		text = "the others go on without it"
	}
	if len(e.Unreached) > 0 {
		text += "; " + (&UnreachedError{e.Unreached}).Error()
	}
	if e.Last != nil {
		text += fmt.Sprintf("; its last error: %v", e.Last)
	}
	if e.ID == 0 { // of an Observer
		return "elastic: " + text
	}
	return fmt.Sprintf("elastic: process %v: %s", e.ID, text)
}

// UnreachedError names processes that this one cannot reach.
type UnreachedError struct{ IDs []ID }

// Error names them, and says what to look at.
func (e *UnreachedError) Error() string {
	return fmt.Sprintf("it cannot reach %s: is a link down, or a port closed?", names(e.IDs))
}

func names(ids []ID) string {
	all := make([]string, len(ids))
	for i, id := range ids {
		all[i] = "process " + id.String()
	}
	return strings.Join(all, ", ")
}

// Unwrap returns the last error.
func (e *StoppedError) Unwrap() error { return e.Last }

// ErrFinished is a StoppedError whose reason is Finished.
var ErrFinished = errors.New("the others have done the last step")

// Is reports whether a Finished is compared with ErrFinished.
func (e *StoppedError) Is(target error) bool { return e.Why == Finished && target == ErrFinished }

// Job is a Process that is driven by a register. Methods may be called by several goroutines.
type Job struct {
	id       ID
	first    View // of the job
	register Register
	parts    int           // of the model, 0 for one
	part     int           // that this process is made for
	patience time.Duration // for enough processes
	over     context.Context
	end      context.CancelCauseFunc
	running  sync.WaitGroup
	reach    Unreached
	writes   chan writing
	heard    atomic.Int64 // entries of the log

	replacement func(ctx context.Context) error // begins the part of one; nil where it has begun

	mu      sync.Mutex
	since   int // the entry of the present generation's decision
	closed  bool
	process *Process
	present generation      // that it was told to connect to last
	timers  []*time.Timer   // of its end
	timed   int             // 1 more than the generation whose timers were started last
	next    chan generation // until Next takes it
	last    error           // of a generation that broke
}

// Unreached returns those of other processes that this one cannot reach, once it is sure. It
// returns nil when ctx ends. It is nil itself where all are on one machine.
type Unreached func(ctx context.Context, ids []ID) []ID

// writing is a record to write, and with a decision the entry of the one before it.
type writing struct {
	record
	since int
}

// generation is a view, and a context that ends with it.
type generation struct {
	View
	during context.Context
	end    context.CancelCauseFunc
}

// Start makes a process take part in a job: as a member of the first generation, or else as a
// replacement, which the others hear of in its first Next: they wait for it once it is let in. Less
// than limits.Least processes wait as long as patience for others.
func Start(r Register, id ID, limits Limits, first View, patience time.Duration,
	reach Unreached) *Job {
	j := &Job{id: id, first: first, register: r, patience: patience, reach: reach,
		writes: make(chan writing, 64), next: make(chan generation, 1)}
	j.over, j.end = context.WithCancelCause(context.Background())
	if first.Rank(id) >= 0 {
		p, actions := NewProcess(id, limits, first)
		j.driveFrom(p, actions, 0)
		return j
	}
	j.replacement = func(ctx context.Context) error {
		present, early, at, err := j.catchUp(ctx, first)
		if err != nil {
			return err
		}
		p, actions := NewReplacement(id, limits, present)
		p.Divide(j.parts, j.part)
		for _, e := range early {
			actions = append(actions, p.Step(e)...)
		}
		j.driveFrom(p, actions, at)
		return nil
	}
	return j
}

// Divide says how many parts the model has, and returns which one this process is to be made for: a
// replacement takes that of which the fewest are left. Call it before Next; later calls return the
// same part. An error is one of the register, or says that the first generation is not of whole
// replicas, or that there were other parts before.
func (j *Job) Divide(ctx context.Context, parts int) (part int, err error) {
	if n := len(j.first.Members); n%parts > 0 {
		return 0, fmt.Errorf("elastic: the job begins with %d ranks, and %d have the parts of the "+
			"model: start a multiple of %[2]d (-n)", n, parts)
	}
	switch {
	case parts == 1:
		return 0, nil
	case j.parts == parts:
		return j.part, nil
	case j.parts > 0:
		return 0, fmt.Errorf("elastic: the model has %d parts, and a layout of this process %d: "+
			"use one layout", parts, j.parts)
	}
	have := map[ID]int{} // those that are not dead
	for r, id := range j.first.Members {
		have[id] = r % parts
	}
	part, member := have[j.id]
	if member && j.id != j.first.Members[0] { // one says how many there are, for who observes
		return j.divided(parts, part), nil
	}
	for i := 0; ; {
		if !member {
			part = rarest(have, parts)
		}
		text, err := json.Marshal(record{Took: &Took{j.id, part, parts}})
		done := false
		if err == nil {
			key := fmt.Sprintf("%s/%d", logKey, i)
			_, done, err = j.register.CompareAndSwap(ctx, key, nil, text)
		}
		if err != nil {
			return 0, unwritten(err)
		}
		if done {
			return j.divided(parts, part), nil
		}
		texts, err := j.register.Entries(ctx, logKey, i)
		if err != nil {
			return 0, fmt.Errorf("read the log of the elastic job: %w", err)
		}
		for _, text := range texts {
			switch e := decode(text).(type) {
			case Took:
				have[e.ID] = e.Part
			case Dead:
				delete(have, e.ID)
			}
		}
		i += len(texts)
	}
}

// rarest returns the part that the fewest processes have.
func rarest(have map[ID]int, parts int) int {
	counts := make([]int, parts)
	for _, part := range have {
		counts[part]++
	}
	return slices.Index(counts, slices.Min(counts))
}

// divided notes the part of this process, and returns it.
func (j *Job) divided(parts, part int) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.parts, j.part = parts, part
	if j.process != nil { // of the first generation
		j.process.Divide(parts, part)
	}
	return part
}

// driveFrom drives a process, by the log from an entry on.
func (j *Job) driveFrom(p *Process, actions []Action, at int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.process = p
	j.heard.Store(int64(at))
	j.running.Go(j.writeAll)
	j.act(actions)
	j.running.Go(func() { j.read(at) })
}

// catchUp reads the log up to an entry of this replacement's own, and returns the present
// generation, what has happened besides, and how many entries that are.
func (j *Job) catchUp(ctx context.Context, first View) (present View, events []Event, read int,
	err error) {
	text, _, err := j.register.CompareAndSwap(ctx, sinceKey, nil, []byte("0"))
	if err == nil {
		_, err = fmt.Sscan(string(text), &j.since)
	}
	if err != nil {
		return first, nil, 0, fmt.Errorf("ask where the log of the elastic job begins: %w", err)
	}
	present = first
	own, err := write(ctx, j.register, j.since, record{Hello: j.id}, func(text []byte) bool {
		var entry record
		if json.Unmarshal(text, &entry) != nil {
			return false // no process writes such
		}
		if v := entry.Decided; v != nil && v.Generation > present.Generation {
			present = *v
		}
		if e := entry.event(); e != nil {
			events = append(events, e)
		}
		return false
	})
	return present, events, own + 1, err
}

// event returns what an entry tells a process, nil for nothing.
func (r record) event() Event {
	switch {
	case r.Revoked != nil:
		return Revoked{*r.Revoked}
	case r.Posted != nil:
		return *r.Posted
	case r.Lives != nil:
		return *r.Lives
	case r.Holds != nil:
		return *r.Holds
	case r.Took != nil:
		return *r.Took
	case r.Decided != nil:
		return Decided{*r.Decided}
	case r.Dead != 0:
		return Dead{r.Dead}
	}
	return nil
}

// read follows the log from an entry on.
func (j *Job) read(i int) {
	for {
		texts, err := j.register.Entries(j.over, logKey, i)
		for ; err == nil && len(texts) > 0; texts = texts[1:] {
			var entry record
			if err = json.Unmarshal(texts[0], &entry); err == nil {
				j.hear(i, entry)
				i++
			}
		}
		if err != nil {
			j.end(fmt.Errorf("process %v reads the log of the elastic job: %w", j.id, err))
			return
		}
	}
}

// hear takes an entry of the log.
func (j *Job) hear(i int, entry record) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.heard.Store(int64(i + 1))
	if v := entry.Decided; v != nil && v.Generation > j.process.View().Generation {
		j.since = i
	}
	if e := entry.event(); e != nil {
		j.act(j.process.Step(e))
	}
	if p := entry.Posted; p != nil && p.ID == j.id && !j.closed && j.timed <= p.Generation {
		j.timed = p.Generation + 1
		j.stopTimers() // of generations that a standby has heard of before
		j.after(grace, GraceOver{p.Generation})
		j.after(j.patience/2, LateOver{p.Generation})
		j.after(j.patience, GiveUp{p.Generation})
	}
}

// writeAll writes what act gives it, in order, until Close, or until the register does not answer.
func (j *Job) writeAll() {
	lost := false
	for w := range j.writes {
		if lost {
			continue // Close waits for no more answers
		}
		ctx, cancel := context.WithTimeout(context.Background(), j.patience)
		if err := j.write(ctx, w); err != nil {
			lost = true
			if ctx.Err() != nil {
				err = fmt.Errorf("euryale run, which keeps the log of the elastic job, has not "+
					"answered for %v (EURYALE_TIMEOUT): was it stopped? %w", j.patience, err)
			}
			j.end(fmt.Errorf("process %v: %w", j.id, err))
		}
		cancel()
	}
}

// write writes a record. A decision is long, and all members take it: it is written once. With it,
// replacements learn where the one before it is.
func (j *Job) write(ctx context.Context, w writing) error {
	if w.Decided == nil {
		text, err := json.Marshal(w.record)
		if err == nil {
			_, err = j.register.Append(ctx, logKey, int(j.heard.Load()), text)
		}
		return unwritten(err)
	}
	_, err := write(ctx, j.register, int(j.heard.Load()), w.record, func(text []byte) bool {
		v, decided := decode(text).(Decided)
		return decided && v.View.Generation >= w.Decided.Generation
	})
	if err == nil {
		err = j.register.Set(ctx, sinceKey, fmt.Append(nil, w.since))
	}
	return err
}

// act carries actions out. j.mu is held.
func (j *Job) act(actions []Action) {
	for _, a := range actions {
		if j.closed {
			return
		}
		switch a := a.(type) {
		case Revoke:
			j.writes <- writing{record: record{Revoked: &a.Generation}}
		case Probe:
			j.probe(a.View)
		case Post:
			post := &Posted{a.Generation, j.id, a.Position, a.Report}
			j.writes <- writing{record: record{Posted: post}}
		case Propose:
			j.writes <- writing{record{Decided: &a.View}, j.since}
		case Live:
			j.writes <- writing{record: record{Lives: &Lives{a.Generation, j.id}}}
		case Hold:
			j.writes <- writing{record: record{Holds: &Holds{a.Generation, j.id}}}
		case Await:
			j.after(lingerTime, Lingers(a))
		case Interrupt:
			if j.present.Generation == a.Generation && j.present.end != nil {
				j.present.end(errors.New(left))
			}
		case Connect:
			if j.present.end != nil {
				j.present.end(context.Canceled) // nobody uses the generation before any more
			}
			j.stopTimers()
			j.last = nil // what broke the generation before
			during, end := context.WithCancelCause(j.over)
			j.present = generation{a.View, during, end}
			j.next <- j.present // the last one was taken, or this process would not have posted
		case Stop:
			j.end(j.stopped(a.Why))
		}
	}
}

// stopped is why this process stops. j.mu is held.
func (j *Job) stopped(why Reason) error {
	e := &StoppedError{ID: j.id, Why: why}
	if why == StateLost && j.process.view.Parts > 0 && j.process.member() {
		e.Had = j.process.lost()
	}
	if why != Finished && why != Retired && why != StateLost && why != Surplus {
		e.Unreached, e.Last = j.process.posted[j.id].Unreached, j.last
		says := ID(0) // who tells most of why
		for id, post := range j.process.posted {
			if id != j.id && post.Why != "" && (says == 0 || post.Blames == j.id) {
				says = id
			}
		}
		if says > 0 && e.Last != nil {
			e.Last = fmt.Errorf("%w; process %v says: %s", e.Last, says, j.process.posted[says].Why)
		}
	}
	return e
}

// probe finds out whom this process cannot reach. j.mu is held.
func (j *Job) probe(v View) {
	if j.reach == nil {
		j.act(j.process.Step(Probed{Generation: v.Generation}))
		return
	}
	others := slices.DeleteFunc(j.process.alive(v.Members), func(id ID) bool { return id == j.id })
	j.running.Go(func() {
		j.step(Probed{v.Generation, j.reach(j.over, others)})
	})
}

// after gives the process an event in a while, unless it has connected before. j.mu is held.
func (j *Job) after(d time.Duration, e Event) {
	j.timers = append(j.timers, time.AfterFunc(d, func() { j.step(e) }))
}

func (j *Job) stopTimers() {
	for _, t := range j.timers {
		t.Stop()
	}
	j.timers = nil
}

// step gives the process an event.
func (j *Job) step(e Event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.act(j.process.Step(e))
}

// Next waits for the next generation of which this process is a member. The context ends with the
// generation. Errors: a [StoppedError]; the register's; the cause of ctx.
func (j *Job) Next(ctx context.Context) (v View, during context.Context, err error) {
	if j.replacement != nil {
		if err := j.replacement(ctx); err != nil {
			return View{}, nil, err
		}
		j.replacement = nil
	}
	select {
	case g := <-j.next:
		return g.divided(j.parts), g.during, nil
	case <-j.over.Done():
		err = context.Cause(j.over)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return View{}, nil, err
}

// At says where the state of this process is now.
func (j *Job) At(p Position) { j.step(At{p}) }

// Connected, CaughtUp, Stepped, Broken, Admits, Retires and Done are the events of the same names.
func (j *Job) Connected(generation int) { j.step(Connected{generation}) }

// CaughtUp: see [CaughtUp].
func (j *Job) CaughtUp(generation int) { j.step(CaughtUp{generation}) }

// Stepped: see [Stepped].
func (j *Job) Stepped(generation int) { j.step(Stepped{generation}) }

// Broken: see [Broken]. The error is why.
func (j *Job) Broken(v View, why error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	var blame Blame
	j.last = why
	if text := why.Error(); !errors.Is(why, context.Canceled) && !strings.Contains(text, left) {
		blame = Blame{v.blamed(why, j.id), text[:min(len(text), maxWhy)]}
	}
	j.act(j.process.Step(Broken{v.Generation, blame}))
}

// Admits: see [Admits].
func (j *Job) Admits(generation int) { j.step(Admits{generation}) }

// Retires: see [Retires].
func (j *Job) Retires(generation int) { j.step(Retires{generation}) }

// Waits reports whether replacements are ready, and Ready whether they are also if all members are
// there.
func (j *Job) Waits() bool { return j.asks((*Process).Waits) }

// Ready: see [Job.Waits].
func (j *Job) Ready() bool { return j.asks((*Process).Ready) }

func (j *Job) asks(f func(*Process) bool) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return f(j.process)
}

// Finish says that this process has done its last step, and ends its part.
func (j *Job) Finish(generation int) {
	j.step(Done{generation})
	j.Close()
}

// Close ends the part of this process. The others take it for dead once its connection to the
// register ends.
func (j *Job) Close() {
	j.mu.Lock()
	if !j.closed {
		j.closed = true
		close(j.writes)
		j.stopTimers()
	}
	j.mu.Unlock()
	j.end(&StoppedError{ID: j.id, Why: Finished})
	j.running.Wait()
}
