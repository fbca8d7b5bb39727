package hierarchy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/serial"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// soon is the time in which every rank must know. It is far from the timeout, patient, also on a
// machine that does much else.
const soon = 15 * time.Second

// communicating are the phases that wait for peers.
var communicating = []phase{reducePhase, exchangePhase, broadcastPhase, gatherPhase, remainderPhase}

// phasesOf are the phases of calls that are compared, where chunks are not in the order of
// devices.
var phasesOf = []struct {
	what   backend.Collective
	phases []phase
}{
	{allReduce, []phase{reducePhase, exchangePhase, addPhase, broadcastPhase, gatherPhase,
		remainderPhase}},
	{reduceScatter, []phase{packPhase, reducePhase, exchangePhase, addPhase, remainderPhase}},
	{allGather, []phase{broadcastPhase, gatherPhase, unpackPhase, remainderPhase}},
	{allToAll, []phase{packPhase, reducePhase, addPhase, exchangePhase, unpackPhase,
		remainderPhase}},
	{broadcast, []phase{broadcastPhase, gatherPhase, remainderPhase}},
}

// computes reports whether a phase consists of kernels, and has no communicator.
func computes(p phase) bool { return !slices.Contains(communicating, p) }

// ofSlices makes 8 slices of 1000 elements of f32 among four ranks, and leaves
// three elements to the flat communicator.
func ofSlices() Options { return Options{Mode: Always, SliceBytes: 4 * 168, Slots: 2} }

const elements = 1003

// queued runs an all-reduce on its own queue.
func queued(c *Communicator, n int) error { return queuedCall(c, allReduce, n) }

// queuedCall is queued for any collective, whose larger operand has n elements, if the
// ranks divide them.
func queuedCall(c *Communicator, what backend.Collective, n int) error {
	q, err := c.Device().NewQueue()
	if err != nil {
		return err
	}
	defer q.Close()
	if what.Kind != backend.AllReduce && what.Kind != backend.Broadcast {
		n /= c.Size()
	}
	nsrc, ndst := lengths(what, c.Size(), n)
	w, err := c.Start(q, what, backend.Of(make([]float32, ndst)), backend.Of(make([]float32, nsrc)))
	if err != nil {
		return err
	}
	return w.Join(context.Background())
}

// kernelsOfASlice is how many kernels a phase without a communicator starts.
func kernelsOfASlice(c *Communicator, what backend.Collective, p phase) int {
	switch l := c.plan.Layout; {
	case what.Kind == backend.AllToAll && p == addPhase:
		return l.Machines()
	case what.Kind == backend.AllToAll && p == unpackPhase:
		return len(l.grouped)
	case p == addPhase:
		return 1
	default:
		return len(l.runs)
	}
}

func TestFailedSliceFailsTheCallAndNamesThePhase(t *testing.T) {
	for _, call := range phasesOf {
		for _, phase := range call.phases {
			t.Run(fmt.Sprintf("%v, %v, when it is started", call.what.Kind, phase),
				func(t *testing.T) {
					failsIn(t, call.what, phase, func(*probe, backend.Queue) (backend.Work, error) {
						return nil, errInjected
					})
				})
			if computes(phase) {
				continue // kernels of the host cannot fail later
			}
			t.Run(fmt.Sprintf("%v, %v, when it runs", call.what.Kind, phase), func(t *testing.T) {
				failsIn(t, call.what, phase, func(p *probe, q backend.Queue) (backend.Work, error) {
					reached, err := q.Record()
					return failed{reached, &backend.Error{Comm: p.Name(), Rank: p.Rank(), Peer: -1,
						Cause: errInjected}}, err
				})
			})
		}
	}
}

