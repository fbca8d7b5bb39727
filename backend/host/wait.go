package host

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale/internal/group"
)

// patience is how a rank looks for its peers before it sleeps.
type patience struct {
	// spin is how long: longer than a step of a peer that is on its way takes,
	// shorter than a scheduler's tick.
	spin time.Duration
	// between is what it does between two looks, and looks how many looks it
	// takes before it reads the clock.
	between func()
	looks   int
	// steady says that it does not lose its patience: see temper.
	steady bool
}

// patienceFor chooses, given the ranks of the group, how many of them are in
// this process, and the cores that they may run on between them.
func patienceFor(size, inProcess, cores int) patience {
	switch {
	case inProcess > 1:
		// Sleeping costs a rank's thread, and the runtime notices late that the
		// others could use its place; letting other goroutines run costs it nothing.
		return patience{time.Millisecond, runtime.Gosched, 32, true}
	case size > cores:
		return patience{20 * time.Microsecond, yield, 1, false}
	default:
		return patience{50 * time.Microsecond, pause, 32, false}
	}
}

// yield lets the other threads of this core run.
func yield() { unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// temper shortens the patience of a rank whose looking is in vain: because its
// peers compute for long, or because somebody else uses the cores that it and
// its peers would need at the same time.
type temper struct {
	vain   uint // halvings of the patience, up to mostVain
	missed int  // waits without looking, since the last one with
}

const (
	mostVain = 6
	// probe is after how many waits without looking it looks again.
	probe = 256
)

// budget returns how long to look in this wait.
func (t *temper) budget(p patience) time.Duration {
	if p.steady {
		return p.spin
	}
	if t.vain < mostVain {
		return p.spin >> t.vain
	}
	if t.missed++; t.missed == probe {
		t.missed, t.vain = 0, mostVain-1
	}
	return 0
}

// learn takes note of how looking went.
func (t *temper) learn(seen bool) {
	switch {
	case seen && t.vain > 0:
		t.vain--
	case !seen && t.vain < mostVain:
		t.vain++
	}
}

// slumber is the longest a rank sleeps before it looks again by itself. It bounds
// the damage of a peer that dies between posting and waking.
const slumber = 100 * time.Millisecond

// turn ends the writing half of a step and begins its reading half: it posts
// this rank's line and waits for every other rank's. In the first step of a
// call it compares headers.
func (c *comm) turn(k *call) error {
	c.step++
	c.post(c.step, k)
	for i := 1; i < c.size; i++ {
		p := (c.rank + i) % c.size
		if !c.posted(p, c.step) {
			if err := c.waitFor(p, k); err != nil {
				return err
			}
		}
		if k.first && c.verify.Load() {
			if err := c.compare(p, k); err != nil {
				return err
			}
		}
	}
	k.first = false
	return nil
}

func (c *comm) post(step uint64, k *call) {
	l := c.region.line(c.rank, step)
	if k.first {
		l.digest, l.src, l.dst = k.digest, k.srcAt, k.dstAt
		*c.region.header(c.rank, step) = k.header
	}
	l.posted.Store(step)
	if c.region.group().sleepers.Load() > 0 {
		c.wakeThoseWaiting(step)
	}
}

func (c *comm) posted(p int, step uint64) bool {
	return c.region.line(p, step).posted.Load() >= step
}

// compare fails the group if rank p has begun another call than k.
func (c *comm) compare(p int, k *call) error {
	if c.region.line(p, c.step).digest == k.digest {
		return nil
	}
	d := group.Difference{Peer: p, Mine: k.header, Theirs: *c.region.header(p, c.step)}
	c.member.Tell(d.Differs())
	return c.failure(k)
}

// waitFor waits until rank p has posted the current step: first looking, then
// asleep.
func (c *comm) waitFor(p int, k *call) error {
	if budget := c.temper.budget(c.patience); budget > 0 {
		seen, err := c.look(p, k, budget)
		if seen || err != nil {
			return err
		}
	}
	return c.sleep(p, k)
}

// look waits awake, and reports whether rank p has posted the current step.
func (c *comm) look(p int, k *call, budget time.Duration) (seen bool, err error) {
	for began := (time.Time{}); ; {
		for range c.patience.looks {
			if c.posted(p, c.step) {
				c.temper.learn(true)
				return true, nil
			}
			c.patience.between()
		}
		if !c.calm(p) {
			if err := c.interrupted(p, k); err != nil {
				return false, err
			}
		}
		// Most waits end before the clock is read at all.
		now := time.Now()
		if began.IsZero() {
			began = now
		}
		if now.Sub(began) >= budget {
			c.temper.learn(false)
			return false, nil
		}
	}
}

// sleep waits until every rank has posted the current step.
//
// The sleeper names the rank it waits for, then looks once more, then sleeps.
// A rank posts first and then looks who waits for it, so one of the two always
// sees the other.
func (c *comm) sleep(p int, k *call) error {
	me, group := c.region.rankPage(c.rank), c.region.group()
	group.sleepers.Add(1)
	defer group.sleepers.Add(^uint32(0))
	defer me.waiting.Store(0)
	for {
		// The bell first: a rank that still acts on what this one waited for before
		// may ring, and change waiting, at any time. Seen from before, its ring ends
		// the sleep below.
		bell := me.bell.Load()
		me.waiting.Store(uint32(p) + 1)
		if c.posted(p, c.step) {
			if p = c.laggard(c.rank, c.step); p < 0 {
				return nil
			}
			continue
		}
		if err := c.interrupted(p, k); err != nil {
			return err
		}
		if c.posted(p, c.step) {
			continue // interrupted has nothing to say then
		}
		if left := time.Until(c.member.Deadline()); left > 0 {
			sleepOn(&me.bell, bell, min(left, slumber))
		}
	}
}

// wakeThoseWaiting wakes the ranks that sleep for this one, which has just
// posted step. One that would only find another rank missing is left asleep and
// passed on to that rank, so that a rank is woken once in a step and not by
// each of its peers.
func (c *comm) wakeThoseWaiting(step uint64) {
	for q := range c.size {
		sleeper := c.region.rankPage(q)
		for p := c.rank; p >= 0 && sleeper.waiting.Load() == uint32(p)+1; {
			next := c.laggard(q, step)
			if next < 0 {
				wake(&sleeper.bell)
				break
			}
			if !sleeper.waiting.CompareAndSwap(uint32(p)+1, uint32(next)+1) || !c.posted(next, step) {
				break
			}
			p = next // it posted before it could see who waits: act for it
		}
	}
}

// laggard returns a rank other than r that has not posted step, or -1.
func (c *comm) laggard(r int, step uint64) int {
	for p := range c.size {
		if p != r && !c.posted(p, step) {
			return p
		}
	}
	return -1
}

// wakeAll wakes every rank of the group, to look at the group's health.
func (h health) wakeAll() {
	for r := range h.size {
		wake(&h.rankPage(r).bell)
	}
}
