package bench

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

// probes is how many calls tell how long one takes.
const probes = 5

// Measure runs the benchmark on this rank and calls each with the result of one
// size after the other, the same on every rank up to rounding: P50, P99 and
// Iters are those of rank 0. It is collective. Fields of the Result that
// describe how the ranks were made are left to the caller.
//
// Errors: those of [Config.Check], of the communicator, and of each, which ends
// the benchmark.
func Measure(comm backend.Communicator, c Config, each func(Result) error) error {
	if err := c.Check(comm.Size()); err != nil {
		return err
	}
	r, err := newRun(comm, c)
	if err != nil {
		return err
	}
	for _, n := range c.counts(comm.Size()) {
		result, err := r.measure(n)
		if err != nil {
			return fmt.Errorf("bench: %v of %d elements: %w", c.Collective, n, err)
		}
		if err := each(result); err != nil {
			return err
		}
	}
	return nil
}

// run is a benchmark on one rank.
type run struct {
	comm     backend.Communicator
	cfg      Config
	data     data
	src, dst backend.Buffer // memory for the largest size, U8
	times    []time.Duration
}

func newRun(comm backend.Communicator, c Config) (*run, error) {
	r := &run{comm: comm, cfg: c, times: make([]time.Duration, MaxIters)}
	var err error
	if r.data, err = newData(comm.Device().Default().Kernels(), c.Collective, c.DType, comm.Size()); err != nil {
		return nil, fmt.Errorf("bench: make %v data: %w", c.DType, err)
	}
	counts := c.counts(comm.Size())
	largest := counts[len(counts)-1] * c.DType.Size()
	if chunked(c.Collective.Kind) {
		largest *= comm.Size()
	}
	if r.src, err = r.alloc(largest); err != nil {
		return nil, err
	}
	if !c.InPlace {
		r.dst, err = r.alloc(largest)
	}
	return r, err
}

func (r *run) alloc(nbytes int) (backend.Buffer, error) {
	get := r.comm.Device().Alloc
	if r.cfg.Alloc {
		get = r.comm.Alloc
	}
	b, err := get(nbytes)
	if err != nil {
		return b, fmt.Errorf("bench: get a buffer of %v: %w", Size(nbytes), err)
	}
	if b.Device() {
		return b, fmt.Errorf("bench: the buffers are on %s: only host memory can be measured so far", r.comm.Device().Name())
	}
	return b, nil
}

// trial is one size of a run.
type trial struct {
	*run
	n        int // the count of the call
	src, dst backend.Buffer
}

// size returns the buffers of this rank for a call of n elements.
func (r *run) size(n int) trial {
	rank, P := r.comm.Rank(), r.comm.Size()
	srcLen, dstLen := lengths(r.cfg.Collective, rank, P, n)
	src, dst := r.src.As(r.cfg.DType), r.dst.As(r.cfg.DType)
	if r.cfg.InPlace {
		dst = src
		// The smaller buffer is this rank's chunk of the larger one.
		if chunked(r.cfg.Collective.Kind) && srcLen > 0 && dstLen > 0 {
			smaller := &src
			if dstLen < srcLen {
				smaller = &dst
			}
			*smaller = smaller.Slice(rank*n, (rank+1)*n)
		}
	}
	return trial{r, n, passed(src, srcLen), passed(dst, dstLen)}
}

// passed returns the first n elements of b, or no buffer.
func passed(b backend.Buffer, n int) backend.Buffer {
	if n == 0 {
		return backend.Buffer{}
	}
	return b.Slice(0, n)
}

func (r *run) measure(n int) (Result, error) {
	t := r.size(n)
	t.prepare()
	iters, err := t.warmUp()
	if err != nil {
		return Result{}, err
	}
	if err := t.repeat(iters); err != nil {
		return Result{}, err
	}
	result := t.result(iters)
	if err := t.agree(backend.Max, &result.MeanMicros); err != nil {
		return Result{}, err
	}
	result.rate(r.comm.Size())
	result.Wrong, err = t.verify()
	return result, err
}

