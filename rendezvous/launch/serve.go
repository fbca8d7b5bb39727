package launch

import (
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
	Port     int // a free one, at first
	Out, Err []byte
	Notice   string
	Done     *outcome // of the task, at last
}

// outcome is how a task has ended.
type outcome struct {
	Failed    *Failed // and what it does not export
	Cause     cause
	Elsewhere []int
	Usage     bool
	Text      string // of another error, "" for none
	Told      bool   // the launcher of the job had told it to end
}

// outcomeOf makes an error an outcome.
func outcomeOf(err error) *outcome {
	var o outcome
	var told *Interrupted
	switch o.Told = errors.As(err, &told); {
	case errors.As(err, &o.Failed):
		o.Cause, o.Elsewhere, o.Usage = o.Failed.cause, o.Failed.elsewhere, o.Failed.usage
	case err != nil:
		o.Text = err.Error()
	}
	return &o
}

// err makes an outcome the error of a host.
func (o *outcome) err(host string) error {
	switch f := o.Failed; {
	case f != nil:
		f.Host, f.cause, f.elsewhere, f.usage = host, o.Cause, o.Elsewhere, o.Usage
		return f
	case o.Text != "":
		return fmt.Errorf("host %s: %s", host, o.Text)
	}
	return nil
}

// errOver is why ranks end when the connection does.
var errOver = errors.New("the launcher of the job has ended, or the connection to it")

// server is the launcher of a host.
type server struct {
	task    chan task
	signals chan os.Signal

	mu      sync.Mutex
	encoder *gob.Encoder // used under mu
}

// Serve runs the ranks of this machine in an attempt at a job on hosts, for the launcher of the
// job, which sends its orders over in and hears over out; it is what that launcher starts by ssh.
// When in ends or nothing comes from there for 4 seconds, ranks get SIGTERM, then SIGKILL after the
// grace. advise says what this machine lacks for GPUs, a line each; it is asked before a program
// starts that uses them.
//
// Serve returns nil when the ranks or in have ended, and otherwise the cause of ctx or an error of
// the connection.
func Serve(ctx context.Context, in io.Reader, out io.Writer, advise func() []string) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &server{task: make(chan task, 1), signals: make(chan os.Signal, 4),
		encoder: gob.NewEncoder(out)}
	go s.listen(in, cancel) // ends with in, or with this process
	port, err := freePort()
	if err != nil {
		return fmt.Errorf("find a free port: %w", err)
	}
	s.tell(news{Port: port})
	living := make(chan struct{})
	defer close(living) // signs of life go on while ranks end
	go pulse(living, func() { s.tell(news{}) })
	select {
	case <-ctx.Done():
	case t := <-s.task:
		done := outcomeOf(s.run(ctx, t, advise))
		if ctx.Err() == nil { // else nobody listens
			return s.tell(news{Done: done})
		}
	}
	if err := context.Cause(ctx); !errors.Is(err, errOver) {
		return err
	}
	return nil
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
			s.task <- *o.Task // the only one
		case o.Signal != 0:
			select {
			case s.signals <- syscall.Signal(o.Signal):
			default: // enough have been sent
			}
		}
	}
}

// run runs a task.
func (s *server) run(ctx context.Context, t task, advise func() []string) error {
	j, err := s.job(t)
	if err != nil {
		return err
	}
	if usesGPU(j.Program) {
		for _, line := range advise() {
			j.Notice(line)
		}
	}
	return Run(ctx, j)
}

// job returns the job of a task.
func (s *server) job(t task) (Job, error) {
	self, err := os.Executable()
	if err != nil {
		return Job{}, fmt.Errorf("find this program: %w", err)
	}
	cached, program := filepath.Dir(self), t.Program
	if t.Hash != "" {
		program = filepath.Join(filepath.Dir(cached), t.Hash, t.Program)
		f, err := newFile(program)
		if err == nil && f.hash != t.Hash {
			err = errors.Join(fmt.Errorf("%s is damaged: run again, which copies it", program),
				os.Remove(program))
		}
		if err != nil {
			return Job{}, fmt.Errorf("check the copy of the program: %w", err)
		}
	} else if program == filepath.Base(self) {
		program = self
	}
	dir := t.Dir
	if _, err := os.Stat(dir + "/."); err != nil { // the host does not have it, or keeps it closed
		if dir, err = os.UserHomeDir(); err != nil {
			return Job{}, fmt.Errorf("find a directory for the ranks: %w", err)
		}
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
