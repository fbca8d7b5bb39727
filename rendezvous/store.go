package rendezvous

import (
	"context"
	"errors"
	"fmt"
)

// Store is a small key-value store shared by the ranks of a job. Keys are 1 to 256 bytes; those
// that begin with "euryale/" are reserved for the package. Values are at most 1 MiB. Methods may be
// called by several goroutines. A value is never changed in place: the slices passed in and
// returned are the caller's own.
//
// Every method ends with an error when ctx does, and with [ErrClosed] after
// Close, which also wakes calls that wait.
type Store interface {
	// Set stores value under key.
	Set(ctx context.Context, key string, value []byte) error
	// Get waits until key is set and returns its value.
	Get(ctx context.Context, key string) ([]byte, error)
	// CompareAndSwap stores new under key if its value is old; if old is nil, the key must not be
	// set. It returns the value after the call, nil if the key is not set, and whether this call
	// stored it.
	CompareAndSwap(ctx context.Context, key string, old, new []byte) (current []byte, swapped bool,
		err error)
	// Close ends this rank's use of the store. Later calls do nothing.
	Close() error
}

// Log is a [Store] with logs, which many processes write and read: the values of key/0, key/1 and
// so on. Each call is one round trip.
type Log interface {
	Store
	// Append stores value as the first entry of a log, from entry i on, that is not set. It returns
	// which one that is.
	Append(ctx context.Context, key string, i int, value []byte) (at int, err error)
	// Entries waits until entry i of a log is set. It returns that and the entries behind it, up to
	// 1 MiB in all, but at least one.
	Entries(ctx context.Context, key string, i int) ([][]byte, error)
	// Peek returns some entries, nil for those that are not set. It does not wait.
	Peek(ctx context.Context, key string, entries ...int) ([][]byte, error)
}

// The limits of every Store, in bytes.
const (
	maxKey   = 256
	maxValue = 1 << 20
)

// ErrClosed is the error of calls on a Store or World that was closed by this rank or by the rank
// that serves the store.
var ErrClosed = errors.New("closed")

// checkPair finds argument errors common to all stores.
func checkPair(key string, value []byte) error {
	switch {
	case key == "":
		return errors.New("the key is empty")
	case len(key) > maxKey:
		return fmt.Errorf("the key has %d bytes, at most %d are allowed", len(key), maxKey)
	case len(value) > maxValue:
		return fmt.Errorf("the value of key %q has %d bytes, at most %d are allowed", key,
			len(value), maxValue)
	}
	return nil
}

// copied returns a copy of v that is not nil.
func copied(v []byte) []byte { return append([]byte{}, v...) }
