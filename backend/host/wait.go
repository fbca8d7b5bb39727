package host

import (
	"runtime"
	"time"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/spinwait"
)

// spinBudget says how a rank polls for its peers before it sleeps.
type spinBudget struct {
	// spin is how long it polls: longer than a step of a running peer takes, shorter than a tick of
	// the scheduler.
	spin time.Duration
	// between runs between two polls; looks is the number of polls between two reads
	// of the clock.
	between func()
	looks   int
	// steady switches adaptiveSpin off.
	steady bool
	// perCore is the largest number of the group's ranks on a core, if they are spread evenly; 0 if
	// ranks are not threads, which a core could have.
	perCore int
	// crowded says that ranks outnumber their cores, the same on all ranks.
	crowded bool
}

// spinBudgetFor chooses by the number of ranks of the group, the number of them in this
// process, and the cores that they may use together.
func spinBudgetFor(size, inProcess, cores int) spinBudget {
	crowded := size > cores
	switch {
	case inProcess > 1:
		// Sleeping blocks a rank's thread, and the runtime notices late that other
		// goroutines could use its processor. Gosched lets them run at once. A longer spin takes
		// the cores from ranks that compute: see bench/results/2026-11/2026-11-26-ci.md.
		return spinBudget{spin: 50 * time.Microsecond, between: runtime.Gosched, looks: 32,
			steady: true, crowded: crowded}
	case crowded:
		return spinBudget{spin: 200 * time.Microsecond, between: spinwait.Yield, looks: 8,
			perCore: (size + cores - 1) / cores, crowded: true}
	default:
		return spinBudget{spin: 50 * time.Microsecond, between: pause, looks: 128, perCore: 1}
	}
}

// adaptiveSpin shortens the spin time of a rank whose polling mostly fails: its peers compute for
// long, or other programs use the cores that the rank and its peers need at the same time.
type adaptiveSpin struct {
	halvings uint // of the spin time, up to mostHalvings
	skipped  int  // waits without polling since the last wait with polling
}

const (
	mostHalvings = 6
	// probe is the number of waits without polling after which it polls again.
	probe = 256
)

// budget returns how long to poll in this wait.
func (t *adaptiveSpin) budget(p spinBudget) time.Duration {
	if p.steady {
		return p.spin
	}
	if t.halvings < mostHalvings {
		return p.spin >> t.halvings
	}
	if t.skipped++; t.skipped < probe {
		return 0
	}
	t.skipped = 0
	return p.spin // a peer that sleeps, too, takes longer to wake than the halved spin lasts
}

// learn records whether polling succeeded.
func (t *adaptiveSpin) learn(seen bool) {
	switch {
	case seen && t.halvings == mostHalvings:
		t.halvings = 0
	case seen && t.halvings > 0:
		t.halvings--
	case !seen && t.halvings < mostHalvings:
		t.halvings++
	}
}

// futexTimeout is the longest time that a rank sleeps before it looks again. It matters if a peer
// dies between posting and waking.
const futexTimeout = 100 * time.Millisecond

// turn ends the writing half of a step and begins its reading half.
func (c *comm) turn(k *call) error {
	c.post(k)
	return c.await(k)
}

// post posts this rank's line.
func (c *comm) post(k *call) {
	c.step++
	l := c.region.line(c.rank, c.step)
	if k.first {
		k.digest = k.c.PutHeader(c.region.header(c.rank, c.step), k.seq, k.count, k.dtype)
		l.digest = k.digest
	}
	l.posted.Store(c.step)
	if c.region.group().sleepers.Load() > 0 {
		c.wakeThoseWaiting(c.step)
	}
	if k.announce != nil {
		// Lines are on their way meanwhile, and one of them is requested first: a call of 4 bytes
		// takes 190 of 220 ns. See bench/results/2026-11/2026-11-23-epyc2-host.md.
		next := c.rank + 1
		if next == c.size {
			next = 0
		}
		fetchToRead(unsafe.Pointer(c.region.line(next, c.step)))
		k.tell()
	}
}

