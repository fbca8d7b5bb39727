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

// HostLost is the error of a job on hosts that has lost one: the connection to it has ended.
type HostLost struct {
	Host string // as it is in Job.Hosts

	ranks string
	why   error
}

// Error names the host and says what is known of its loss.
func (e *HostLost) Error() string {
	return fmt.Sprintf("host %s is lost, with %s: %v", e.Host, e.ranks, e.why)
}

// cluster is a job on hosts.
type cluster struct {
	job      Job
	screen   *screen
	hosts    []*remote // in the order of Job.Hosts; each attempt has new connections
	kits     map[platform]kit
	scratch  *scratch // nil before something is built
	noticing sync.Mutex
}

// event is the end of a host's part in an attempt.
type event struct {
	host *remote
	err  error
	told bool // it was told to end
}

// newCluster prepares the job.
func newCluster(j Job) *cluster {
	j.Stdout, j.Stderr = cmp.Or[io.Writer](j.Stdout, io.Discard), cmp.Or[io.Writer](j.Stderr,
		io.Discard)
	c := &cluster{job: j, screen: newScreen(), kits: map[platform]kit{}}
	for _, h := range j.Hosts {
		c.hosts = append(c.hosts, &remote{Host: h})
	}
	return c
}

// close removes what was built.
func (c *cluster) close() {
	if c.scratch != nil {
		c.scratch.remove()
	}
}

// attempt runs the ranks once; n counts from 0. In the first attempt every host must be there.
// Later, a host that cannot be reached is left out.
func (c *cluster) attempt(ctx context.Context, n int) error {
	for {
		used := c.choose()
		if len(used) == 0 {
			return errors.New("no host is left that could be reached")
		}
		err := c.connect(ctx, used)
		gone := unreached(used)
		if err = cmp.Or(err, gone); err == nil {
			if n > 0 {
				c.notice(c.placement(used))
			}
			c.order(used, n)
			err = c.watch(ctx, used)
		}
		hangUp(used)
		if gone == nil || gone != err || n == 0 {
			return err
		}
	}
}

// choose divides the ranks among hosts: those that were never lost, then those that were. With
// too few slots it divides fewer ranks.
func (c *cluster) choose() (used []*remote) {
	left, first := c.job.Ranks, 0
	for _, lost := range []bool{false, true} {
		for i, h := range c.hosts {
			if h.gone != nil || left == 0 || lost != h.lost {
				continue
			}
			h = &remote{Host: h.Host, lost: lost, first: first, ranks: min(h.Slots, left)}
			first, left = first+h.ranks, left-h.ranks
			c.hosts[i], used = h, append(used, h)
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
	if ranks := size(used); ranks < c.job.Ranks {
		text += fmt.Sprintf("; they are %d instead of %d", ranks, c.job.Ranks)
	}
	return text
}

// size is how many ranks hosts have together.
func size(used []*remote) int {
	last := used[len(used)-1]
	return last.first + last.ranks
}

// connect connects to hosts, and makes them launchers if all of them can be reached.
func (c *cluster) connect(ctx context.Context, hosts []*remote) error {
	for _, h := range hosts {
		if err := h.start(); err != nil {
			return err
		}
	}
	if err := c.each(ctx, hosts, (*remote).greet); err != nil || unreached(hosts) != nil {
		return err
	}
	for _, h := range hosts {
		k, found := c.kits[h.platform]
		if !found {
			var err error
			if k, err = c.newKit(ctx, h.platform); err != nil {
				return fmt.Errorf("host %s: %w", h.Name, err)
			}
			c.kits[h.platform] = k
		}
		h.kit = k
	}
	return c.each(ctx, hosts, (*remote).begin)
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
		forAll(hosts, func(h *remote) { h.gone = f(h) })
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

// forAll does something with all hosts at once.
func forAll(hosts []*remote, f func(*remote)) {
	var running sync.WaitGroup
	defer running.Wait()
	for _, h := range hosts {
		running.Go(func() { f(h) })
	}
}

// order gives the hosts their parts of attempt n.
func (c *cluster) order(used []*remote, n int) {
	meeting, secret, wd := c.meeting(used), token(), c.job.Dir
	if wd == "" {
		wd, _ = os.Getwd() // without one, hosts take theirs
	}
	for i, h := range used {
		t := task{Program: c.job.Program, Args: c.job.Args, Env: c.environment(), Dir: wd,
			LogDir: c.job.LogDir, Ranks: h.ranks, Grace: c.job.Grace, Plain: c.job.Plain,
			Machines: Machines{Count: len(used), Number: i, Rendezvous: meeting, Token: secret,
				First: h.first, Size: size(used), Attempt: n}}
		if f := h.kit.program; f != nil {
			t.Program, t.Hash = f.name, f.hash
		}
		h.order(order{Task: &t})
	}
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
	events := make(chan event)
	for _, h := range used {
		go func() { events <- c.listen(h) }()
	}
	var ends []event
	var why error // why the job was told to end, other than by a host
	var timer <-chan time.Time
	over, told := ctx.Done(), 0
	tell := func(s os.Signal, cause error) {
		why, told = cmp.Or(why, cause), told+1
		signal(used, s, told)
	}
	for len(ends) < len(used) {
		select {
		case e := <-events:
			e.host.done, ends = true, append(ends, e)
			if timer == nil && e.err != nil {
				timer = time.After(reportTime)
			}
		case <-timer:
			signal(used, syscall.SIGTERM, 1)
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

// signal passes a signal to the launchers that have not ended. The second has them kill the ranks,
// and the third does not wait for them any more.
func signal(used []*remote, s os.Signal, count int) {
	number, _ := s.(syscall.Signal)
	for _, h := range used {
		switch {
		case h.done:
		case count > 2:
			h.cutOff("the launcher was told to end at once")
		default:
			h.order(order{Signal: int(number)})
		}
	}
}

// hostVerdict is the error of the host that failed first, nil for none. A host whose ranks fail
// because of ranks elsewhere counts only if there is no other, and one that was told to end never
// does.
func hostVerdict(ends []event) (first error) {
	usage := true
	for _, e := range ends {
		var f *Failed
		usage = errors.As(e.err, &f) && f.usage && usage
		if e.err != nil && !e.told &&
			(first == nil || blamesOthers(first) && !blamesOthers(e.err)) {
			first = e.err
		}
	}
	if f, ok := first.(*Failed); ok {
		f.usage = usage
	}
	return first
}

// blamesOthers reports whether ranks failed because of one on another host.
func blamesOthers(err error) bool {
	f, ok := err.(*Failed)
	return ok && len(f.elsewhere) > 0
}

// listen takes what a host tells until its part has ended, or the connection.
func (c *cluster) listen(h *remote) event {
	for {
		var n news
		heard := h.within(silence)
		err := h.news.Decode(&n)
		heard.Stop()
		switch {
		case err != nil:
			h.lost = true
			return event{host: h, err: &HostLost{h.Name, h.span(), h.whyLost(err)}}
		case n.Out != nil:
			c.screen.print(c.job.Stdout, n.Out)
		case n.Err != nil:
			c.screen.print(c.job.Stderr, n.Err)
		case n.Notice != "":
			c.notice("host " + h.Name + ": " + n.Notice)
		case n.Done != nil:
			return event{h, n.Done.err(h.Name), n.Done.Told}
		}
	}
}

// notice says something to the user. Hosts do at any time.
func (c *cluster) notice(text string) {
	c.noticing.Lock()
	defer c.noticing.Unlock()
	c.job.notice(text)
}
