package backendtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
)

// soon is how long a rank may take to notice the end of its group: the second
// that is promised, and what a busy machine adds.
const soon = 2 * time.Second

// call is a collective with buffers that fit this rank.
type call struct {
	what     backend.Collective
	dst, src backend.Buffer
}

// arguments makes every wrong call on the last rank alone: if a byte moved, the
// calls that follow would go wrong.
func (s *suite) arguments(P int) error {
	return s.ranks(P, func(c backend.Communicator) error {
		return s.vectors(c, 2, 33*P, func(vs []*vector) error {
			if c.Rank() == P-1 {
				for name, k := range wrongCalls(P, vs[0].buffer(), vs[1].buffer()) {
					w, err := c.Start(nil, k.what, k.dst, k.src)
					if !errors.Is(err, backend.ErrArgument) || w != nil {
						return fmt.Errorf("%s: Start gave the work %v and the error %v, want nil "+
							"and ErrArgument", name, w, orNone(err))
					}
				}
			}
			for i := range 3 {
				if err := oneOf(c, allReduce, vs[0], vs[1], i); err != nil {
					return fmt.Errorf("after argument errors: %w", err)
				}
			}
			if err := c.Err(); err != nil {
				return fmt.Errorf("a communicator that works has the error %w", err)
			}
			return nil
		})
	})
}

// wrongCalls returns wrong calls of the last of P ranks.
func wrongCalls(P int, x, y backend.Buffer) map[string]call {
	with := func(k backend.Kind, splits ...int) backend.Collective {
		return backend.Collective{Kind: k, Splits: splits}
	}
	x8, y8 := x.Slice(0, 8), y.Slice(0, 8)
	negative := make([]int, P)
	negative[0] = -1
	calls := map[string]call{
		"no kind":      {backend.Collective{}, y8, x8},
		"unknown kind": {with(99), y8, x8},
		"unknown op":   {backend.Collective{Kind: backend.AllReduce, Op: 99}, y8, x8},
		"unknown algorithm": {backend.Collective{Kind: backend.AllReduce, Algorithm: 99},
			y8, x8},
		"negative root":        {backend.Collective{Kind: backend.Broadcast, Root: -1}, y8, x8},
		"root too large":       {backend.Collective{Kind: backend.Reduce, Root: P}, y8, x8},
		"splits without chunk": {with(backend.AllReduce, 8), y8, x8},
		"too few splits":       {with(backend.AllGather, make([]int, P-1)...), y8, x8},
		"too many splits":      {with(backend.Scatter, make([]int, P+1)...), y8, x8},
		"negative split":       {with(backend.ReduceScatter, negative...), y8, x8},
		"negative pair":        {with(backend.AllToAll, append(make([]int, P*P-1), -1)...), y8, x8},
		"destination shorter":  {allReduce, y.Slice(0, 7), x8},
		"destination longer":   {with(backend.AllGather), y.Slice(0, 8*P+1), x8},
		"source longer":        {with(backend.ReduceScatter), y8, x.Slice(0, 8*P+1)},
		"splits of other size": {with(backend.AllGather, slices.Repeat([]int{5}, P)...),
			y.Slice(0, 5*P), x8},
		"two dtypes":      {allReduce, y8.As(backend.F64), x8},
		"no dtype":        {allReduce, backend.Buffer{}, backend.Buffer{}},
		"shifted overlap": {allReduce, x8, x.Slice(1, 9)},
	}
	if P > 1 {
		calls["indivisible"] = call{with(backend.AllToAll), y.Slice(0, P+1), x.Slice(0, P+1)}
		calls["place of another rank"] = call{with(backend.AllGather), x.Slice(0, 8*P), x8}
		calls["all-to-all in place"] = call{with(backend.AllToAll), x.Slice(0, 8*P),
			x.Slice(0, 8*P)}
		calls["a row of pairs"] = call{with(backend.AllToAll, slices.Repeat([]int{8}, P)...),
			y.Slice(0, 8*P), x.Slice(0, 8*P)}
	}
	return calls
}

