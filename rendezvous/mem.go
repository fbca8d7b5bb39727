package rendezvous

import (
	"context"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/internal/spinwait"
)

// table drives a core, for the calls of this process and for what carry does for others.
type table struct {
	mu sync.Mutex
	core
	carry func(action) // must not wait; nil where all are of this process
}

func newTable() *table { return &table{core: newCore(identity{}, false)} }

// tell tells the core what happens, and carries out what it says.
func (t *table) tell(event func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.now = time.Now()
	event()
	todo := t.todo
	t.todo = nil
	for _, a := range todo {
		switch a := a.(type) {
		case answer:
			a.to.value = a.value
			close(a.to.done)
		case spread:
			go func() {
				spinwait.Patient(spreadTime).Await(a.call.to.done)
				t.tell(func() { t.spreads(a.call) })
			}()
		default:
			t.carry(a)
		}
	}
}

// get waits until key is set or ctx ends. If both have happened the value wins, so that a published
// failure is never dropped.
func (t *table) get(ctx context.Context, key string) ([]byte, error) {
	return t.answered(ctx, &wait{get: key})
}

// answered is get for any wait.
func (t *table) answered(ctx context.Context, w *wait) ([]byte, error) {
	w.done = make(chan struct{})
	t.tell(func() { t.await(w) })
	select {
	case <-w.done:
	case <-ctx.Done():
		t.tell(func() { t.cancel(w) })
		<-w.done
	}
	if w.value == nil {
		return nil, context.Cause(ctx)
	}
	return w.value, nil
}

// memStore is one rank's use of a table in its own process.
type memStore struct {
	t      *table
	closed context.Context
	close  context.CancelCauseFunc
}

// NewMemStore returns a store for goroutines of this process.
func NewMemStore() Log { return newTable().open() }

// open returns one more Store on the table.
func (t *table) open() *memStore {
	closed, cancel := context.WithCancelCause(context.Background())
	return &memStore{t: t, closed: closed, close: cancel}
}

// check returns an error if a call must not begin.
func (m *memStore) check(ctx context.Context, key string, value []byte) error {
	if m.closed.Err() != nil {
		return ErrClosed
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return checkPair(key, value)
}

func (m *memStore) Set(ctx context.Context, key string, value []byte) error {
	if err := m.check(ctx, key, value); err != nil {
		return err
	}
	m.t.tell(func() { m.t.put(key, copied(value)) })
	return nil
}

func (m *memStore) Get(ctx context.Context, key string) ([]byte, error) {
	if err := m.check(ctx, key, nil); err != nil {
		return nil, err
	}
	ctx, cancel := endWith(ctx, m.closed)
	defer cancel()
	v, err := m.t.get(ctx, key)
	if err != nil {
		return nil, err
	}
	return copied(v), nil
}

func (m *memStore) CompareAndSwap(ctx context.Context, key string, old, new []byte) (current []byte,
	swapped bool, err error) {
	if err := m.check(ctx, key, new); err != nil {
		return nil, false, err
	}
	m.t.tell(func() { current, swapped = m.t.swap(key, old, copied(new)) })
	if current != nil {
		current = copied(current)
	}
	return current, swapped, nil
}

// Append implements [Log].
func (m *memStore) Append(ctx context.Context, key string, i int, value []byte) (at int,
	err error) {
	if err := m.check(ctx, rankKey(key, i), value); err != nil {
		return 0, err
	}
	m.t.tell(func() { at = m.t.append(key, i, copied(value)) })
	return at, nil
}

// Entries implements [Log].
func (m *memStore) Entries(ctx context.Context, key string, i int) ([][]byte, error) {
	if err := m.check(ctx, rankKey(key, i), nil); err != nil {
		return nil, err
	}
	ctx, cancel := endWith(ctx, m.closed)
	defer cancel()
	body, err := m.t.answered(ctx, &wait{get: rankKey(key, i), log: key, from: i})
	if err != nil {
		return nil, err
	}
	return (&unpacker{rest: body}).list() // which is a copy
}

// Peek implements [Log].
func (m *memStore) Peek(ctx context.Context, key string, entries ...int) ([][]byte, error) {
	return peekEntries(ctx, oneByOne{m}, key, entries)
}

func (m *memStore) Close() error {
	m.close(ErrClosed)
	return nil
}

// endWith returns a context that ends when ctx or other ends, with the cause of the first to end.
func endWith(ctx, other context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	if other.Err() != nil { // AfterFunc would be late
		cancel(context.Cause(other))
	}
	stop := context.AfterFunc(other, func() { cancel(context.Cause(other)) })
	return ctx, func() { stop(); cancel(nil) }
}
