package rendezvous

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/internal/awaited"
)

// DefaultTimeout bounds every wait for another rank unless EURYALE_TIMEOUT says
// otherwise.
const DefaultTimeout = 60 * time.Second

const (
	// downKey holds the first failure of the job. Every World waits on it: this one key of the
	// store is the failure detector.
	downKey = "euryale/down"
	// newsTime bounds how long a rank that fails or leaves tries to tell the others.
	newsTime = time.Second
	// silentTime is the same for a server that did not answer before, or is itself lost.
	silentTime = 50 * time.Millisecond
	// maxCause bounds the text of a failure, in bytes.
	maxCause = 4096
)

// Failure is the loss of a rank, with the cause if it is known.
type Failure struct {
	Rank  int
	Cause error
	// Declared says that a rank has declared it, of itself or of one that it blames, see
	// [World.Fail]: the process of Rank need not have ended.
	Declared bool
}

// Error names the rank and the cause. A rank is down if its process, or its connection, has ended.
func (f *Failure) Error() string {
	if f.Declared {
		return fmt.Sprintf("rank %d failed: %v", f.Rank, f.Cause)
	}
	return fmt.Sprintf("rank %d is down: %v", f.Rank, f.Cause)
}

// Unwrap returns the cause.
func (f *Failure) Unwrap() error { return f.Cause }

// Blames returns the rank.
func (f *Failure) Blames() int { return f.Rank }

// encode is the value under downKey.
func (f *Failure) encode() []byte {
	text := f.Cause.Error()
	return fmt.Appendf(nil, "%d %t %s", f.Rank, f.Declared, text[:min(len(text), maxCause)])
}

// decodeFailure is the inverse of encode. Rank is -1 if encode did not write b.
func decodeFailure(b []byte) *Failure {
	number, text, _ := strings.Cut(string(b), " ")
	declared, text, _ := strings.Cut(text, " ")
	rank, err := strconv.Atoi(number)
	if err != nil {
		rank = -1
	}
	return &Failure{Rank: rank, Cause: errors.New(Printable(text)), Declared: declared == "true"}
}

// MissingError names the ranks that did not join, or did not call what waits for all, in time. It
// wraps the error of the context.
type MissingError struct {
	Rank  int    // the rank that reports it
	What  string // what it waited for
	Ranks []int  // the missing ranks, in order
	Cause error
}

// Error names the missing ranks.
func (e *MissingError) Error() string {
	missed := "call it"
	if strings.HasPrefix(e.What, "join") {
		missed = "join"
	}
	return fmt.Sprintf("rendezvous: rank %d: %s: %s did not %s in time (%v): check "+
		"their output, or raise EURYALE_TIMEOUT if they are only slow",
		e.Rank, e.What, ranks(e.Ranks), missed, e.Cause)
}

// Unwrap returns the cause, context.DeadlineExceeded in the end.
func (e *MissingError) Unwrap() error { return e.Cause }

// Blames returns the first of the ranks that are missing.
func (e *MissingError) Blames() int { return e.Ranks[0] }

// ranks prints "rank 1" or "ranks 1, 4, 5".
func ranks(list []int) string {
	word := "rank "
	if len(list) != 1 {
		word = "ranks "
	}
	text := make([]string, len(list))
	for i, r := range list {
		text[i] = strconv.Itoa(r)
	}
	return word + strings.Join(text, ", ")
}

