package mpi

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// here is MPI in this process: it is one for all, since MPI begins and ends once in a process.
var here process

// process is MPI's part in this process.
type process struct {
	opening sync.Once
	lib     library
	missing error // why there is none

	mu     sync.Mutex // guards what follows
	begun  bool
	ended  bool
	rank   int
	size   int
	thread chan func()       // runs functions on the thread that has begun MPI
	world  *rendezvous.World // that of the last Connect
	failed bool              // a call was given up, or waits in MPI for good
	kept   []*runtime.Pinner // of the memory of calls that were given up
}

// open returns the library.
func (p *process) open() (library, error) {
	p.opening.Do(func() { p.lib, p.missing = load(os.Getenv) })
	return p.lib, p.missing
}

// initialize begins MPI in the processes of all ranks that gather, and returns the communicator of
// all. It fails on all ranks or on none.
func (p *process) initialize(w *rendezvous.World, gather group.Gatherer) (handle, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	lib, err := p.open()
	if err == nil && p.ended {
		err = errors.New("MPI has ended in this process, and cannot begin again: close the " +
			"backend when the last communicator is closed")
	}
	if err := gather.Vote(nil, err); err != nil {
		return 0, err
	}
	p.world = w
	if !p.begun {
		err = p.start(lib)
	}
	if err == nil && (p.size != w.Size || p.rank != w.Rank) {
		err = fmt.Errorf("MPI has rank %d of %d here, but this is rank %d of %d of the job: "+
			"start the program with the mpirun or mpiexec of that MPI (%s), or name the "+
			"launcher's library in EURYALE_MPI",
			p.rank, p.size, w.Rank, w.Size, lib.describe())
	}
	if err := gather.Vote(nil, err); err != nil {
		return 0, err
	}
	return lib.world(), nil
}

// start begins MPI on a thread that is kept for its end. p.mu is held.
func (p *process) start(lib library) error {
	p.begun = true
	// Hydra tells ranks by this signal that another one has died, which would end a program of Go
	// before it can say so. Other users of the signal get it, too.
	signal.Notify(make(chan os.Signal, 1), lossSignal)
	p.thread = make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range p.thread {
			f()
		}
	}()
	err := p.within(p.world, "begin MPI", func() (err error) {
		p.rank, p.size, err = lib.initialize()
		return err
	}, p.onThread)
	if err != nil {
		p.failed = true
	}
	return err
}

// onThread runs f on the thread that begins and ends MPI, without waiting for it.
func (p *process) onThread(f func()) { p.thread <- f }

// within waits for a function of MPI that waits for other ranks, which run starts, until a rank is
// lost, or for the timeout. MPI may never return from one that was given up.
func (p *process) within(w *rendezvous.World, what string, f func() error, run func(func())) error {
	done := make(chan error, 1)
	run(func() { done <- f() })
	timeout := time.NewTimer(w.Timeout)
	defer timeout.Stop()
	select {
	case err := <-done:
		return err
	case <-w.Down():
		return w.Failure()
	case <-timeout.C:
		return fmt.Errorf("%w: to %s takes longer than %v (EURYALE_TIMEOUT)", backend.ErrTimeout,
			what, w.Timeout)
	}
}

// split makes the communicators of parts: see library.
func (p *process) split(w *rendezvous.World, parent handle, color, key int) (part handle,
	err error) {
	err = p.within(w, "split a communicator of MPI", func() (err error) {
		part, err = p.lib.split(parent, color, key)
		return err
	}, func(f func()) { go f() })
	if err != nil {
		p.fail(nil)
		return 0, err
	}
	return part, nil
}

// fail notes that MPI cannot end in this process, and keeps memory that it may still use.
func (p *process) fail(pins *runtime.Pinner) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed = true
	if pins != nil {
		p.kept = append(p.kept, pins)
	}
}

// finalize ends MPI, and returns when it has ended on every rank, or a rank is lost.
func (p *process) finalize() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.begun || p.ended {
		return nil
	}
	p.ended = true
	defer close(p.thread)
	if p.failed || p.world.Failure() != nil {
		return nil
	}
	done := make(chan error, 1)
	p.onThread(func() { done <- p.lib.finalize() })
	select {
	case err := <-done:
		return err
	case <-p.world.Down():
		return nil
	}
}
