package backendtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/reference"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// referenceGroup makes groups of the reference communicator, each wrapped.
func referenceGroup(wrap func(*reference.Communicator) backend.Communicator) func(int,
	time.Duration) (*Group, error) {
	return func(size int, timeout time.Duration) (*Group, error) {
		plain := reference.New("test", size, timeout)
		g := &Group{Fail: plain[0].Lose}
		for _, c := range plain {
			g.Comms = append(g.Comms, wrap(c))
		}
		return g, nil
	}
}

func asIs(c *reference.Communicator) backend.Communicator { return c }

func TestReferencePassesUnraced(t *testing.T) { Run(t, Options{New: referenceGroup(asIs)}) }

// broken is a communicator that is wrong in one way.
type broken struct {
	*reference.Communicator
	// after runs when a call is done.
	after func(c backend.Communicator, what backend.Collective, dst, src backend.Buffer)
	// instead runs instead of a call, unless it returns false.
	instead func(c backend.Communicator, what *backend.Collective, dst, src backend.Buffer) (
		done bool, err error)
	abort func(c backend.Communicator, cause error)
	split func(c backend.Communicator, color, key int) (backend.Communicator, error)
	close func(c backend.Communicator) error
}

func (b *broken) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if b.instead != nil {
		done, err := b.instead(b.Communicator, &what, dst, src)
		switch {
		case err != nil:
			return nil, err
		case done:
			return backend.Finished(nil), nil
		}
	}
	w, err := b.Communicator.Start(q, what, dst, src)
	if err == nil && b.after != nil && w.Join(context.Background()) == nil {
		b.after(b, what, dst, src)
	}
	return w, err
}

func (b *broken) Abort(cause error) {
	if b.abort != nil {
		b.abort(b.Communicator, cause)
		return
	}
	b.Communicator.Abort(cause)
}

func (b *broken) Split(color, key int) (backend.Communicator, error) {
	if b.split != nil {
		return b.split(b.Communicator, color, key)
	}
	return b.Communicator.Split(color, key)
}

func (b *broken) Close() error {
	if b.close != nil {
		return b.close(b.Communicator)
	}
	return b.Communicator.Close()
}

// fromTheLast sums float32 in the wrong order.
func fromTheLast(c backend.Communicator, what *backend.Collective, dst, src backend.Buffer) (bool,
	error) {
	if _, err := what.Check(c.Rank(), c.Size(), dst, src); err != nil ||
		what.Kind != backend.AllReduce || what.Op != backend.Sum || src.DType() != backend.F32 {
		return false, err
	}
	n := src.Len()
	all := make([]float32, n*c.Size())
	if err := backend.Run(c, backend.Collective{Kind: backend.AllGather}, backend.Of(all),
		src); err != nil {
		return false, err
	}
	for i, y := 0, backend.View[float32](dst); i < n; i++ {
		y[i] = all[n*(c.Size()-1)+i]
		for r := c.Size() - 2; r >= 0; r-- {
			y[i] += all[n*r+i]
		}
	}
	return true, nil
}

