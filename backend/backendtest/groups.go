package backendtest

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// split makes groups in every way and uses them.
func (s *suite) split(P int) error {
	ways := []struct {
		name       string
		color, key func(r int) int
	}{
		{"all, in the same order", func(int) int { return 0 }, func(int) int { return 0 }},
		{"all, reversed", func(int) int { return 7 }, func(r int) int { return -r }},
		{"odd and even, reversed", func(r int) int { return r % 2 }, func(r int) int {
			return P - r
		}},
		{"each alone", func(r int) int { return r }, func(int) int { return 0 }},
		{"without the last rank", func(r int) int { return -(r / max(P-1, 1)) }, func(int) int {
			return 0
		}},
		{"nobody", func(int) int { return -5 }, func(int) int { return 0 }},
		{"extreme keys", func(int) int { return math.MaxInt32 }, func(r int) int {
			return []int{math.MaxInt, math.MinInt, 0}[r%3]
		}},
	}
	return s.ranks(P, func(c backend.Communicator) error {
		names := map[string]bool{c.Name(): true}
		for _, w := range ways {
			part, err := c.Split(w.color(c.Rank()), w.key(c.Rank()))
			if err != nil {
				return fmt.Errorf("split %s: %w", w.name, err)
			}
			if err := s.checkPart(c, part, w.color, w.key, names); err != nil {
				return fmt.Errorf("split %s: %w", w.name, err)
			}
		}
		return s.splitAgain(c)
	})
}

// checkPart compares a part with what it must be, and closes it.
func (s *suite) checkPart(c, part backend.Communicator, color, key func(int) int,
	names map[string]bool) (err error) {
	me := color(c.Rank())
	if me < 0 {
		if part != nil {
			return fmt.Errorf("color %d gave a communicator, want nil", me)
		}
		return nil
	}
	if part == nil {
		return fmt.Errorf("color %d gave nil", me)
	}
	defer func() { err = errors.Join(err, part.Close()) }()
	members := membersOf(c.Size(), me, color, key)
	if part.Size() != len(members) || part.Rank() < 0 || part.Rank() >= len(members) ||
		members[part.Rank()] != c.Rank() {
		return fmt.Errorf("rank %d is rank %d of %d in its part, whose members are %v", c.Rank(),
			part.Rank(), part.Size(), members)
	}
	if names[part.Name()] {
		return fmt.Errorf("the name %q is taken by another group", part.Name())
	}
	names[part.Name()] = true
	return s.useBoth(c, part, members)
}

// membersOf returns the ranks of a color by key, then by rank.
func membersOf(P, mine int, color, key func(int) int) (members []int) {
	for r := range P {
		if color(r) != mine {
			continue
		}
		at := len(members)
		for at > 0 && key(members[at-1]) > key(r) {
			at--
		}
		members = slices.Insert(members, at, r)
	}
	return members
}

// useBoth runs collectives on a part and the group it came from.
func (s *suite) useBoth(c, part backend.Communicator, members []int) error {
	n := part.Size()
	return s.vectors(c, 2, n, func(vs []*vector) error {
		x, y := vs[0], vs[1]
		if err := x.set(func(int) int64 { return int64(c.Rank()) }); err != nil {
			return err
		}
		if err := backend.Run(part, backend.Collective{Kind: backend.AllGather}, y.buffer(),
			x.buffer().Slice(0, 1)); err != nil {
			return err
		}
		if err := y.want(func(i int) int64 { return int64(members[i]) }); err != nil {
			return fmt.Errorf("all-gather of ranks in the part: %w", err)
		}
		if err := backend.Barrier(part); err != nil {
			return err
		}
		if _, err := part.Alloc(128); err != nil {
			return fmt.Errorf("an Alloc in the part: %w", err)
		}
		return s.sameName(part)
	})
}

