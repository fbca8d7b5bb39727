//go:build linux

package main

import (
	"fmt"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
)

// cut is a link between two machines that is cut, one way or both, while all processes live.
type cut struct {
	from, to *proctest.Namespace
	at       time.Time // zero: there is none
	until    time.Time // zero: it stays
	stepped  bool      // a step has followed
	alone    bool      // no other fault came shortly before, or until that step
}

// sever cuts a random link for a while or, in half of the cases, for good. j.mu is held.
func (j *job) sever() {
	hosts := j.site.hosts
	a := j.random.IntN(len(hosts))
	b := (a + 1 + j.random.IntN(len(hosts)-1)) % len(hosts)
	c := cut{from: hosts[a], to: hosts[b], at: time.Now()}
	c.alone = c.at.Sub(j.struck) > 2*j.timeout
	both := j.random.IntN(2) == 0
	if j.random.IntN(2) == 0 {
		c.until = c.at.Add(time.Duration(j.random.Float64() * 4 * float64(j.timeout)))
	}
	j.fails(j.site.ground.Run(func() error {
		c.from.Sever(j.site.ground, c.to)
		if both {
			c.to.Sever(j.site.ground, c.from)
		}
		return nil
	}))
	j.note("immortal: %s-%s is cut, both ways %t, until %v", c.from.Addr, c.to.Addr, both, c.until)
	j.cut, j.cuts = c, j.cuts+1
	j.killed = time.Time{} // the next step takes longer
}

// mend ends a cut whose time is over, or any. j.mu is held.
func (j *job) mend(any bool) {
	c := j.cut
	if c.at.IsZero() || !any && (c.until.IsZero() || time.Now().Before(c.until)) {
		return
	}
	j.fails(j.site.ground.Run(func() error {
		c.from.Mend(j.site.ground)
		c.to.Mend(j.site.ground)
		return nil
	}))
	j.note("immortal: %s-%s is mended", c.from.Addr, c.to.Addr)
	j.cut = cut{}
}

// passes notes a step after a cut. The steps of the first moments, while the machines take what is
// on its way, are no sign, nor are those before the ranks need that link: the time begins with the
// cut or with the last step before the one that was held up. j.mu is held.
func (j *job) passes() {
	c := &j.cut
	if c.at.IsZero() || c.stepped || time.Since(j.stepped) <= j.timeout/2 {
		return
	}
	c.stepped = true
	held := min(time.Since(c.at), time.Since(j.stepped))
	j.cutTimes = append(j.cutTimes, held)
	if c.alone {
		j.aloneTimes = append(j.aloneTimes, held)
	}
}

// fails keeps the first error of the tool itself. j.mu is held.
func (j *job) fails(err error) {
	if err != nil && j.wrong == nil {
		j.wrong = fmt.Errorf("the tool fails: %w", err)
	}
}
