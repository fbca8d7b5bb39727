package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	variables "github.com/euryale-ml/euryale/internal/env"
)

// HostFailed is the error of a job on hosts in which a rank failed or a host was lost.
type HostFailed struct {
	Host string // as it is in Job.Hosts
	Lost bool   // the connection to it has ended; else one of its ranks failed first

	text, summary string
	code          int
	final         bool // a restart would not help
}

// Error names the host and says what is known of it.
func (e *HostFailed) Error() string { return "host " + e.Host + e.text }

// ExitCode is the code of the rank that failed first, as [Failed.ExitCode]; 1 for a lost host.
func (e *HostFailed) ExitCode() int { return e.code }

// cluster is a job on hosts.
type cluster struct {
	job       Job
	screen    *screen
	hosts     []*remote // in the order of Job.Hosts
	kits      map[platform]kit
	scratch   *scratch // nil before something is built
	events    chan event
	listeners sync.WaitGroup
	closed    chan struct{}
	noticing  sync.Mutex
}

// event is the end of a task, or of the connection to a host.
type event struct {
	host *remote
	done outcome
	port int
	lost error
}

// across runs the job on its hosts.
func (j Job) across(ctx context.Context) (err error) {
	c := &cluster{job: j, screen: newScreen(), kits: map[platform]kit{},
		events: make(chan event), closed: make(chan struct{})}
	for _, h := range j.Hosts {
		c.hosts = append(c.hosts, &remote{Host: h})
	}
	defer c.close()
	for n := 0; ; n++ {
		used, err := c.gather(ctx, n)
		if err == nil {
			err = c.attempt(ctx, used, n)
		}
		var f *HostFailed
		if !errors.As(err, &f) || f.final || n == j.MaxRestarts {
			return err
		}
		c.notice(fmt.Sprintf("host %s%s: all ranks start anew (restart %d of %d)", f.Host,
			f.summary, n+1, j.MaxRestarts))
	}
}

// gather connects to the hosts of attempt n. In the first, every host must be there. Later, a host
// that cannot be reached is left out.
func (c *cluster) gather(ctx context.Context, n int) (used []*remote, err error) {
	c.hear()
	for {
		used = c.choose()
		if len(used) == 0 {
			return nil, errors.New("no host is left that could be reached")
		}
		if err := c.connect(ctx, used); err != nil {
			return nil, err
		}
		err := unreached(used)
		if err == nil {
			break
		}
		if n == 0 {
			return nil, err
		}
	}
	if n > 0 {
		c.notice(c.placement(used))
	}
	return used, nil
}

// take notes what an event says of the host.
func (h *remote) take(e event) {
	h.port = e.port
	if e.lost != nil {
		h.live, h.lost = false, true
	}
}

// hear takes the loss of hosts that happened between attempts.
func (c *cluster) hear() {
	for {
		select {
		case e := <-c.events:
			e.host.take(e)
		default:
			return
		}
	}
}

// choose divides the ranks among hosts: those in use and spares, then those that were lost. With
// too few slots it divides fewer ranks.
func (c *cluster) choose() (used []*remote) {
	left, first := c.job.Ranks, 0
	for _, lost := range []bool{false, true} {
		for i, h := range c.hosts {
			if h.gone != nil || left == 0 || lost != h.lost {
				continue
			}
			if lost {
				h = &remote{Host: h.Host, lost: true}
				c.hosts[i] = h
			}
			h.first, h.ranks = first, min(h.Slots, left)
			first, left = first+h.ranks, left-h.ranks
			used = append(used, h)
		}
	}
	return used
}

// placement says which ranks are where, and which hosts are left out.
func (c *cluster) placement(used []*remote) string {
	var with, without []string
	for _, h := range c.hosts {
		if slices.Contains(used, h) {
			with = append(with, h.Name+" with "+h.span())
		} else if h.lost {
			without = append(without, h.Name)
		}
	}
	text := "the ranks are on " + strings.Join(with, ", ")
	if len(without) > 0 {
		text += "; left out: " + strings.Join(without, ", ")
	}
	last := used[len(used)-1]
	if ranks := last.first + last.ranks; ranks < c.job.Ranks {
		text += fmt.Sprintf("; they are %d instead of %d", ranks, c.job.Ranks)
	}
	return text
}

// span names the host's ranks.
func (h *remote) span() string {
	if h.ranks == 1 {
		return fmt.Sprint("rank ", h.first)
	}
	return fmt.Sprintf("ranks %d to %d", h.first, h.first+h.ranks-1)
}

