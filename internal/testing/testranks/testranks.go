// Package testranks makes ranks that are goroutines of a test.
//
// [Each] and [All] run a function as every rank at once. [Connect] connects the ranks of a world,
// [New] does so for a test, and [Run] is the whole life of a world: connect, do something, close.
// What a rank has is a type of the caller's, most often a communicator:
//
//	connect := func(w *rendezvous.World) (backend.Communicator, error) {
//		return host.Backend{}.Connect(t.Context(), w)
//	}
//	g := testranks.New(t, 3, time.Minute, connect)
//	err := testranks.All(3, func(rank int) error { return backend.Barrier(g.Ranks[rank]) })
//
// Inside of such a function [NoError] and [Must] end the rank with an error, as package require
// ends a test.
//
// [Group.Fail] loses a rank, as the death of its process would. Processes that really die are
// package proctest's.
package testranks

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Each runs f as each of P ranks at once, and returns their errors by rank.
func Each(P int, f func(rank int) error) []error {
	errs := make([]error, P)
	var all sync.WaitGroup
	for r := range P {
		all.Go(func() { errs[r] = Ended(func() error { return f(r) }) })
	}
	all.Wait()
	return errs
}

// failure is what NoError panics with.
type failure struct{ error }

// NoError ends the function of a rank with an error, unless it is nil.
func NoError(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// Must returns a value, or ends the function of a rank with an error.
func Must[T any](value T, err error) T {
	NoError(err)
	return value
}

// Ended runs a function that NoError may end, and returns its error. Each and what calls it do so
// for ranks.
func Ended(f func() error) (err error) {
	defer func() {
		switch v := recover().(type) {
		case nil:
		case failure:
			err = v.error
		default:
			panic(v)
		}
	}()
	return f()
}

// All is Each. It returns all errors together, each with its rank, or nil if there is none.
func All(P int, f func(rank int) error) error { return Join(Each(P, f)) }

// Join joins errors by rank, each with its rank.
func Join(errs []error) error {
	var all error
	for r, err := range errs {
		if err != nil {
			all = errors.Join(all, fmt.Errorf("rank %d: %w", r, err))
		}
	}
	return all
}

// Group is the ranks of one world.
type Group[R io.Closer] struct {
	Worlds []*rendezvous.World
	Ranks  []R
}

// Connect makes a world of P ranks, whose waits for another rank last at most timeout, and
// connects them all at once. If one cannot connect, the others are closed again, and the errors
// of all are returned together. Groups that are still open may hold little shared memory.
func Connect[R io.Closer](P int, timeout time.Duration, connect func(w *rendezvous.World) (R,
	error)) (*Group[R], error) {
	if err := room(P); err != nil {
		return nil, err
	}
	worlds, err := rendezvous.Local(P, timeout)
	if err != nil {
		return nil, err
	}
	g := &Group[R]{worlds, make([]R, P)}
	errs := Each(P, func(r int) (err error) {
		g.Ranks[r], err = connect(worlds[r])
		return err
	})
	if err := Join(errs); err != nil {
		closing := All(P, func(r int) error {
			if errs[r] != nil {
				return nil
			}
			return g.Ranks[r].Close()
		})
		return nil, errors.Join(err, closing, g.CloseWorlds())
	}
	return g, nil
}

// New is Connect for a test, at whose end the group is closed. A test of many groups closes each
// when its work is done: see [Run] and [Within].
func New[R io.Closer](t testing.TB, P int, timeout time.Duration,
	connect func(w *rendezvous.World) (R, error)) *Group[R] {
	t.Helper()
	g := require.Value(Connect(P, timeout, connect))(t)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	return g
}

// Within is New for one body, after which the group is closed.
func Within[R io.Closer](t testing.TB, P int, timeout time.Duration,
	connect func(w *rendezvous.World) (R, error), body func(rank R) error) {
	t.Helper()
	g := require.Value(Connect(P, timeout, connect))(t)
	require.NoError(t, errors.Join(g.All(body), g.Close()))
}

// Run lets each of P ranks connect, run body and close, and returns their errors by rank. A rank
// whose body fails is lost to the others, as in euryale.Run.
func Run[R io.Closer](P int, connect func(w *rendezvous.World) (R, error),
	body func(rank R) error) []error {
	worlds, err := rendezvous.Local(P, 0)
	if err = errors.Join(err, room(P)); err != nil {
		return slices.Repeat([]error{err}, P)
	}
	errs := Each(P, func(r int) error {
		rank, err := connect(worlds[r])
		if err == nil {
			err = Ended(func() error { return body(rank) })
			if err != nil {
				worlds[r].Fail(err)
			}
			err = errors.Join(err, rank.Close())
		}
		return err
	})
	for r, w := range worlds {
		errs[r] = errors.Join(errs[r], w.Close())
	}
	return errs
}

// All runs f as every rank of the group at once.
func (g *Group[R]) All(f func(rank R) error) error {
	return All(len(g.Ranks), func(r int) error { return f(g.Ranks[r]) })
}

// Fail loses a rank.
func (g *Group[R]) Fail(rank int, cause error) { g.Worlds[rank].Fail(cause) }

// Close closes all ranks at once, as the ranks of a program do, and then their worlds.
func (g *Group[R]) Close() error {
	return errors.Join(g.All(func(rank R) error { return rank.Close() }), g.CloseWorlds())
}

// CloseWorlds closes the worlds, and leaves the ranks.
func (g *Group[R]) CloseWorlds() error {
	return All(len(g.Worlds), func(r int) error { return g.Worlds[r].Close() })
}