// failsIn makes the second slice of a phase fail on rank 1; of what runs flat there is one.
func failsIn(t *testing.T, what backend.Collective, phase phase,
	injected func(*probe, backend.Queue) (backend.Work, error)) {
	const culprit = 1
	slice := 1
	if phase == remainderPhase {
		slice = 0
	}
	l := Grid(2, 2)
	hook := func(p *probe, q backend.Queue) (backend.Work, error) {
		if p.rank == culprit && p.phase == phase && p.number() == slice+1 {
			return injected(p, q)
		}
		return nil, nil
	}
	ranksOver(t, l, ofSlices(), probes(l, hook), func(c *Communicator) error {
		if c.Rank() == culprit && computes(phase) {
			kernels := 0
			tap(c, phase, func(backend.Queue) error {
				if kernels++; kernels <= slice*kernelsOfASlice(c, what, phase) {
					return nil
				}
				return errInjected
			})
		}
		begin := time.Now()
		err := queuedCall(c, what, elements)
		if took := time.Since(begin); took > soon {
			return fmt.Errorf("it took %v to fail", took)
		}
		if c.Rank() == culprit && !errors.Is(err, errInjected) {
			return fmt.Errorf("the error is %v, want the injected one", err)
		}
		// Ranks of the other machine may be through by the last phase, and the other rails
		// once they have exchanged. Root's machine only sends.
		through := what.Kind == backend.Broadcast && c.place.machine == 0 || phase >= gatherPhase &&
			c.place.machine != 0 || what.Kind == backend.ReduceScatter && phase == exchangePhase &&
			c.place.device != culprit
		if err == nil && !through {
			return errors.New("the call gave no error")
		}
		var e *backend.Error
		if err != nil && (!errors.As(err, &e) || e.Rank != c.Rank() || e.Comm != c.Name() ||
			!strings.Contains(err.Error(), phase.String()) ||
			!strings.Contains(err.Error(), errInjected.Error())) {
			return fmt.Errorf("the error is %w", err)
		}
		if phase != remainderPhase && err != nil && !strings.Contains(err.Error(), "slice 2 of ") {
			return fmt.Errorf("the error does not name the slice: %w", err)
		}
		return ended(c)
	})
}

// ended waits until the communicator has ended, and checks that it stays so, with
// all that it consists of.
func ended(c *Communicator) error {
	deadline := time.Now().Add(soon)
	for c.Err() == nil && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	for _, n := range []int{elements, 2, 0} {
		if err := queued(c, n); !errors.Is(err, backend.ErrAborted) {
			return fmt.Errorf("a later call of %d elements has the error %v, want ErrAborted",
				n, err)
		}
	}
	for _, inner := range c.Unwrap() {
		x, err := backend.Of(make([]float32, 1)), error(nil)
		for err == nil { // the end may be on its way there
			if err = backend.Run(inner, allReduce, x, x); err == nil && time.Now().After(deadline) {
				return fmt.Errorf("%s goes on", inner.Name())
			}
		}
	}
	return nil
}

// In every phase one rank stalls, so that others wait in all phases that there
// are, and some rank, perhaps the one that stalls, perhaps an idle one, aborts.
func TestAbortInEveryPhaseWakesAllRanks(t *testing.T) {
	for _, call := range phasesOf {
		for _, phase := range call.phases {
			for _, from := range []int{0, 3} {
				t.Run(fmt.Sprintf("%v, %v, from rank %d", call.what.Kind, phase, from),
					func(t *testing.T) { wakesFrom(t, call.what, phase, from) })
			}
		}
	}
}

