package elastic

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
)

// Entry waits for an entry of the log of a job, which are numbered from 0, and returns what it
// tells: nil for nothing.
func Entry(ctx context.Context, r Register, i int) (Event, error) {
	text, err := r.Get(ctx, fmt.Sprintf("%s/%d", logKey, i))
	if err != nil {
		return nil, fmt.Errorf("read the log of the elastic job: %w", err)
	}
	return decode(text), nil
}

// decode returns what the text of an entry tells, nil for nothing.
func decode(text []byte) Event {
	var entry record
	if json.Unmarshal(text, &entry) != nil {
		return nil // no process writes such
	}
	return entry.event()
}

// Bury writes to the log of a job that a process has ended, in entry i or after it. hear is given
// the entries from i to there.
func Bury(ctx context.Context, r Register, i int, id ID, hear func(i int, e Event)) error {
	at, err := write(ctx, r, i, record{Dead: id}, func(text []byte) bool {
		hear(i, decode(text))
		i++
		return false
	})
	if err == nil {
		hear(at, Dead{id})
	}
	return err
}

// Observer knows how a job is, from its log.
type Observer struct {
	decided func(next View, behind []ID)
	job     *Process   // that is never ready
	left    map[ID]int // those that have said that they have no step left, and which was next
	lost    bool
}

// NewObserver returns an observer of a job with this first generation. It tells decided each later
// one, and which members the others have left behind, alive.
func NewObserver(first View, decided func(next View, behind []ID)) *Observer {
	p, _ := NewReplacement(0, Limits{}, first)
	return &Observer{decided: decided, job: p, left: map[ID]int{}}
}

// Hear takes the next entry of the log.
func (o *Observer) Hear(e Event) {
	if p, ok := e.(Posted); ok && p.Position.Leaving {
		o.left[p.ID] = p.Position.Step
	}
	if v, ok := e.(Decided); ok && v.View.Generation == o.job.view.Generation+1 {
		o.decided(v.View, o.job.leavesBehind(v.View))
	}
	if e == nil {
		return
	}
	// Step would hear nothing once nobody waits for replacements any more.
	for _, a := range e.apply(o.job) {
		s, stops := a.(Stop)
		o.lost = o.lost || stops && s.Why == StateLost && len(o.left) == 0
	}
}

// Lost returns a [StoppedError] if no process has the state of the training any more.
func (o *Observer) Lost() error {
	if !o.lost {
		return nil
	}
	return &StoppedError{Why: StateLost}
}

// Left reports whether a process has done its last step, and whether any process has.
func (o *Observer) Left(id ID) (left, finished bool) {
	_, left = o.left[id]
	return left, len(o.left) > 0
}

// Awaited returns the members that are alive and have not stopped although another one waits for
// that. If none with the state of the training waits, whole is false.
func (o *Observer) Awaited() (ids []ID, whole bool) { return o.job.awaited() }

// Holders returns the members that are alive and have the state of the training, as they had when
// they entered their generation, or have said since.
func (o *Observer) Holders() (ids []ID) {
	for rank, id := range o.job.view.Members {
		has := o.job.view.At[rank].Phase != Empty || o.job.holds[id] ||
			o.job.posted[id].Position.Phase != Empty
		if has && !o.job.dead[id] {
			ids = append(ids, id)
		}
	}
	return ids
}

// Part returns the part of the model that a process is made for.
func (o *Observer) Part(id ID) int {
	if r := o.job.view.Rank(id); r >= 0 {
		return o.job.view.At[r].Part
	}
	return o.job.posted[id].Position.Part
}

// Idle reports whether a process is ready, and not let in.
func (o *Observer) Idle(id ID) bool {
	_, ready := o.job.posted[id]
	return ready && o.job.view.Rank(id) < 0
}

// Over reports whether a process takes no part in the job any more, and whether it has done the
// last step: one that has closed its part before another one had done more steps has not.
func (o *Observer) Over(id ID) (over, done bool) {
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
