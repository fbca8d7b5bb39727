//go:build linux

package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// mode is how the ranks of a job are started.
type mode string

const (
	processes  mode = "processes"  // by hand, without a launcher
	launched   mode = "launched"   // by package launch
	goroutines mode = "goroutines" // by euryale.Run, in one process
	machines   mode = "machines"   // by hand, on several machines
	far        mode = "far"        // by hand, 25 ms from rank 0, beside a storm of clients
	saves      mode = "saves"      // two jobs that save to one directory, and one that resumes
)

// failure is what happens to one rank.
type failure struct {
	name  string
	rank  int
	call  int           // which collective it happens at, of those that EURYALE_FAULT makes
	step  int           // which step it happens before, of those that the program makes
	after time.Duration // after the start of the job, for killed
}

// The failures by name.
const (
	none   = "none"
	kill   = "kill" // these five are from EURYALE_FAULT
	stop   = "stop"
	panics = "panic"
	exit   = "exit"
	abort  = "abort"
	leave  = "leave"  // the rank closes its communicators and ends well, in the middle
	closed = "close"  // another goroutine closes the communicator
	absent = "absent" // the process ends well before Init
	killed = "killed" // the process is killed at a time, whatever it does
	locked = "locked" // the rank returns an error and holds the build lock
	goexit = "goexit" // the rank ends its goroutine, as t.FailNow does
	inside = "inside" // a collective of the rank panics
	cut    = "cut"    // the rank's machine is cut off
	inSave = "save"   // the process is killed while it saves
	stuck  = "stuck"  // the rank waits for ever: a hang, for the tests of this program
)

// often lists the failures for each mode, those that come more often several times.
var often = map[mode][]string{
	processes: {none, none, kill, kill, stop, panics, inside, exit, abort, leave, closed, closed,
		absent, killed, killed},
	launched: {none, none, kill, stop, panics, panics, inside, exit, abort, leave, closed, absent,
		killed},
	goroutines: {none, none, panics, inside, abort, leave, closed, closed, locked, goexit},
	machines: {none, kill, kill, kill, stop, stop, panics, inside, exit, abort, leave, killed,
		cut},
	far:   {none, kill, abort, exit, leave},
	saves: {none, inSave, inSave, inSave, inSave},
}

// injected reports whether EURYALE_FAULT makes the failure.
func (f failure) injected() bool {
	return slices.Contains([]string{kill, stop, panics, exit, abort}, f.name)
}

// silent reports whether only the timeout can detect the failure.
func (f failure) silent() bool {
	return slices.Contains([]string{stop, absent, killed, cut}, f.name)
}

// panics reports whether the rank panics.
func (f failure) panics() bool { return f.name == panics || f.name == inside }

func (f failure) String() string {
	switch {
	case f.name == none:
		return "no failure"
	case f.injected():
		return fmt.Sprintf("%s,rank=%d,call=%d", f.name, f.rank, f.call)
	case f.name == killed || f.name == cut || f.name == inSave:
		return fmt.Sprintf("%s,rank=%d,after=%v", f.name, f.rank, f.after)
	case f.name == absent:
		return fmt.Sprintf("%s,rank=%d", f.name, f.rank)
	}
	return fmt.Sprintf("%s,rank=%d,step=%d", f.name, f.rank, f.step)
}

const (
	// shortTimeout is the EURYALE_TIMEOUT of jobs whose failure only the timeout detects.
	shortTimeout = 3 * time.Second
	// margin is how long a job may take beyond its timeout, or in total if its failure is
	// detected without the timeout: the machine may be busy with other jobs.
	margin = 12 * time.Second
	// siege is how much longer a job may take beside a storm of unauthenticated clients.
	siege = 20 * time.Second
	// longTimeout is the timeout of the other jobs: a job that waits for it hangs.
	longTimeout = time.Minute
	// mostMachines is how many machines a job is on at most.
	mostMachines = 3
	// lingering is longer than rank 0 waits for the others when it leaves.
	lingering = 2500 * time.Millisecond
)

// job is one job, a function of the seed and the number.
type job struct {
	seed     uint64
	number   int
	mode     mode
	ranks    int
	agents   int // as torchrun has, or machines, that start equal shares of the ranks
	failure  failure
	abrupt   bool            // ranks end at once after an error, without Close
	backend  string          // for EURYALE_BACKEND
	tls      bool            // for EURYALE_TLS
	part     int             // of saves: which of the three jobs
	topology string          // for EURYALE_TOPOLOGY
	visitors int             // that connect to each port of the job
	delays   []time.Duration // before Init, by rank
	steps    []action
	limit    time.Duration // by when all ranks must have ended
}

