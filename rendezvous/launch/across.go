package launch

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

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
	job     Job
	hosts   []*remote // in the order of Job.Hosts; each attempt has new connections
	kits    map[platform]kit
	scratch *scratch // nil before something is built
}

// newCluster prepares the job.
func newCluster(j Job) *cluster {
	var noticing sync.Mutex // hosts do at any time
	notice := j.notice
	j.Notice = func(text string) {
		noticing.Lock()
		defer noticing.Unlock()
		notice(text)
	}
	c := &cluster{job: j, kits: map[platform]kit{}}
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
				c.job.notice(c.placement(used))
			}
			err = c.run(ctx, used, n)
		}
		release(used)
		if gone == nil || gone != err || n == 0 {
			return err
		}
	}
}

// choose divides the ranks among hosts: those that were never lost, then those that were. With
// too few slots it divides fewer ranks. An elastic job uses all hosts.
func (c *cluster) choose() (used []*remote) {
	left, first := c.job.Ranks, 0
	if c.job.Elastic != nil {
		left = Slots(c.job.Hosts)
	}
	for _, lost := range []bool{false, true} {
		for i, h := range c.hosts {
			if h.gone != nil || left == 0 || lost != h.lost {
				continue
			}
			h = &remote{Host: h.Host, lost: lost, first: first, ranks: min(h.Slots, left),
				running: map[int]*rank{}}
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
			var ranks []int
			for i := range h.ranks {
				ranks = append(ranks, h.first+i)
			}
			with = append(with, h.Name+" with "+span(ranks))
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
	reached(hosts)
	if err := c.checkRegister(hosts); err != nil {
		return err
	}
	return c.each(ctx, hosts, (*remote).prepare)
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

// run makes attempt n on hosts that are connected.
func (c *cluster) run(ctx context.Context, used []*remote, n int) error {
	j := c.job
	j.Ranks, j.Env = min(j.Ranks, size(used)), c.environment()
	w := newWatch(j, j.environment(n, c.meeting(used, j.Ranks)))
	w.hosts = used
	w.begin = func(r *rank) error {
		h := cmp.Or(place(used), used[0]) // one that was just lost has its ranks end at once
		own := []string{fmt.Sprint("RANK=", r.number)}
		if w.pool != nil {
			own = w.pool.environment(r.number, j.Ranks, h)
		}
		slot, local := h.free(), min(h.ranks, j.Ranks) // of an elastic job a host may take more
		h.begin(w, r, slot, slices.Concat(own, r.terminal(), []string{
			fmt.Sprint("GROUP_RANK=", slices.Index(used, h)),
			fmt.Sprint("LOCAL_WORLD_SIZE=", local), fmt.Sprint("LOCAL_RANK=", slot%local)}))
		return nil
	}
	return w.attempt(ctx, n)
}

// task is what a host runs of an attempt.
func (w *watch) task(h *remote) *task {
	t := &task{Program: w.job.Program, Args: w.job.Args, Env: w.env, Dir: w.job.Dir,
		Grace: w.job.Grace}
	if t.Dir == "" {
		t.Dir, _ = os.Getwd() // without one, hosts take theirs
	}
	if f := h.kit.program; f != nil {
		t.Program, t.Hash = f.name, f.hash
	}
	if w.pool != nil {
		t.Register = w.pool.reached(h)
	}
	return t
}

// place returns the first host that takes another rank, nil if none does.
func place(hosts []*remote) *remote {
	for _, h := range hosts {
		if h.free() < h.ranks {
			return h
		}
	}
	return nil
}

// meeting returns the variables by which the ranks find each other.
func (c *cluster) meeting(used []*remote, ranks int) []string {
	host, port, err := net.SplitHostPort(c.job.Rendezvous)
	if err != nil { // there is none
		host, port = used[0].address, strconv.Itoa(used[0].port)
	}
	return []string{fmt.Sprint("WORLD_SIZE=", ranks), "MASTER_ADDR=" + host, "MASTER_PORT=" + port,
		"EURYALE_JOB=run-" + rand.Text()[:12], "EURYALE_TOKEN=" + token()}
}

// checkRegister returns an error for hosts that do not say where ranks there reach this machine.
func (c *cluster) checkRegister(hosts []*remote) error {
	for _, h := range hosts {
		if c.job.Elastic != nil && h.guest == "" {
			return fmt.Errorf("host %s: its ssh server does not set SSH_CONNECTION, so its ranks "+
				"cannot reach the register of an elastic job on this machine", h.Name)
		}
	}
	return nil
}

// reached finds out by which addresses hosts reach each other: those by which ssh reaches them,
// unless that is an address of this machine alone. Such a host is this machine, which others reach
// where their ssh comes from.
func reached(hosts []*remote) {
	for _, h := range hosts {
		for _, other := range hosts {
			own, err := netip.ParseAddr(h.address)
			if err != nil || !own.IsLoopback() {
				break
			}
			if other != h {
				h.address = cmp.Or(other.guest, h.address)
			}
		}
	}
}

// environment returns the variables that hosts get.
func (c *cluster) environment() []string {
	if c.job.Env != nil {
		return c.job.Env
	}
	env := []string{} // not nil, which would be all of this process
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		if slices.Contains(variables.Names(), name) && name != string(variables.Token) ||
			strings.HasPrefix(name, "NCCL_") {
			env = append(env, entry)
		}
	}
	return env
}
