package launch

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	variables "github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/rendezvous"
)

// An elastic job on machines where another launcher, such as srun, has started this one: the first
// is the launcher of the job, and all of them, also that one, are launchers of hosts, as those that
// ssh starts. They connect to it, also later: a machine that comes back is one more host.

// agent is the connection of the launcher of a machine.
type agent struct {
	number int
	conn   net.Conn
	out    *bufio.Reader
	port   string
	orders chan order
	over   chan struct{}
}

// agents are those that have connected.
type agents struct {
	job     Job
	arrived chan *agent
	slots   int // of a machine

	mu      sync.Mutex
	running *watch // nil before
}

// otherLauncher is the exit status of a job whose launcher is on another machine.
type otherLauncher int

func (e otherLauncher) Error() string {
	if e == exit.Unfinished {
		return "the connection to machine 0, where the elastic job is, has ended"
	}
	return "the elastic job has failed: machine 0 says why"
}

func (e otherLauncher) ExitCode() int { return int(e) }

// runAgents runs a machine's part of an elastic job on several.
func (j Job) runAgents(ctx context.Context, b *builder) error {
	meeting, err := j.meeting()
	if err != nil {
		return err
	}
	m := *j.Machines
	e, err := rendezvous.ReadEnv(variables.Lookup(slices.Concat(os.Environ(), j.Env, meeting,
		[]string{fmt.Sprint("WORLD_SIZE=", m.Count), fmt.Sprint("RANK=", m.Number), "LOCAL_RANK=0",
			"LOCAL_WORLD_SIZE=1"})))
	if err != nil {
		return err
	}
	if m.Number > 0 {
		return j.serveAgent(ctx, m.Rendezvous, e, j.Signals)
	}
	if j.Program, err = b.resolve(ctx, j.Program); err != nil {
		return err
	}
	ctx, end := context.WithCancel(ctx)
	defer end()
	a := &agents{job: j, arrived: make(chan *agent, MaxRanks), slots: j.Ranks}
	_, port, _ := net.SplitHostPort(m.Rendezvous)
	ln, err := rendezvous.ListenAt(net.JoinHostPort("", port), e, a.serve)
	if err != nil {
		return err
	}
	defer ln.Close()
	own := make(chan struct{})
	go func() {
		defer close(own)
		// what is wrong the job says
		_ = j.serveAgent(ctx, net.JoinHostPort("localhost", port), e, nil)
	}()
	for i := range m.Count {
		j.Hosts = append(j.Hosts, Host{fmt.Sprint("number ", i), j.Ranks})
	}
	j.Ranks, j.Machines, j.Stdin = Slots(j.Hosts)-j.Elastic.Standby, nil, nil
	if err := j.check(); err != nil {
		return wrongJob{err}
	}
	c := newCluster(j, b)
	c.connects, c.secret = a.await, m.Token
	c.begins = func(w *watch) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.running = w
		for len(a.arrived) > 0 { // since all had connected
			a.join(<-a.arrived)
		}
	}
	err = c.attempt(ctx, 0)
	within(drainTime, func() { <-own })
	return err
}

// serveAgent is the launcher of this machine, whose orders come from machine 0.
func (j Job) serveAgent(ctx context.Context, at string, e rendezvous.Env,
	signals <-chan os.Signal) error {
	conn, err := rendezvous.DialAt(ctx, at, e)
	if err != nil {
		return err
	}
	defer conn.Close()
	err = serve(ctx, conn, conn, nil, signals, exit.Unfinished)
	// To close a connection from which orders were not read would take back what was told last.
	if halved := (halved{conn}); errors.As(err, new(*Interrupted)) && halved.Close() == nil {
		within(silence, func() { _, _ = io.Copy(io.Discard, conn) })
	}
	return err
}

// serve takes the connection of an agent.
func (a *agents) serve(number int, conn net.Conn) {
	of := &agent{number: number, conn: conn, out: bufio.NewReader(conn), orders: make(chan order),
		over: make(chan struct{})}
	conn.SetDeadline(time.Now().Add(greetTime))
	port, err := of.out.ReadString('\n')
	if err != nil {
		conn.Close()
		return
	}
	conn.SetDeadline(time.Time{})
	of.port = strings.TrimSpace(port)
	go speak(conn, of.orders, of.over)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.running != nil {
		a.join(of)
		return
	}
	a.arrived <- of
}

// join makes the agent's machine one more host of the running job.
func (a *agents) join(of *agent) {
	h := &remote{host: host{ranks: a.slots}}
	of.employs(h)
	go a.running.pass(joined{host: &h.host, agent: h})
}

// employs makes a host of the agent's machine.
func (a *agent) employs(h *remote) {
	h.agent, h.in, h.out, h.pipe = true, halved{a.conn}, a.out, a.conn
	h.orders, h.over, h.port = a.orders, a.over, a.port
	h.address, _, _ = net.SplitHostPort(a.conn.RemoteAddr().String())
	h.guest, _, _ = net.SplitHostPort(a.conn.LocalAddr().String())
	h.Name, h.Slots = fmt.Sprintf("%d at %s", a.number, h.address), max(h.Slots, h.ranks)
}

// halved is a connection whose Close still lets the other end speak.
type halved struct{ net.Conn }

func (c halved) Close() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Conn.Close()
}

// await waits until the agents of all hosts have connected. One that connects again has been
// started again: its first connection is of no use.
func (a *agents) await(ctx context.Context, hosts []*remote) error {
	patience := patience(slices.Concat(os.Environ(), a.job.Env))
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for missing := len(hosts); missing > 0; {
		of, err := until(ctx, a.job.Signals, a.arrived)
		if err != nil && ctx.Err() == nil {
			return err
		}
		if err != nil {
			break
		}
		h := hosts[of.number]
		if h.in == nil {
			missing--
		} else {
			h.pipe.Close()
			close(h.over)
		}
		of.employs(h)
	}
	var missing []string
	for i, h := range hosts {
		if h.in == nil {
			missing = append(missing, fmt.Sprint(i))
		}
		h.reachedBy(hosts)
	}
	if missing == nil {
		return nil
	}
	return fmt.Errorf("the launchers of machines %s have not connected within %v "+
		"(EURYALE_TIMEOUT): start the command on all machines, and let them reach this one: %w",
		strings.Join(missing, ", "), patience, context.Cause(ctx))
}