// World is one rank's view of a job. Make one with [Join], [Local] or [New],
// and Close it.
type World struct {
	// Name identifies this World, the same on all ranks. Each call of [Join] makes
	// a World with a new name.
	Name string
	// Rank is this rank's number, 0 to Size-1.
	Rank, Size int
	// LocalRank is its number among the LocalSize ranks of its machine; Node is
	// the number of the machine.
	LocalRank, LocalSize, Node int
	// Timeout bounds every wait for another rank.
	Timeout time.Duration
	// LongWait is called when this rank has waited for others for 20 seconds, or for a third of
	// Timeout if that is longer. It gets "rank 0" or "ranks 0, 2": those that have not begun the
	// call. A group of ranks calls it once. Set it before the first communicator is made; nil
	// disables it.
	LongWait func(ranks string, waited time.Duration)
	// Awaited counts for whom this rank waits. Set it before the first communicator is made; nil
	// disables it.
	Awaited *awaited.Times
	// TLS encrypts the connections of Listen and Dial, on all ranks or on none.
	TLS bool
	// Store is shared by all ranks. Its calls also end when a rank is lost, with the [*Failure] as
	// error, and after Timeout.
	Store Store

	token string // of connections between ranks
	host  string // where the others reach this rank

	waits waits

	processes []Process // on this rank's machine, if their numbers are known here

	notes []string // of all ranks' Envs, if they have joined

	mu    sync.Mutex
	nodes []int // the machine of each rank; nil if that is not known

	inner    Store // whose calls continue after a lost rank or Timeout
	down     context.Context
	lose     context.CancelCauseFunc // its cause is the first *Failure
	watching context.CancelFunc
	watched  chan struct{} // closed when the watch has ended
	once     sync.Once
	closeErr error

	dissolved atomic.Bool
}

// New returns the World of one rank over a store that all ranks share. The World owns the store.
// The others learn of a failure if the rank declares it with Fail. They notice a rank that vanishes
// only when their wait for it times out; with [Join] they notice it at once.
func New(e Env, store Store) (*World, error) {
	if err := e.check(); err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	w := &World{
		Name: e.Job, Rank: e.Rank, Size: e.Size, LocalRank: e.LocalRank, LocalSize: e.LocalSize,
		Node:    e.Node,
		Timeout: e.Timeout, TLS: e.TLS, inner: store, watched: make(chan struct{}), token: e.Token,
		host: loopbackHost,
	}
	if at, ok := store.(rooted); ok {
		w.token, w.host = at.root()
	}
	if w.token == "" && w.Size == 1 {
		w.token = rand.Text()
	}
	w.Store = bounded{w}
	w.down, w.lose = context.WithCancelCause(context.Background())
	ctx, cancel := context.WithCancel(context.Background())
	w.watching = cancel
	go w.watch(ctx)
	return w, nil
}

// Local returns the Worlds of size ranks that are goroutines of this process.
// timeout bounds every wait for another rank; 0 means [DefaultTimeout].
func Local(size int, timeout time.Duration) ([]*World, error) {
	e := Env{Job: fmt.Sprintf("local-%d-%.8s", os.Getpid(), rand.Text()), Size: size,
		LocalSize: size, Timeout: cmp.Or(timeout, DefaultTimeout), Token: rand.Text()}
	if err := e.check(); err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	t := newTable()
	worlds := make([]*World, size)
	for r := range worlds {
		e.Rank, e.LocalRank = r, r
		w, err := New(e, t.open())
		if err != nil {
			return nil, err
		}
		worlds[r] = w
	}
	return worlds, nil
}

// Notes returns the Note of every rank's Env, nil in a World that [Join] did not make.
func (w *World) Notes() []string { return slices.Clone(w.notes) }

// Down is closed when a rank is lost. Failure then says which.
func (w *World) Down() <-chan struct{} { return w.down.Done() }

// Failure returns the first failure, or nil while Down is open.
func (w *World) Failure() *Failure {
	f, _ := context.Cause(w.down).(*Failure)
	return f
}

// watch waits until a rank is lost.
func (w *World) watch(ctx context.Context) {
	defer close(w.watched)
	value, err := w.inner.Get(ctx, downKey)
	var f *Failure
	switch {
	case err == nil:
		w.lose(decodeFailure(value))
	case ctx.Err() != nil || errors.Is(err, ErrClosed):
		// This rank leaves, or rank 0 has left: nobody was lost.
	case errors.As(err, &f):
		w.lose(f)
	default:
		w.lose(&Failure{Rank: w.Rank, Cause: fmt.Errorf("it lost the store: %w", err),
			Declared: true})
	}
}

