package sparse

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/serial"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// kinds are the places of the tests: on the host, on guarded memory, on GPUs.
func kinds() []testenv.Kind { return append([]testenv.Kind{testenv.Hosts}, testenv.OnDevices()...) }

// everywhere is group, in every place.
func everywhere(t *testing.T, P int, wrap func(backend.Communicator) backend.Communicator,
	f func(c *Communicator) error) {
	t.Helper()
	testenv.Each(t, kinds(), func(t *testing.T, k testenv.Kind) { at(t, k, P, wrap, f) })
}

// at is group, in one place. What it leaves on the device is an error.
func at(t testing.TB, k testenv.Kind, P int, wrap func(backend.Communicator) backend.Communicator,
	f func(c *Communicator) error) {
	t.Helper()
	r := connected(t, k, P)
	err := r.All(func(r *testenv.Rank) error {
		before := inUse(r.Comm)
		c := wrap(lent{backend.Wrap(r.Comm)}).(*Communicator)
		err := testranks.Ended(func() error { return f(c) })
		if err != nil {
			r.World.Fail(err) // nobody waits for it
		}
		testranks.NoError(errors.Join(err, c.Close()))
		if after := inUse(r.Comm); after != before {
			return fmt.Errorf("%d bytes of the device are in use, %d before", after, before)
		}
		return nil
	})
	require.Report(t, err)
	if k.OnGPU() && err == nil && r.All(func(r *testenv.Rank) error {
		return backend.Barrier(r.Comm)
	}) == nil {
		return // for the next test
	}
	if k.OnGPU() {
		onGPUs = nil
	}
	require.Report(t, r.Close())
}

// onGPUs are the ranks of the last test on GPUs, as long as they are well: to connect them
// takes longer than a test.
var onGPUs *testranks.Group[*testenv.Rank]

