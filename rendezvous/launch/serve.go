package launch

import (
	"cmp"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// order is what a launcher tells the launcher of a host. The zero order is a sign of life.
type order struct {
	Signal int   // for the ranks
	Task   *task // to run
}

// task is what a host runs of an attempt at a job.
type task struct {
	// Program is a name to look up in PATH; or, with Hash, that of a file of the cache.
	Program, Hash string
	Args, Env     []string
	Dir, LogDir   string
	Ranks         int
	Grace         time.Duration
	Plain         bool
	Machines      Machines
}

// news is what the launcher of a host tells. The zero news is a sign of life.
type news struct {
	Out, Err []byte
	Notice   string
	Done     *outcome // of the task
	Port     int      // a free one for the next attempt, with Done and at first
}

// outcome is how a task has ended.
type outcome struct {
	Text      string // the error, "" for none
	Summary   string // a line of it
	Code      int    // the exit code
	Failed    bool   // a rank has failed
	Elsewhere bool   // because of one on another host
	Usage     bool   // as ranks do when their command line is wrong
	Stuck     bool   // ranks hang
	Told      bool   // the launcher of the job had told it to end
}

// Serve runs the ranks of this machine for the launcher of a job on hosts, which sends its orders
// over in and hears over out; it is what that launcher starts by ssh. When in ends or nothing comes
// from there for 4 seconds, ranks get SIGTERM, then SIGKILL after the grace. advise says what this
// machine lacks for GPUs, a line each; it is asked before a program starts that uses them.
//
// Serve returns nil when in ends, and otherwise the cause of ctx or an error of the connection.
func Serve(ctx context.Context, in io.Reader, out io.Writer, advise func() []string) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &server{tasks: make(chan task, 1), signals: make(chan os.Signal, 4), advise: advise,
		encoder: gob.NewEncoder(out)}
	go s.listen(in, cancel) // ends with in, or with this process
	// Signs of life go on while ranks end.
	living, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	go pulse(living.Done(), func() { s.tell(news{}) })
	port, err := freePort()
	if err != nil {
		return fmt.Errorf("find a free port: %w", err)
	}
	s.tell(news{Port: port})
	for {
		select {
		case <-ctx.Done():
			if err := context.Cause(ctx); !errors.Is(err, errOver) {
				return err
			}
			return nil
		case t := <-s.tasks:
			done := s.run(ctx, t)
			if ctx.Err() != nil { // nobody listens
				continue
			}
			if port, err = freePort(); err != nil {
				return fmt.Errorf("find a free port: %w", err)
			}
			s.tell(news{Done: &done, Port: port})
		}
	}
}

// errOver is why ranks end when the connection does.
var errOver = errors.New("the launcher of the job has ended, or the connection to it")

// server is the launcher of a host.
type server struct {
	tasks   chan task
	signals chan os.Signal
	advise  func() []string

	mu      sync.Mutex
	encoder *gob.Encoder // used under mu
}

// tell sends news. If it cannot be sent, the connection has ended, which listen sees.
func (s *server) tell(n news) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.encoder.Encode(n)
}

// listen takes orders until they end.
func (s *server) listen(in io.Reader, cancel context.CancelCauseFunc) {
	late := time.AfterFunc(silence, func() { cancel(errOver) })
	defer late.Stop()
	for decoder := gob.NewDecoder(in); ; {
		var o order
		err := decoder.Decode(&o)
		late.Reset(silence)
		switch {
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
			cancel(errOver)
			return
		case err != nil:
			cancel(fmt.Errorf("read orders: %w", err))
			return
		case o.Task != nil:
			for len(s.signals) > 0 { // they were for the task before
				<-s.signals
			}
			s.tasks <- *o.Task // one at a time
		case o.Signal != 0:
			select {
			case s.signals <- syscall.Signal(o.Signal):
			default: // enough have been sent
			}
		}
	}
}

// run runs a task.
func (s *server) run(ctx context.Context, t task) outcome {
	j, err := s.job(t)
	if err == nil && usesGPU(j.Program) {
		for _, line := range s.advise() {
			j.Notice(line)
		}
	}
	if err == nil {
		err = Run(ctx, j)
	}
	return outcomeOf(err)
}

// job returns the job of a task.
func (s *server) job(t task) (Job, error) {
	self, err := os.Executable()
	if err != nil {
		return Job{}, fmt.Errorf("find this program: %w", err)
	}
	cached := filepath.Dir(self)
	program := t.Program
	if t.Hash != "" {
		program = filepath.Join(filepath.Dir(cached), t.Hash, t.Program)
	} else if program == filepath.Base(self) {
		program = self
	}
	dir := t.Dir
	if _, err := os.Stat(dir); err != nil {
		dir = "" // the host does not have it
	}
	logs := t.LogDir
	if logs != "" && !filepath.IsAbs(logs) {
		logs = filepath.Join(dir, logs)
	}
	// Programs may start this one.
	path := "PATH=" + cached + string(filepath.ListSeparator) + os.Getenv("PATH")
	return Job{
		Program: program, Args: t.Args, Ranks: t.Ranks, Machines: &t.Machines, Dir: dir,
		Env: append(append(os.Environ(), path), t.Env...), Plain: t.Plain,
		Stdout: writer(func(b []byte) error { return s.tell(news{Out: b}) }),
		Stderr: writer(func(b []byte) error { return s.tell(news{Err: b}) }),
		LogDir: logs, Grace: t.Grace, Signals: s.signals,
		Notice: func(text string) { s.tell(news{Notice: text}) },
	}, nil
}

// writer is a function as an io.Writer.
type writer func([]byte) error

func (w writer) Write(b []byte) (int, error) { return len(b), w(b) }

// outcomeOf says what the error of a task means for the job.
func outcomeOf(err error) (o outcome) {
	if err == nil {
		return o
	}
	o.Text, o.Summary, o.Code = err.Error(), err.Error(), 1
	var coded interface{ ExitCode() int }
	if errors.As(err, &coded) {
		o.Code = cmp.Or(coded.ExitCode(), 1)
	}
	var told *Interrupted
	o.Told = errors.As(err, &told)
	var f *Failed
	if errors.As(err, &f) {
		o.Failed, o.Summary, o.Usage, o.Stuck = true, f.summary(), f.Usage(), len(f.Hang) > 0
		o.Elsewhere = len(f.elsewhere) > 0
	}
	return o
}
