package sparse

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// residual is what later calls need of one operand, by its state key.
type residual struct {
	n        int
	home     *memory        // where kept is; nil before the first call
	kept     backend.Buffer // F32; empty without feedback, and before the first call
	restored []float32      // by SetState, until the first call
	calls    int
	most     counts
	plan     plan  // of the last call
	last     *call // the last one
	before   *call // the one before it
	past     past
}

// counts are the most elements that a rank has selected in each of the last two calls: in call
// i at i%2, -1 if there was none.
type counts [2]int

// of returns the place for the count of a call. Until the call has finished, it holds the count of
// the call two before it.
func (c *counts) of(call int) *int { return &c[call%len(c)] }

// past is what a residual was before its last call: for Undo.
type past struct {
	known       bool
	calls, most int
	kept        backend.Buffer // on a strict communicator
}

// countCall counts a call.
func (r *residual) countCall() {
	r.past.calls, r.past.most, r.past.known = r.calls, *r.most.of(r.calls), true
	r.calls++
}

// revoke takes back the count of a call that could not be started.
func (r *residual) revoke() { r.calls, r.past.known = r.past.calls, false }

// settleIn makes home the place of the residual.
func (r *residual) settleIn(home *memory, do steps) (err error) {
	if r.kept, err = home.alloc(4 * r.n); err != nil {
		return err
	}
	r.kept, r.home = r.kept.As(backend.F32), home
	if r.restored == nil {
		return nil
	}
	restored := backend.Of(r.restored)
	r.restored = nil
	return do.Move(r.kept, restored)
}

// keepPast copies the residual in the order of a call's queue, before the call changes it.
func (r *residual) keepPast(do steps) (err error) {
	if r.kept.Len() == 0 {
		return nil
	}
	p := &r.past
	if p.kept.Len() == 0 {
		if p.kept, err = r.home.alloc(4 * r.n); err != nil {
			return err
		}
		p.kept = p.kept.As(backend.F32)
	}
	return do.Copy(p.kept, r.kept)
}

// settle waits for the calls, whose callers have the errors.
func (r *residual) settle() {
	for _, k := range []*call{r.before, r.last} {
		if k != nil {
			k.settle()
		}
	}
}

// release gives back memory.
func (r *residual) release() (all error) {
	for _, b := range []*backend.Buffer{&r.kept, &r.past.kept} {
		if b.Len() > 0 {
			all = errors.Join(all, r.home.free(b.As(backend.U8)))
			*b = backend.Buffer{}
		}
	}
	return all
}

// Undo restores what a strict communicator keeps with a state to what it was before the last call,
// bit for bit. So a training step can be left out as a whole: after a [NotFiniteError] with one
// state, calls with others have sent something that nobody will apply. Every rank must call Undo
// for the same states at the same place of its program. It waits for the call; if there was none
// since the last Undo, nothing changes.
//
// Errors: ErrArgument without [WithStrict], which keeps what Undo restores.
func (c *Communicator) Undo(state int) error {
	if !c.strict {
		return fmt.Errorf("%w: %s: Undo of state %d needs WithStrict", backend.ErrArgument,
			backend.RankOf(c), state)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.residuals[state]
	if r == nil || !r.past.known {
		return nil
	}
	r.settle()
	p := &r.past
	p.known = false
	r.calls, *r.most.of(p.calls) = p.calls, p.most
	r.kept, p.kept = p.kept, r.kept
	return nil
}

// Reset forgets all residuals. Every rank must call it at the same place of its program.
func (c *Communicator) Reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.replace(map[int]*residual{})
}

// replace waits for the calls under way, and replaces all residuals by others.
func (c *Communicator) replace(others map[int]*residual) {
	for _, r := range c.residuals {
		r.settle()
		if r.home != nil {
			_ = r.release() // it was allocated, and nothing uses it: there is no error
		}
	}
	c.residuals = others
}

// What State calls the two parts of a residual: the elements, f32, none without
// feedback; and four i64: its length, its calls, and the most elements that a rank has
// selected in the last two.
const (
	residualOf = "sparse.residual."
	countsOf   = "sparse.counts."
)

// stateWords is how many words the counts are in a state.
const stateWords = 4

