package backendtest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// quarrel is a call that one rank or two begin otherwise than the rest.
type quarrel struct {
	disagreement
	differ []int           // ranks of the job
	calls  int             // before it
	late   []time.Duration // how late each rank is
	part   bool            // in a group from Split, in the opposite order
	blamed int             // rank of the job, -1 if it is as likely another one
}

// quarrel draws one, the same on all ranks.
func (s *suite) quarrel(seed, P int) quarrel {
	draw := rand.New(rand.NewPCG(uint64(seed), uint64(P)))
	all := s.disagreements(P)
	q := quarrel{disagreement: all[draw.IntN(len(all))], calls: draw.IntN(3),
		part: draw.IntN(2) == 0}
	q.differ = draw.Perm(P)[:1+draw.IntN(min(2, P/2))]
	for range P {
		q.late = append(q.late, time.Duration(draw.IntN(4)*draw.IntN(8))*time.Millisecond)
	}
	switch {
	case 2*len(q.differ) == P:
		q.blamed = -1
	case q.part: // the lowest of the part
		q.blamed = slices.Max(q.differ)
	default:
		q.blamed = slices.Min(q.differ)
	}
	return q
}

// blame lets ranks quarrel, and checks whom they blame. A group that they quarrel in a part of goes
// on.
func (s *suite) blame(P int) error {
	if s.Unverified {
		return errSkip("calls are not compared across ranks")
	}
	for seed := range s.times(100) {
		q := s.quarrel(seed, P)
		err := s.ranks(P, func(c backend.Communicator) error {
			if !q.part {
				return s.in(q, c, c.Rank())
			}
			part, err := c.Split(0, -c.Rank())
			if err != nil {
				return err
			}
			err = errors.Join(s.in(q, part, c.Rank()), part.Close())
			for range 3 {
				err = errors.Join(err, backend.Barrier(c))
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("seed %d: ranks %v of %d disagree on %s, part %v: %w", seed, q.differ,
				P, q.name, q.part, err)
		}
	}
	return nil
}

// in starts a rank's side, and checks its error.
func (s *suite) in(q quarrel, c backend.Communicator, rank int) error {
	verify(c)
	for range q.calls {
		if err := backend.Barrier(c); err != nil {
			return err
		}
	}
	time.Sleep(q.late[rank])
	err := q.start(s, c, nil, slices.Contains(q.differ, rank))
	var e *backend.Error
	var m *backend.MismatchError
	if !errors.As(err, &e) || !errors.As(err, &m) {
		return fmt.Errorf("the error is %v, want a MismatchError", orNone(err))
	}
	blamed := e.Blames()
	odd := func(r int) bool {
		if q.part {
			r = c.Size() - 1 - r
		}
		return slices.Contains(q.differ, r)
	}
	if blamed != q.blamed || odd(m.Rank) == odd(m.Peer) || blamed >= 0 && m.Peer != e.Peer {
		return fmt.Errorf("rank %d of the job is to blame, and the error blames %d: %w", q.blamed,
			blamed, err)
	}
	return nil
}