// Fail declares this rank failed. Down closes on every rank, and Failure names this rank with the
// text of cause, unless another failure was first. If cause has a method Blames() int that returns
// a rank of the job other than -1, the failure names that rank. Fail returns an error if it could
// not tell the others; they then notice by Close or by the end of this process. Close is still
// needed.
func (w *World) Fail(cause error) error {
	if cause == nil {
		cause = errors.New("it declared itself failed")
	}
	f := w.failureOf(cause)
	ctx, cancel := context.WithTimeout(context.Background(), w.NewsTime(f.Rank))
	defer cancel()
	_, mine, err := w.inner.CompareAndSwap(ctx, downKey, nil, f.encode())
	var first []byte
	if err == nil {
		first, err = w.inner.Get(ctx, downKey) // on rank 0, this returns once the others know
	}
	if err == nil && !mine {
		f = decodeFailure(first)
	}
	w.lose(f)
	if err != nil {
		return fmt.Errorf("rendezvous: rank %d: tell the others of a failure: %w", w.Rank, err)
	}
	return nil
}

// failureOf returns the failure for a cause: it names the rank that cause blames, else this one,
// which is only down if the cause says so.
func (w *World) failureOf(cause error) *Failure {
	f := &Failure{Rank: w.Rank, Cause: cause, Declared: true}
	var other interface{ Blames() int }
	if errors.As(cause, &other) && other.Blames() >= 0 {
		f.Rank = other.Blames()
	}
	var known *Failure
	if errors.As(cause, &known) && known.Rank == f.Rank {
		f.Declared = known.Declared
	}
	return f
}

// NewsTime returns how long to wait for the store to accept the news that a rank is lost. The news
// is sent even if the store does not answer in that time.
func (w *World) NewsTime(lost int) time.Duration {
	most := newsTime
	if c, ok := w.inner.(*client); ok {
		c.tell(func() {
			c.silent = c.silent || lost == c.server.rank
			most = c.newsTime()
		})
	}
	return most
}

// Close leaves the job, which is never a failure for the others. Calls in progress end with
// ErrClosed. In a World from [Join], rank 0 serves the store: its Close first waits up to two
// seconds for the others to close, and then for those that are slow to go over to the rank that
// watches them from then on. Later calls do nothing.
func (w *World) Close() error {
	w.once.Do(func() {
		w.closeErr = w.inner.Close()
		w.watching()
		<-w.watched
	})
	return w.closeErr
}

// Dissolve says that no rank needs another one of this world any more, as the processes of an
// elastic job agree when a generation ends: what ends it waits for none, nor does Close. Some may
// be out of reach. In other jobs, Close would then cut off ranks that still need the store.
func (w *World) Dissolve() {
	w.dissolved.Store(true)
	if s, ok := w.inner.(interface{ dissolve() }); ok {
		s.dissolve()
	}
}

// Dissolved reports whether Dissolve was called.
func (w *World) Dissolved() bool { return w.dissolved.Load() }

// Barrier returns once every rank has called it with the same key. Each key is
// used once in the life of a job. Errors: see [World.AllGather].
func (w *World) Barrier(ctx context.Context, key string) error {
	_, err := w.allGather(ctx, fmt.Sprintf("barrier %q", key), key, nil)
	return err
}

// AllGather returns the values of all ranks, in rank order, once every rank has called it with the
// same key. Each key is used once in the life of a job. With members, which must be the same on
// every rank that calls it, it returns the values of those ranks, in their order. It takes one
// round trip to rank 0 after the last rank has called it.
//
// Errors: [*MissingError] names the ranks that did not call it in time;
// [*Failure] a rank that was lost; [ErrClosed]; the cause with which ctx was cancelled, unless all
// have called it by then.
func (w *World) AllGather(
	ctx context.Context, key string, value []byte, members ...int,
) ([][]byte, error) {
	return w.allGather(ctx, fmt.Sprintf("all-gather %q", key), key, value, members...)
}

// allGather is AllGather; what names it in errors.
func (w *World) allGather(
	ctx context.Context, what, key string, value []byte, members ...int,
) ([][]byte, error) {
	g := gathering{key: key, size: w.Size, members: members, rank: w.Rank, value: value}
	ctx, cancel := w.bound(ctx)
	defer cancel()
	values, err := w.gatherer().allGather(ctx, g)
	late := w.Failure() == nil && errors.Is(err, context.DeadlineExceeded)
	if err == nil || !late && w.Failure() == nil && context.Cause(ctx) == ctx.Err() {
		return values, w.wrap(what, err)
	}
	short, end := context.WithTimeout(context.Background(), newsTime)
	defer end()
	there, lookErr := w.gatherer().peek(short, g)
	if late && lookErr != nil {
		select { // rank 0 may have found the failure first and left: wait for its report
		case <-w.watched:
		case <-short.Done():
		}
		err = unanswered{err}
	}
	values, err = g.outcome(what, there, late, err)
	if errors.As(err, new(*MissingError)) {
		return nil, err
	}
	return values, w.wrap(what, err)
}

