package rendezvous

import (
	"bytes"
	"context"
	"sync"
)

// table is the store itself: a map with waiting reads. Its slices never change, so they
// are handed out without copying.
type table struct {
	mu     sync.Mutex
	values map[string][]byte
	waits  map[string]*wait
}

// wait is shared by the getters of one unset key.
type wait struct {
	set     chan struct{} // closed when the key is set
	getters int
}

func newTable() *table {
	return &table{values: map[string][]byte{}, waits: map[string]*wait{}}
}

// put stores a value and wakes the getters; t.mu is held.
func (t *table) put(key string, value []byte) {
	t.values[key] = value
	if w := t.waits[key]; w != nil {
		close(w.set)
		delete(t.waits, key)
	}
}

func (t *table) set(key string, value []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.put(key, value)
}

func (t *table) add(key string, delta int64) (int64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	sum, text, err := plus(key, t.values[key], delta)
	if err == nil {
		t.put(key, text)
	}
	return sum, err
}

func (t *table) compareAndSwap(key string, old, new []byte) (current []byte, swapped bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	current, isSet := t.values[key]
	if isSet != (old != nil) || !bytes.Equal(current, old) {
		return current, false
	}
	t.put(key, new)
	return new, true
}

// get waits until key is set or ctx ends. If both have happened the value wins, so that a published
// failure is never dropped.
func (t *table) get(ctx context.Context, key string) ([]byte, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for {
		if v, ok := t.values[key]; ok {
			return v, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		w := t.waits[key]
		if w == nil {
			w = &wait{set: make(chan struct{})}
			t.waits[key] = w
		}
		w.getters++
		t.mu.Unlock()
		select {
		case <-w.set:
		case <-ctx.Done():
		}
		t.mu.Lock()
		if w.getters--; w.getters == 0 && t.waits[key] == w {
			delete(t.waits, key) // the key may never be set
		}
	}
}

// memStore is one rank's use of a table in its own process.
type memStore struct {
	t      *table
	closed context.Context
	close  context.CancelCauseFunc
}

// NewMemStore returns a store for goroutines of this process.
func NewMemStore() Store { return newTable().open() }

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
	m.t.set(key, copied(value))
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

func (m *memStore) Add(ctx context.Context, key string, delta int64) (int64, error) {
	if err := m.check(ctx, key, nil); err != nil {
		return 0, err
	}
	return m.t.add(key, delta)
}

func (m *memStore) CompareAndSwap(ctx context.Context, key string, old, new []byte) ([]byte, bool,
	error) {
	if err := m.check(ctx, key, new); err != nil {
		return nil, false, err
	}
	current, swapped := m.t.compareAndSwap(key, old, copied(new))
	if current != nil {
		current = copied(current)
	}
	return current, swapped, nil
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
