package observe

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"io"
	"math/bits"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/gpu/nvml"
	"github.com/euryale-ml/euryale/observe/internal/straggler"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Watch follows the steps of a training on one rank, and knows which rank was late, and why. One
// goroutine trains; any goroutine may ask. Methods of a nil Watch do nothing.
//
// Package fit reports its steps to the watch of a communicator. Another loop does so itself: with
// [Start] at the beginning, and in each step
//
//	told, err := autograd.Gather(comm, w.Sample()...)
//	w.Step(observe.StepInfo{Number: n, Loss: loss}, told)
type Watch struct {
	recorder *Recorder
	world    *rendezvous.World
	process  int64 // see [straggler.Sample]
	reports  io.Writer
	doing    atomic.Int32 // a cause + 1
	served   atomic.Bool  // by package metrics

	mu      sync.Mutex
	notes   *straggler.Process // nil before Start
	gpu     *gpu               // nil without one
	began   time.Time          // of the step, zero before the first one
	exposed stamp              // of the recorder, at that time
	tick    scale              // for exposed: computing it takes ten readings of clocks
	mine    straggler.Sample
	awaited []time.Duration // by rank, until the last Sample
	step    straggler.Comparison
	all     straggler.Tally // of the training
	recent  straggler.Tally
	past    straggler.Past
	so      Progress
	over    chan struct{}
	ended   sync.WaitGroup
}

// StepInfo is what a training reports about a step.
type StepInfo struct {
	Number          int     // in the training, from 1
	Loss            float64 // of all ranks
	Samples         int     // of this rank
	FLOPs           int64   // of this rank
	Ready, Capacity int     // batches that are read ahead, and the maximum
}

// Cause is why a rank is late.
type Cause = straggler.Cause

// The training code reports to a [Watch] how long these took.
const (
	Loader        = straggler.Loader        // waiting for samples
	HostOperation = straggler.HostOperation // operations of a graph, by their Do
)

// Verdict says which rank was late, and why.
type Verdict = straggler.Verdict

// Progress is what a rank has done since Start.
type Progress struct {
	StepInfo       // of the last step
	Steps          int64
	Samples, FLOPs int64                          // of all steps
	Time           time.Duration                  // of all steps
	Buckets        [Buckets]uint64                // steps by their time: see [Bound]
	Late           time.Duration                  // behind the rank in the middle, in all steps
	Noted          [straggler.Noted]time.Duration // by cause
	Recent         time.Duration                  // of a step, averaged over the last ones
	Exposed        float64                        // share of this time spent in collectives
	Caused         float64                        // share of all ranks' time there due to it
	Verdict        Verdict                        // of the last steps; Late is 0 if it was not late
	State          string
}

// States are the states of a rank, for [Progress].
var States = [...]string{"starting", "computing", "communicating", "loading", "failed", "ended"}

// Buckets is the number of bounds for the time of a step.
const Buckets = 20

// Bound returns the time of the longest steps in a bucket: 0.1 ms for the first, and each twice the
// one before. Longer steps are in no bucket.
func Bound(bucket int) time.Duration { return 100 * time.Microsecond << bucket }

// keep is the weight of earlier steps beside the next one: some 16 steps count.
const keep = 15.0 / 16

// NewWatch returns the watch of a rank. r must be told of the rank's calls. On rank 0 the watch
// writes reports on SIGUSR1.
func NewWatch(w *rendezvous.World, r *Recorder, reports io.Writer) *Watch {
	h := fnv.New64a()
	io.WriteString(h, rendezvous.ThisProcess())
	return &Watch{world: w, recorder: r, process: int64(h.Sum64() >> 12), // exact as a float64
		reports: reports, recent: straggler.Tally{Keep: keep, Layer: r.layerName},
		all: straggler.Tally{Layer: r.layerName}}
}

// Start makes the watch of a communicator of euryale.Init follow the training. Call it on all ranks
// or on none, before the training; EURYALE_LATENESS and EURYALE_METRICS do so, too. In an elastic
// job, the watches of communicators of later generations are then started, too, on all ranks.
//
// Errors: ErrArgument if the communicator has no watch.
func Start(comm backend.Communicator) (*Watch, error) {
	if err := backend.Given("observe.Start", "comm", comm); err != nil {
		return nil, err
	}
	w := watchOf(comm)
	if w == nil {
		return nil, fmt.Errorf("observe: %w: %s is not from euryale.Init, Connect or Run",
			backend.ErrArgument, comm.Name())
	}
	w.Start(comm.Device())
	return w, nil
}