// TestBrokenCommunicatorsAreCaught breaks one promise at a time.
func TestBrokenCommunicatorsAreCaught(t *testing.T) {
	var kept [][]byte // by the communicator that keeps something of every call
	cases := []struct {
		name, scenario, says string
		broken               broken
	}{
		{"sums from the last rank", "ResultsEqualReference", "want", broken{instead: fromTheLast}},
		{"ignores the root", "ResultsEqualReference", "", broken{
			instead: func(_ backend.Communicator, what *backend.Collective, _, _ backend.Buffer) (
				bool, error) {
				if what.Kind == backend.Broadcast {
					what.Root = 0
				}
				return false, nil
			}}},
		{"clobbers the source", "ResultsEqualReference", "must not touch", broken{
			after: func(_ backend.Communicator, what backend.Collective, dst, src backend.Buffer) {
				if b := src.Bytes(); what.Kind == backend.AllReduce && len(b) > 0 &&
					dst.Addr() != src.Addr() {
					b[0]++
				}
			}}},
		{"writes past the end", "ResultsEqualReference", "past the end", broken{
			after: func(_ backend.Communicator, what backend.Collective, dst, _ backend.Buffer) {
				if b := dst.Bytes(); what.Kind == backend.AllToAll && len(b) > 0 {
					*(*byte)(unsafe.Add(unsafe.Pointer(&b[0]), len(b)))++
				}
			}}},
		{"writes before the start", "ResultsEqualReference", "before the operand", broken{
			after: func(_ backend.Communicator, what backend.Collective, dst, _ backend.Buffer) {
				if b := dst.Bytes(); what.Kind == backend.Gather && len(b) > 0 {
					*(*byte)(unsafe.Add(unsafe.Pointer(&b[0]), -1))++
				}
			}}},
		{"other bits on one rank", "ResultsEqualReference", "other bits", broken{
			after: func(c backend.Communicator, _ backend.Collective, dst, _ backend.Buffer) {
				// A NaN with another payload is as good a NaN, but not bitwise identical.
				for b := dst.Bytes(); dst.DType() == backend.F32 && len(b) > 0; b = b[4:] {
					if isNaN(backend.F32, b) {
						b[0] = byte(c.Rank())
					}
				}
			}}},
		{"cannot do f16", "ResultsEqualReference", "unsupported", broken{
			instead: func(_ backend.Communicator, _ *backend.Collective, dst, _ backend.Buffer) (
				bool, error) {
				if dst.DType() == backend.F16 {
					return false, fmt.Errorf("%w: f16", backend.ErrUnsupported)
				}
				return false, nil
			}}},
		{"keeps something of every call", "NothingGrows", "heap grew", broken{
			after: func(c backend.Communicator, _ backend.Collective, _, _ backend.Buffer) {
				if c.Rank() == 0 {
					kept = append(kept, make([]byte, 4096))
				}
			}}},
		{"leaves a goroutine", "MemoryIsFreeOnceWorkIsDone", "left behind", broken{
			close: func(c backend.Communicator) error {
				go time.Sleep(3 * time.Second)
				return c.Close()
			}}},
		{"waits on a queue", "StartOnQueueReturnsAtOnce", "stuck", broken{
			after: func(backend.Communicator, backend.Collective, backend.Buffer,
				backend.Buffer) {
			}}},
		{"ignores keys", "SplitMakesGroups", "whose members are", broken{
			split: func(c backend.Communicator, color, _ int) (backend.Communicator, error) {
				return c.Split(color, 0)
			}}},
		{"gives parts for negative colors", "SplitMakesGroups", "split without the last rank",
			broken{
				split: func(c backend.Communicator, color, key int) (backend.Communicator, error) {
					return c.Split(max(color, 0), key)
				}}},
		{"ends with an argument error", "ArgumentErrorsLeaveItUsable", "after argument errors",
			broken{
				instead: func(c backend.Communicator, what *backend.Collective, dst,
					src backend.Buffer) (bool, error) {
					_, err := what.Check(c.Rank(), c.Size(), dst, src)
					if err != nil {
						c.Abort(err)
					}
					return false, err
				}}},
		{"does not tell the cause", "AbortWakesPeers", "the weather", broken{
			abort: func(c backend.Communicator, _ error) { c.Abort(errors.New("something")) }}},
		{"aborts late", "AbortWakesPeers", "after the end", broken{
			abort: func(c backend.Communicator, cause error) {
				if cause.Error() == "the weather" {
					time.Sleep(soon + 100*time.Millisecond)
				}
				c.Abort(cause)
			}}},
		{"closes in silence", "CloseEndsOwnCall", "stuck", broken{
			close: func(backend.Communicator) error { return nil }}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if testing.Short() && c.says == "stuck" {
				t.Skip("it takes seconds to see that nothing happens")
			}
			s := newSuite(
				Options{New: referenceGroup(func(r *reference.Communicator) backend.Communicator {
					b := c.broken
					b.Communicator = r
					return &b
				})})
			s.limit = 3 * time.Second
			require.Check(t, slices.Contains(wrapperScenarios, c.scenario),
				"RunWrapper leaves out %s", c.scenario)
			caught(t, s, c.scenario, c.says)
		})
	}
}

