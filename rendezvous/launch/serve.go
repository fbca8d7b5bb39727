package launch

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"
)

// order is what a launcher tells the launcher of a host. The zero order is a sign of life.
type order struct {
	Task   *task    // comes first
	Start  *process // one more
	Signal int      // for all processes
}

// task is what a host runs of an attempt at a job.
type task struct {
	// Program is a name to look up in PATH; or, with Hash, that of a file of the cache.
	Program, Hash string
	Args, Env     []string
	Dir           string
	Grace         time.Duration
	Register      string // of an elastic job, "" for others
}

// process is a rank to start, or a process of an elastic job, and the variables that it alone has.
type process struct {
	Number int
	Env    []string
}

// news is what the launcher of a host tells. The zero news is a sign of life.
type news struct {
	Port     int // a free one, at first
	Notice   string
	Failed   string // why no process can start, or, with End, the one
	Number   int    // of the process that the rest is about
	Out, Err []byte
	End      *outcome
}

// outcome is how a process has ended: see ending.
type outcome struct {
	Status         syscall.WaitStatus
	Asked, Stopped bool
	Hang           string
}

// errOver is why ranks end when the connection does.
var errOver = errors.New("the launcher of the job has ended, or the connection to it")

// server is the launcher of a host.
type server struct {
	orders chan order
	over   <-chan struct{} // closed when the connection has ended

	mu      sync.Mutex
	encoder *gob.Encoder // used under mu
}

// maxOrders bounds the orders that wait to be obeyed, so that signs of life are heard meanwhile.
const maxOrders = 2 * MaxRanks

// Serve runs the ranks of this machine in an attempt at a job on hosts, for the launcher of the
// job, which sends its orders over in and hears over out; it is what that launcher starts by ssh.
// When in ends or nothing comes from there for 4 seconds, ranks get SIGTERM, then SIGKILL after the
// grace. advise says what this machine lacks for GPUs, a line each; it is asked before a program
// starts that uses them.
//
// Serve returns nil when in has ended, and with it the ranks, and otherwise the cause of ctx or an
// error of the connection. It locks the calling goroutine to its thread as [Run] does.
func Serve(ctx context.Context, in io.Reader, out io.Writer, advise func() []string) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &server{orders: make(chan order, maxOrders), over: ctx.Done(),
		encoder: gob.NewEncoder(out)}
	go s.listen(in, cancel) // ends with in, or with this process
	port, err := freePort()
	if err != nil {
		return fmt.Errorf("find a free port: %w", err)
	}
	s.tell(news{Port: port})
	go pulse(s.over, func() { s.tell(news{}) })
	select {
	case <-ctx.Done():
	case o := <-s.orders:
		if o.Task == nil {
			return errors.New("the first order must be a task")
		}
		if err := s.run(ctx, *o.Task, advise); err != nil {
			s.tell(news{Failed: err.Error()})
			<-ctx.Done() // the job's launcher ends the connection
		}
	}
	if err := context.Cause(ctx); !errors.Is(err, errOver) {
		return err
	}
	return nil
}

// tell sends news until the connection ends, which listen sees: sshd may hold what is sent for
// minutes then, and ranks must end meanwhile.
func (s *server) tell(n news) {
	select {
	case <-s.over:
		return
	default:
	}
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		s.mu.Lock()
		defer s.mu.Unlock()
		_ = s.encoder.Encode(n) // an error is the end of the connection
	}()
	select {
	case <-sent:
	case <-s.over:
	}
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
		case o.Task != nil || o.Start != nil || o.Signal != 0:
			select {
			case s.orders <- o:
			default:
				cancel(errors.New("too many orders"))
				return
			}
		}
	}
}

// run runs a task until ctx ends. Of its processes it tells, the error is of what comes before.
func (s *server) run(ctx context.Context, t task, advise func() []string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	program, err := t.program(self)
	if err != nil {
		return err
	}
	command, err := interpreted(program)
	if err != nil {
		return err
	}
	if usesGPU(program) {
		s.advise(ctx, advise)
	}
	dir := t.Dir
	if _, err := os.Stat(dir + "/."); err != nil { // the host does not have it, or keeps it closed
		if dir, err = os.UserHomeDir(); err != nil {
			return fmt.Errorf("find a directory for the ranks: %w", err)
		}
	}
	j := Job{Args: append(command[1:], t.Args...), Dir: dir, Grace: t.Grace, times: defaultTimes(),
		Notice: func(text string) { s.tell(news{Notice: text}) }}
	if t.Register != "" {
		j.Elastic = &Elastic{}
		if err := reach(ctx, t.Register); err != nil {
			return err
		}
	}
	// Programs may start this one.
	path := "PATH=" + filepath.Dir(self) + string(filepath.ListSeparator) + os.Getenv("PATH")
	w := newWatch(j, slices.Concat(os.Environ(), []string{path}, t.Env))
	w.orders, w.heard = s.orders, s.tell
	w.begin = func(r *rank) error { return w.startHere(command[0], r, r.env) }
	w.run(ctx) // whose outcome the job's launcher finds
	return nil
}

// advise tells what this machine lacks for GPUs. A driver may hold who asks it.
func (s *server) advise(ctx context.Context, lacks func() []string) {
	lines := make(chan []string, 1)
	go func() { lines <- lacks() }()
	select {
	case all := <-lines:
		for _, line := range all {
			s.tell(news{Notice: line})
		}
	case <-ctx.Done():
	}
}

// reachTime is how long a host tries to reach the machine where the job was started.
const reachTime = 10 * time.Second

// reach checks that a register can be reached.
func reach(ctx context.Context, addr string) error {
	conn, err := (&net.Dialer{Timeout: reachTime}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("it does not reach the machine where the elastic job was started, and "+
			"its processes must: let connections from here in there, or start the job on one of "+
			"the hosts: %w", err)
	}
	return conn.Close()
}

// obey does what the job's launcher wants of this host.
func (w *watch) obey(o order) {
	switch {
	case o.Signal != 0:
		s := syscall.Signal(o.Signal)
		w.stop(s, &Interrupted{s})
	case o.Start != nil:
		r := &rank{number: o.Start.Number, env: o.Start.Env, tail: &tail{}}
		w.ranks = append(w.ranks, r)
		if err := w.begin(r); err != nil {
			w.ranks = w.ranks[:len(w.ranks)-1]
			w.heard(news{Number: r.number, End: &outcome{},
				Failed: fmt.Sprintf("start rank %d: %v", r.number, explainStart(err))})
		}
	}
}

// program returns the path of the program. This one is at self.
func (t task) program(self string) (string, error) {
	if t.Hash == "" && t.Program == filepath.Base(self) {
		return self, nil
	}
	if t.Hash == "" {
		return find(t.Program)
	}
	path := filepath.Join(filepath.Dir(filepath.Dir(self)), t.Hash, t.Program)
	f, err := newFile(path)
	if err == nil && f.hash != t.Hash {
		err = errors.Join(fmt.Errorf("%s is damaged: run again, which copies it", path),
			os.Remove(path))
	}
	if err != nil {
		return "", fmt.Errorf("check the copy of the program: %w", err)
	}
	return path, nil
}

// writer is a function that keeps what it gets, as an io.Writer. It never fails, so that ranks may
// print while they end.
type writer func([]byte)

func (w writer) Write(b []byte) (int, error) {
	w(bytes.Clone(b))
	return len(b), nil
}
