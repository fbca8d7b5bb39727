package gpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// How a rank leaves a group. Kernels of the others write into its memory, and one of them
// may still be behind other work on its queue when this rank closes. So the memory is kept
// until every rank whose kernels reach it has left, too, or its process is dead: nobody
// else is to get it before. Close waits for that only so long; the rest goes on behind it.

// Stages of a [group.Teardown].
const (
	hasLeft  = 1 + iota // this rank's kernels are done with the memory of the others
	hasFreed            // it has given back its own
)

// leave ends the part of this rank, whose last kernel is on a queue, if there was one. It
// returns when all ranks have given back their memory. If nobody can tell that the kernels
// have ended, everything stays as it is, here and elsewhere.
func (m *peerMemory) leave(last backend.Queue) error {
	m.held.Store(int64(m.bytes()))
	if err := settle(last, forever); err != nil {
		return fmt.Errorf("the memory of the kernels stays in use: %w", err)
	}
	errs := []error{m.closeImports()}
	m.end.Reach(hasLeft, m.reaches)
	errs = append(errs, m.freeAll())
	m.held.Store(0)
	m.end.Reach(hasFreed, m.reaches)
	m.end.Close()
	return errors.Join(errs...)
}

// settle waits for the kernels on a queue, if there is one. They have been told to stop, but
// what is before them may take its time.
func settle(q backend.Queue, limit time.Duration) error {
	if q == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	err := drain(ctx, q)
	if errors.Is(err, backend.ErrArgument) || errors.Is(err, backend.ErrClosed) { // the queue is, and has waited
		return nil
	}
	return err
}

const forever = time.Duration(math.MaxInt64)

// bytes is how much memory of the device is not given back.
func (m *peerMemory) bytes() int {
	n := 0
	for _, b := range m.owned() {
		n += b.Len()
	}
	return n
}

// owned is the memory of the device that is to be given back.
func (m *peerMemory) owned() []backend.Buffer {
	var all []backend.Buffer
	for _, w := range m.shared() {
		all = append(all, w.own)
	}
	return slices.DeleteFunc(append(all, m.private...), func(b backend.Buffer) bool { return b.Len() == 0 })
}

// shared is what other ranks reach.
func (m *peerMemory) shared() []*window {
	all := append([]*window{m.pad}, m.windows...)
	return slices.DeleteFunc(all, func(w *window) bool { return w == nil })
}

// closeImports gives back what others have shown.
func (m *peerMemory) closeImports() error {
	var errs []error
	for _, w := range m.shared() {
		errs = append(errs, m.closeImportsOf(w))
	}
	return errors.Join(errs...)
}

func (m *peerMemory) closeImportsOf(w *window) error {
	var errs []error
	for _, b := range w.imported {
		errs = append(errs, m.dev.CloseImport(b))
	}
	w.imported = nil
	return errors.Join(errs...)
}

// freeAll gives back all memory of this rank. Nothing may use it any more, here or elsewhere.
// The driver may take its time over the host's, while a kernel of another group waits.
func (m *peerMemory) freeAll() error {
	m.giving.Lock()
	var errs []error
	for _, b := range m.owned() {
		errs = append(errs, m.free(b))
	}
	m.pad, m.windows, m.private = nil, nil, nil
	m.giving.Unlock()
	if m.dev == nil {
		return errors.Join(errs...)
	}
	if words := m.c.status.take(); words.Len() > 0 {
		errs = append(errs, m.dev.FreeHost(words))
	}
	return errors.Join(append(errs, m.dev.Release())...)
}

// keep takes what is not given back yet from the device, which may be closed before that
// is: it is this memory's alone then.
func (m *peerMemory) keep() error {
	m.giving.Lock()
	defer m.giving.Unlock()
	if m.dev == nil {
		return nil
	}
	var errs []error
	for _, b := range m.owned() {
		errs = append(errs, m.dev.Disown(b))
	}
	return errors.Join(errs...)
}

// teardowns are the ends of a rank's groups, a group and its parts, which go on in the
// background and may take longer than Close.
type teardowns struct {
	mu    sync.Mutex
	under []*teardown // errors of which nobody has heard
}

type teardown struct {
	engine <-chan struct{} // closed when NCCL is done with, nil if that is not waited for
	done   chan struct{}
	err    error // once done is closed
}

// begin runs f, which is part of an end, in the background.
func (t *teardowns) begin(engine <-chan struct{}, f func() error) *teardown {
	one := &teardown{engine: engine, done: make(chan struct{})}
	t.mu.Lock()
	t.under = append(t.under, one)
	t.mu.Unlock()
	go func() {
		defer close(one.done)
		one.err = f()
	}()
	return one
}

// engines waits until NCCL is done with.
func (t *teardowns) engines() {
	for _, one := range t.all() {
		if one.engine != nil {
			<-one.engine
		}
	}
}

// wait waits for some teardowns, up to a time, and returns what went wrong in all that have
// come to their end.
func (t *teardowns) wait(limit time.Duration, some ...*teardown) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for _, one := range some {
		select {
		case <-one.done:
		case <-ctx.Done():
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var errs []error
	t.under = slices.DeleteFunc(t.under, func(one *teardown) bool {
		select {
		case <-one.done:
			errs = append(errs, one.err)
			return true
		default:
			return false
		}
	})
	return errors.Join(errs...)
}

// all are the teardowns that nobody has heard of.
func (t *teardowns) all() []*teardown {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.under)
}
