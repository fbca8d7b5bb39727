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

// How a rank leaves a group. Kernels of other ranks write into its memory, and such a kernel may
// still be queued behind other work when this rank closes. So the memory is not given back until
// every rank whose kernels reach it has left, too, or its process is dead. Close waits briefly;
// then the teardown goes on in the background.

// Stages of a [group.Teardown].
const (
	hasLeft  = 1 + iota // this rank's kernels are done with the memory of the others
	hasFreed            // it has given back its own
)

// giveBack gives back this rank's memory, and returns when all ranks have given back theirs. last
// is the queue of this rank's last kernel, nil if there was none. If it cannot be told that the
// kernels have ended, no rank gives anything back.
func (m *peerMemory) giveBack(last backend.Queue) error {
	m.held.Store(int64(m.bytes()))
	if err := settle(last, forever); err != nil {
		return fmt.Errorf("the memory of the kernels stays in use: %w", err)
	}
	errs := []error{m.c.waits.Load().close(), m.closeImports()}
	m.end.Reach(hasLeft, m.reaches)
	errs = append(errs, m.freeAll())
	m.held.Store(0)
	m.end.Reach(hasFreed, m.reaches)
	m.end.Close()
	return errors.Join(errs...)
}

// settle waits up to limit for the kernels on a queue; nil waits for nothing. They have been told
// to stop, but work queued before them may take longer.
func settle(q backend.Queue, limit time.Duration) error {
	if q == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	err := drain(ctx, q)
	// the queue is, and has waited
	if errors.Is(err, backend.ErrArgument) || errors.Is(err, backend.ErrClosed) {
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

// owned lists the device memory that this rank has to give back.
func (m *peerMemory) owned() []backend.Buffer {
	var all []backend.Buffer
	for _, w := range m.shared() {
		all = append(all, w.own)
	}
	return slices.DeleteFunc(append(all, m.private...), func(b backend.Buffer) bool {
		return b.Len() == 0
	})
}

// shared lists the windows that other ranks reach.
func (m *peerMemory) shared() []*window {
	all := append([]*window{m.pad}, m.windows...)
	return slices.DeleteFunc(all, func(w *window) bool { return w == nil })
}

// closeImports closes this rank's imports of other ranks' memory.
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

// freeAll gives back all memory of this rank, which no rank may use any more. Freeing host memory
// may block in the driver while a kernel of another group waits.
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
	if words := m.c.status.takeMemory(); words.Len() > 0 {
		errs = append(errs, m.dev.FreeHost(words))
	}
	return errors.Join(append(errs, m.dev.Release())...)
}

// keep disowns the memory that is not given back yet, so that the device may be closed first.
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

// teardowns are the background teardowns of a group and its parts on this rank. They may take
// longer than Close.
type teardowns struct {
	mu    sync.Mutex
	under []*teardown // whose errors were not returned yet
}

type teardown struct {
	engine <-chan struct{} // closed when NCCL has ended, nil if this teardown is not of NCCL
	done   chan struct{}
	err    error // once done is closed
}

// beginPart runs f, a part of a teardown, in the background.
func (t *teardowns) beginPart(engine <-chan struct{}, f func() error) *teardown {
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

// engines waits until NCCL has ended.
func (t *teardowns) engines() {
	for _, one := range t.all() {
		if one.engine != nil {
			<-one.engine
		}
	}
}

// wait waits up to limit for some teardowns, and returns the errors of all that have ended.
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

// all returns the teardowns whose errors were not returned yet.
func (t *teardowns) all() []*teardown {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.under)
}
