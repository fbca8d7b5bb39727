package host

import (
	"runtime"
	"time"
)

// patience is how long a rank looks before it sleeps.
type patience struct {
	// spin is for ranks with a core each: longer than a step of a peer that is
	// on its way takes, shorter than a scheduler's tick.
	spin time.Duration
	// yield lets other goroutines run between two looks, for ranks that share a
	// process.
	yield bool
}

// patienceFor chooses, given the ranks of the group, how many of them are in
// this process, and the cores that they may run on between them.
func patienceFor(size, inProcess, cores int) patience {
	switch {
	case inProcess > 1:
		// Sleeping costs a rank's thread, and the runtime notices late that the
		// others could use its place; yielding costs it nothing.
		return patience{spin: time.Millisecond, yield: true}
	case size > cores:
		return patience{spin: 0}
	default:
		return patience{spin: 50 * time.Microsecond}
	}
}

// slumber is the longest a rank sleeps before it looks again by itself. Nothing
// depends on it: it bounds the damage of a peer that dies between posting and
// waking.
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
		l.header, l.src, l.dst = k.header, k.srcAt, k.dstAt
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
	theirs := c.region.line(p, c.step).header
	if theirs == k.header {
		return nil
	}
	return c.fail(report{reason: mismatch, peer: p, mine: k.header, theirs: theirs}, k)
}

// waitFor waits until rank p has posted the current step: first looking, then
// asleep.
func (c *comm) waitFor(p int, k *call) error {
	const looks = 32 // between two looks at the clock and at the group's health
	var until time.Time
	for c.patience.spin > 0 {
		for range looks {
			if c.posted(p, c.step) {
				return nil
			}
			if c.patience.yield {
				runtime.Gosched()
			} else {
				pause()
			}
		}
		if err := c.interrupted(p, k); err != nil {
			return err
		}
		now := time.Now()
		if until.IsZero() {
			until = now.Add(c.patience.spin)
		} else if now.After(until) {
			break
		}
	}
	return c.sleep(p, k)
}

// sleep waits until every rank has posted the current step.
//
// The sleeper names the rank it waits for, then looks once more, then sleeps.
// A rank posts first and then looks who waits for it, so one of the two always
// sees the other.
func (c *comm) sleep(p int, k *call) error {
	me, group := c.region.rank(c.rank), c.region.group()
	deadline := time.Now().Add(c.timeout)
	group.sleepers.Add(1)
	defer group.sleepers.Add(^uint32(0))
	defer me.waiting.Store(0)
	for {
		me.waiting.Store(uint32(p) + 1)
		bell := me.bell.Load()
		if c.posted(p, c.step) {
			if p = c.laggard(c.rank, c.step); p < 0 {
				return nil
			}
			continue
		}
		if err := c.interrupted(p, k); err != nil {
			return err
		}
		left := time.Until(deadline)
		if left <= 0 {
			return c.fail(report{reason: timedOut, peer: p, text: c.absent()}, k)
		}
		sleepOn(&me.bell, bell, min(left, slumber))
	}
}

// wakeThoseWaiting wakes the ranks that sleep for this one, which has just
// posted step. One that would only find another rank missing is left asleep and
// passed on to that rank, so that a rank is woken once in a step and not by
// each of its peers.
func (c *comm) wakeThoseWaiting(step uint64) {
	for q := range c.size {
		sleeper := c.region.rank(q)
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
func (c *comm) wakeAll() {
	for r := range c.size {
		wake(&c.region.rank(r).bell)
	}
}