func newJob(seed uint64, number int) job {
	rng := rand.New(rand.NewPCG(seed, uint64(number)))
	j := job{seed: seed, number: number, ranks: 2 + rng.IntN(7), agents: 1}
	j.mode = pick(rng, processes, processes, processes, launched, launched, goroutines, goroutines,
		machines, machines, machines, far, saves)
	j.shape(rng)
	j.steps = newSteps(rng, j.ranks)
	f := failure{name: pick(rng, often[j.mode]...), rank: rng.IntN(j.ranks)}
	f.call = 1 + rng.IntN(calls(j.steps, j.ranks, f.rank))
	f.step = rng.IntN(stays(j.steps, f.rank))
	f.after = time.Duration(rng.IntN(300)) * time.Millisecond
	j.failure = f
	j.abrupt = j.mode != goroutines && rng.IntN(2) == 0
	for range j.ranks {
		j.delays = append(j.delays, time.Duration(rng.IntN(50))*time.Millisecond)
	}
	if (j.mode == processes || j.mode == launched) && rng.IntN(2) == 0 {
		j.visitors = pick(rng, 3, 3, 10, 30, 300)
		// One rank is late, so that the port of rank 0 is open for a while.
		j.delays[1+rng.IntN(j.ranks-1)] += 300 * time.Millisecond
	}
	j.limit = margin
	if f.silent() {
		j.limit += shortTimeout
	}
	if j.mode == far { // clients take much of the cores: a rank may try again
		j.limit += siege
	}
	return j
}

// shape decides how many ranks are where, and how they are connected.
func (j *job) shape(rng *rand.Rand) {
	switch j.mode {
	case machines:
		j.agents = 2 + rng.IntN(mostMachines-1)
		j.ranks = j.agents * (1 + rng.IntN(3))
	case far:
		j.ranks = 2 + rng.IntN(3)
		j.agents = j.ranks
		j.visitors, j.tls = 3000, rng.IntN(2) == 0
		if j.tls {
			j.visitors = 1500
		}
	case saves:
		j.ranks = 2 + rng.IntN(2)
	case processes:
		if j.ranks%2 == 0 && rng.IntN(4) == 0 {
			j.agents = 2
		}
	}
	if j.mode != machines && j.mode != saves && j.ranks%2 == 0 && rng.IntN(4) == 0 {
		j.topology = fmt.Sprintf(pick(rng, "2x%d", "2x%d:minor"), j.ranks/2)
	}
	if j.mode != goroutines && rng.IntN(4) == 0 {
		j.backend = "tcp"
	}
}

// onOneMachine is the job where there are no others: they are declared, and none can be cut off.
func (j job) onOneMachine() job {
	j.topology = fmt.Sprintf("%dx%d", j.agents, j.ranks/j.agents)
	if j.failure.name == cut {
		j.failure.name = kill
	}
	return j
}

// machineOf returns the machine that a rank is on.
func (j job) machineOf(rank int) int { return rank * j.agents / j.ranks }

func pick[T any](rng *rand.Rand, from ...T) T { return from[rng.IntN(len(from))] }

// timeout is the EURYALE_TIMEOUT of the job.
func (j job) timeout() time.Duration {
	if j.failure.silent() {
		return shortTimeout
	}
	return longTimeout
}

// String describes the job in one line.
func (j job) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d, job %d: %d ranks as %s, %v", j.seed, j.number, j.ranks, j.mode,
		j.failure)
	if j.topology != "" {
		fmt.Fprintf(&b, ", topology %s", j.topology)
	}
	if j.backend != "" {
		fmt.Fprintf(&b, ", backend %s", j.backend)
	}
	if j.agents > 1 {
		fmt.Fprintf(&b, ", %d agents or machines", j.agents)
	}
	if j.abrupt {
		b.WriteString(", without Close after errors")
	}
	if j.visitors > 0 {
		fmt.Fprintf(&b, ", %d unauthenticated clients", j.visitors)
	}
	fmt.Fprintf(&b, ", %d steps", len(j.steps))
	return b.String()
}
