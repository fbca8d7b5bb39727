package elastic

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
)

// Observer follows a job from outside, and tells it which processes have ended. Methods may be
// called by several goroutines.
type Observer struct {
	register Register
	decided  func(next View, behind []ID)

	mu   sync.Mutex
	job  *Process   // that is never ready
	next int        // the first entry of the log that it has not heard
	left map[ID]int // those that have said that they have no step left, and which was next
	lost bool       // nobody has the state of the training
}

// NewObserver returns an observer of a job with this first generation. It tells decided each later
// one, and which members the others have left behind, alive.
func NewObserver(r Register, first View, decided func(next View, behind []ID)) *Observer {
	p, _ := NewNewcomer(0, Limits{}, first)
	return &Observer{register: r, decided: decided, job: p, left: map[ID]int{}}
}

// Bury tells the job that a process has ended. It reports whether this one had done its last step,
// and whether any process has, as far as the log says before.
func (o *Observer) Bury(ctx context.Context, id ID) (left, finished bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, err = write(ctx, o.register, o.next, record{Dead: id}, o.hear)
	_, left = o.left[id]
	return left, len(o.left) > 0, err
}

// Awaited returns the members that are alive and have not stopped although another one waits for
// that. If none with the state of the training waits, whole is false.
func (o *Observer) Awaited() (ids []ID, whole bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.job.awaited()
}

// Holders returns the members that are alive and have the state of the training, as they had when
// they entered their generation, or have posted since.
func (o *Observer) Holders() (ids []ID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for rank, id := range o.job.view.Members {
		has := o.job.view.At[rank].Phase != Empty || o.job.posted[id].Position.Phase != Empty
		if has && !o.job.dead[id] {
			ids = append(ids, id)
		}
	}
	return ids
}

// Idle reports whether a process waits, ready, to be let in.
func (o *Observer) Idle(id ID) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, ready := o.job.posted[id]
	return ready && o.job.view.Rank(id) < 0
}

// Over reports whether a process takes no part in the job any more, and whether it has done the
// last step: one that has closed its part before another one had done more steps has not.
func (o *Observer) Over(id ID) (over, done bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	step, left := o.left[id]
	last := 0
	for _, s := range o.left {
		last = max(last, s)
	}
	trains := slices.ContainsFunc(o.job.alive(o.job.view.Members), func(id ID) bool {
		_, left := o.left[id]
		return !left
	})
	return left || o.job.dead[id] || len(o.left) > 0 && !trains, left && step == last
}

// Follow follows the job until ctx ends. It returns a [StoppedError] if the state is lost.
func (o *Observer) Follow(ctx context.Context) error {
	for {
		o.mu.Lock()
		next, lost := o.next, o.lost
		o.mu.Unlock()
		if lost {
			return &StoppedError{Why: StateLost}
		}
		text, err := o.register.Get(ctx, logKey(next))
		if err != nil {
			return err
		}
		o.mu.Lock()
		if o.next == next { // Bury has not heard it meanwhile
			o.hear(text)
		}
		o.mu.Unlock()
	}
}

// hear takes the next entry of the log. o.mu is held.
func (o *Observer) hear(text []byte) {
	o.next++
	var entry record
	if json.Unmarshal(text, &entry) != nil {
		return // no process writes such
	}
	e := entry.event()
	if p, ok := e.(Posted); ok && p.Position.Leaving {
		o.left[p.ID] = p.Position.Step
	}
	if v, ok := e.(Decided); ok && v.View.Generation == o.job.view.Generation+1 {
		o.decided(v.View, o.job.leavesBehind(v.View))
	}
	if e == nil {
		return
	}
	// Step would hear nothing once nobody waits for newcomers any more.
	for _, a := range e.apply(o.job) {
		s, stops := a.(Stop)
		o.lost = o.lost || stops && s.Why == StateLost && len(o.left) == 0
	}
}