// WatchOf returns the watch of a communicator of all ranks, nil if it has no started watch.
func WatchOf(comm backend.Communicator) *Watch {
	if w := watchOf(comm); w.Started() && comm.Size() == w.world.Size {
		return w
	}
	return nil
}

func watchOf(comm backend.Communicator) *Watch {
	s, ok := backend.As[interface{ Watch() *Watch }](comm)
	if !ok {
		return nil
	}
	return s.Watch()
}

// Started reports whether the watch was started; false for a nil Watch.
func (w *Watch) Started() bool {
	if w == nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.notes != nil
}

// Start is [Start] of this watch, for a rank that computes on a device. A watch that was started
// must be closed.
func (w *Watch) Start(d backend.Device) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.notes != nil || w.so.State == "ended" {
		return
	}
	w.recorder.Count()
	w.tick = w.recorder.ticks.scale()
	if w.world.Awaited != nil {
		w.world.Awaited.Count()
	}
	if d != nil {
		_ = w.recorder.TimeParts(d, 0) // without a clock, graphs are not looked into
	}
	w.gpu = openGPU(d)
	w.notes, w.over = straggler.Open(w.gpu.throttled), make(chan struct{})
	asked := make(chan os.Signal, 1)
	straggler.NotifyReport(asked) // on all ranks: a launcher passes it to all, and it ends programs
	w.ended.Go(func() {
		defer signal.Stop(asked)
		for {
			select {
			case <-asked:
				if w.world.Rank == 0 {
					_ = w.Report(w.reports) // there is nobody to report the error to
				}
			case <-w.over:
				return
			}
		}
	})
}

// Close ends the watch.
func (w *Watch) Close() {
	w.mu.Lock()
	if w.notes != nil && w.so.State != "ended" {
		close(w.over)
		w.notes.Close()
		w.gpu.close()
	}
	w.so.State = "ended"
	w.mu.Unlock()
	w.ended.Wait()
}

// World returns the rank's view of its job.
func (w *Watch) World() *rendezvous.World { return w.world }

// Recorder returns the recorder of the rank's calls.
func (w *Watch) Recorder() *Recorder { return w.recorder }

// Serve tells the watch that its metrics are served.
func (w *Watch) Serve() { w.served.Store(true) }

// Served reports whether metrics of the watch are served.
func (w *Watch) Served() bool { return w != nil && w.served.Load() }

// GPU returns the state of the rank's GPU, and whether it has one that can be queried, which takes
// a build with tag gpu, and NVML.
func (w *Watch) GPU() (nvml.State, bool) {
	w.mu.Lock()
	g := w.gpu
	w.mu.Unlock()
	return g.state()
}

// tally copies one of the watch's tallies, for readers that must not keep a step waiting.
func (w *Watch) tally(t *straggler.Tally) straggler.Tally {
	w.mu.Lock()
	defer w.mu.Unlock()
	return t.Copy()
}

// Report writes who was late in the training, and why, in at most ten lines, and one more if the
// last steps were slower on all ranks than earlier ones.
func (w *Watch) Report(to io.Writer) error {
	all := w.tally(&w.all)
	err := all.Report(to)
	if v, slower := w.slower(); slower && err == nil {
		_, err = fmt.Fprintf(to, "  %v\n", v)
	}
	return err
}

// slower compares the last steps with the fastest ones.
func (w *Watch) slower() (straggler.Verdict, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.past.Verdict(&w.recent)
}

// Begin begins a step, together with all ranks: what a rank has done since its last step does not
// count. The first Step needs a Begin before it.
func (w *Watch) Begin() {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.recorder.readReplays()
	w.recorder.takeComputed()
	w.notes.Reset()
	w.tick = w.recorder.ticks.scale()
	w.await()
	w.beginWindow(time.Now())
}

func (w *Watch) beginWindow(now time.Time) { w.began, w.exposed = now, w.recorder.exposed() }

// During runs f, and notes its time for a cause.
func (w *Watch) During(c Cause, f func() error) error {
	if w == nil {
		return f()
	}
	began := time.Now()
	w.doing.Store(int32(c) + 1)
	err := f()
	w.doing.Store(0)
	w.Note(c, time.Since(began))
	return err
}