// sameName compares a hash of the name across the ranks.
func (s *suite) sameName(c backend.Communicator) error {
	hash := int64(0)
	for _, b := range []byte(c.Name()) {
		hash = (hash*131 + int64(b)) % (1 << 24)
	}
	// the largest of both is the same only if all are
	mine := func(i int) int64 { return hash * int64(1-2*i) }
	return s.vectors(c, 1, 2, func(vs []*vector) error {
		if err := vs[0].set(mine); err != nil {
			return err
		}
		largest := backend.Collective{Kind: backend.AllReduce, Op: backend.Max}
		if err := backend.Run(c, largest, vs[0].buffer(), vs[0].buffer()); err != nil {
			return err
		}
		if err := vs[0].want(mine); err != nil {
			return fmt.Errorf("the ranks of the group give it different names, %q here: %w",
				c.Name(), err)
		}
		return nil
	})
}

// splitAgain splits a part, and uses the group afterwards.
func (s *suite) splitAgain(c backend.Communicator) error {
	half := testranks.Must(c.Split(c.Rank()%2, 0))
	quarter := testranks.Must(half.Split(half.Rank()%2, 0))
	if err := backend.Barrier(quarter); err != nil {
		return fmt.Errorf("barrier of a part of a part: %w", err)
	}
	return errors.Join(quarter.Close(), half.Close(), backend.Barrier(c))
}

// partsClose closes and aborts a part and goes on with the group.
func (s *suite) partsClose(P int) error {
	return s.ranks(P, func(c backend.Communicator) error {
		for i := range 2 {
			part := testranks.Must(c.Split(0, 0))
			testranks.NoError(backend.Barrier(part))
			if i == 1 {
				part.Abort(errors.New("this part is over"))
			}
			testranks.NoError(part.Close())
			if err := backend.Barrier(c); err != nil {
				return fmt.Errorf("barrier of the group after the end of a part: %w", err)
			}
		}
		return nil
	})
}

// partsName has a rank close a part, in which every rank has another number, while
// the others wait for it.
func (s *suite) partsName(P int) error {
	return s.ranks(P, func(c backend.Communicator) error {
		part, err := c.Split(0, -c.Rank())
		if err != nil {
			return err
		}
		if part.Rank() == 0 {
			return part.Close()
		}
		err = ended(part, backend.Barrier(part), backend.ErrClosed,
			fmt.Sprintf("because of rank %d (0 of the group)", P-1))
		return errors.Join(err, part.Close())
	})
}

// overlapping runs collectives on two groups that share ranks 0 and 2 at the
// same time, each on its own queue, with random skew.
func (s *suite) overlapping(P int) error {
	times := s.times(1000)
	return s.ranks(P, func(c backend.Communicator) error {
		color := -1
		if c.Rank() == 0 || c.Rank() == 2 {
			color = 0
		}
		part := testranks.Must(c.Split(color, 0))
		errs := make(chan error, 2)
		go func() { errs <- s.skewed(c, times, 1) }()
		go func() {
			if part == nil {
				errs <- nil
				return
			}
			errs <- s.skewed(part, times, 2)
		}()
		first, second := <-errs, <-errs
		if part != nil {
			second = errors.Join(second, part.Close())
		}
		return errors.Join(first, second)
	})
}

// skewed makes calls on a queue with random pauses on the host.
func (s *suite) skewed(c backend.Communicator, times int, seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, uint64(c.Rank())))
	return queues(c, 1, func(qs []backend.Queue) error {
		return s.vectors(c, 2, 257, func(vs []*vector) error {
			for call := range times {
				if rng.IntN(4) == 0 {
					spin(time.Duration(rng.IntN(100)) * time.Microsecond)
				}
				if err := vs[0].set(func(i int) int64 {
					return int64(c.Rank()*call + i)
				}); err != nil {
					return err
				}
				if err := start(c, qs[0], allReduce, vs[1].buffer(), vs[0].buffer()); err != nil {
					return err
				}
				want := func(i int) int64 {
					return sumOf(c.Size(), func(s int) int64 { return int64(s*call + i) })
				}
				if err := vs[1].want(want); err != nil {
					return fmt.Errorf("call %d of %s: %w", call, c.Name(), err)
				}
			}
			return nil
		})
	})
}
