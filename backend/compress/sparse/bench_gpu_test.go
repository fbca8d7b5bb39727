//go:build gpu

package sparse_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// BenchmarkGPUAllReduce compares ways to reduce the same f32 operand with NCCL, one
// after the other in one run: "of-dense" is the time as a share of the dense one. On
// emulated devices, only the small operands end soon.
func BenchmarkGPUAllReduce(b *testing.B) {
	for _, n := range []int{1 << 20, 1 << 25} {
		for _, P := range []int{2, 4} {
			b.Run(fmt.Sprintf("%dMi/P=%d", n>>20, P), func(b *testing.B) {
				dense := 0.0 // seconds
				for _, way := range ways {
					b.Run(way.name, func(b *testing.B) {
						t := onGPUs(b, n, P, way, false)
						if way.name == ways[0].name {
							dense = t // of the last run, which has the most calls
						}
						if dense > 0 {
							b.ReportMetric(t/dense, "of-dense")
						}
					})
				}
			})
		}
	}
}

// BenchmarkGPUStages reports what the time of a call is made of, by the device's clock on rank
// 0: selecting, the exchange of messages, which waits for the slowest rank, and adding up.
// Events are in the way a little. host-us is what it takes to start a call.
func BenchmarkGPUStages(b *testing.B) {
	for _, n := range []int{1 << 20, 1 << 25} {
		for _, P := range []int{2, 4} {
			b.Run(fmt.Sprintf("%dMi/P=%d", n>>20, P), func(b *testing.B) {
				for _, way := range ways {
					if strings.Contains(way.name, "=") {
						b.Run(way.name, func(b *testing.B) { onGPUs(b, n, P, way, true) })
					}
				}
			})
		}
	}
}

// stages times the parts of sparse calls that exchange messages over a communicator.
type stages struct {
	backend.Communicator
	timers [][stagesOfACall]*bench.Timer // of each call
	call   int
	host   time.Duration
}

// What a call is made of.
const (
	selecting = iota
	exchanging
	adding
	stagesOfACall
)

// on makes timers for so many calls on a queue.
func (s *stages) on(q backend.Queue, calls int) (err error) {
	s.timers, s.call, s.host = make([][stagesOfACall]*bench.Timer, calls), 0, 0
	for i := range s.timers {
		for j := range s.timers[i] {
			if s.timers[i][j], err = bench.NewTimer(q.(backend.TimedQueue)); err != nil {
				return err
			}
		}
	}
	return nil
}

// time times a call, which start starts.
func (s *stages) time(start func() error) error {
	if s.timers == nil {
		return start()
	}
	began, timers := time.Now(), s.timers[s.call]
	err := errors.Join(timers[selecting].Start(), start(), timers[adding].Stop())
	s.host += time.Since(began)
	s.call++
	return err
}

// Start implements [backend.Communicator].
func (s *stages) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	if s.timers == nil || what.Kind != backend.AllGather {
		return s.Communicator.Start(q, what, dst, src)
	}
	t := s.timers[s.call]
	if err := errors.Join(t[selecting].Stop(), t[exchanging].Start()); err != nil {
		return nil, err
	}
	w, err := s.Communicator.Start(q, what, dst, src)
	if err != nil {
		return nil, err
	}
	return w, errors.Join(w.Wait(q), t[exchanging].Stop(), t[adding].Start())
}

// report reports the mean times, and frees the timers.
func (s *stages) report(b *testing.B) error {
	var errs []error
	var sums [stagesOfACall]time.Duration
	for _, timers := range s.timers {
		for i, t := range timers {
			took, err := t.Elapsed()
			errs = append(errs, err, t.Close())
			sums[i] += took
		}
	}
	micros := func(d time.Duration) float64 {
		return float64(d.Nanoseconds()) / 1e3 / float64(len(s.timers))
	}
	if s.Rank() == 0 {
		for i, name := range []string{"select-us", "exchange-us", "add-us"} {
			b.ReportMetric(micros(sums[i]), name)
		}
		b.ReportMetric(micros(s.host), "host-us")
	}
	return errors.Join(errs...)
}

// way is one to reduce. With feedback, every second operand of a threshold is the
// first one with the other sign, so that its density stays what it is.
type way struct {
	name string
	wrap func(backend.Communicator) (backend.Communicator, error)
	sign float32
}