// Note notes some time of a cause: [Loader], [HostOperation].
func (w *Watch) Note(c Cause, d time.Duration) {
	if w == nil || d == 0 {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.notes.Note(c, d)
}

// Sample ends a step, and returns what all ranks must be told about it: always the same number of
// values, and none for a nil Watch.
func (w *Watch) Sample() []float64 {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.recorder.readReplays()
	computed, slower := w.recorder.takeComputed()
	w.mine = straggler.Sample{Process: w.process, Slower: slower}
	w.notes.Note(straggler.Device, computed)
	if !w.began.IsZero() {
		w.mine.Time = time.Since(w.began)
		w.mine.Exposed = min(w.tick.since(w.recorder.exposed()-w.exposed), w.mine.Time)
		w.notes.Sample(&w.mine)
	}
	w.await()
	return w.mine.Put()
}

// await computes for whom this rank has waited longest since the last Sample.
func (w *Watch) await() {
	if w.world.Awaited == nil {
		return
	}
	n := len(w.awaited)
	w.awaited = w.world.Awaited.AppendTo(w.awaited)
	for r, d := range w.awaited[n:] {
		if n > 0 {
			d -= w.awaited[r]
		}
		if d > w.mine.Waited {
			w.mine.For, w.mine.Waited = r, d
		}
	}
	w.awaited = w.awaited[:copy(w.awaited, w.awaited[n:])]
}

// Step takes the Samples of all ranks for a step, and begins the next one. A Sample is the last
// numbers of each rank's entry in told.
func (w *Watch) Step(s StepInfo, told [][]float64) {
	if w == nil {
		return
	}
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.step.Compare(told)
	w.all.Add(&w.step)
	w.recent.Add(&w.step)
	w.past.Add(&w.recent)
	behind := w.step.Behind[w.world.Rank]
	w.count(s, behind)
	if w.so.Steps == 1 && w.world.Rank == 0 && !w.served.Load() &&
		env.Metrics.Text(os.Getenv) != "" {
		fmt.Fprintln(w.reports, "euryale: EURYALE_METRICS is set, and this program serves no "+
			"metrics: it must call metrics.Serve, of package observe/metrics")
	}
	w.beginWindow(now)
	w.notes.Look(behind > leastLook && behind > w.mine.Time/lookPart)
}

// A rank that lags by less than this, or by less than this part of a step, does not look for the
// cause at once.
const (
	leastLook = time.Millisecond
	lookPart  = 20
)

// count counts a step.
func (w *Watch) count(s StepInfo, behind time.Duration) {
	so := &w.so
	so.StepInfo = s
	so.Steps++
	so.Samples, so.FLOPs = so.Samples+int64(s.Samples), so.FLOPs+s.FLOPs
	so.Time, so.Late = so.Time+w.mine.Time, so.Late+behind
	if i := bits.Len64(uint64(max(w.mine.Time-1, 0) / Bound(0))); i < Buckets {
		so.Buckets[i]++
	}
	for c, d := range w.mine.Noted {
		so.Noted[c] += d
	}
}

// Verdicts returns which ranks were late in the last steps, the worst first, and then whose GPU, or
// which bucket, has taken longer than it did for three recorded steps: the same on all ranks.
// If steps have become a quarter slower than they were, the last verdict is on all ranks, -1.
func (w *Watch) Verdicts() []Verdict {
	recent := w.tally(&w.recent)
	all := recent.Verdicts()
	if v, slower := w.slower(); slower {
		all = append(all, v)
	}
	return all
}

// Progress returns what the rank has done so far.
func (w *Watch) Progress() Progress {
	w.mu.Lock()
	so, recent, starting := w.so, w.recent.Copy(), w.began.IsZero()
	w.mu.Unlock()
	if so.Steps > 0 {
		so.Recent, so.Exposed, so.Caused = recent.Of(w.world.Rank)
	}
	for _, v := range recent.Verdicts() {
		if v.Rank == w.world.Rank {
			so.Verdict = v
		}
	}
	so.State = cmp.Or(so.State, w.state(starting))
	return so
}

// state returns one of [States] for a rank that has not ended.
func (w *Watch) state(starting bool) string {
	last, ok := w.recorder.Last()
	switch {
	case ok && last.Err != nil:
		return "failed"
	case w.doing.Load() == int32(straggler.Loader)+1:
		return "loading"
	case ok && last.End.IsZero():
		return "communicating"
	case starting:
		return "starting"
	}
	return "computing"
}
