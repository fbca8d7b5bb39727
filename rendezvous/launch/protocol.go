package launch

import (
	"bytes"
	"encoding/gob"
	"io"
	"time"
)

const (
	// beat is the time between signs of life. silence is the time after which the other end of a
	// connection counts as dead. Together with the default Job.Grace it keeps a lost connection
	// from holding ranks for longer than 5 seconds.
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
}

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

// hear takes messages until the connection ends, and returns why it did. The timer goes off after a
// silence.
func hear[M any](from io.Reader, late *time.Timer, take func(M)) error {
	defer late.Stop()
	for decoder := gob.NewDecoder(from); ; late.Reset(silence) {
		var m M
		if err := decoder.Decode(&m); err != nil {
			return err
		}
		late.Stop() // reading the output of ranks may take any time
		take(m)
	}
}

// writer is an io.Writer that passes what it gets to a function. It never fails, so that ranks may
// print while they end.
type writer func([]byte)

func (w writer) Write(b []byte) (int, error) {
	w(bytes.Clone(b))
	return len(b), nil
}