func TestWrapperScenariosAreOfTheSuite(t *testing.T) {
	if n := len(ofWrappers()); n != len(wrapperScenarios) {
		t.Errorf("the suite has %d of the %d scenarios for wrappers", n, len(wrapperScenarios))
	}
}

// caught checks that a scenario finds an error that says something.
func caught(t *testing.T, s *suite, name, says string) {
	t.Helper()
	i := slices.IndexFunc(scenarios, func(c scenario) bool { return c.name == name })
	err := s.try(scenarios[i], 3)
	require.Fails(t, name, err, says)
}

// unverified cannot compare calls.
type unverified struct{ backend.Communicator }

func (unverified) Capabilities() backend.Capabilities { return backend.Capabilities{} }

func TestMissingVerificationIsCaught(t *testing.T) {
	s := newSuite(Options{New: referenceGroup(func(r *reference.Communicator) backend.Communicator {
		r.Verify(false)
		return unverified{r}
	})})
	caught(t, s, "MismatchNamesBothSides", "want a MismatchError")
	caught(t, s, "MismatchOnAQueueEndsEveryRank", "ranks disagree")
}

func TestListedCallThatWorksIsCaught(t *testing.T) {
	s := newSuite(Options{New: referenceGroup(asIs), Unsupported: func(k backend.Kind,
		d backend.DType, op backend.ReduceOp) bool {
		return k == backend.Reduce && d == backend.U8 && op == backend.Prod
	}})
	caught(t, s, "ResultsEqualReference", "listed as unsupported")
}

func TestListedUnsupportedPasses(t *testing.T) {
	noHalf := func(_ backend.Kind, d backend.DType, _ backend.ReduceOp) bool {
		return d == backend.F16
	}
	s := newSuite(
		Options{Unsupported: noHalf,
			New: referenceGroup(func(r *reference.Communicator) backend.Communicator {
				return &broken{Communicator: r, instead: func(c backend.Communicator,
					what *backend.Collective, dst, src backend.Buffer) (bool, error) {
					if dst.DType() == backend.F16 || src.DType() == backend.F16 {
						return false, fmt.Errorf("%w: f16", backend.ErrUnsupported)
					}
					return false, nil
				}}
			})})
	for _, c := range scenarios[:7] {
		var skip errSkip
		err := s.try(c, 2)
		require.Check(t, err == nil || errors.As(err, &skip), "%s: %v", c.name, err)
	}
}

func TestStuckRankIsReportedWithStacks(t *testing.T) {
	comms, err := referenceGroup(asIs)(2, time.Minute)
	require.NoError(t, err)
	err = eachWithin(100*time.Millisecond, comms.Comms, func(c backend.Communicator) error {
		if c.Rank() == 0 {
			return nil
		}
		return backend.Barrier(c)
	})
	require.Fails(t, "eachWithin", err, "backend.Barrier")
}

func TestFailedRankEndsTheOthers(t *testing.T) {
	comms, err := referenceGroup(asIs)(3, time.Minute)
	require.NoError(t, err)
	cause := errors.New("a failed test")
	err = each(comms.Comms, func(c backend.Communicator) error {
		if c.Rank() == 2 {
			return cause
		}
		return backend.Barrier(c)
	})
	require.Check(t, errors.Is(err, cause) && strings.HasPrefix(err.Error(), "rank 2 of 3"),
		"the error is %v, want that of rank 2", err)
}
