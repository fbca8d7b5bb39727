package backendtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// queues makes several, runs f and closes them.
func queues(c backend.Communicator, n int, f func(qs []backend.Queue) error) (err error) {
	qs := make([]backend.Queue, n)
	for i := range qs {
		if qs[i], err = c.Device().NewQueue(); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, qs[i].Close()) }()
	}
	return f(qs)
}

// drain waits for a queue.
func drain(q backend.Queue) error {
	done, err := q.Record()
	if err != nil {
		return err
	}
	return done.Join(context.Background())
}

// startReturns holds the other ranks back until Start has returned on rank 0.
func (s *suite) startReturns(P int) error {
	return s.ranks(P, func(c backend.Communicator) error {
		return queues(c, 1, func(qs []backend.Queue) error {
			return s.vectors(c, 1, 8, func(vs []*vector) error {
				if c.Rank() != 0 {
					if _, err := s.hear("its Start", 0); err != nil {
						return err
					}
				}
				w, err := c.Start(qs[0], allReduce, vs[0].buffer(), vs[0].buffer())
				if err != nil {
					return err
				}
				if c.Rank() == 0 {
					if err := s.tell("its Start", 0); err != nil {
						return err
					}
				}
				return w.Join(context.Background())
			})
		})
	})
}

// workOrders chains a call on one queue to a call on another by Work.Wait.
func (s *suite) workOrders(P int) error {
	return s.ranks(P, func(c backend.Communicator) error {
		return queues(c, 2, func(qs []backend.Queue) error {
			return s.vectors(c, 3, 500, func(vs []*vector) error {
				for round := range s.times(100) {
					if err := vs[0].set(func(i int) int64 { return int64(round + i) }); err != nil {
						return err
					}
					for i, q := range qs {
						w, err := c.Start(q, allReduce, vs[i+1].buffer(), vs[i].buffer())
						if err != nil {
							return err
						}
						if err := w.Wait(qs[1-i]); err != nil {
							return err
						}
					}
					if err := drain(qs[0]); err != nil { // it waits for the second call
						return err
					}
					if err := vs[2].want(func(i int) int64 {
						return int64(P * P * (round + i))
					}); err != nil {
						return fmt.Errorf("round %d: %w", round, err)
					}
				}
				return nil
			})
		})
	})
}

// acrossQueues starts every call on another queue, the default one among them,
// each rank in its own turn, and nothing but the communicator's promise orders
// them.
func (s *suite) acrossQueues(P int) error {
	const calls = 6
	return s.ranks(P, func(c backend.Communicator) error {
		return queues(c, 2, func(qs []backend.Queue) error {
			choice := []backend.Queue{qs[0], qs[1], nil, c.Device().Default()}
			return s.vectors(c, calls+1, 100, func(vs []*vector) error {
				for round := range s.times(100) {
					// times 9^6 it has 24 bits
					value := func(i int) int64 { return int64((round + i) % 32) }
					if err := vs[0].set(value); err != nil {
						return err
					}
					var last backend.Work
					for i := range calls {
						q := choice[(round+i*(1+c.Rank()))%len(choice)]
						w, err := c.Start(q, allReduce, vs[i+1].buffer(), vs[i].buffer())
						if err != nil {
							return err
						}
						last = w
					}
					if err := last.Join(context.Background()); err != nil {
						return err
					}
					scale := int64(1)
					for i := range calls {
						scale *= int64(P)
						if err := vs[i+1].want(func(j int) int64 {
							return scale * value(j)
						}); err != nil {
							return fmt.Errorf("round %d, call %d: %w", round, i, err)
						}
					}
				}
				return nil
			})
		})
	})
}

// inFlight joins many works in the reverse order.
func (s *suite) inFlight(P int) error {
	const calls = 64
	return s.ranks(P, func(c backend.Communicator) error {
		return queues(c, 1, func(qs []backend.Queue) error {
			return s.vectors(c, calls, 300, func(vs []*vector) error {
				ws := make([]backend.Work, calls)
				for i, v := range vs {
					if err := v.set(func(j int) int64 {
						return int64(c.Rank() + i*j)
					}); err != nil {
						return err
					}
					var err error
					if ws[i], err = c.Start(qs[0], allReduce, v.buffer(), v.buffer()); err != nil {
						return err
					}
				}
				for i := calls - 1; i >= 0; i-- {
					if err := ws[i].Join(context.Background()); err != nil {
						return err
					}
					if err := ws[i].Join(context.Background()); err != nil {
						return fmt.Errorf("second Join: %w", err)
					}
					if err := vs[i].want(func(j int) int64 {
						return sumOf(P, func(s int) int64 { return int64(s + i*j) })
					}); err != nil {
						return fmt.Errorf("call %d: %w", i, err)
					}
				}
				return nil
			})
		})
	})
}

// sharedQueue puts kernels between collectives, without waiting on the host.
func (s *suite) sharedQueue(P int) error {
	return s.ranks(P, func(c backend.Communicator) error {
		return queues(c, 1, func(qs []backend.Queue) error {
			return s.vectors(c, 2, 1000, func(vs []*vector) error {
				q, x, y := qs[0], vs[0], vs[1]
				add := func(of *vector, n int) error { // x = n * of
					return q.Reduce(backend.Sum, x.buffer(), slices.Repeat([]backend.Buffer{
						of.buffer()}, n)...)
				}
				for round := range s.times(100) {
					if err := x.set(func(i int) int64 { return int64(i + round) }); err != nil {
						return err
					}
					steps := []func() error{
						func() error { return add(x, 2) },
						func() error {
							_, err := c.Start(q, allReduce, y.buffer(),
								x.buffer())
							return err
						},
						func() error { return add(y, 3) },
						func() error {
							_, err := c.Start(q, allReduce, x.buffer(),
								x.buffer())
							return err
						},
						func() error { return drain(q) },
					}
					for i, step := range steps {
						if err := step(); err != nil {
							return fmt.Errorf("step %d: %w", i, err)
						}
					}
					if err := x.want(func(i int) int64 {
						return int64(6 * P * P * (i + round))
					}); err != nil {
						return fmt.Errorf("round %d: %w", round, err)
					}
				}
				return nil
			})
		})
	})
}

// joinContext lets a Join end before its collective, and a collective before
// the context of its Join.
func (s *suite) joinContext(P int) error {
	return s.ranks(P, func(c backend.Communicator) error {
		return queues(c, 1, func(qs []backend.Queue) error {
			return s.vectors(c, 1, 8, func(vs []*vector) error {
				if c.Rank() != 0 {
					if _, err := s.hear("its Join", 0); err != nil {
						return err
					}
					return start(c, qs[0], allReduce, vs[0].buffer(), vs[0].buffer())
				}
				w, err := c.Start(qs[0], allReduce, vs[0].buffer(), vs[0].buffer())
				if err == nil {
					err = joinBriefly(w)
				}
				if err := errors.Join(err, s.tell("its Join", 0)); err != nil {
					return err
				}
				return errors.Join(w.Join(context.Background()), joinTooLate(w))
			})
		})
	})
}

func joinTooLate(w backend.Work) error {
	if !w.Done() {
		return errors.New("a work that was joined is not Done")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for range 20 {
		if err := w.Join(ctx); err != nil {
			return fmt.Errorf("a Join of a work that was done before its context: %w", err)
		}
	}
	return nil
}

func joinBriefly(w backend.Work) error {
	if w.Done() {
		return errors.New("a work whose peers have not begun is Done")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := w.Join(ctx); !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("a Join with a context that ended: the error is %v, want "+
			"context.DeadlineExceeded", orNone(err))
	}
	return nil
}
