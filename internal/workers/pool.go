package workers

import (
	"fmt"
	"reflect"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/internal/spinwait"
)

// awake is how long an idle worker spins before it sleeps. Steps of a plan that run on one core
// only, and the host's work between two runs, take less; to wake a worker takes up to 50 us.
const awake = 200 * time.Microsecond

// polls is how often an idle worker looks for work before it lets other goroutines run: about 1 us.
const polls = 256

// Task is work in parts.
type Task interface {
	// Run does one part. Parts run in any order, several at a time, and a worker, of which the
	// caller of Do is number 0, runs one part at a time: memory that belongs to a worker needs no
	// lock. Run must not call Do of the same Pool.
	Run(part, worker int)
}

// Pool is a number of workers: goroutines, and the caller of Do. A nil Pool is the caller alone.
type Pool struct {
	size int
	busy atomic.Bool // a Do is under way
	kept map[reflect.Type]any

	scratch []scratch // by worker, and last Shared and Operands

	// Of the Do under way. They change only while no worker is inside.
	task  Task
	parts int

	_    line
	turn atomic.Uint64 // odd while there are parts to take
	_    line
	next atomic.Int64 // the next part to take
	_    line
	in   atomic.Int64 // workers that may look at task and parts
	_    line

	failed   atomic.Pointer[Panic]
	closed   atomic.Bool
	sleeping atomic.Int64
	mu       sync.Mutex
	wake     sync.Cond // turn or closed has changed
	running  sync.WaitGroup
}

// line keeps what many cores write apart: two cache lines, since processors fetch them in pairs.
type line [128]byte

// New returns a pool of n workers, at least one. Close it.
func New(n int) *Pool {
	p := &Pool{size: max(n, 1), kept: map[reflect.Type]any{}}
	p.scratch = make([]scratch, p.size+2)
	p.wake.L = &p.mu
	for worker := 1; worker < p.size; worker++ {
		p.running.Go(func() { p.work(worker) })
	}
	return p
}

// Size returns the number of workers.
func (p *Pool) Size() int {
	if p == nil {
		return 1
	}
	return p.size
}

// Close ends the workers. The pool may not be used any more.
func (p *Pool) Close() {
	if p == nil {
		return
	}
	p.mu.Lock()
	p.closed.Store(true)
	p.mu.Unlock()
	p.wake.Broadcast()
	p.running.Wait()
}

// Do runs all parts of a task, each once, and returns when they are done. It allocates nothing. A
// pool of one worker runs them in order.
//
// One Do may be under way at a time: Do panics in a task of the same pool and beside another Do. A
// panic of a part ends Do when no other part runs any more, as a [*Panic] where there are several
// workers; parts that have not begun by then are left out.
func (p *Pool) Do(parts int, t Task) {
	if p == nil {
		inOrder(parts, t)
		return
	}
	p.enter()
	defer p.busy.Store(false)
	p.do(parts, t)
}

// Run is Do of a task that the caller has as a value. The pool keeps memory for one of each type,
// so that it allocates nothing; a nil Pool allocates it.
func Run[T any, P interface {
	*T
	Task
}](p *Pool, parts int, task T) {
	if p == nil {
		own := task // task itself stays on the stack
		inOrder(parts, P(&own))
		return
	}
	p.enter()
	defer p.busy.Store(false)
	t := reflect.TypeFor[T]()
	kept, _ := p.kept[t].(P)
	if kept == nil {
		kept = new(T)
		p.kept[t] = kept
	}
	*kept = task
	defer func() { *kept = *new(T) }() // it refers to the caller's memory
	p.do(parts, kept)
}

func (p *Pool) enter() {
	if !p.busy.CompareAndSwap(false, true) {
		panic("workers: Do in a task of the same pool, or beside another Do")
	}
}

func inOrder(parts int, t Task) {
	for part := range parts {
		t.Run(part, 0)
	}
}

func (p *Pool) do(parts int, t Task) {
	if p.size == 1 || parts < 2 {
		inOrder(parts, t)
		return
	}
	p.task, p.parts = t, parts
	p.next.Store(0)
	p.turn.Add(1)
	if p.sleeping.Load() > 0 {
		p.mu.Lock() // a worker that has seen the turn before this one waits by now
		for range min(parts, p.size) - 1 {
			p.wake.Signal()
		}
		p.mu.Unlock()
	}
	defer p.finish()
	p.runParts(0)
}

// finish waits until no worker is inside, and passes on a panic.
func (p *Pool) finish() {
	p.turn.Add(1)
	for w := (spinwait.Wait{}); p.in.Load() > 0; w.Pause() {
	}
	p.task = nil
	if failed := p.failed.Swap(nil); failed != nil {
		panic(failed)
	}
}

// runParts runs parts until there are no more.
func (p *Pool) runParts(worker int) {
	defer p.catch()
	for {
		part := p.next.Add(1) - 1
		if part >= int64(p.parts) {
			return
		}
		p.task.Run(int(part), worker)
	}
}

// catch keeps the first panic, and takes the other parts away.
func (p *Pool) catch() {
	if value := recover(); value != nil {
		p.failed.CompareAndSwap(nil, &Panic{value, debug.Stack()})
		p.next.Store(int64(p.parts))
	}
}

// work is the life of a worker.
func (p *Pool) work(worker int) {
	for seen := uint64(0); p.wait(seen); {
		seen = p.help(worker)
	}
}

// help takes parts of the Do under way, and returns its turn.
func (p *Pool) help(worker int) uint64 {
	p.in.Add(1)
	defer p.in.Add(-1)
	// the Do that was waited for may have ended; one that is under way now waits for us
	turn := p.turn.Load()
	if turn%2 == 1 {
		p.runParts(worker)
	}
	return turn
}

// wait returns true when there is a Do that the worker has not seen, false when the pool is closed.
func (p *Pool) wait(seen uint64) bool {
	for begin := time.Now(); time.Since(begin) < awake; runtime.Gosched() {
		for range polls {
			if p.due(seen) {
				return true
			}
		}
		if p.closed.Load() {
			return false
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sleeping.Add(1)
	defer p.sleeping.Add(-1)
	for !p.due(seen) && !p.closed.Load() {
		p.wake.Wait()
	}
	return !p.closed.Load()
}

// due reports whether there may be parts of a Do other than the one that was seen.
func (p *Pool) due(seen uint64) bool {
	turn := p.turn.Load()
	return turn%2 == 1 && turn != seen
}

// Panic is what Do panics with where a part of a task does.
type Panic struct {
	Value any    // of the part
	Stack []byte // of the goroutine that ran it
}

// Error says what the part panicked with, and where.
func (p *Panic) Error() string { return fmt.Sprintf("workers: %v\n\n%s", p.Value, p.Stack) }

// Unwrap returns the value if it is an error.
func (p *Panic) Unwrap() error {
	err, _ := p.Value.(error)
	return err
}
