package buildlock

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// Lock is the lock that the ranks of a job share. It knows which rank holds
// it: a rank that waits in a collective call meanwhile waits for ever if
// another one needs the lock to get to that call.
type Lock struct {
	timeout time.Duration
	free    chan struct{}        // has a token while no rank holds the lock
	holder  atomic.Pointer[Rank] // nil while no rank does
	taken   atomic.Uint64        // how often it was taken, to notice a change of the holder
}

// New makes a lock; a rank that waits for it for longer than timeout ends the job.
func New(timeout time.Duration) *Lock {
	l := &Lock{timeout: timeout, free: make(chan struct{}, 1)}
	l.free <- struct{}{}
	return l
}

// Rank returns the lock as rank r has it.
func (l *Lock) Rank(r int) *Rank { return &Rank{build: l, rank: r} }

// Rank is the lock as one rank has it.
type Rank struct {
	build *Lock
	rank  int
	comm  backend.Communicator
	call  atomic.Pointer[waitingCall] // of this rank, begun with the lock, nil for none

	mu  sync.Mutex
	err error // why a wait for the lock was given up
}

var _ sync.Locker = (*Rank)(nil)

// waitingCall is a collective call.
type waitingCall struct {
	what  string
	since time.Time
}

const (
	// lookTime is between two looks of a rank that waits for the lock.
	lookTime = 100 * time.Millisecond
	// stallTime is how long a rank that holds the lock may be in one collective
	// call, which can end well if the others have started it before.
	stallTime = time.Second
)

// Lock waits for the lock. See euryale.Run for how the wait ends otherwise.
func (l *Rank) Lock() {
	look := time.NewTicker(lookTime)
	defer look.Stop()
	taken, since := l.build.taken.Load(), time.Now()
	for {
		select {
		case <-l.build.free:
			l.build.taken.Add(1)
			l.build.holder.Store(l)
			return
		case <-look.C:
		}
		holder := l.build.holder.Load()
		if now := l.build.taken.Load(); now != taken || holder == nil {
			taken, since = now, time.Now()
			continue
		}
		holder.endStall(l.rank)
		if time.Since(since) >= l.build.timeout {
			l.giveUp(holder.rank)
		}
	}
}

// Unlock gives the lock to a rank that waits for it, if this rank holds it.
func (l *Rank) Unlock() { l.Release() }

// Release is Unlock, for a rank that has ended.
func (l *Rank) Release() {
	if l.build.holder.CompareAndSwap(l, nil) {
		l.build.free <- struct{}{}
	}
}

// endStall ends the job if this rank, which holds the lock, is stuck in a collective
// call while another one waits for the lock.
func (l *Rank) endStall(waiting int) {
	call := l.call.Load()
	if call == nil || time.Since(call.since) < stallTime {
		return
	}
	l.comm.Abort(fmt.Errorf("rank %d waits in %s while it holds the build lock of euryale.Run, "+
		"which rank %d waits for: unlock before autograd.New, RunAll and every other collective "+
		"call",
		l.rank, call.what, waiting))
}

// giveUp ends the job and this goroutine.
func (l *Rank) giveUp(holder int) {
	err := fmt.Errorf("rank %d has waited for the build lock of euryale.Run for %v, all of which "+
		"rank %d has held it: unlock after building (EURYALE_TIMEOUT sets how long to wait)",
		l.rank, l.build.timeout, holder)
	l.mu.Lock()
	l.err = err
	l.mu.Unlock()
	l.comm.Abort(err)
	runtime.Goexit()
}

// GaveUp returns why a wait for the lock was given up, or nil.
func (l *Rank) GaveUp() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Watch returns comm with its calls watched: those that the rank begins while it holds the lock.
// Call it before the rank can take the lock.
func (l *Rank) Watch(comm backend.Communicator) backend.Communicator {
	l.comm = comm
	return &building{backend.Wrap(comm), l}
}

// held reports whether this rank holds the lock.
func (l *Rank) held() bool { return l.build.holder.Load() == l }

// enter notes that the rank, which holds the lock, begins a collective call.
func (l *Rank) enter(what string) { l.call.Store(&waitingCall{what, time.Now()}) }

// exit notes that the rank is back.
func (l *Rank) exit() { l.call.Store(nil) }

// building is the communicator of a rank that may hold the build lock.
type building struct {
	backend.Base
	lock *Rank
}

// Start implements [backend.Communicator].
func (b *building) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if b.lock.held() {
		b.lock.enter(what.String())
		defer b.lock.exit()
	}
	return b.Communicator.Start(q, what, dst, src)
}

// StartChecked implements [backend.CheckedStarter].
func (b *building) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	if b.lock.held() {
		b.lock.enter(what.String())
		defer b.lock.exit()
	}
	return b.Pass(q, what, count, dst, src)
}

// Alloc implements [backend.Communicator].
func (b *building) Alloc(nbytes int) (backend.Buffer, error) {
	if b.lock.held() {
		b.lock.enter("Alloc")
		defer b.lock.exit()
	}
	return b.Communicator.Alloc(nbytes)
}

// Split implements [backend.Communicator]. Calls of the part are watched, too.
func (b *building) Split(color, key int) (backend.Communicator, error) {
	if b.lock.held() {
		b.lock.enter("Split")
		defer b.lock.exit()
	}
	part, err := b.Communicator.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return &building{backend.Wrap(part), b.lock}, nil
}
