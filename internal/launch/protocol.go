package launch

import (
	"bytes"
	"encoding/gob"
	"io"
	"sync"
	"time"
)

const (
	// beat is the time between signs of life. silence is the time after which a host counts as
	// lost, and the least after which it gives up its launcher: that may be stopped for a while.
	beat    = 500 * time.Millisecond
	silence = 4 * time.Second
)

// order is an order from a launcher to the launcher of a host. The zero order is a sign of life.
// Gob drops a pointer to a zero that is no struct.
type order struct {
	Task   *task   // comes first
	Start  *member // one more
	Signal int     // for all ranks
	Kill   *member // by its number
	Over   *over   // the job
}

// over is the exit status of a job.
type over struct{ Status int }

// task is a host's part of an attempt at a job.
type task struct {
	// Program is a name to look up in PATH or, with Hash, the name of a file in the cache.
	Program, Hash string
	Args, Env     []string
	Dir           string
	Grace         time.Duration
	Register      string // of an elastic job, "" for others
}

// member is a rank to start, with the variables that only it has.
type member struct {
	Number int
	Env    []string
}

// news is a message from the launcher of a host. The zero news is a sign of life.
type news struct {
	Notice   string
	Failed   string // why no rank can start or, with End, why one cannot
	Number   int    // of the rank that the rest describes
	Out, Err []byte
	End      *ending
	Stops    bool // the rank has been stopped
	Goes     bool // it goes on again
	Leaves   bool // the host was told to end
}

// speak sends messages, with signs of life between them, until the connection ends.
func speak[M any](to io.Writer, messages <-chan M, over <-chan struct{}) {
	pulse := time.NewTicker(beat)
	defer pulse.Stop()
	for encoder := gob.NewEncoder(to); ; {
		var m M
		select {
		case m = <-messages:
		case <-pulse.C:
		case <-over:
			return
		}
		_ = encoder.Encode(m) // an error means the connection has ended, which hear notices
	}
}

// launcherSilence is how long a host hears nothing of its launcher until it ends its ranks. One
// that is stopped for less than ranks wait has lost nothing: its last sign of life was sent up to a
// beat before, and the next one may take a while.
func launcherSilence(patience time.Duration) time.Duration { return max(silence, patience+4*beat) }

// hear takes messages until the connection ends, and returns why it did. The alarm is of silence.
func hear[M any](from io.Reader, late *alarm, take func(M)) error {
	defer late.Stop()
	for decoder := gob.NewDecoder(from); ; late.Reset() {
		var m M
		if err := decoder.Decode(&m); err != nil {
			return err
		}
		late.Stop() // reading the output of ranks may take any time
		take(m)
	}
}

// countdown is a silence that the other end may keep, in beats of this process: while this is
// stopped, what others send waits to be read.
type countdown struct{ limit, left time.Duration }

// beat counts a beat, and reports whether the silence is too long.
func (c *countdown) beat() bool {
	c.left -= beat
	return c.left <= 0
}

// quiet reports whether a few signs of life are missing: it is not known how the other end is.
func (c *countdown) quiet() bool { return c.limit-c.left >= 2*beat }

// alarm does something after a silence.
type alarm struct {
	ring func()

	mu sync.Mutex
	countdown
	next *time.Timer // nil while the alarm is off
}

// newAlarm returns an alarm that is on.
func newAlarm(limit time.Duration, ring func()) *alarm {
	a := &alarm{countdown: countdown{limit: limit}, ring: ring}
	a.Reset()
	return a
}

// Reset begins the silence anew.
func (a *alarm) Reset() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.left = a.limit
	if a.next == nil {
		a.next = time.AfterFunc(beat, a.count)
	}
}

// Stop turns the alarm off, until Reset.
func (a *alarm) Stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.next != nil {
		a.next.Stop()
		a.next = nil
	}
}

// silent reports whether it is on, and the other end quiet.
func (a *alarm) silent() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.next != nil && a.quiet()
}

// setLimit makes the silence longer or shorter, from the next Reset on.
func (a *alarm) setLimit(limit time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.limit = limit
}

func (a *alarm) count() {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.next == nil: // it was turned off meanwhile
	case a.beat():
		a.next = nil
		go a.ring()
	default:
		a.next.Reset(beat)
	}
}

// writer is an io.Writer that passes what it gets to a function. It never fails, so that ranks may
// print while they end.
type writer func([]byte)

func (w writer) Write(b []byte) (int, error) {
	w(bytes.Clone(b))
	return len(b), nil
}