// await waits for every other rank's line. In the first step of a call it compares headers.
func (c *comm) await(k *call) error {
	for i := 1; i < c.size; i++ {
		p := c.rank + i
		if p >= c.size { // a division would take as long as everything else
			p -= c.size
		}
		theirs := c.region.line(p, c.step)
		if theirs.posted.Load() < c.step {
			if err := c.waitFor(p, k); err != nil {
				return err
			}
		}
		if k.first && theirs.digest != k.digest && c.Verify.Load() {
			return c.differs(k)
		}
	}
	k.first = false
	return nil
}

func (c *comm) posted(p int, step uint64) bool {
	return c.region.line(p, step).posted.Load() >= step
}

// differs fails the group, because ranks have begun different calls. What most of them call shows
// once all have come.
func (c *comm) differs(k *call) error {
	for late := c.Member.AwaitsStragglers(); !late.Over(); time.Sleep(stragglerLook) {
		p := c.laggard(c.rank, c.step)
		if p < 0 {
			break
		}
		if err := c.interrupted(p, k); err != nil {
			return err
		}
	}
	digests := make([]uint64, c.size)
	for p := range digests {
		digests[p] = group.Unseen
		if c.posted(p, c.step) {
			digests[p] = c.region.line(p, c.step).digest
		}
	}
	d := group.Differ(digests, func(p int) *[backend.HeaderSize]byte {
		return c.region.header(p, c.step)
	})
	c.Member.Tell(d.Differs())
	return c.failure(k)
}

// stragglerLook is between two looks at stragglers where the others' calls differ.
const stragglerLook = 200 * time.Microsecond

// waitFor waits until rank p has posted the current step: it polls first, then sleeps.
func (c *comm) waitFor(p int, k *call) error {
	if a := c.Member.World.Awaited; a.Counts() {
		defer a.Since(time.Now(), c.Member.Members[p])
	}
	if budget := c.adaptive.budget(c.spin); budget > 0 {
		seen, err := c.look(p, k, budget)
		if seen || err != nil {
			return err
		}
		c.stepAside()
	}
	return c.sleep(p, k)
}

// look polls, and reports whether rank p has posted the current step.
func (c *comm) look(p int, k *call, budget time.Duration) (seen bool, err error) {
	for began := (time.Time{}); ; {
		for range c.spin.looks {
			if c.posted(p, c.step) {
				c.adaptive.learn(true)
				return true, nil
			}
			c.spin.between()
		}
		if !c.calm(p) {
			if err := c.interrupted(p, k); err != nil {
				return false, err
			}
		}
		// Most waits end before the clock is read for the first time.
		now := time.Now()
		if began.IsZero() {
			began = now
		}
		if now.Sub(began) >= budget {
			c.adaptive.learn(false)
			return false, nil
		}
	}
}

// sleep waits until every rank has posted the current step.
//
// The sleeper names the rank it waits for, then looks once more, then sleeps. A rank posts first
// and then checks who waits for it, so one of the two always sees the other.
func (c *comm) sleep(p int, k *call) error {
	me, group := c.region.rankPage(c.rank), c.region.group()
	me.core.Store(uint32(core()) + 1)
	group.sleepers.Add(1)
	defer group.sleepers.Add(^uint32(0))
	defer me.waiting.Store(0)
	for {
		// Load futexWord first. A rank that still reacts to this rank's last wait may wake it,
		// and change waiting, at any time; that wake-up then ends the sleep below.
		futexWord := me.futexWord.Load()
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
			continue // interrupted returned nil for that
		}
		if left := time.Until(c.Member.Deadline()); left > 0 {
			sleepOn(&me.futexWord, futexWord, min(left, futexTimeout))
		}
	}
}

// wakeThoseWaiting wakes the ranks that sleep for this one, which has just posted step. If a
// sleeper would only find another rank missing, it is left asleep and passed on to that rank. So a
// rank is woken once in a step, and not by each of its peers.
func (c *comm) wakeThoseWaiting(step uint64) {
	for q := range c.size {
		sleeper := c.region.rankPage(q)
		for p := c.rank; p >= 0 && sleeper.waiting.Load() == uint32(p)+1; {
			next := c.laggard(q, step)
			if next < 0 {
				wake(&sleeper.futexWord)
				break
			}
			if !sleeper.waiting.CompareAndSwap(uint32(p)+1, uint32(next)+1) ||
				!c.posted(next, step) {
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
		wake(&h.rankPage(r).futexWord)
	}
}