// wakesFrom stalls rank 3 in a phase until rank from aborts.
func wakesFrom(t *testing.T, what backend.Collective, phase phase, from int) {
	cause := errors.New("the weather")
	l := Grid(2, 2)
	hook := func(p *probe, q backend.Queue) (backend.Work, error) {
		if p.rank == 3 && p.phase == phase {
			return stalledOn(p, q)
		}
		return nil, nil
	}
	g := connected(t, l, patient, ofSlices(), probes(l, hook))
	aborted := make(chan time.Time, 1)
	time.AfterFunc(30*time.Millisecond, func() {
		aborted <- time.Now()
		g.Comms[from].Abort(cause)
	})
	woken := make([]time.Time, l.Size())
	backendtest.Each(t, g.Comms, func(b backend.Communicator) error {
		c := b.(*Communicator)
		if c.Rank() == 3 && computes(phase) {
			tap(c, phase, func(q backend.Queue) error { return q.Wait(endOf{c}) })
		}
		err := queuedCall(c, what, elements)
		woken[c.Rank()] = time.Now()
		// The other machine may be through, and root's, which only sends.
		through := what.Kind == backend.AllReduce && phase == gatherPhase ||
			what.Kind == backend.Broadcast && c.place.machine == 0
		if err == nil && !through {
			return errors.New("the call gave no error")
		}
		if err != nil && (!errors.Is(err, backend.ErrAborted) ||
			!strings.Contains(err.Error(), cause.Error())) {
			return fmt.Errorf("the error is %w", err)
		}
		return ended(c)
	})
	began := <-aborted
	for r, at := range woken {
		took := at.Sub(began)
		require.Check(t, took <= soon, "it took %v until rank %d was awake", took, r)
	}
}

// Rank 3 aborts while rank 2 is idle and the others wait for it: nobody but the
// store could tell rank 2's peers.
func TestAbortReachesThoseWhoWaitForAnIdleRank(t *testing.T) {
	g := connected(t, gridOf(2, 2, machineMinor), patient, ofSlices(), nil)
	time.AfterFunc(20*time.Millisecond, func() { g.Comms[3].Abort(errInjected) })
	begin := time.Now()
	backendtest.Each(t, g.Comms[:2], func(b backend.Communicator) error {
		if err := queued(b.(*Communicator), elements); !errors.Is(err, backend.ErrAborted) ||
			!strings.Contains(err.Error(), "because of rank 3: aborted: a cable") {
			return fmt.Errorf("the error is %v", err)
		}
		return nil
	})
	took := time.Since(begin)
	require.Check(t, took <= soon, "it took %v", took)
	backendtest.Each(t, g.Comms[2:], func(b backend.Communicator) error {
		return ended(b.(*Communicator))
	})
}

// What a rank sends after its own phase has failed must reach nobody: a rank
// whose call ends well has the right numbers.
func TestNobodyIsGivenWhatAFailedPhaseLeftBehind(t *testing.T) {
	for round := range times(200, 20) {
		l := Grid(2, 2)
		phase := communicating[round%4]
		end := make(chan struct{})
		hook := func(p *probe, q backend.Queue) (backend.Work, error) {
			if p.rank != round%3 || p.phase != phase || p.number() != 1+round%2 {
				return nil, nil
			}
			if round%5 > 2 { // the peers wait until it closes
				close(end)
				return stalledOn(p, q)
			}
			return backend.Finished(errInjected), nil
		}
		wrap := func(c backend.Communicator) backend.Communicator {
			p := probes(l, hook)(c).(*probe)
			p.lag = 2 * time.Millisecond
			return p
		}
		ranksOver(t, l, ofSlices(), wrap, func(c *Communicator) error {
			if c.Rank() == round%3 && round%5 > 2 {
				go func() {
					<-end
					c.Close()
				}()
			}
			if err := exactOrError(c); err != nil {
				return fmt.Errorf("round %d, %v: %w", round, phase, err)
			}
			return nil
		})
	}
}

// exactOrError checks a call, unless that has an error.
func exactOrError(c *Communicator) error {
	x := make([]float32, elements)
	for i := range x {
		x[i] = float32(c.Rank() + i)
	}
	q, err := c.Device().NewQueue()
	if err != nil {
		return err
	}
	defer q.Close()
	w, err := c.Start(q, allReduce, backend.Of(x), backend.Of(x))
	if err != nil || w.Join(context.Background()) != nil {
		return nil
	}
	for i, got := range x {
		if want := float32(6 + 4*i); got != want {
			return fmt.Errorf("the call ended well, but element %d is %v, want %v", i, got, want)
		}
	}
	return nil
}