// disagreement is what most ranks call, and what the others do, such as the last one. Operands
// are cut to the lengths that fit.
type disagreement struct {
	name            string
	most, last      backend.Collective
	n, nLast        int
	dtype, lastType backend.DType
}

func (s *suite) disagreements(P int) []disagreement {
	own, other := s.Integers, backend.F64 // of the same size
	if own == backend.F32 {
		other = backend.I32
	}
	bcast := backend.Collective{Kind: backend.Broadcast}
	two := slices.Repeat([]int{2}, P)
	uneven := slices.Clone(two)
	uneven[0], uneven[1] = 1, 3
	return []disagreement{
		{"kind", allReduce, bcast, 8, 8, own, own},
		{"op", allReduce, backend.Collective{Kind: backend.AllReduce, Op: backend.Max}, 8, 8, own,
			own},
		{"root", bcast, backend.Collective{Kind: backend.Broadcast, Root: 1}, 8, 8, own, own},
		{"dtype", allReduce, allReduce, 8, 8, own, other},
		{"length", allReduce, allReduce, 8, 9, own, own},
		{"length, by far", allReduce, allReduce, 50000, 3, own, own},
		{"nothing", allReduce, allReduce, 0, 8, own, own},
		{"splits", backend.Collective{Kind: backend.AllGather, Splits: two},
			backend.Collective{Kind: backend.AllGather, Splits: uneven}, 2 * P, 2 * P, own, own},
		{"even and uneven", backend.Collective{Kind: backend.AllGather},
			backend.Collective{Kind: backend.AllGather, Splits: uneven}, 2, 2 * P, own, own},
		{"algorithm", allReduce, backend.Collective{Kind: backend.AllReduce,
			Algorithm: backend.TwoShot}, 8, 8, own, own},
		{"state", allReduce, backend.Collective{Kind: backend.AllReduce, State: 3}, 8, 8, own, own},
	}
}

// start starts a rank's side of a disagreement and waits for its end.
func (d disagreement) start(
	s *suite, c backend.Communicator, q backend.Queue, differs bool,
) error {
	what, n, dtype := d.most, d.n, d.dtype
	if differs {
		what, n, dtype = d.last, d.nLast, d.lastType
	}
	nsrc, ndst := lengths(what, c.Rank(), c.Size(), n)
	return s.vectors(c, 2, max(nsrc, ndst), func(vs []*vector) error {
		src, dst := vs[0].buffer().Slice(0, max(nsrc, 0)), vs[1].buffer().Slice(0, max(ndst, 0))
		err := start(c, q, what, dst.As(dtype), src.As(dtype))
		if q != nil {
			err = errors.Join(err, drain(q)) // the memory is in use until then
		}
		return err
	})
}

func isLast(c backend.Communicator) bool { return c.Rank() == c.Size()-1 }

// names checks that an error names both sides.
func (d disagreement) names(err error) error {
	var m *backend.MismatchError
	if !errors.As(err, &m) || !errors.Is(err, backend.ErrMismatch) {
		return fmt.Errorf("the error is %v, want a MismatchError", orNone(err))
	}
	got := []backend.Header{m.Mine, m.Theirs}
	for i := range got {
		got[i].Seq = 0
	}
	most, last := d.most.Header(0, d.n, d.dtype), d.last.Header(0, d.nLast, d.lastType)
	if got[0] == most && got[1] == last || got[0] == last && got[1] == most {
		return nil
	}
	return fmt.Errorf("the error is %w, want it to name %v and %v", err, most, last)
}

// verify switches the comparison of headers on where it can be switched.
func verify(c backend.Communicator) {
	if verify := c.Capabilities().Verify; verify != nil {
		verify(true)
	}
}

