package rendezvous

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// DefaultTimeout bounds every wait for another rank unless EURYALE_TIMEOUT says
// otherwise.
const DefaultTimeout = 60 * time.Second

// Store is a small key-value store shared by the ranks of a job. Keys are
// short strings; values are at most [MaxValue] bytes. Methods may be called by
// several goroutines. A value is never changed in place: the slices passed in
// and returned are the caller's own.
type Store interface {
	// Set stores value under key.
	Set(ctx context.Context, key string, value []byte) error
	// Get waits until key is set and returns its value.
	Get(ctx context.Context, key string) ([]byte, error)
	// Add adds delta to the integer under key, 0 if it is not set, and returns
	// the sum. The value is stored as decimal text.
	Add(ctx context.Context, key string, delta int64) (int64, error)
	// CompareAndSwap stores new under key if its value is old, where nil means
	// that the key is not set. It returns the value that is there afterwards and
	// whether it is the new one by this call.
	CompareAndSwap(ctx context.Context, key string, old, new []byte) (current []byte, swapped bool, err error)
	// Close ends this rank's use of the store.
	Close() error
}

// MaxValue is the largest value a Store takes, in bytes.
const MaxValue = 1 << 20

// Failure says that a rank was lost, and why as far as is known.
type Failure struct {
	Rank  int
	Cause error
}

// Error names the rank and the cause.
func (f *Failure) Error() string { return fmt.Sprintf("rank %d is down: %v", f.Rank, f.Cause) }

// Unwrap returns the cause.
func (f *Failure) Unwrap() error { return f.Cause }

// World is one rank's view of a job. Make one with [Join] or [Local].
type World struct {
	// Name identifies the job, the same on all ranks.
	Name string
	// Rank is this rank's number, 0 to Size-1.
	Rank, Size int
	// LocalRank is its number among the LocalSize ranks of its machine; Node is
	// the number of the machine.
	LocalRank, LocalSize, Node int
	// Timeout bounds every wait for another rank.
	Timeout time.Duration
	// Store is shared by all ranks. Its calls also end when a rank is lost.
	Store Store

	once    sync.Once
	down    chan struct{}
	failure *Failure
	leave   func(error) error // nil error: a clean leave; else a failure of this rank
}

// Down is closed when a rank is lost. Failure then says which.
func (w *World) Down() <-chan struct{} { return w.down }

// Failure returns the first failure, or nil while Down is open.
func (w *World) Failure() *Failure {
	select {
	case <-w.down:
		return w.failure
	default:
		return nil
	}
}

// lose records a failure; the first one stays.
func (w *World) lose(f *Failure) {
	w.once.Do(func() {
		w.failure = f
		close(w.down)
	})
}
