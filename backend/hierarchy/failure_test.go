package hierarchy

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
)

// soon is the second in which every rank must know, and what a busy machine adds.
const soon = 2 * time.Second

// communicating are the phases that wait for peers.
var communicating = []Phase{Reduce, Exchange, Spread, Gather, Remainder}

// ofSlices makes 24 slices of 1000 elements of f32 among four ranks, and leaves
// three elements to the flat communicator.
func ofSlices() Options { return Options{Mode: Always, SliceBytes: 4 * 168, Slots: 2} }

const elements = 1003

// queued runs an all-reduce on a queue of its own.
func queued(c *Communicator, n int) error {
	q, err := c.Device().NewQueue()
	if err != nil {
		return err
	}
	defer q.Close()
	x := backend.Of(make([]float32, n))
	w, err := c.Start(q, allReduce, x, x)
	if err != nil {
		return err
	}
	return w.Join(context.Background())
}

func TestFailedSliceFailsTheCallAndNamesThePhase(t *testing.T) {
	const culprit = 1
	ways := map[string]func(p *probe) (backend.Work, error){
		"when it is started": func(*probe) (backend.Work, error) { return nil, errInjected },
		"when it runs": func(p *probe) (backend.Work, error) {
			return backend.Done(&backend.Error{Comm: p.Name(), Rank: p.Rank(), Peer: -1, Cause: errInjected}), nil
		},
	}
	for way, injected := range ways {
		for _, phase := range communicating {
			slice := 1
			if phase == Remainder {
				slice = 0 // there is one
			}
			t.Run(fmt.Sprintf("%v, %s", phase, way), func(t *testing.T) {
				l := Grid(2, 2, MachineMajor)
				hook := func(p *probe, _ backend.Queue) (backend.Work, error) {
					if p.rank == culprit && p.phase == phase && p.number() == slice+1 {
						return injected(p)
					}
					return nil, nil
				}
				ranksOver(t, l, ofSlices(), probes(l, hook), func(c *Communicator) error {
					begin := time.Now()
					err := queued(c, elements)
					if took := time.Since(begin); took > soon {
						return fmt.Errorf("it took %v to fail", took)
					}
					if c.Rank() == culprit && !errors.Is(err, errInjected) {
						return fmt.Errorf("the error is %v, want the injected one", err)
					}
					// Ranks of the other machine may be through by the last phase.
					if err == nil && (phase < Gather || c.place.machine == 0) {
						return errors.New("the call gave no error")
					}
					var e *backend.Error
					if err != nil && (!errors.As(err, &e) || e.Rank != c.Rank() || e.Comm != c.Name() ||
						!strings.Contains(err.Error(), phase.String()) || !strings.Contains(err.Error(), errInjected.Error())) {
						return fmt.Errorf("the error is %w", err)
					}
					if phase != Remainder && err != nil && !strings.Contains(err.Error(), "slice 2 of ") {
						return fmt.Errorf("the error does not name the slice: %w", err)
					}
					return ended(c)
				})
			})
		}
	}
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
			return fmt.Errorf("a later call of %d elements has the error %v, want ErrAborted", n, err)
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
	cause := errors.New("the weather")
	for _, phase := range communicating {
		for _, from := range []int{0, 3} {
			t.Run(fmt.Sprintf("%v, from rank %d", phase, from), func(t *testing.T) {
				l := Grid(2, 2, MachineMajor)
				hook := func(p *probe, _ backend.Queue) (backend.Work, error) {
					if p.rank == 3 && p.phase == phase {
						return stalled{p}, nil
					}
					return nil, nil
				}
				g := connected(t, l, patient, ofSlices(), probes(l, hook))
				aborted := make(chan time.Time, 1)
				time.AfterFunc(30*time.Millisecond, func() {
					aborted <- time.Now()
					g.Comms[from].Abort(cause)
				})
				backendtest.Each(t, g.Comms, func(b backend.Communicator) error {
					c := b.(*Communicator)
					err := queued(c, elements)
					if err == nil && phase != Gather { // the other machine may be through
						return errors.New("the call gave no error")
					}
					if err != nil && (!errors.Is(err, backend.ErrAborted) || !strings.Contains(err.Error(), cause.Error())) {
						return fmt.Errorf("the error is %w", err)
					}
					return ended(c)
				})
				if took := time.Since(<-aborted); took > soon {
					t.Errorf("it took %v until all ranks were awake", took)
				}
			})
		}
	}
}