var ways = []way{
	{"dense", func(c backend.Communicator) (backend.Communicator, error) { return c, nil }, 0},
	{"bf16", half.Wrap(backend.BF16), 0},
	{"f16", half.Wrap(backend.F16), 0},
	{"topk=1%", sparse.Wrap(sparse.TopK(0.01)), 0},
	{"topk=1%bf16", sparse.Wrap(sparse.TopK(0.01), sparse.WithValues(backend.BF16)), 0},
	{"topk=5%", sparse.Wrap(sparse.TopK(0.05)), 0},
	{"topk=5%bf16", sparse.Wrap(sparse.TopK(0.05), sparse.WithValues(backend.BF16)), 0},
	{"threshold=1%", sparse.Wrap(sparse.Threshold(2.5758)), -1},
	{"threshold=5%", sparse.Wrap(sparse.Threshold(1.96)), -1},
	{"threshold=5%bf16", sparse.Wrap(sparse.Threshold(1.96), sparse.WithValues(backend.BF16)), -1},
}

// onGPUs returns the seconds of a call, and reports its stages if asked.
func onGPUs(b *testing.B, n, P int, way way, staged bool) float64 {
	errs := testranks.Run(P, testenv.GPUs.Connect(b, P), func(r *testenv.Rank) error {
		s := &stages{Communicator: r.Comm}
		comm := testranks.Must(way.wrap(s))
		r.Comm = comm
		if !staged {
			s = nil
		}
		return reduces(b, comm, n, way.sign, s)
	})
	require.NoError(b, testranks.Join(errs))
	return b.Elapsed().Seconds() / float64(b.N)
}

// Calls take turns in slots, as those of several buckets do: a threshold waits for the
// last one of its slot. After settled calls the room in messages is what it needs.
const (
	slots   = 4
	settled = 4 * slots
)

// reduces makes the calls of one rank. All ranks are measured together.
func reduces(b *testing.B, c backend.Communicator, n int, sign float32, s *stages) error {
	q, err := c.Device().NewQueue()
	if err != nil {
		return err
	}
	defer q.Close()
	y, err := c.Alloc(4 * n)
	if err != nil {
		return err
	}
	var xs [2]backend.Buffer
	for i := range xs {
		if xs[i], err = c.Device().Alloc(4 * n); err != nil {
			return err
		}
		defer c.Device().Free(xs[i])
		testranks.NoError(fill(q, xs[i].As(backend.F32), uint64(c.Rank()), i, sign))
	}
	calls := func(n int) error {
		var last backend.Work
		for i := range n {
			call := func() (err error) {
				what := backend.Collective{Kind: backend.AllReduce, Op: backend.Avg, State: 1 +
					i%slots}
				last, err = c.Start(q, what, y.As(backend.F32), xs[i/slots%2].As(backend.F32))
				return err
			}
			time := func(call func() error) error { return call() }
			if s != nil {
				time = s.time
			}
			if err := time(call); err != nil {
				return err
			}
		}
		return last.Join(b.Context())
	}
	testranks.NoError(errors.Join(calls(settled), backend.Barrier(c)))
	if s != nil {
		testranks.NoError(s.on(q, b.N))
	}
	if c.Rank() == 0 {
		b.ResetTimer()
	}
	err = errors.Join(calls(b.N), backend.Barrier(c))
	if c.Rank() == 0 {
		b.StopTimer()
		report(b, c)
	}
	if s != nil {
		err = errors.Join(err, s.report(b))
	}
	return err
}

// report says how much was sent, and how often it was dense.
func report(b *testing.B, c backend.Communicator) {
	s, ok := c.(*sparse.Communicator)
	if !ok {
		return
	}
	n := s.Counters()
	b.ReportMetric(float64(n.Bytes)/float64(n.DenseBytes), "of-bytes")
	b.ReportMetric(float64(n.Dense)/float64(n.Calls), "dense")
}

// fill uploads numbers of a normal distribution.
func fill(q backend.Queue, to backend.Buffer, rank uint64, i int, sign float32) error {
	seed, factor := uint64(i), float32(1)
	if i > 0 && sign != 0 {
		seed, factor = 0, sign
	}
	rng := rand.New(rand.NewPCG(rank, seed))
	x := make([]float32, to.Len())
	for j := range x {
		x[j] = factor * float32(rng.NormFloat64())
	}
	return q.Move(to, backend.Of(x))
}