// outcome decides how an all-gather ends that has got no answer, or one that is late: there are the
// values that the store has, nil for those that are not set. All may have come by then: a rank may
// fail or leave right after it has set its value, and a later call reports that. Else, if its time
// is up, the others are missing.
func (g *gathering) outcome(what string, there [][]byte, late bool, err error) ([][]byte, error) {
	var missing []int
	for i, v := range there {
		if v == nil {
			missing = append(missing, g.member(i))
		}
	}
	switch {
	case there != nil && missing == nil:
		return there, nil
	case late && missing != nil:
		return nil, &MissingError{Rank: g.rank, What: what, Ranks: missing, Cause: err}
	}
	return nil, err
}

// gatherer returns the store as a gatherer.
func (w *World) gatherer() gatherer {
	if g, ok := w.inner.(gatherer); ok {
		return g
	}
	return oneByOne{w.inner}
}

func rankKey(key string, rank int) string { return fmt.Sprintf("%s/%d", key, rank) }

// unanswered is the error of a call that a working store would answer at once.
type unanswered struct{ error }

func (u unanswered) Error() string {
	return fmt.Sprintf("because of rank 0: the store, which it serves, does not answer: %v",
		u.error)
}

func (u unanswered) Unwrap() error { return u.error }

// Blames returns the rank that serves the store.
func (u unanswered) Blames() int { return 0 }

// answers reports whether the store still answers.
func (w *World) answers(key string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), newsTime)
	defer cancel()
	_, err := look(ctx, w.inner, key)
	return err == nil
}

// atOnce is wrap for a call that the store answers at once: a timeout means that the store is to
// blame.
func (w *World) atOnce(what string, err error) error {
	if errors.As(err, new(timeoutError)) {
		err = unanswered{err}
	}
	return w.wrap(what, err)
}

// bound returns ctx ending after Timeout and when a rank is lost.
func (w *World) bound(ctx context.Context) (context.Context, func()) {
	ctx, end := endWith(ctx, w.down)
	ctx, cancel := context.WithTimeoutCause(ctx, w.Timeout, timeoutError{w.Timeout})
	return ctx, func() { cancel(); end() }
}

// timeoutError says that World.Timeout has passed.
type timeoutError struct{ after time.Duration }

func (e timeoutError) Error() string { return fmt.Sprintf("timeout after %v", e.after) }

func (e timeoutError) Is(target error) bool { return target == context.DeadlineExceeded }

// wrap says who did what, and replaces the symptom of a failure by the failure.
func (w *World) wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	if f := w.Failure(); f != nil {
		err = f
	}
	return fmt.Errorf("rendezvous: rank %d: %s: %w", w.Rank, what, err)
}

// bounded is World.Store: its calls end as World.bound says.
type bounded struct{ w *World }

func (b bounded) Set(ctx context.Context, key string, value []byte) error {
	ctx, cancel := b.w.bound(ctx)
	defer cancel()
	err := b.w.inner.Set(ctx, key, value)
	return b.w.atOnce(fmt.Sprintf("set key %q", key), err)
}

func (b bounded) Get(ctx context.Context, key string) ([]byte, error) {
	ctx, cancel := b.w.bound(ctx)
	defer cancel()
	value, err := b.w.inner.Get(ctx, key)
	if errors.As(err, new(timeoutError)) && !b.w.answers(key) {
		err = unanswered{err}
	}
	return value, b.w.wrap(fmt.Sprintf("get key %q", key), err)
}

func (b bounded) CompareAndSwap(ctx context.Context, key string, old, new []byte) ([]byte, bool,
	error) {
	ctx, cancel := b.w.bound(ctx)
	defer cancel()
	current, swapped, err := b.w.inner.CompareAndSwap(ctx, key, old, new)
	return current, swapped, b.w.atOnce(fmt.Sprintf("compare and swap key %q", key), err)
}

func (b bounded) Close() error { return b.w.inner.Close() }
