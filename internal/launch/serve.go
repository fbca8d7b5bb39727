package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/internal/exit"
)

// errOver is the reason for which ranks end when the connection does.
var errOver = errors.New("the launcher of the job has ended, or the connection to it")

// server is the launcher of a host.
type server struct {
	orders  chan order
	news    chan news
	over    <-chan struct{} // closed when the connection has ended
	signals <-chan os.Signal
	cache   cache

	mu     sync.Mutex
	status int // of the job, as its launcher has said
}

// maxOrders bounds the queue of orders, which lets signs of life be heard while orders wait.
const maxOrders = 2 * MaxRanks

// Serve runs this machine's ranks in an attempt at a job on hosts. The launcher of the job starts
// it by ssh, sends its orders over in and hears over out. When in ends or nothing comes from there
// for launcherSilence, ranks get SIGTERM, then SIGKILL after the grace. advise says what this
// machine lacks for GPUs, in one line each; it is called before a program that uses them starts.
// signals, nil for none, go to the ranks; an elastic job goes on without this machine then.
//
// Serve returns nil when in, and with it the ranks, have ended; otherwise the cause of ctx or an
// error of the connection. It locks the calling goroutine to its thread as [Run] does.
func Serve(ctx context.Context, in io.Reader, out io.Writer, advise func() []string,
	signals <-chan os.Signal) error {
	return serve(ctx, in, out, advise, signals, exit.Finished)
}

// serve is Serve with the exit status of a job whose launcher does not say it.
func serve(ctx context.Context, in io.Reader, out io.Writer, advise func() []string,
	signals <-chan os.Signal, status int) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &server{orders: make(chan order, maxOrders), news: make(chan news), over: ctx.Done(),
		signals: signals, status: status}
	go s.listen(in, cancel) // ends with in, or with this process
	port, err := freePort()
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(out, port); err != nil {
		return fmt.Errorf("tell the launcher of the job: %w", err)
	}
	go speak(out, s.news, s.over)
	select {
	case <-ctx.Done():
	case o := <-s.orders:
		if o.Task == nil {
			return errors.New("the first order must be a task")
		}
		if err := s.run(ctx, *o.Task, advise); errors.As(err, new(*Interrupted)) {
			s.tell(news{}) // what was told before is sent once this is taken
			return err
		} else if err != nil {
			s.tell(news{Failed: err.Error()})
			<-ctx.Done() // the job's launcher ends the connection
		}
	}
	if err := context.Cause(ctx); !errors.Is(err, errOver) {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status != exit.Finished {
		return otherLauncher(s.status)
	}
	return nil
}

// tell sends news until the connection ends, which listen notices: after that sshd may hold data
// for minutes, and ranks must end meanwhile.
func (s *server) tell(n news) {
	select {
	case s.news <- n:
	case <-s.over:
	}
}

// listen takes orders until there are no more.
func (s *server) listen(in io.Reader, cancel context.CancelCauseFunc) {
	late := newAlarm(silence, func() { cancel(errOver) })
	err := hear(in, late, func(o order) {
		switch {
		case o == (order{}):
			return
		case o.Over != nil:
			s.mu.Lock()
			s.status = o.Over.Status
			s.mu.Unlock()
			return
		case o.Task != nil:
			late.setLimit(launcherSilence(patience(slices.Concat(os.Environ(), o.Task.Env))))
		}
		select {
		case s.orders <- o:
		default:
			cancel(errors.New("too many orders"))
		}
	})
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = errOver
	}
	cancel(err)
}

// run runs a task until ctx ends. It sends news of the processes; the error is about what comes
// before them.
func (s *server) run(ctx context.Context, t task, advise func() []string) error {
	self, err := s.cache.self()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	program, err := t.program(self, &s.cache)
	if err != nil {
		return err
	}
	s.cache.expire()
	command, err := interpreted(program)
	if err != nil {
		return err
	}
	if usesGPU(program) && advise != nil {
		s.advise(ctx, advise)
	}
	dir := t.Dir
	if _, err := os.Stat(dir + "/."); err != nil || dir == "" { // it does not exist, or is closed
		if dir, err = os.UserHomeDir(); err != nil {
			return fmt.Errorf("find a directory for the ranks: %w", err)
		}
	}
	j := Job{Program: command[0], Args: append(command[1:], t.Args...), Dir: dir, Grace: t.Grace,
		times: defaultTimes(), guard: newGuard(), Signals: s.signals,
		Notice: func(text string) { s.tell(news{Notice: text}) }}
	defer j.guard.close()
	if t.Register != "" {
		j.Elastic = &Elastic{}
		if err := reach(ctx, t.Register); err != nil {
			return err
		}
	}
	// Programs may start this one.
	path := "PATH=" + filepath.Dir(self) + string(filepath.ListSeparator) + os.Getenv("PATH")
	w := newWatch(j, slices.Concat(os.Environ(), []string{path}, t.Env))
	w.orders, w.heard, w.supervisor.above = s.orders, s.tell, true
	w.run(ctx) // the job's launcher finds the outcome
	if n := w.supervisor.leaves; n != 0 {
		return &Interrupted{n}
	}
	return nil
}

// advise reports what this machine lacks for GPUs. A driver may block the caller.
func (s *server) advise(ctx context.Context, lacks func() []string) {
	lines := make(chan []string, 1)
	go func() { lines <- lacks() }()
	all, _ := until(ctx, nil, lines) // none if the connection has ended
	for _, line := range all {
		s.tell(news{Notice: line})
	}
}

// reachTime is how long a host tries to reach the machine where the job was started.
const reachTime = 10 * time.Second

// reach checks that a register can be reached.
func reach(ctx context.Context, addr string) error {
	conn, err := (&net.Dialer{Timeout: reachTime}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("its processes cannot connect to the machine where the elastic job was "+
			"started: allow connections from here to that machine, or start the job on one of "+
			"the hosts: %w", err)
	}
	return conn.Close()
}

// program returns the path of the program, which the cache holds unless it is the host's. self is
// the path of this one.
func (t task) program(self string, c *cache) (string, error) {
	if t.Hash == "" && t.Program == filepath.Base(self) {
		return self, nil
	}
	if t.Hash == "" {
		return find(t.Program)
	}
	dir, err := c.hold(t.Hash)
	path := filepath.Join(dir, t.Program)
	var f file
	if err == nil {
		f, err = newFile(path)
	}
	if err == nil && f.hash != t.Hash {
		err = errors.Join(fmt.Errorf("%s is damaged: run again to copy it anew",
			filepath.Join(t.Hash, t.Program)), os.Remove(path))
	}
	if err != nil {
		return "", fmt.Errorf("check the copy of the program: %w", err)
	}
	return path, nil
}
