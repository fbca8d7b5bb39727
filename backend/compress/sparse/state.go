package sparse

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// What State calls the two parts of a slot: its residual, f32, empty without
// feedback, or after a call that has passed; and four i64: its length, its calls, and
// the most elements that a rank has selected in the last two. And the races, if any, six
// i64 of each, since who resumes must not hold them again.
const (
	residualOf = "sparse.residual."
	countsOf   = "sparse.counts."
	racesOf    = "sparse.races"
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
		var residual []float32
		if s.owes { // else the next call that passes has nothing to take along, nor when it is resumed
			var err error
			if residual, err = c.download(s); err != nil {
				return nil, fmt.Errorf("%s: the residual of sparse slot %d: %w", backend.RankOf(c), number, err)
			}
		}
		state[residualOf+n] = backend.Of(residual)
		state[countsOf+n] = backend.Of([]int64{int64(s.n), int64(s.calls), int64(s.most[0]), int64(s.most[1])})
	}
	if len(c.races) > 0 {
		state[racesOf] = backend.Of(listed(c.races))
	}
	return state, nil
}

// slotWords and raceWords are how many words the counts of a slot and a race are in a state.
const slotWords, raceWords = 4, 6

// listed returns races for a state, in no order.
func listed(races map[raceKind]race) (list []int64) {
	for kind, r := range races {
		device := int64(0)
		if kind.device {
			device = 1
		}
		list = append(list, int64(kind.n), int64(kind.k), int64(kind.dtype), device, int64(r.messages), int64(r.plain))
	}
	return list
}

// unlisted returns the races of a state.
func unlisted(list backend.Buffer) (map[raceKind]race, error) {
	if list.DType() != backend.I64 || list.Len()%raceWords != 0 {
		return nil, fmt.Errorf("%d %v, want %d i64 for each race", list.Len(), list.DType(), raceWords)
	}
	races := map[raceKind]race{}
	for w := range slices.Chunk(backend.View[int64](list), raceWords) {
		races[raceKind{int(w[0]), int(w[1]), backend.DType(w[2]), w[3] != 0}] = race{time.Duration(w[4]), time.Duration(w[5])}
	}
	return races, nil
}

// SetState makes the communicator what it was when State returned this: later
// calls give the same bits. Other names are ignored. Every rank must do it at the
// same place of its program, with its own state.
//
// Errors: ErrArgument for a state that is damaged, or of other options; nothing
// is changed then.
func (c *Communicator) SetState(state map[string]backend.Buffer) error {
	slots, races, err := c.parse(state)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settle()
	for _, s := range c.slots {
		c.release(s) // it was allocated, and nothing uses it: there is no error
	}
	c.slots, c.races = slots, races
	return nil
}

// CheckState returns the error that SetState would, or that the next calls would if
// the operands of slots 1, 2 and so on are like these; it changes nothing. Only their
// lengths have a meaning.
func (c *Communicator) CheckState(state map[string]backend.Buffer, operands []backend.Buffer) error {
	slots, _, err := c.parse(state)
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

// parse makes the slots and races of a state.
func (c *Communicator) parse(state map[string]backend.Buffer) (map[int]*slot, map[raceKind]race, error) {
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
			slots[number], err = c.restore(state[countsOf+n], state[residualOf+n])
		}
		if err != nil {
			return nil, nil, fmt.Errorf("%w: %s: the state of sparse slot %s: %w", backend.ErrArgument, backend.RankOf(c), n, err)
		}
	}
	races := map[raceKind]race{}
	if list, ok := state[racesOf]; ok {
		var err error
		if races, err = unlisted(list); err != nil {
			return nil, nil, fmt.Errorf("%w: %s: the races of sparse calls in a state: %w", backend.ErrArgument, backend.RankOf(c), err)
		}
	}
	return slots, races, nil
}

// restore makes a slot of its parts.
func (c *Communicator) restore(numbers, residual backend.Buffer) (*slot, error) {
	want := 0
	if numbers.DType() == backend.I64 && numbers.Len() == slotWords && c.feedback {
		want = int(backend.View[int64](numbers)[0])
	}
	switch {
	case numbers.DType() != backend.I64 || numbers.Len() != slotWords:
		return nil, fmt.Errorf("its counts are %d %v, want %d i64", numbers.Len(), numbers.DType(), slotWords)
	case c.how.density != 0 && !c.fewest && residual.Len() == 0: // the last call has passed
	case residual.Len() != want || want > 0 && residual.DType() != backend.F32:
		return nil, fmt.Errorf("its residual is %d %v, want %d f32: is it of a run with other options?", residual.Len(), residual.DType(), want)
	}
	v := backend.View[int64](numbers)
	if v[0] < 1 || v[1] < 0 || min(v[2], v[3]) < -1 || max(v[2], v[3]) > v[0] {
		return nil, fmt.Errorf("its counts say that, of %d elements, %d and %d were selected in the last two of %d calls", v[0], v[2], v[3], v[1])
	}
	s := &slot{n: int(v[0]), calls: int(v[1]), most: counts{int(v[2]), int(v[3])}, owes: residual.Len() > 0}
	if residual.Len() > 0 {
		s.residual = slices.Clone(backend.View[float32](residual))
	}
	return s, nil
}
