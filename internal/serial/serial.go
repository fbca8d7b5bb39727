// Package serial runs functions in order on one goroutine. The host's queues are built on it.
package serial

import (
	"context"
	"sync"
)

// Executor runs what is submitted, in order.
type Executor struct {
	mu     sync.Mutex
	some   sync.Cond // there are tasks, or closed is set
	tasks  []func()
	closed bool
	done   chan struct{} // closed when the goroutine has ended
}

// New starts an executor. Close ends it.
func New() *Executor {
	e := &Executor{done: make(chan struct{})}
	e.some.L = &e.mu
	go e.run()
	return e
}

func (e *Executor) run() {
	defer close(e.done)
	for {
		task, ok := e.next()
		if !ok {
			return
		}
		task()
	}
}

func (e *Executor) next() (func(), bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for len(e.tasks) == 0 {
		if e.closed {
			return nil, false
		}
		e.some.Wait()
	}
	task := e.tasks[0]
	e.tasks[0] = nil
	e.tasks = e.tasks[1:]
	return task, true
}

// Submit appends a task. It reports false, and does nothing, after Close.
func (e *Executor) Submit(task func()) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.tasks = append(e.tasks, task)
	e.some.Signal()
	return true
}

// Close waits until all submitted tasks are done. Later calls do nothing.
func (e *Executor) Close() {
	e.mu.Lock()
	e.closed = true
	e.some.Signal()
	e.mu.Unlock()
	<-e.done
}

// Event is closed when it has happened.
type Event chan struct{}

// Join waits until it has happened, or ctx ends.
func (e Event) Join(ctx context.Context) error {
	if e.Done() { // even if ctx has ended, too
		return nil
	}
	select {
	case <-e:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Done reports whether it has happened.
func (e Event) Done() bool {
	select {
	case <-e:
		return true
	default:
		return false
	}
}