// As on GPUs, where nothing on the host waits for a phase.
func TestFailureOfACallThatNobodyJoinsEndsAllRanks(t *testing.T) {
	l, d := Grid(2, 2), guarded(t)
	hook := func(p *probe, q backend.Queue) (backend.Work, error) {
		if p.rank != 1 || p.phase != gatherPhase {
			return nil, nil
		}
		reached, err := q.Record()
		return failed{reached, &backend.Error{Comm: p.Name(), Rank: p.Rank(), Peer: -1,
			Cause: errInjected}}, err
	}
	wrap := func(c backend.Communicator) backend.Communicator {
		return probes(l, hook)(fakedevice.Over(c, d))
	}
	ranksOver(t, l, always(), wrap, func(c *Communicator) error {
		x := testranks.Must(d.Alloc(4 * elements))
		b := x.As(backend.F32)
		if _, err := c.Start(nil, allReduce, b, b); err != nil &&
			!errors.Is(err, backend.ErrAborted) {
			return err
		}
		for deadline := time.Now().Add(soon); c.Err() == nil; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				return errors.New("it goes on")
			}
		}
		if err := c.Err(); !errors.Is(err, backend.ErrAborted) ||
			!strings.Contains(err.Error(), gatherPhase.String()) {
			return fmt.Errorf("the error is %w", err)
		}
		return errors.Join(pastTheQueues(c), d.Free(x))
	})
}

// pastTheQueues waits until nothing of a call that nobody joins uses its memory.
func pastTheQueues(c *Communicator) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.drain()
}

func TestMismatchNamesTheCallersCalls(t *testing.T) {
	ranks(t, Grid(2, 2), always(), func(c *Communicator) error {
		x, y := backend.Of(make([]float32, 400)), backend.Of(make([]float32, 100))
		what, dst := allReduce, x
		if c.Rank() == 3 {
			what, dst = reduceScatter, y
		}
		err := backend.Run(c, what, dst, x)
		if !errors.Is(err, backend.ErrMismatch) ||
			!strings.Contains(err.Error(), "allreduce(sum) of 400 f32 (call 1)") ||
			!strings.Contains(err.Error(), "reducescatter(sum) of 100 f32 (call 1)") {
			return fmt.Errorf("the error is %w", err)
		}
		return blames(err, 3)
	})
}

// TestShapesAreComparedAcrossMachines: the collectives of all phases are the same.
func TestShapesAreComparedAcrossMachines(t *testing.T) {
	ranks(t, Grid(2, 2), always(), func(c *Communicator) error {
		shape := backend.ShapeOf(10, 40)
		if c.Rank() == 3 {
			shape = backend.ShapeOf(40, 10)
		}
		x := backend.Of(make([]float32, 400))
		err := backend.Run(c, backend.Collective{Kind: backend.AllReduce,
			Origin: &backend.Origin{Shape: shape}}, x, x)
		if !errors.Is(err, backend.ErrMismatch) ||
			!strings.Contains(err.Error(), "of (10, 40) f32") ||
			!strings.Contains(err.Error(), "of (40, 10) f32") {
			return fmt.Errorf("the error is %w", err)
		}
		return blames(err, 3)
	})
}

func blames(err error, rank int) error {
	var e *backend.Error
	if !errors.As(err, &e) || e.Peer != rank {
		return fmt.Errorf("rank %d is to blame for %w", rank, err)
	}
	return nil
}

