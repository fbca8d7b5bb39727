package euryale

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/buildlock"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/session"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Run runs n ranks as goroutines of this process and waits for them. Each gets its communicator and
// a lock that they all share: Gorgonia cannot build graphs concurrently, so a rank holds the lock
// while it builds, and releases it to run.
//
// When a rank returns an error, the others are told, so that none waits for it; Run returns the
// error of the rank that failed first. A rank that panics fails with a [*PanicError], which Run
// returns once all ranks have ended. A rank whose goroutine is ended by runtime.Goexit, as t.Fatal
// does, fails too.
//
// A rank that holds the lock must not wait for other ranks, which may need the lock to get there:
// no collective call, no autograd.New, no RunAll. If it does so while another rank waits for the
// lock, the job ends with an error that says so. If a rank ends while it holds the lock, Run
// releases it. If a rank waits for the lock for longer than EURYALE_TIMEOUT and its holder does not
// change, the rank ends by runtime.Goexit, and the job with it. Unlock does nothing on a rank that
// does not hold the lock.
func Run(ctx context.Context, n int, rank func(comm backend.Communicator, build sync.Locker) error,
	backends ...backend.Backend) error {
	if err := backend.Given("euryale.Run", "ctx", ctx, "rank", rank, "backends",
		backends); err != nil {
		return err
	}
	timeout, err := env.Timeout.Read(os.Getenv, rendezvous.DefaultTimeout)
	if err != nil {
		return fmt.Errorf("euryale: %w", err)
	}
	worlds, err := rendezvous.Local(n, timeout)
	if err != nil {
		return fmt.Errorf("euryale: %w", err)
	}
	build := buildlock.New(timeout)
	errs := make([]error, n)
	var all sync.WaitGroup
	for r, w := range worlds {
		all.Go(func() {
			m := &member{world: w, lock: build.Rank(r)}
			defer func() { errs[r] = m.endRank(recover()) }()
			m.run(ctx, rank, backends)
		})
	}
	all.Wait()
	for _, w := range worlds { // some may have left before there was a failure
		if f := w.Failure(); f != nil && errs[f.Rank] != nil {
			return errs[f.Rank] // the others are its consequences
		}
	}
	return cmp.Or(errs...)
}

// PanicError is the error of a rank of [Run] that panicked.
type PanicError struct {
	Rank  int
	Value any    // what it panicked with
	Stack []byte // of its goroutine
}

// Error gives the value and the stack.
func (e *PanicError) Error() string {
	return fmt.Sprintf("rank %d panicked: %v\n\n%s", e.Rank, e.Value, e.Stack)
}

// Unwrap returns the value if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// errGoexit is the error of a rank whose goroutine ended without returning.
var errGoexit = errors.New("its goroutine was ended by runtime.Goexit, as t.Fatal and t.FailNow " +
	"do: return an error instead")

// member is one rank of Run.
type member struct {
	world    *rendezvous.World
	lock     *buildlock.Rank
	session  *session.Session // nil until it is connected
	returned bool
	err      error // if returned
}

// run connects and runs the rank. The rank may end the goroutine on the way.
func (m *member) run(ctx context.Context, rank func(backend.Communicator, sync.Locker) error,
	backends []backend.Backend) {
	backends, own := orOwn(backends)
	if m.session, m.err = session.Connect(ctx, m.world, backends, own, -1); m.err == nil {
		stop := context.AfterFunc(ctx, func() { m.session.Abort(context.Cause(ctx)) })
		defer stop()
		m.err = rank(m.lock.Watch(m.session), m.lock)
	}
	m.returned = true
}

// endRank ends the rank after run, which may have panicked, and returns its error. It tells the
// others before it releases the lock, so that they do not begin work that can no longer succeed.
func (m *member) endRank(panicked any) error {
	defer m.lock.Release()
	switch {
	case panicked != nil:
		m.err = &PanicError{Rank: m.world.Rank, Value: panicked, Stack: debug.Stack()}
	case !m.returned:
		m.err = cmp.Or(m.lock.GaveUp(), errGoexit)
	}
	switch {
	case m.err == nil:
		return m.session.Close()
	case m.session == nil:
		session.Leave(m.world, m.err)
		return fmt.Errorf("euryale: %w", m.err)
	}
	m.session.Tell() // the rank's error may not say which rank it follows from
	session.Leave(m.world, m.err)
	m.session.Close() // the error of the rank says more
	name := fmt.Sprintf("rank %d", m.world.Rank)
	if errors.As(m.err, new(*backend.Error)) || errors.As(m.err, new(*PanicError)) ||
		strings.Contains(m.err.Error(), name+" of ") {
		return m.err // which names the rank
	}
	return fmt.Errorf("%s: %w", name, m.err)
}