func TestMain(m *testing.M) {
	code := m.Run()
	if onGPUs != nil {
		if err := onGPUs.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// connected returns P ranks: on GPUs those of the test before, if they are as many.
func connected(t testing.TB, k testenv.Kind, P int) *testranks.Group[*testenv.Rank] {
	t.Helper()
	connect := k.Connect(t, P)
	if k.OnGPU() && onGPUs != nil {
		if len(onGPUs.Ranks) == P {
			return onGPUs
		}
		require.NoError(t, onGPUs.Close())
		onGPUs = nil
	}
	r := require.Value(testranks.Connect(P, 0, connect))(t)
	if k.OnGPU() {
		onGPUs = r
	}
	return r
}

// inUse is how much memory of a communicator's device is, 0 where that is not counted: guarded
// memory finds out when it is closed.
func inUse(c backend.Communicator) int64 {
	if d, ok := c.Device().(interface{ MemoryStats() cuda.MemoryStats }); ok {
		return int64(d.MemoryStats().InUse)
	}
	return 0
}

// run is backend.Run for operands of the host, which are taken to where the
// communicator is, and back.
func run(c backend.Communicator, what backend.Collective, dst, src backend.Buffer) error {
	if c.Device().Name() == "host" {
		return backend.Run(c, what, dst, src)
	}
	y, x, free, err := pair(c, dst, src)
	if err != nil {
		return err
	}
	err = move(c, x, src)
	if err == nil {
		err = backend.Run(c, what, y, x)
	}
	return errors.Join(err, move(c, dst, y), free())
}

// pair returns memory of the device as long as two buffers, apart.
func pair(c backend.Communicator, dst, src backend.Buffer) (y, x backend.Buffer, free func() error,
	err error) {
	b, err := c.Device().Alloc(dst.NBytes() + src.NBytes())
	if err != nil {
		return y, x, nil, err
	}
	y, x = b.Slice(0, dst.NBytes()).As(dst.DType()), b.Slice(dst.NBytes(), b.Len()).As(src.DType())
	return y, x, func() error { return c.Device().Free(b) }, nil
}

// move copies, and waits for it.
func move(c backend.Communicator, dst, src backend.Buffer) error {
	q := c.Device().Default()
	if err := q.Move(dst, src); err != nil {
		return err
	}
	done, err := q.Record()
	if err != nil {
		return err
	}
	return done.Join(context.Background())
}

// kept returns the residual of state 3.
func kept(c *Communicator) []float32 {
	state, err := c.State()
	if err != nil {
		panic(err)
	}
	return backend.View[float32](state["sparse.residual.3"])
}

// gate is an event that happens when it is opened.
type gate chan struct{}

func (g gate) Done() bool { return serial.Event(g).Done() }

func (g gate) Join(ctx context.Context) error {
	select {
	case <-g:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Calls of a top-k are started one after the other while the queue stands still, and two of a
// threshold: the third one waits for the counts of the first.
func TestTheHostIsNotStopped(t *testing.T) {
	const n, calls = 5000, 20
	for _, test := range []struct {
		how   Selection
		ahead int // calls
		opts  []Option
	}{
		{TopK(0.01), calls, nil},
		{TopK(0.01), calls, []Option{WithStrict()}},
		{TopK(0.01), calls, []Option{WithValues(backend.F16), WithoutFeedback()}},
		{Threshold(0.2), 2, nil},
		{Threshold(0.2), 2, []Option{WithStrict()}},
	} {
		var want [calls][]float32
		at(t, testenv.Hosts, 2, wrap(always, test.how, test.opts...), func(c *Communicator) error {
			for i := range want {
				y := testranks.Must(sum(c, backend.Avg, bursts(n, c.Rank(), i)))
				if c.Rank() == 0 {
					want[i] = y
				}
			}
			return nil
		})
		at(t, testenv.Devices, 2, wrap(always, test.how, test.opts...),
			func(c *Communicator) error {
				q := testranks.Must(c.Device().NewQueue())
				defer q.Close()
				memory := testranks.Must(c.Device().Alloc(2 * calls * 4 * n))
				all := memory.As(backend.F32)
				y, x := all.Slice(0, calls*n), all.Slice(calls*n, 2*calls*n)
				for i := range calls {
					testranks.NoError(move(c, x.Slice(i*n, (i+1)*n),
						backend.Of(bursts(n, c.Rank(), i))))
				}
				var last backend.Work
				i := 0
				start := func() (err error) {
					last, err = c.Start(q, reduction(backend.Avg), y.Slice(i*n, (i+1)*n),
						x.Slice(i*n, (i+1)*n))
					i++
					return err
				}
				for i < calls {
					closed := make(gate)
					testranks.NoError(q.Wait(closed))
					for range min(test.ahead, calls-i) {
						testranks.NoError(start())
					}
					if last.(*call).done.Done() {
						return errors.New("the queue went on")
					}
					time.AfterFunc(10*time.Millisecond, func() { close(closed) })
					if i < calls {
						testranks.NoError(start())
					}
					testranks.NoError(errors.Join(last.Join(context.Background()),
						backend.Barrier(c)))
				}
				got := make([]float32, calls*n)
				testranks.NoError(move(c, backend.Of(got), y))
				for i := range calls {
					if err := same(got[i*n:(i+1)*n], want[i]); err != nil {
						return fmt.Errorf("call %d: %w", i, err)
					}
				}
				if e := c.Counters(); e.Entries < calls*n/100/2 {
					return fmt.Errorf("the counters are %+v", e)
				}
				return c.Device().Free(memory)
			})
	}
}

// The same calls give bitwise identical results wherever they are made, also what stays. What is
// reduced densely is added by inner, on GPUs in its own order: there, only sums that
// are exact are compared.
func TestDevicesGiveTheBitsOfTheHostUnraced(t *testing.T) {
	const n, steps, P = 9000, 6, 3
	for _, test := range []struct {
		how     Selection
		op      backend.ReduceOp
		operand func(n, rank, step int) []float32
		ordered bool // inner has to add in rank order
	}{
		{Threshold(0.15), backend.Avg, normals, false},
		{TopK(0.02), backend.Avg, normals, false},
		{TopK(0.8), backend.Avg, normals, true},
		{TopK(0.8), backend.Sum, multiples, false},
	} {
		how := test.how
		for _, values := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
			var want [P][steps][]float32
			compare := func(t *testing.T, k testenv.Kind) {
				at(t, k, P, wrap(asIs, how, WithValues(values)), func(c *Communicator) error {
					for step := range steps {
						y := testranks.Must(sum(c, test.op, test.operand(n, c.Rank(), step)))
						y = append(y, kept(c)...)
						if k == testenv.Hosts {
							want[c.Rank()][step] = y
						} else if err := same(y, want[c.Rank()][step]); err != nil {
							return fmt.Errorf("%v as %v, step %d: %w", how, values, step, err)
						}
					}
					return nil
				})
			}
			compare(t, testenv.Hosts)
			list := testenv.OnDevices()
			if test.ordered {
				list = slices.DeleteFunc(list, testenv.Kind.OnGPU)
			}
			testenv.Each(t, list, compare)
		}
	}
}

// multiples is normals, as multiples of 1/256: sums of thousands of them are exact.
func multiples(n, rank, step int) []float32 {
	x := normals(n, rank, step)
	for i := range x {
		x[i] = float32(math.Round(float64(x[i])*256) / 256)
	}
	return x
}

// A residual stays where it is, and a checkpoint of the host resumes on a
// device.
func TestAStateMovesToADevice(t *testing.T) {
	const n = 1000
	var state [2]map[string]backend.Buffer
	var want [2][]float32
	for _, k := range []testenv.Kind{testenv.Hosts, testenv.Devices} {
		at(t, k, 2, wrap(asIs, TopK(0.01)), func(c *Communicator) error {
			if k == testenv.Hosts {
				if _, err := sum(c, backend.Sum, normals(n, c.Rank(), 0)); err != nil {
					return err
				}
				state[c.Rank()], _ = c.State()
			} else if err := c.SetState(state[c.Rank()]); err != nil {
				return err
			}
			y, err := sum(c, backend.Sum, normals(n, c.Rank(), 1))
			if k == testenv.Hosts {
				want[c.Rank()] = y
				return err
			}
			testranks.NoError(errors.Join(err, same(y, want[c.Rank()])))
			x := make([]float32, n)
			if _, err := c.Start(nil, reduction(backend.Sum), backend.Of(x),
				backend.Of(x)); !errors.Is(err, backend.ErrArgument) {
				return fmt.Errorf("an operand of the host, with a state of the device: %v", err)
			}
			return nil
		})
	}
}

// lent is a communicator that a wrapper does not own.
type lent struct{ backend.Base }

// Close does nothing: the owner closes it.
func (lent) Close() error { return nil }

// The host reads sizes in the middle of a sparse call, which a graph cannot do; others pass.
func TestSparseCallsAreNotRecorded(t *testing.T) {
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		at(t, k, 2, wrap(asIs, TopK(0.1)), func(c *Communicator) error {
			memory := testranks.Must(c.Device().Alloc(400))
			x, q := memory.As(backend.F32), c.Device().Default().(backend.GraphQueue)
			what := backend.Collective{Kind: backend.AllReduce, State: 1}
			graph := testranks.Must(q.Capture(func() error {
				if _, err := c.Start(q, what, x, x); !errors.Is(err, backend.ErrUnsupported) {
					return fmt.Errorf("the error is %w", err)
				}
				what.Exact = true
				_, err := c.Start(q, what, x, x)
				return err
			}))
			return errors.Join(graph.Close(), c.Device().Free(memory))
		})
	})
}