// Rank 3 aborts while rank 2 is idle and the others wait for it: nobody but the
// store could tell rank 2's peers.
func TestAbortReachesThoseWhoWaitForAnIdleRank(t *testing.T) {
	g := connected(t, Grid(2, 2, MachineMinor), patient, ofSlices(), nil)
	time.AfterFunc(20*time.Millisecond, func() { g.Comms[3].Abort(errInjected) })
	begin := time.Now()
	backendtest.Each(t, g.Comms[:2], func(b backend.Communicator) error {
		if err := queued(b.(*Communicator), elements); !errors.Is(err, backend.ErrAborted) || !strings.Contains(err.Error(), "rank 3 aborted: a cable") {
			return fmt.Errorf("the error is %v", err)
		}
		return nil
	})
	if took := time.Since(begin); took > soon {
		t.Errorf("it took %v", took)
	}
	backendtest.Each(t, g.Comms[2:], func(b backend.Communicator) error { return ended(b.(*Communicator)) })
}

// What a rank sends after a phase of its own has failed must reach nobody: a rank
// whose call ends well has the right numbers.
func TestNobodyIsGivenWhatAFailedPhaseLeftBehind(t *testing.T) {
	for round := range times(200, 20) {
		l := Grid(2, 2, MachineMajor)
		phase := communicating[round%4]
		end := make(chan struct{})
		hook := func(p *probe, _ backend.Queue) (backend.Work, error) {
			if p.rank != round%3 || p.phase != phase || p.number() != 1+round%2 {
				return nil, nil
			}
			if round%5 > 2 { // the peers wait until it closes
				close(end)
				return stalled{p}, nil
			}
			return backend.Done(errInjected), nil
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

func TestMismatchNamesTheCallersCalls(t *testing.T) {
	ranks(t, Grid(2, 2, MachineMajor), always(), func(c *Communicator) error {
		x, y := backend.Of(make([]float32, 400)), backend.Of(make([]float32, 100))
		what, dst := allReduce, x
		if c.Rank() == 3 {
			what, dst = reduceScatter, y
		}
		err := backend.Run(c, what, dst, x)
		if !errors.Is(err, backend.ErrMismatch) || !strings.Contains(err.Error(), "allreduce(sum) of 400 f32 (call 1)") ||
			!strings.Contains(err.Error(), "reducescatter(sum) of 100 f32 (call 1)") {
			return fmt.Errorf("the error is %w", err)
		}
		return nil
	})
}

func TestRefusedCallLeavesRanksInStep(t *testing.T) {
	ranks(t, Grid(2, 2, MachineMajor), always(), func(c *Communicator) error {
		x := backend.Of(make([]float32, elements))
		if c.Rank() == 1 {
			q, err := c.Device().NewQueue()
			if err != nil {
				return err
			}
			q.Close()
			for _, n := range []int{elements, 2} {
				if _, err := c.Start(q, allReduce, x.Slice(0, n), x.Slice(0, n)); !errors.Is(err, backend.ErrArgument) {
					return fmt.Errorf("%d elements on a closed queue: %w", n, err)
				}
			}
		}
		return errors.Join(backend.Run(c, allReduce, x, x), backend.Barrier(c), queued(c, elements))
	})
}

func TestDeviceMemoryOnTheHostIsAnArgumentError(t *testing.T) {
	ranks(t, Grid(2, 2, MachineMajor), always(), func(c *Communicator) error {
		x := backend.OnDevice(backend.F32, 4096, 1000)
		if err := backend.Run(c, allReduce, x, x); !errors.Is(err, backend.ErrArgument) || !strings.Contains(err.Error(), "memory of a device") {
			return fmt.Errorf("the error is %v", err)
		}
		return equalsFlat(c, allReduce, backend.F32, 1000, 1)
	})
}