func TestRefusedCallLeavesRanksInStep(t *testing.T) {
	ranks(t, Grid(2, 2), always(), func(c *Communicator) error {
		x := backend.Of(make([]float32, elements))
		if c.Rank() == 1 {
			q := testranks.Must(c.Device().NewQueue())
			q.Close()
			for _, n := range []int{elements, 2} {
				if _, err := c.Start(q, allReduce, x.Slice(0, n), x.Slice(0, n)); !errors.Is(
					err, backend.ErrArgument) {
					return fmt.Errorf("%d elements on a closed queue: %w", n, err)
				}
			}
		}
		return errors.Join(backend.Run(c, allReduce, x, x), backend.Barrier(c), queued(c, elements))
	})
}

// impatient is a queue that waits for nothing, and says that it was asked to.
type impatient struct {
	backend.Queue
	asked serial.Event
}

func (q impatient) Wait(backend.Event) error {
	close(q.asked)
	return errInjected
}

// A call that has begun when Start fails would go on in memory that the caller takes back.
func TestCallThatHasBegunEndsWithAStartThatFails(t *testing.T) {
	for name, n := range map[string]int{"hierarchical": elements, "flat": 2} {
		t.Run(name, func(t *testing.T) {
			l := Grid(2, 2)
			asked := make(serial.Event)
			var calls atomic.Bool // rank 1
			slow := func(p *probe, q backend.Queue) (backend.Work, error) {
				if p.rank == 1 && calls.Load() { // what it has begun is under way when Start fails
					return nil, q.Wait(asked)
				}
				return nil, q.Wait(delay(time.Millisecond))
			}
			ranksOver(t, l, ofSlices(), probes(l, slow), func(c *Communicator) error {
				if c.Rank() != 1 {
					_ = queued(c, n) // perhaps it was through
					return ended(c)
				}
				q := testranks.Must(c.Device().NewQueue())
				defer q.Close()
				var on backend.Queue = impatient{q, asked}
				if n < c.Size() { // who waits then is the stream that looks for errors
					on, c.queues[unpackPhase] = q, impatient{c.queues[unpackPhase], asked}
				}
				calls.Store(true)
				x := make([]float32, n)
				if _, err := c.Start(on, allReduce, backend.Of(x), backend.Of(x)); !errors.Is(
					err, errInjected) || !errors.Is(err, backend.ErrAborted) {
					return fmt.Errorf("the error is %v", err)
				}
				for i := range x {
					x[i] = 1 // races with a call that goes on
				}
				return ended(c)
			})
		})
	}
}

func TestDeviceMemoryOnTheHostIsAnArgumentError(t *testing.T) {
	ranks(t, Grid(2, 2), always(), func(c *Communicator) error {
		x := backend.OnDevice(backend.F32, 4096, 1000)
		if err := backend.Run(c, allReduce, x, x); !errors.Is(err, backend.ErrArgument) ||
			!strings.Contains(err.Error(), "memory of a device") {
			return fmt.Errorf("the error is %v", err)
		}
		return equalsFlat(c, allReduce, backend.F32, 1000, 1)
	})
}

func TestFoundErrorsOfPhasesNameTheJobsRanksAndTheCall(t *testing.T) {
	for missing := range 4 {
		g := require.Value(layeredGroup(Grid(2, 2), 300*time.Millisecond, ofSlices(), nil))(t)
		backendtest.Each(t, g.Comms, func(b backend.Communicator) error {
			if b.Rank() == missing {
				return nil
			}
			err := queued(b.(*Communicator), elements)
			if err == nil {
				return errors.New("no error")
			}
			text := err.Error()
			if !errors.Is(err, backend.ErrTimeout) ||
				!strings.Contains(text, fmt.Sprintf("no sign of rank %d", missing)) {
				return fmt.Errorf("the error does not name rank %d: %w", missing, err)
			}
			if strings.Contains(text, "slot -") || strings.Contains(text, " u8") ||
				strings.Count(text, g.Comms[0].Name()) != 1 {
				return fmt.Errorf("the error speaks of calls that nobody has made, or of the "+
					"group more than once: %w", err)
			}
			return nil
		})
		closeGroup(t, g)
	}
}
