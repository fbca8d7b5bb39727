package sparse

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// What State calls the two parts of a slot: its residual, f32, empty without
// feedback; and four i64: its length, its calls, and the most elements that a rank has
// selected in the last two.
const (
	residualOf = "sparse.residual."
	countsOf   = "sparse.counts."
)

// State returns a copy of all that later calls depend on, by names, to be kept in
// a checkpoint: each rank's own. It waits for calls under way.
func (c *Communicator) State() (map[string]backend.Buffer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settle()
	state := map[string]backend.Buffer{}
	for number, s := range c.slots {
		if s.calls == 0 { // those that were tried did not start, or are undone
			continue
		}
		n := strconv.Itoa(number)
		residual, err := c.download(s)
		if err != nil {
			return nil, fmt.Errorf("%s: the residual of sparse slot %d: %w", backend.RankOf(c), number, err)
		}
		state[residualOf+n] = backend.Of(residual)
		state[countsOf+n] = backend.Of([]int64{int64(s.n), int64(s.calls), int64(s.most[0]), int64(s.most[1])})
	}
	return state, nil
}

// slotWords is how many words the counts of a slot are in a state.
const slotWords = 4

// SetState makes the communicator what it was when State returned this: later
// calls give the same bits. Other names are ignored. Every rank must do it at the
// same place of its program, with its own state.
//
// Errors: ErrArgument for a state that is damaged, or of other options; nothing
// is changed then.
func (c *Communicator) SetState(state map[string]backend.Buffer) error {
	slots, err := c.parse(state)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settle()
	for _, s := range c.slots {
		c.release(s) // it was allocated, and nothing uses it: there is no error
	}
	c.slots = slots
	return nil
}

// CheckState returns the error that SetState would, or that the next calls would if
// the operands of slots 1, 2 and so on are like these; it changes nothing. Only their
// lengths have a meaning.
func (c *Communicator) CheckState(state map[string]backend.Buffer, operands []backend.Buffer) error {
	slots, err := c.parse(state)
	if err != nil {
		return err
	}
	for i, x := range operands {
		if s := slots[i+1]; s != nil && s.n != x.Len() {
			return fmt.Errorf("%w: %s: the state of sparse slot %d is of %d elements, the operand has %d",
				backend.ErrArgument, backend.RankOf(c), i+1, s.n, x.Len())
		}
	}
	return nil
}

// parse makes the slots of a state.
func (c *Communicator) parse(state map[string]backend.Buffer) (map[int]*slot, error) {
	slots := map[int]*slot{}
	for name := range state {
		n, ok := strings.CutPrefix(name, countsOf)
		if !ok {
			if n, ok = strings.CutPrefix(name, residualOf); !ok {
				continue
			}
		}
		number, err := strconv.Atoi(n)
		if slots[number] != nil {
			continue // it has both names
		}
		if err == nil {
			residual, kept := state[residualOf+n]
			slots[number], err = c.restore(state[countsOf+n], residual, kept)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %s: the state of sparse slot %s: %w", backend.ErrArgument, backend.RankOf(c), n, err)
		}
	}
	return slots, nil
}

// restore makes a slot of its parts. A top-k without an element used to stand for a
// residual of zeros.
func (c *Communicator) restore(numbers, residual backend.Buffer, kept bool) (*slot, error) {
	want := 0
	if numbers.DType() == backend.I64 && numbers.Len() == slotWords && c.feedback {
		want = int(backend.View[int64](numbers)[0])
	}
	switch {
	case numbers.DType() != backend.I64 || numbers.Len() != slotWords:
		return nil, fmt.Errorf("its counts are %d %v, want %d i64", numbers.Len(), numbers.DType(), slotWords)
	case c.how.density != 0 && kept && residual.Len() == 0:
	case residual.Len() != want || want > 0 && residual.DType() != backend.F32:
		return nil, fmt.Errorf("its residual is %d %v, want %d f32: is it of a run with other options?", residual.Len(), residual.DType(), want)
	}
	v := backend.View[int64](numbers)
	if v[0] < 1 || v[1] < 0 || min(v[2], v[3]) < -1 || max(v[2], v[3]) > v[0] {
		return nil, fmt.Errorf("its counts say that, of %d elements, %d and %d were selected in the last two of %d calls", v[0], v[2], v[3], v[1])
	}
	s := &slot{n: int(v[0]), calls: int(v[1]), most: counts{int(v[2]), int(v[3])}}
	if residual.Len() > 0 {
		s.residual = slices.Clone(backend.View[float32](residual))
	}
	return s, nil
}