// connect connects to those of the hosts that are not live, and makes them launchers, if that is
// possible with all of them: see unreached.
func (c *cluster) connect(ctx context.Context, hosts []*remote) error {
	var fresh []*remote
	defer func() {
		for _, h := range fresh {
			if !h.live {
				h.hangUp()
			}
		}
	}()
	for _, h := range hosts {
		if h.live {
			continue
		}
		if err := h.start(); err != nil {
			return err
		}
		fresh = append(fresh, h)
	}
	if err := c.each(ctx, fresh, (*remote).greet); err != nil || unreached(fresh) != nil {
		return err
	}
	for _, h := range fresh {
		k, found := c.kits[h.platform]
		if !found {
			var err error
			if k, err = c.job.newKit(ctx, h.platform, c.build); err != nil {
				return fmt.Errorf("host %s: %w", h.Name, err)
			}
			c.kits[h.platform] = k
		}
		h.kit = k
	}
	if err := c.each(ctx, fresh, (*remote).begin); err != nil || unreached(fresh) != nil {
		return err
	}
	for _, h := range fresh {
		h.live, h.lost = true, false
		c.listeners.Go(func() { c.listen(h) })
		go pulse(h.over, func() { h.order(order{}) })
	}
	return nil
}

// unreached says which hosts could not be reached, and why.
func unreached(hosts []*remote) error {
	var errs []error
	for _, h := range hosts {
		if h.gone != nil {
			errs = append(errs, fmt.Errorf("host %s: %w", h.Name, h.gone))
		}
	}
	return errors.Join(errs...)
}

// each does something with all hosts at once. Where that fails, the host is gone. A signal, or the
// end of ctx, stops it.
func (c *cluster) each(ctx context.Context, hosts []*remote, f func(*remote) error) error {
	all := make(chan struct{})
	go func() {
		var running sync.WaitGroup
		for _, h := range hosts {
			running.Go(func() { h.gone = f(h) })
		}
		running.Wait()
		close(all)
	}()
	var stopped error
	select {
	case <-all:
		return nil
	case s := <-c.job.Signals:
		stopped = &Interrupted{s}
	case <-ctx.Done():
		stopped = context.Cause(ctx)
	}
	for _, h := range hosts {
		h.cutOff("the launcher was told to end")
	}
	<-all
	return stopped
}

// build returns the directory to build in.
func (c *cluster) build() (dir string, err error) {
	if c.scratch == nil {
		if c.scratch, err = newScratch(); err != nil {
			return "", err
		}
	}
	return c.scratch.path, nil
}

// attempt runs the ranks once; n counts from 0.
func (c *cluster) attempt(ctx context.Context, used []*remote, n int) error {
	meeting := c.meeting(used)
	secret, last := token(), used[len(used)-1]
	wd := c.job.Dir
	if wd == "" {
		wd, _ = os.Getwd() // without one, hosts take theirs
	}
	for i, h := range used {
		t := task{Program: c.job.Program, Args: c.job.Args, Env: c.environment(), Dir: wd,
			LogDir: c.job.LogDir, Ranks: h.ranks, Grace: c.job.Grace, Plain: c.job.Plain,
			Machines: Machines{Count: len(used), Number: i, Rendezvous: meeting, Token: secret,
				First: h.first, Size: last.first + last.ranks, Attempt: n}}
		if f := h.kit.program; f != nil {
			t.Program, t.Hash = f.name, f.hash
		}
		h.order(order{Task: &t})
	}
	return c.watch(ctx, used)
}

// meeting returns where the ranks meet: where ssh reaches the first host, unless that is an address
// of this machine alone. Then the first host is this machine, and others reach it where their ssh
// comes from.
func (c *cluster) meeting(used []*remote) string {
	if c.job.Rendezvous != "" {
		return c.job.Rendezvous
	}
	address := used[0].address
	for _, h := range used[1:] {
		own, err := netip.ParseAddr(address)
		if err != nil || !own.IsLoopback() {
			break
		}
		address = cmp.Or(h.guest, address)
	}
	return net.JoinHostPort(address, strconv.Itoa(used[0].port))
}

// environment returns the variables that hosts get.
func (c *cluster) environment() (env []string) {
	if c.job.Env != nil {
		return c.job.Env
	}
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		if slices.Contains(variables.Names(), name) && name != string(variables.Token) ||
			strings.HasPrefix(name, "NCCL_") {
			env = append(env, entry)
		}
	}
	return env
}