// mismatch lets the last rank call something else.
func (s *suite) mismatch(P int) error {
	if s.Unverified {
		return errSkip("calls are not compared across ranks")
	}
	for _, d := range s.disagreements(P) {
		err := s.ranks(P, func(c backend.Communicator) error {
			verify(c)
			testranks.NoError(backend.Barrier(c))
			begin := time.Now()
			testranks.NoError(d.names(d.start(s, c, nil, isLast(c))))
			if took := time.Since(begin); took > soon {
				return fmt.Errorf("it took %v to find out", took)
			}
			if err := backend.Barrier(c); !errors.Is(err, backend.ErrMismatch) {
				return fmt.Errorf("the next call has the error %v, want the same again",
					orNone(err))
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("ranks disagree on %s: %w", d.name, err)
		}
	}
	return nil
}

// mismatchOnQueue is mismatch on queues of the ranks' own: every rank gets an
// error, and some rank the one that names both sides.
func (s *suite) mismatchOnQueue(P int) error {
	if s.Unverified {
		return errSkip("calls are not compared across ranks")
	}
	for _, d := range s.disagreements(P) {
		named := make([]error, P)
		err := s.ranks(P, func(c backend.Communicator) error {
			verify(c)
			return queues(c, 1, func(qs []backend.Queue) error {
				begin := time.Now()
				err := d.start(s, c, qs[0], isLast(c))
				named[c.Rank()] = d.names(err)
				if took := time.Since(begin); err == nil || took > soon {
					return fmt.Errorf("after %v the error is %v, want one soon", took, orNone(err))
				}
				return nil
			})
		})
		if err == nil && !slices.Contains(named, nil) {
			err = errors.Join(named...)
		}
		if err != nil {
			return fmt.Errorf("ranks disagree on %s: %w", d.name, err)
		}
	}
	return nil
}

// ended checks an error that ended a group for a rank: that it is a
// [backend.Error] of the rank, that it wraps cause, and that it says text.
func ended(c backend.Communicator, err, cause error, text string) error {
	var e *backend.Error
	switch {
	case !errors.As(err, &e):
		return fmt.Errorf("the error is %v, want a *backend.Error", orNone(err))
	case e.Rank != c.Rank() || e.Comm != c.Name():
		return fmt.Errorf("the error is of rank %d of %s, want rank %d of %s: %w", e.Rank, e.Comm,
			c.Rank(), c.Name(), err)
	case !errors.Is(err, cause):
		return fmt.Errorf("the error is %w, want one that wraps %q", err, cause)
	case !strings.Contains(err.Error(), text):
		return fmt.Errorf("the error is %w, want it to say %q", err, text)
	}
	return nil
}

// sticky checks that later calls have the same cause, at once, and that Err has it, too.
func (s *suite) sticky(c backend.Communicator, cause error) error {
	var first error
	for _, k := range s.waits() {
		begin := time.Now()
		if err := k.run(c); !errors.Is(err, cause) {
			return fmt.Errorf("a later %s has the error %v, want one that wraps %q", k.name,
				orNone(err), cause)
		}
		if took := time.Since(begin); took > soon {
			return fmt.Errorf("a later %s took %v to fail", k.name, took)
		}
		err := c.Err()
		if err := ended(c, err, cause, ""); err != nil {
			return fmt.Errorf("the error after a later %s: %w", k.name, err)
		}
		if first = cmp.Or(first, err); err.Error() != first.Error() {
			return fmt.Errorf("the error became %w, which was %w", err, first)
		}
	}
	return nil
}

// wait is something that waits for other ranks.
type wait struct {
	name string
	run  func(c backend.Communicator) error
}

// waits returns every way to wait.
func (s *suite) waits() []wait {
	reduce := func(n int) func(backend.Communicator) error {
		return func(c backend.Communicator) error {
			return s.vectors(c, 1, n, func(vs []*vector) error {
				return backend.Run(c, allReduce, vs[0].buffer(), vs[0].buffer())
			})
		}
	}
	return []wait{
		{"small all-reduce", reduce(8)},
		{"large all-reduce", reduce(100000)},
		{"empty all-reduce", reduce(0)},
		{"alloc", func(c backend.Communicator) error { _, err := c.Alloc(4096); return err }},
		{"split", func(c backend.Communicator) error { _, err := c.Split(0, 0); return err }},
	}
}

// woken has every rank but the last one wait, then lets the last one end the
// group, and checks how the others end.
func (s *suite) woken(g *Group, w wait, end func(c backend.Communicator) error,
	check func(c backend.Communicator, err error) error) error {
	return s.each(g.Comms, func(c backend.Communicator) error {
		last := c.Size() - 1
		if c.Rank() == last {
			time.Sleep(20 * time.Millisecond) // the others wait by now, most likely
			testranks.NoError(s.tell("the end", last, time.Now().UnixNano()))
			return end(c)
		}
		err := w.run(c)
		returned := time.Now()
		over := testranks.Must(s.hear("the end", last))
		switch took := returned.Sub(time.Unix(0, over[0])); {
		case took < 0:
			return fmt.Errorf("%s returned %v before the end, with the error %v", w.name, -took,
				orNone(err))
		case took > soon:
			return fmt.Errorf("%s returned %v after the end", w.name, took)
		}
		if err := check(c, err); err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
		return nil
	})
}

// eachWait runs f on a fresh group for every way to wait.
func (s *suite) eachWait(P int, timeout time.Duration, f func(g *Group, w wait) error) error {
	for _, w := range s.waits() {
		if err := s.with(P, timeout, func(g *Group) error { return f(g, w) }); err != nil {
			return err
		}
	}
	return nil
}

// abort checks that every rank gets the first cause.
func (s *suite) abort(P int) error {
	cause := errors.New("the weather")
	return s.eachWait(P, patient, func(g *Group, w wait) error {
		return s.woken(g, w, func(c backend.Communicator) error {
			c.Abort(cause)
			c.Abort(errors.New("a later cause"))
			if err := ended(c, backend.Barrier(c), cause, cause.Error()); err != nil {
				return fmt.Errorf("the rank that aborted: %w", err)
			}
			return s.sticky(c, backend.ErrAborted)
		}, func(c backend.Communicator, err error) error {
			if err := ended(c, err, backend.ErrAborted, cause.Error()); err != nil {
				return err
			}
			return s.sticky(c, backend.ErrAborted)
		})
	})
}

// abortQueued aborts works that wait on a queue, from their own rank, and
// checks that the queue goes on.
func (s *suite) abortQueued(P int) error {
	return s.with(P, patient, func(g *Group) error {
		return s.oneRank(g, 0, func(c backend.Communicator) error {
			return queues(c, 1, func(qs []backend.Queue) error {
				return s.vectors(c, 2, 8, func(vs []*vector) error {
					ws := make([]backend.Work, 3)
					for i := range ws {
						var err error
						if ws[i], err = c.Start(qs[0], allReduce, vs[0].buffer(),
							vs[0].buffer()); err != nil {
							return err
						}
					}
					c.Abort(errors.New("enough"))
					for _, w := range ws {
						if err := ended(c, w.Join(context.Background()), backend.ErrAborted,
							"enough"); err != nil {
							return err
						}
					}
					if err := qs[0].Zero(vs[1].buffer()); err != nil {
						return fmt.Errorf("the queue after an abort: %w", err)
					}
					return drain(qs[0])
				})
			})
		})
	})
}

// oneRank runs f on one rank of a group, for whose end the others wait.
func (s *suite) oneRank(g *Group, rank int, f func(c backend.Communicator) error) error {
	return s.each(g.Comms, func(c backend.Communicator) error {
		if c.Rank() != rank {
			_, err := s.hear("its end", rank)
			return err
		}
		return errors.Join(f(c), s.tell("its end", rank))
	})
}

// closeWakes closes a rank that the others wait for.
func (s *suite) closeWakes(P int) error {
	name := fmt.Sprintf("rank %d", P-1)
	return s.eachWait(P, patient, func(g *Group, w wait) error {
		return s.woken(g, w, backend.Communicator.Close, func(c backend.Communicator,
			err error) error {
			if err := ended(c, err, backend.ErrClosed, name); err != nil {
				return err
			}
			return s.sticky(c, backend.ErrClosed)
		})
	})
}

// closeOwn closes the communicator of a rank that waits.
func (s *suite) closeOwn(P int) error {
	for _, w := range s.waits() {
		err := s.with(P, patient, func(g *Group) error {
			return s.oneRank(g, P-1, func(c backend.Communicator) error {
				closed := make(chan error, 1)
				go func() {
					// w.run waits by now, most likely: either order has the same error
					time.Sleep(20 * time.Millisecond)
					closed <- c.Close()
				}()
				if err := w.run(c); !errors.Is(err, backend.ErrClosed) {
					return fmt.Errorf("%s during Close: the error is %v, want ErrClosed", w.name,
						orNone(err))
				}
				return <-closed
			})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// afterClose calls everything after Close, which comes as soon as the rank is
// through with the last call.
func (s *suite) afterClose(P int) error {
	return s.ranks(P, func(c backend.Communicator) error {
		for range 10 {
			testranks.NoError(backend.Barrier(c))
		}
		name, rank, size := c.Name(), c.Rank(), c.Size()
		for i := range 2 {
			if err := c.Close(); err != nil {
				return fmt.Errorf("call %d of Close: %w", i+1, err)
			}
		}
		testranks.NoError(s.sticky(c, backend.ErrClosed))
		c.Abort(errors.New("too late"))
		if err := s.sticky(c, backend.ErrClosed); err != nil {
			return fmt.Errorf("after Abort: %w", err)
		}
		if c.Name() != name || c.Rank() != rank || c.Size() != size {
			return errors.New("name, rank or size changed with Close")
		}
		return nil
	})
}

// timeout leaves one rank out. When that one comes at last, it may find all it
// needs for the call that the others gave up, but for none after that. A machine under load may
// keep other ranks from their call for as long, too: then all is tried again with more patience.
func (s *suite) timeout(P int) error {
	err := s.timeoutAfter(P, 300*time.Millisecond)
	if err != nil {
		err = s.timeoutAfter(P, 3*time.Second)
	}
	return err
}

func (s *suite) timeoutAfter(P int, after time.Duration) error {
	name := fmt.Sprintf("rank %d", P-1)
	w := s.waits()[0]
	return s.with(P, after, func(g *Group) error {
		return s.each(g.Comms, func(c backend.Communicator) error {
			if c.Rank() == P-1 {
				for p := range P - 1 {
					if _, err := s.hear("its timeout", p); err != nil {
						return err
					}
				}
				if err := w.run(c); err != nil && !errors.Is(err, backend.ErrTimeout) {
					return fmt.Errorf("the call that comes too late has the error %w, want "+
						"ErrTimeout", err)
				}
				return s.sticky(c, backend.ErrTimeout)
			}
			begin := time.Now()
			err := w.run(c)
			took := time.Since(begin)
			testranks.NoError(s.tell("its timeout", c.Rank()))
			if took < after/2 || took > after+soon {
				return fmt.Errorf("%s gave up after %v, want %v", w.name, took, after)
			}
			testranks.NoError(ended(c, err, backend.ErrTimeout, name))
			return s.sticky(c, backend.ErrTimeout)
		})
	})
}

// lost loses a rank of the job.
func (s *suite) lost(P int) error {
	return s.eachWait(P, patient, func(g *Group, w wait) error {
		if g.Fail == nil {
			return errSkip("a rank cannot be lost here")
		}
		return s.woken(g, w, func(backend.Communicator) error {
			g.Fail(P-1, errors.New("out of petrol"))
			return nil
		}, func(c backend.Communicator, err error) error {
			var f *rendezvous.Failure
			if !errors.As(err, &f) || f.Rank != P-1 {
				return fmt.Errorf("the error is %v, want one that wraps the Failure of rank %d",
					orNone(err), P-1)
			}
			if err := ended(c, err, f, "out of petrol"); err != nil {
				return err
			}
			return s.sticky(c, backend.ErrAborted)
		})
	})
}
