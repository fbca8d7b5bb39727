package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"

	variables "github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/exit"
)

// HostLost is the error of a job on hosts when the connection to one of them has ended.
type HostLost struct {
	Host string // as it is in Job.Hosts

	ranks []int
	why   error
}

// Error names the host and says what is known about its loss.
func (e *HostLost) Error() string {
	return fmt.Sprintf("host %s is lost, with %s: %v", e.Host, span(e.ranks), e.why)
}

// cluster is a job on hosts.
type cluster struct {
	job     Job
	hosts   []*remote // in the order of Job.Hosts; each attempt has new connections
	kits    map[platform][]file
	builder *builder

	connects func(ctx context.Context, hosts []*remote) error
	runs     func(ctx context.Context, used []*remote, ranks, n int) error
	begins   func(w *watch) // nil for nothing
	secret   string         // of a job whose launchers have one, otherwise ""
}

// newCluster prepares the job.
func newCluster(j Job, b *builder) *cluster {
	var noticing sync.Mutex // hosts can call it at any time
	notice := j.notice
	j.Notice = func(text string) {
		noticing.Lock()
		defer noticing.Unlock()
		notice(text)
	}
	c := &cluster{job: j, kits: map[platform][]file{}, builder: b}
	c.connects, c.runs = c.connect, c.run
	for _, h := range j.Hosts {
		c.hosts = append(c.hosts, &remote{host: host{Host: h}})
	}
	return c
}

// attempt runs the ranks once; n counts from 0. In the first attempt every host must be reachable.
// Later attempts leave out hosts that are not.
func (c *cluster) attempt(ctx context.Context, n int) error {
	for {
		used, missing := c.choose()
		if len(used) == 0 {
			return errors.New("no host is left that could be reached")
		}
		err := c.connects(ctx, used)
		gone := unreached(used)
		if err = cmp.Or(err, gone); err == nil {
			if n > 0 {
				c.job.notice(c.placement(used, missing))
			}
			err = c.runs(ctx, used, c.job.Ranks-missing, n)
		}
		release(used)
		if gone == nil || gone != err || n == 0 {
			return err
		}
	}
}

// choose divides the ranks among hosts, preferring hosts that were never lost. missing is the
// number of ranks without a slot. An elastic job uses all hosts.
func (c *cluster) choose() (used []*remote, missing int) {
	missing = c.job.Ranks
	if c.job.Elastic != nil {
		missing = Slots(c.job.Hosts)
	}
	for _, lost := range []bool{false, true} {
		for i, h := range c.hosts {
			gone := h.down != nil && !h.isLost()
			if gone || missing == 0 || lost != h.wasLost() {
				continue
			}
			h = &remote{host: host{Host: h.Host, ranks: min(h.Slots, missing)}, lost: lost}
			missing -= h.ranks
			c.hosts[i], used = h, append(used, h)
		}
	}
	return used, missing
}

// placement says which ranks run where, and which hosts are left out.
func (c *cluster) placement(used []*remote, missing int) string {
	var with, without []string
	next := 0
	for _, h := range used {
		var ranks []int
		for range h.ranks {
			ranks = append(ranks, next)
			next++
		}
		with = append(with, h.Name+" with "+span(ranks))
	}
	for _, h := range c.hosts {
		if h.wasLost() && !slices.Contains(used, h) {
			without = append(without, h.Name)
		}
	}
	text := "the ranks are on " + strings.Join(with, ", ")
	if len(without) > 0 {
		text += "; left out: " + strings.Join(without, ", ")
	}
	if missing > 0 {
		text += fmt.Sprintf("; they are %d instead of %d", next, c.job.Ranks)
	}
	return text
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
		if c.job.Elastic != nil && h.guest == "" {
			return h.about(errGuest)
		}
		if c.kits[h.platform] == nil {
			k, err := c.newKit(ctx, h.platform)
			if err != nil {
				return h.about(err)
			}
			c.kits[h.platform] = k
		}
		h.kit = c.kits[h.platform]
	}
	for _, h := range hosts {
		h.reachedBy(hosts)
	}
	return c.each(ctx, hosts, (*remote).prepare)
}

