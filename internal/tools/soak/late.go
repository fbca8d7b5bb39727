//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// beat is how often the pulse is felt, and how often a failure is looked for.
	beat = 5 * time.Millisecond
	// wakes is how many goroutines wake up one after another until a survivor has said what it
	// lost: each may wait for a core as long as the pulse has.
	wakes = 6
	// promise is how long after a death its survivors know.
	promise = time.Second
	// farewell is how long a launcher lets survivors speak, and how long a rank takes leave.
	farewell = time.Second
	// asking is how long a rank whose time is up asks the store who is missing. Each wait may end
	// so.
	asking = 500 * time.Millisecond
)

// pulse measures how late the machine wakes up a thread that only sleeps: what has waited for a
// core that long is not the fault of what is tested.
type pulse struct {
	mu    sync.Mutex
	skips []skip
}

// skip is a beat that came late.
type skip struct {
	at   time.Time
	late time.Duration
}

// feel feels the pulse until ctx ends.
func (p *pulse) feel(ctx context.Context) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for ctx.Err() == nil {
		due := time.Now().Add(beat)
		time.Sleep(beat)
		if late := time.Since(due); late > beat {
			p.mu.Lock()
			p.skips = append(p.skips, skip{due, late})
			p.mu.Unlock()
		}
	}
}

// worst returns how late a beat has come since a time.
func (p *pulse) worst(since time.Time) (late time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := len(p.skips) - 1; i >= 0 && p.skips[i].at.After(since); i-- {
		late = max(late, p.skips[i].late)
	}
	return late
}

// watch waits until the process of the rank that fails has ended or is stopped, and notes the time.
func (r *running) watch(ctx context.Context) {
	if r.job.mode == goroutines || r.job.failure.name == closed {
		return
	}
	for ctx.Err() == nil {
		for _, pid := range processesOf(r.id, fmt.Sprintf("RANK=%d", r.job.failure.rank)) {
			for ctx.Err() == nil && runs(pid) {
				time.Sleep(beat)
			}
			r.struck.Store(time.Now().UnixMicro())
			return
		}
		time.Sleep(beat)
	}
}

// runs reports whether a process has not ended and is not stopped.
func runs(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, after, ok := strings.Cut(string(text), ") ")
	return err == nil && ok && !strings.ContainsAny(after[:1], "ZXTt")
}

// joinedSaid is how ranks say that they have joined.
var joinedSaid = regexp.MustCompile(`soak: joined rank=(\d+) at=(\d+)\n`)

// judgeLate judges when the survivors and the launcher have said what they lost.
func (j job) judgeLate(o outcome, ranks map[int]said) (found []anomaly) {
	victim := j.failure.rank
	struck := o.struck
	if j.mode == goroutines || j.failure.name == abort || j.failure.name == leave {
		struck = ranks[victim].at
	}
	if struck == 0 || j.failure.name == none || j.failure.name == closed {
		return nil
	}
	joined := map[int]int64{}
	for _, line := range joinedSaid.FindAllStringSubmatch(o.said(), -1) {
		rank, _ := strconv.Atoi(line[1])
		joined[rank], _ = strconv.ParseInt(line[2], 10, 64)
	}
	for rank := range j.ranks {
		s := ranks[rank]
		if rank == victim || s.word != wordError {
			continue
		}
		// In a Split its ranks meet, too: they wait for connections, and then for votes.
		meets := j.failure.name == cut && strings.Contains(s.text, ", split on layer")
		allowed := j.allowed(joined[victim] > 0 && joined[rank] > 0 && !meets) + wakes*o.stall
		if j.failure.name == cut && rank == 0 { // it serves the store until the others have left
			allowed += farewell
		}
		from := max(struck, joined[rank])
		if took := time.Duration(s.at-from) * time.Microsecond; took > allowed {
			text := fmt.Sprintf("rank %d says so after %v, %v allowed: %s", rank, took, allowed,
				s.text)
			found = append(found, anomaly{late, text})
		}
	}
	if line := launcherSaid.FindStringSubmatch(o.said()); line != nil && joined[victim] > 0 {
		at, _ := strconv.ParseInt(line[3], 10, 64)
		allowed := j.allowed(true) + 2*farewell + wakes*o.stall
		if took := time.Duration(at-struck) * time.Microsecond; took > allowed {
			text := fmt.Sprintf("the launcher says so after %v, %v allowed", took, allowed)
			found = append(found, anomaly{late, text})
		}
	}
	return found
}

// allowed is how long after a failure a survivor may take, all cores being there. Before all have
// met, only the timeout tells who does not come.
func (j job) allowed(met bool) time.Duration {
	d := promise
	if j.failure.silent() && j.failure.name != killed || !met {
		d += j.timeout()
	}
	if j.failure.name == cut { // they take leave of those who do not answer
		d += farewell
	}
	if j.failure.name == cut && !met { // they wait for what others tell, and then for their votes
		d += j.timeout() + asking
	}
	if stays(j.steps, 0) < len(j.steps) { // others wait for rank 0 to have left
		d += lingering
	}
	return d
}