// State returns a copy of all that later calls depend on, by name, for a checkpoint. Each rank has
// its own. State waits for calls under way.
func (c *Communicator) State() (map[string]backend.Buffer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	state := map[string]backend.Buffer{}
	for key, r := range c.residuals {
		r.settle()
		if r.calls == 0 { // those that were tried did not start, or are undone
			continue
		}
		kept, err := r.download(c.Device())
		if err != nil {
			return nil, fmt.Errorf("%s: the residual of sparse state %d: %w", backend.RankOf(c),
				key, err)
		}
		n := strconv.Itoa(key)
		state[residualOf+n] = backend.Of(kept)
		state[countsOf+n] = backend.Of([]int64{int64(r.n), int64(r.calls), int64(r.most[0]),
			int64(r.most[1])})
	}
	return state, nil
}

// download returns the elements, while no call is under way.
func (r *residual) download(d backend.Device) ([]float32, error) {
	if !r.kept.Device() {
		// one of them is empty
		return slices.Clone(append(r.restored, backend.View[float32](r.kept)...)), nil
	}
	q := d.Default()
	elements := make([]float32, r.n)
	if err := q.Move(backend.Of(elements), r.kept); err != nil {
		return nil, err
	}
	done, err := q.Record()
	if err != nil {
		return nil, err
	}
	return elements, done.Join(context.Background())
}

// SetState restores the communicator to what it was when State returned this state: later calls
// give bitwise identical results. Other names are ignored. Every rank must call it at the same
// place of its program, with its own state.
//
// Errors: ErrArgument for a state that is damaged, or comes from other options; nothing is changed
// then.
func (c *Communicator) SetState(state map[string]backend.Buffer) error {
	residuals, err := c.parse(state)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.replace(residuals)
	return nil
}

// CheckState returns the error that SetState would, or that the next calls would if the operands
// with states 1, 2 and so on are like these; it changes nothing. Of these operands only the lengths
// matter.
func (c *Communicator) CheckState(state map[string]backend.Buffer,
	operands []backend.Buffer) error {
	residuals, err := c.parse(state)
	if err != nil {
		return err
	}
	for i, x := range operands {
		if r := residuals[i+1]; r != nil && r.n != x.Len() {
			return fmt.Errorf("%w: %s: the sparse state %d is of %d elements, the operand has %d",
				backend.ErrArgument, backend.RankOf(c), i+1, r.n, x.Len())
		}
	}
	return nil
}

// parse makes the residuals of a state.
func (c *Communicator) parse(state map[string]backend.Buffer) (map[int]*residual, error) {
	residuals := map[int]*residual{}
	for name := range state {
		n, ok := strings.CutPrefix(name, countsOf)
		if !ok {
			if n, ok = strings.CutPrefix(name, residualOf); !ok {
				continue
			}
		}
		key, err := strconv.Atoi(n)
		if residuals[key] != nil {
			continue // it has both names
		}
		if err == nil {
			elements, found := state[residualOf+n]
			residuals[key], err = c.restore(state[countsOf+n], elements, found)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %s: the sparse state %s: %w", backend.ErrArgument,
				backend.RankOf(c), n, err)
		}
	}
	return residuals, nil
}

// restore makes a residual of its parts. For a top-k, missing elements used to stand for zeros.
func (c *Communicator) restore(numbers, elements backend.Buffer, found bool) (*residual, error) {
	if numbers.DType() != backend.I64 || numbers.Len() != stateWords {
		return nil, fmt.Errorf("its counts are %d %v, want %d i64", numbers.Len(), numbers.DType(),
			stateWords)
	}
	v := backend.View[int64](numbers)
	if v[0] < 1 || v[1] < 0 || min(v[2], v[3]) < -1 || max(v[2], v[3]) > v[0] {
		return nil, fmt.Errorf("its counts say that, of %d elements, %d and %d were selected in "+
			"the last two of %d calls", v[0], v[2], v[3], v[1])
	}
	r := &residual{n: int(v[0]), calls: int(v[1]), most: counts{int(v[2]), int(v[3])}}
	want := 0
	if c.feedback {
		want = r.n
	}
	switch {
	case c.how.density != 0 && found && elements.Len() == 0:
		r.restored = make([]float32, want)
	case elements.Len() != want || want > 0 && elements.DType() != backend.F32:
		return nil, fmt.Errorf("its residual is %d %v, want %d f32: is it of a run with other "+
			"options?", elements.Len(), elements.DType(), want)
	case want > 0:
		r.restored = slices.Clone(backend.View[float32](elements))
	}
	return r, nil
}
