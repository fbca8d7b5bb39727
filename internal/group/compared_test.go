package group

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// unverified hides that the reference communicator can compare headers.
type unverified struct{ backend.CheckedStarter }

func (u unverified) Capabilities() backend.Capabilities {
	caps := u.CheckedStarter.Capabilities()
	caps.Verify = nil
	return caps
}

func (u unverified) Split(color, key int) (backend.Communicator, error) {
	part, err := u.CheckedStarter.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return unverified{part.(backend.CheckedStarter)}, nil
}

func checked(size int, timeout time.Duration,
	wrap func(backend.Communicator) backend.Communicator) *backendtest.Group {
	plain := reference.New("test", size, timeout)
	g := &backendtest.Group{Fail: plain[0].Lose}
	for _, c := range plain {
		c.Verify(false)
		g.Comms = append(g.Comms, wrap(unverified{c}))
	}
	return g
}

func TestCheckedCommunicatorPasses(t *testing.T) {
	backendtest.RunWrapper(t, backendtest.Options{
		Sizes: []int{1, 2, 4},
		New: func(size int, timeout time.Duration) (*backendtest.Group, error) {
			return checked(size, timeout, Compared), nil
		},
	})
}

func asIs(c backend.Communicator) backend.Communicator { return c }

func allReduce(op backend.ReduceOp) backend.Collective {
	return backend.Collective{Kind: backend.AllReduce, Op: op}
}

// disagree lets rank 0 add and rank 1 look for the largest.
func disagree(c backend.Communicator, y []int64) error {
	op := []backend.ReduceOp{backend.Sum, backend.Max}[c.Rank()]
	return backend.Run(c, allReduce(op), backend.Of(y), backend.Of([]int64{3}))
}

func TestWithoutCheckRanksGetWrongNumbers(t *testing.T) {
	results := make([]int64, 2)
	backendtest.Each(t, checked(2, time.Minute, asIs).Comms, func(c backend.Communicator) error {
		return disagree(c, results[c.Rank():c.Rank()+1])
	})
	require.That(t, results[0] != results[1],
		"both ranks got %d: this test does not show what check is for", results[0])
}

func TestWithoutCheckRanksHang(t *testing.T) {
	backendtest.Each(t, checked(2, 200*time.Millisecond, asIs).Comms,
		func(c backend.Communicator) error {
			if err := disagree(c, make([]int64, 1)); err != nil || c.Rank() == 1 {
				return err
			}
			// Rank 0 is one call behind, as after a mismatch that nobody has noticed.
			if err := disagree(c, make([]int64, 1)); !errors.Is(err, backend.ErrTimeout) {
				return fmt.Errorf("the error is %v, want ErrTimeout", err)
			}
			return nil
		})
}

func TestMismatchLeavesDestinationAlone(t *testing.T) {
	backendtest.Each(t, checked(2, time.Minute, Compared).Comms,
		func(c backend.Communicator) error {
			y := []int64{-1}
			err := disagree(c, y)
			if !errors.Is(err, backend.ErrMismatch) || y[0] != -1 {
				return fmt.Errorf("the result is %d, the error %v", y[0], err)
			}
			for _, part := range []string{"allreduce(sum)", "allreduce(max)", "rank 0", "rank 1"} {
				if !strings.Contains(err.Error(), part) {
					return fmt.Errorf("the error %q does not say %q", err, part)
				}
			}
			return nil
		})
}

func TestAllocAgainstCollectiveIsAMismatch(t *testing.T) {
	others := map[string]func(c backend.Communicator) error{
		"all-reduce": func(c backend.Communicator) error {
			x := backend.Of(make([]int64, 1))
			return backend.Run(c, allReduce(backend.Sum), x, x)
		},
		"split": func(c backend.Communicator) error { _, err := c.Split(0, 0); return err },
		"alloc": func(c backend.Communicator) error { _, err := c.Alloc(4); return err },
	}
	for name, other := range others {
		t.Run(name, func(t *testing.T) {
			backendtest.Each(t, checked(2, time.Minute, Compared).Comms,
				func(c backend.Communicator) error {
					err := other
					if c.Rank() == 0 {
						err = func(c backend.Communicator) error {
							_, err := c.Alloc(8)
							return err
						}
					}
					if err := err(c); !errors.Is(err, backend.ErrMismatch) {
						return fmt.Errorf("the error is %v, want ErrMismatch", err)
					}
					return nil
				})
		})
	}
}

