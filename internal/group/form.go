package group

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

// Resource is one of the things that ranks make together when they connect: memory that they share,
// a board, connections.
type Resource interface {
	// Offer prepares this rank's part, and returns what the others must know. It waits for nobody.
	// Pass is 0, and then 1 if the ranks do not see each other's processes: steps that have
	// succeeded then do nothing.
	Offer(pass int) (any, error)
	// Take makes the rest with the offers of all ranks. It may wait for ranks that do the same.
	// Several steps take at once.
	Take(pass int, offers Offers) error
	// End is called once, with the outcome on all ranks: after an error nothing is left.
	End(outcome error) error
}

// Offers are what ranks have offered for one step.
type Offers struct {
	members backend.Members
	notes   []json.RawMessage
}

// Read returns the offers by rank.
func Read[T any](o Offers) ([]T, error) {
	all := make([]T, len(o.notes))
	for r, note := range o.notes {
		if err := json.Unmarshal(note, &all[r]); err != nil {
			return nil, fmt.Errorf("%s sent what cannot be read: %w", o.members.Rank(r), err)
		}
	}
	return all, nil
}

// Form takes steps together, of which every rank has the same number. It fails on all ranks or on
// none: problem is why this one cannot take part. It costs one exchange, what the slowest step
// waits for, and a vote.
func (s Sharing) Form(problem error, steps ...Resource) error {
	err := s.pass(0, problem, steps)
	if errors.Is(err, errUnseen) {
		err = s.pass(1, nil, steps)
	}
	var ends []error
	for _, step := range steps {
		ends = append(ends, step.End(err))
	}
	return errors.Join(append([]error{err}, ends...)...)
}

// pass is one pass of Form.
func (s Sharing) pass(n int, problem error, steps []Resource) error {
	mine := make([]json.RawMessage, len(steps))
	for i, step := range steps {
		offer, err := step.Offer(n)
		problem = worse(problem, err)
		if mine[i], err = json.Marshal(offer); err != nil {
			problem = worse(problem, err)
		}
	}
	all, err := Agree(s.Gather, s.Members, mine, problem)
	if err != nil {
		return err
	}
	offers := make([][]json.RawMessage, len(steps))
	for r, theirs := range all {
		if len(theirs) != len(steps) {
			return fmt.Errorf("%s connects in %d steps, this rank in %d",
				s.Members.Rank(r), len(theirs), len(steps))
		}
		for i, offer := range theirs {
			offers[i] = append(offers[i], offer)
		}
	}
	return s.Gather.Vote(s.Members, s.takeOffers(n, steps, offers))
}

// takeOffers has all steps take their offers.
func (s Sharing) takeOffers(n int, steps []Resource, offers [][]json.RawMessage) (problem error) {
	errs := make([]error, len(steps))
	var all sync.WaitGroup
	for i, step := range steps {
		all.Go(func() { errs[i] = step.Take(n, Offers{s.Members, offers[i]}) })
	}
	all.Wait()
	for _, err := range errs {
		problem = worse(problem, err)
	}
	return problem
}

// worse returns the first of two problems, unless another way may mend that alone.
func worse(first, second error) error {
	if first == nil || second != nil && mendable(first) && !mendable(second) {
		return second
	}
	return first
}