// watch waits until the attempt has ended on all hosts.
func (c *cluster) watch(ctx context.Context, used []*remote) error {
	var ends []event
	var why error // why the job was told to end, other than by a host
	var timer <-chan time.Time
	over, told := ctx.Done(), 0
	tell := func(s os.Signal, cause error) {
		why, told = cmp.Or(why, cause), told+1
		c.signal(used, ends, s, told)
	}
	for len(ends) < len(used) {
		select {
		case e := <-c.events:
			e.host.take(e)
			if !slices.Contains(used, e.host) || ended(ends, e.host) {
				continue
			}
			ends = append(ends, e)
			if timer == nil && (e.lost != nil || e.done.Text != "") {
				timer = time.After(reportTime)
			}
		case <-timer:
			c.signal(used, ends, syscall.SIGTERM, 1)
		case s := <-c.job.Signals:
			tell(s, &Interrupted{s})
		case err := <-c.screen.broken:
			tell(syscall.SIGTERM, err)
		case <-over:
			over = nil
			tell(syscall.SIGTERM, context.Cause(ctx))
		}
	}
	return cmp.Or(why, c.screen.failure(), hostVerdict(ends))
}

// ended reports whether a host's task has ended.
func ended(ends []event, h *remote) bool {
	return slices.ContainsFunc(ends, func(e event) bool { return e.host == h })
}

// signal passes a signal to the launchers that have not ended. The second has them kill the ranks,
// and the third does not wait for them any more.
func (c *cluster) signal(used []*remote, ends []event, s os.Signal, count int) {
	number, _ := s.(syscall.Signal)
	for _, h := range used {
		switch {
		case ended(ends, h):
		case count > 2:
			h.cutOff("the launcher was told to end at once")
		default:
			h.order(order{Signal: int(number)})
		}
	}
}

// hostVerdict says which host failed first, nil for none. A host whose ranks fail because of ranks
// elsewhere counts only if there is no other, and one that was told to end never does.
func hostVerdict(ends []event) error {
	var first *event
	usage := true
	for i, e := range ends {
		usage = usage && e.done.Usage
		failed := e.lost != nil || e.done.Text != "" && !e.done.Told
		if failed && (first == nil || first.lost == nil && first.done.Elsewhere &&
			!e.done.Elsewhere) {
			first = &ends[i]
		}
	}
	if first == nil {
		return nil
	}
	h, d := first.host, first.done
	if first.lost != nil {
		text := fmt.Sprintf(" is lost, with %s: ", h.span())
		line, _, _ := strings.Cut(first.lost.Error(), "\n")
		return &HostFailed{Host: h.Name, Lost: true, text: text + first.lost.Error(),
			summary: text + line, code: 1}
	}
	return &HostFailed{Host: h.Name, text: ": " + d.Text, summary: ": " + d.Summary, code: d.Code,
		final: usage || d.Stuck || !d.Failed}
}

// listen takes what a host tells until the connection ends.
func (c *cluster) listen(h *remote) {
	for {
		var n news
		heard := h.within(silence)
		err := h.news.Decode(&n)
		heard()
		switch {
		case err != nil:
			c.send(event{host: h, lost: h.whyLost(err)})
			return
		case n.Out != nil:
			c.print(c.job.Stdout, n.Out)
		case n.Err != nil:
			c.print(c.job.Stderr, n.Err)
		case n.Notice != "":
			c.notice("host " + h.Name + ": " + n.Notice)
		case n.Done != nil:
			c.send(event{host: h, done: *n.Done, port: n.Port})
		}
	}
}

// send sends an event to watch, as long as the cluster is there.
func (c *cluster) send(e event) {
	select {
	case c.events <- e:
	case <-c.closed:
	}
}

// notice says something to the user. Hosts do at any time.
func (c *cluster) notice(text string) {
	c.noticing.Lock()
	defer c.noticing.Unlock()
	c.job.notice(text)
}

func (c *cluster) print(to io.Writer, line []byte) {
	if to != nil {
		c.screen.print(to, line)
	}
}

// close ends the connections.
func (c *cluster) close() {
	close(c.closed)
	for _, h := range c.hosts {
		if h.live {
			h.in.Close()
		}
	}
	c.listeners.Wait() // not for longer than silence
	if c.scratch != nil {
		c.scratch.remove()
	}
}