func TestSequenceNumbersAreCompared(t *testing.T) {
	backendtest.Each(t, checked(2, time.Minute, Compared).Comms,
		func(c backend.Communicator) error {
			c.(*compared).seq = uint64(c.Rank())
			x := backend.Of(make([]int64, 1))
			if err := backend.Run(c, allReduce(backend.Sum), x, x); !errors.Is(
				err, backend.ErrMismatch) {
				return fmt.Errorf("the error is %v, want ErrMismatch", err)
			}
			return nil
		})
}

// wrapper is another layer above a communicator.
type wrapper struct{ backend.Base }

func TestVerifierIsSwitchedOnAndNothingIsAdded(t *testing.T) {
	comms := make([]backend.Communicator, 2)
	for r, c := range reference.New("test", 2, time.Minute) {
		c.Verify(false)
		comms[r] = wrapper{backend.Wrap(c)}
		if got := Compared(comms[r]); got != comms[r] {
			t.Fatalf("Compared returned a %T, want the communicator itself", got)
		}
	}
	backendtest.Each(t, comms, func(c backend.Communicator) error {
		if err := disagree(c, make([]int64, 1)); !errors.Is(err, backend.ErrMismatch) {
			return fmt.Errorf("the error is %v, want ErrMismatch", err)
		}
		return nil
	})
}

func TestCheckIsNotAddedTwice(t *testing.T) {
	c := checked(1, time.Minute, Compared).Comms[0]
	require.That(t, Compared(c) == c, "a checked communicator was wrapped once more")
}

func TestSwitchedOffNothingIsExchanged(t *testing.T) {
	backendtest.Each(t, checked(2, time.Minute, Compared).Comms,
		func(c backend.Communicator) error {
			c.Capabilities().Verify(false)
			testranks.NoError(disagree(c, make([]int64, 1)))
			if seq := c.(*compared).seq; seq != 0 {
				return fmt.Errorf("%d exchanges", seq)
			}
			return nil
		})
}

func TestRefusedCallEndsEveryRank(t *testing.T) {
	backendtest.Each(t, checked(2, time.Minute, func(c backend.Communicator) backend.Communicator {
		return Compared(hostOnly{c})
	}).Comms, func(c backend.Communicator) error {
		x := backend.Of(make([]int64, 1))
		want := backend.ErrAborted
		if c.Rank() == 0 {
			x, want = backend.OnDevice(backend.I64, 4096, 1), backend.ErrArgument
		}
		if err := backend.Run(c, allReduce(backend.Sum), x, x); !errors.Is(err, want) {
			return fmt.Errorf("the error is %v, want %v", err, want)
		}
		return nil
	})
}

// TestWhatNoRankOffersLeavesTheGroupUsable: it is no reason to end it.
func TestWhatNoRankOffersLeavesTheGroupUsable(t *testing.T) {
	backendtest.Each(t, checked(2, time.Minute, func(c backend.Communicator) backend.Communicator {
		return Compared(noMax{c})
	}).Comms, func(c backend.Communicator) error {
		x := backend.Of([]int64{int64(c.Rank())})
		if err := backend.Run(c, allReduce(backend.Max), x, x); !errors.Is(
			err, backend.ErrUnsupported) {
			return fmt.Errorf("the error is %v, want ErrUnsupported", err)
		}
		return backend.Run(c, allReduce(backend.Sum), x, x)
	})
}

// noMax offers no Max.
type noMax struct{ backend.Communicator }

func (n noMax) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if what.Op == backend.Max {
		return nil, fmt.Errorf("%w: max", backend.ErrUnsupported)
	}
	return n.Communicator.Start(q, what, dst, src)
}

// hostOnly refuses device memory.
type hostOnly struct{ backend.Communicator }

func (h hostOnly) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if dst.Device() {
		return nil, fmt.Errorf("%w: device memory", backend.ErrArgument)
	}
	return h.Communicator.Start(q, what, dst, src)
}