var errGuest = errors.New("its ssh server does not set SSH_CONNECTION, so its ranks cannot reach " +
	"the register of an elastic job on this machine")

// join connects to one more host, of a system that the job was built for, and makes it a launcher.
func (c *cluster) join(h *remote) error {
	if err := h.greet(); err != nil {
		return err
	}
	switch h.kit = c.kits[h.platform]; {
	case h.guest == "":
		return h.close(errGuest)
	case h.kit == nil:
		return h.close(fmt.Errorf("no host that the job has begun on is such a system (%v): start "+
			"the job again", h.platform))
	}
	h.reachedBy(c.hosts)
	return h.prepare()
}

// unreached says which hosts could not be reached, and why.
func unreached(hosts []*remote) error {
	var errs []error
	for _, h := range hosts {
		errs = append(errs, h.down)
	}
	return errors.Join(errs...)
}

// each does something with all hosts at once. A host where that fails is down. A signal, or the end
// of ctx, stops it.
func (c *cluster) each(ctx context.Context, hosts []*remote, f func(*remote) error) error {
	all := forAll(hosts, func(h *remote) {
		if err := f(h); err != nil {
			h.down = h.about(err)
		}
	})
	_, stopped := until(ctx, c.job.Signals, all)
	if stopped != nil {
		for _, h := range hosts {
			h.cutOff("the launcher was told to end")
		}
		<-all
	}
	return stopped
}

// forAll does something with all hosts at once. It closes the channel when all are done.
func forAll(hosts []*remote, f func(*remote)) <-chan struct{} {
	var running sync.WaitGroup
	for _, h := range hosts {
		running.Go(func() { f(h) })
	}
	all := make(chan struct{})
	go func() {
		running.Wait()
		close(all)
	}()
	return all
}

// run makes attempt n, with a number of ranks, on connected hosts.
func (c *cluster) run(ctx context.Context, used []*remote, ranks, n int) error {
	j := c.job
	j.Ranks = ranks
	host, port, err := net.SplitHostPort(j.Rendezvous)
	if err != nil { // there is none
		host, port = used[0].address, used[0].port
	}
	meeting := newMeeting(ranks, host, port)
	if c.secret != "" {
		meeting = append(meeting, "EURYALE_TOKEN="+c.secret)
	}
	w := newWatch(j, j.environment(n, meeting), used...)
	w.connects = c.join
	if c.begins != nil {
		c.begins(w)
	}
	err = w.attempt(ctx, n)
	for _, h := range w.remotes {
		if h.agent { // an order is sent once the next one is taken
			h.order(order{Over: &over{exit.Of(err)}})
			h.order(order{})
		}
	}
	release(w.joins)
	return err
}

// task is a host's part of an attempt.
func (w *watch) task(h *remote) *task {
	t := &task{Program: w.job.Program, Args: w.job.Args, Env: w.env, Dir: w.job.Dir,
		Grace: w.job.Grace}
	if h.agent { // which knows the job's secret
		t.Env = slices.DeleteFunc(slices.Clone(t.Env), func(entry string) bool {
			name, _, _ := strings.Cut(entry, "=")
			return name == string(variables.Token) || name == string(variables.Credential)
		})
	}
	if t.Dir == "" {
		t.Dir, _ = os.Getwd() // without one, hosts take theirs
	}
	if len(h.kit) > 1 {
		t.Program, t.Hash = h.kit[1].name, h.kit[1].hash
	}
	if w.register != nil {
		t.Register = w.reached(h)
	}
	return t
}

// reachedBy finds the address by which others reach a host: the one by which ssh reaches it, unless
// that is local to this machine. The host is this machine then: others reach it at the address that
// their ssh connections come from.
func (h *remote) reachedBy(hosts []*remote) {
	for _, other := range hosts {
		own, err := netip.ParseAddr(h.address)
		if err != nil || !own.IsLoopback() {
			return
		}
		if other != h {
			h.address = cmp.Or(other.guest, h.address)
		}
	}
}
