package straggler

import (
	"os"
	"os/signal"
	"runtime"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"time"
)

// Process notes what the Go runtime and the system tell of this process. It is for one goroutine.
type Process struct {
	stats     []metrics.Sample
	continued chan os.Signal
	looking   atomic.Bool // whether a goroutine has the files
	looks     sync.WaitGroup
	files     files
	last      usage
	again     time.Time // when it may be read again
	sampled   time.Time
	noted     [Noted]time.Duration // since the last Sample
}

// usage is what a process has come to.
type usage struct {
	cpu, system  time.Duration
	minor, major int64 // page faults
	cycles       uint64
	collecting   time.Duration
	heap         int64
}

// What the runtime is asked for. All but the number of cycles change at the end of one.
const (
	gcCycles = iota
	gcTotal
	gcAssist
	gcHeap
)

// Open begins to note. Close it. throttled returns for how long a GPU's clock has been throttled so
// far.
func Open(throttled func() time.Duration) *Process {
	p := &Process{continued: make(chan os.Signal, 1), files: openFiles("/")}
	p.files.throttledGPU = throttled
	for _, name := range []string{gcCycles: "/gc/cycles/total:gc-cycles",
		gcTotal:  "/cpu/classes/gc/total:cpu-seconds",
		gcAssist: "/cpu/classes/gc/mark/assist:cpu-seconds", gcHeap: "/gc/heap/live:bytes"} {
		p.stats = append(p.stats, metrics.Sample{Name: name})
	}
	notifyContinued(p.continued)
	p.files.look()
	p.Reset()
	return p
}

// Close ends it, and waits for the files that are read.
func (p *Process) Close() {
	signal.Stop(p.continued)
	p.looks.Wait()
}

// Reset forgets what was noted.
func (p *Process) Reset() {
	p.again = time.Time{}
	p.Sample(&Sample{})
}

// Note adds to the time of a cause.
func (p *Process) Note(c Cause, d time.Duration) { p.noted[c] += d }

// Sample adds to s what was noted since the Sample before. It takes 2 us, with 70 threads 20, but
// once a millisecond at most, and a 500th of the time.
func (p *Process) Sample(s *Sample) {
	now := time.Now()
	if !now.Before(p.again) {
		p.use(s)
		p.again = now.Add(min(max(restCost*time.Since(now), readTime), 10*readTime))
	}
	select {
	case <-p.continued: // nobody knows since when it was stopped
		p.noted[Stopped] += now.Sub(p.sampled)
	default:
	}
	p.sampled = now
	s.Heap = p.last.heap
	move(&s.Noted, &p.noted)
	if !p.looking.Load() {
		move(&s.Noted, &p.files.noted)
	}
}

// move adds times to a sum, and clears them.
func move(sum, some *[Noted]time.Duration) {
	for c, d := range some {
		sum[c] += d
	}
	*some = [Noted]time.Duration{}
}

// readTime is the least time between two readings of what the process uses, of which the most is
// ten times that. A rank that lags by more has one at the end of its step.
const readTime = time.Millisecond

// use notes what the process has used since it did so last.
func (p *Process) use(s *Sample) {
	before, now := p.last, &p.last
	now.read()
	p.collected(now)
	p.noted[GarbageCollection] += now.collecting - before.collecting
	p.noted[PageFaults] += min(now.system-before.system,
		time.Duration(now.minor-before.minor)*minorFault) +
		time.Duration(now.major-before.major)*majorFault
	s.CPU = now.cpu - before.cpu
}

// A minor fault takes up to minorFault, 2 us on a machine at rest, of which most is the kernel's; a
// major one is a read from a disk.
const (
	minorFault = 4 * time.Microsecond
	majorFault = 200 * time.Microsecond
)

// collected finds out how long collections of garbage have kept the program from working: its own
// part of them, and the processors that they have taken. The runtime tells at the end of each.
func (p *Process) collected(now *usage) {
	metrics.Read(p.stats[:1])
	cycles := p.stats[gcCycles].Value.Uint64()
	if cycles == now.cycles {
		return
	}
	metrics.Read(p.stats[1:])
	total, assist := p.stats[gcTotal].Value.Float64(), p.stats[gcAssist].Value.Float64()
	taken := assist + (total-assist)/float64(runtime.GOMAXPROCS(0))
	now.cycles, now.collecting = cycles, time.Duration(taken*float64(time.Second))
	now.heap = int64(p.stats[gcHeap].Value.Uint64())
}

// Look has files of the system read if it is time to: more often if this rank is late. A Sample
// after that has what has changed. No step waits for the files, which take some 10 us for each
// thread of the process, and milliseconds where there are many cores and a GPU.
func (p *Process) Look(late bool) {
	if !p.looking.Load() && p.files.due(late) {
		p.looking.Store(true)
		p.looks.Go(func() {
			p.files.look()
			p.looking.Store(false)
		})
	}
}