// prepare fills the buffers. What is in place is all zeros while it is timed:
// they stay zeros, where other values would grow without bound.
func (t trial) prepare() {
	if t.cfg.InPlace {
		clear(t.run.src.Bytes())
		return
	}
	t.data.fill(t.src.Bytes(), t.comm.Rank())
	poison(t.dst.Bytes())
}

// poison writes what is no result of any call.
func poison(b []byte) {
	for i := range b {
		b[i] = 0xa5
	}
}

// warmUp runs the calls that are not timed and agrees on how many are.
func (t trial) warmUp() (iters int, err error) {
	if err := t.repeat(probes); err != nil {
		return 0, err
	}
	if err := t.repeat(probes); err != nil {
		return 0, err
	}
	slices.Sort(t.times[:probes])
	chosen := []int64{int64(t.cfg.itersFor(quantile(t.times[:probes], 0.5)))}
	if err := backend.Run(t.comm, backend.Collective{Kind: backend.Broadcast}, backend.Of(chosen), backend.Of(chosen)); err != nil {
		return 0, err
	}
	iters = int(chosen[0])
	return iters, t.repeat(max(1, iters/5))
}

// itersFor returns how many calls to time, given the time of one.
func (c Config) itersFor(call time.Duration) int {
	if c.Iters > 0 {
		return c.Iters
	}
	return int(min(max(c.Budget/max(call, 1), MinIters), MaxIters))
}

// repeat runs iters calls back to back and notes their times.
func (t trial) repeat(iters int) error {
	ctx := context.Background()
	before := time.Now()
	for i := range t.times[:iters] {
		work, err := t.comm.Start(nil, t.cfg.Collective, t.dst, t.src)
		if err != nil {
			return err
		}
		if err := work.Join(ctx); err != nil {
			return err
		}
		now := time.Now()
		t.times[i] = now.Sub(before)
		before = now
	}
	return nil
}

func total(times []time.Duration) time.Duration {
	sum := time.Duration(0)
	for _, d := range times {
		sum += d
	}
	return sum
}

// agree puts the reduction of every rank's value in its place.
func (t trial) agree(op backend.ReduceOp, value *float64) error {
	b := backend.Of([]float64{*value})
	err := backend.Run(t.comm, backend.Collective{Kind: backend.AllReduce, Op: op}, b, b)
	*value = backend.View[float64](b)[0]
	return err
}

// verify counts the wrong elements of all ranks: of the last timed call, or of
// one more if the calls were in place.
func (t trial) verify() (int, error) {
	if t.cfg.InPlace {
		poison(t.run.src.Bytes())
		t.data.fill(t.src.Bytes(), t.comm.Rank())
		if err := t.repeat(1); err != nil {
			return 0, err
		}
	}
	bad := 0.0
	if t.dst.Len() > 0 {
		bad = float64(t.data.wrong(t.dst.Bytes(), t.data.want(t.cfg.Collective, t.comm.Rank(), t.n)))
	}
	err := t.agree(backend.Sum, &bad)
	return int(bad), err
}

// result returns what this rank has measured.
func (t trial) result(iters int) Result {
	c := t.cfg
	times := t.times[:iters]
	mean := micros(total(times)) / float64(iters)
	slices.Sort(times)
	n := t.n
	if chunked(c.Collective.Kind) {
		n *= t.comm.Size()
	}
	r := Result{
		Collective: c.Collective.Kind.String(), Backend: backend.NameOf(t.comm), Ranks: t.comm.Size(),
		DType: c.DType.String(), Bytes: n * c.DType.Size(),
		P50Micros: micros(quantile(times, 0.5)), P99Micros: micros(quantile(times, 0.99)), MeanMicros: mean,
		Algorithm: c.Collective.Algorithm.String(), Alloc: c.Alloc, InPlace: c.InPlace, Iters: iters,
		kind: c.Collective.Kind,
	}
	if c.Collective.Kind.Reduces() {
		r.Op = c.Collective.Op.String()
	}
	return r
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// quantile returns the value at q of sorted times by the nearest-rank rule.
func quantile(sorted []time.Duration, q float64) time.Duration {
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}
