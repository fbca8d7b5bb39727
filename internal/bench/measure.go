package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/euryale-ml/euryale/backend"
)

const (
	// probes is the number of calls from which the time of a call is estimated.
	probes = 5
	// minBatch, maxBatch and batchTime bound the number of calls between two waits:
	// enough to make the wait negligible, and fewer than a device queues before the
	// host has to wait.
	minBatch  = 20
	maxBatch  = 400
	batchTime = 2 * time.Millisecond
	// wordsBytes is the room for numbers that the ranks exchange.
	wordsBytes = 64
)

// Measure runs the benchmark on this rank and calls each with the result of one
// size after the other, the same on every rank up to rounding: P50, P99 and
// Iters is taken from rank 0. It is collective. Fields of the Result that
// describe how the ranks were made are left to the caller.
//
// Errors: those of [Config.Check], of the communicator, and of each, which ends
// the benchmark.
func Measure(comm backend.Communicator, c Config, each func(Result) error) (err error) {
	if err := c.Check(comm.Size()); err != nil {
		return err
	}
	r := &run{comm: comm, cfg: c, memory: memory{device: comm.Device()},
		times: make([]time.Duration, MaxIters)}
	defer func() { err = errors.Join(err, r.free()) }()
	if err := r.prepare(); err != nil {
		return fmt.Errorf("bench: %w", err)
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
	memory   memory
	src, dst backend.Buffer   // memory for the largest size, U8
	words    backend.Buffer   // for numbers that the ranks exchange
	owned    []backend.Buffer // to be freed
	times    []time.Duration
}

// prepare makes the data and allocates all memory.
func (r *run) prepare() (err error) {
	c := r.cfg
	r.data = newData(c.Collective, c.DType, r.comm.Size())
	counts := c.counts(r.comm.Size())
	largest := counts[len(counts)-1] * c.DType.Size()
	if chunked(c.Collective.Kind) {
		largest *= r.comm.Size()
	}
	if r.src, err = r.alloc(largest); err != nil {
		return err
	}
	if !c.InPlace {
		if r.dst, err = r.alloc(largest); err != nil {
			return err
		}
	}
	if r.src.Device() {
		r.memory.staging = make([]byte, largest)
	}
	// Last, since it returns only after all ranks have called it. An allocation
	// synchronizes a GPU, which would deadlock with a rank of the same process that
	// already waits in a collective.
	if r.words, err = r.comm.Alloc(wordsBytes); err != nil {
		return fmt.Errorf("get memory that all ranks can reach: %w", err)
	}
	return nil
}

// alloc returns memory as the configuration wants it.
func (r *run) alloc(nbytes int) (backend.Buffer, error) {
	if !r.cfg.Alloc {
		return r.own(nbytes)
	}
	b, err := r.comm.Alloc(nbytes) // lives as long as the communicator
	if err != nil {
		return b, fmt.Errorf("get a buffer of %v that all ranks can reach: %w", Size(nbytes), err)
	}
	return b, nil
}

// own returns memory of the device, which free gives back.
func (r *run) own(nbytes int) (backend.Buffer, error) {
	b, err := r.comm.Device().Alloc(nbytes)
	if err != nil {
		return b, fmt.Errorf("get a buffer of %v: %w", Size(nbytes), err)
	}
	r.owned = append(r.owned, b)
	return b, nil
}

func (r *run) free() error {
	var errs []error
	for _, b := range r.owned {
		errs = append(errs, r.comm.Device().Free(b))
	}
	return errors.Join(errs...)
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
	if err := t.prepare(); err != nil {
		return Result{}, err
	}
	p, err := t.warmUp()
	if err != nil {
		return Result{}, err
	}
	if err := t.repeat(p.joined); err != nil {
		return Result{}, err
	}
	result := t.result(p.joined)
	result.StreamMicros, result.HostMicros, err = t.stream(p.batches, p.batch)
	if err != nil {
		return Result{}, err
	}
	slowest := []float64{result.MeanMicros, result.StreamMicros, result.HostMicros}
	if err := together(r, backend.Collective{Kind: backend.AllReduce, Op: backend.Max},
		slowest); err != nil {
		return Result{}, err
	}
	result.MeanMicros, result.StreamMicros, result.HostMicros = slowest[0], slowest[1], slowest[2]
	result.rate(r.comm.Size())
	result.Wrong, err = t.verify()
	return result, err
}

// prepare fills the buffers. In place, timed calls work on zeros: other values would
// grow without bound.
func (t trial) prepare() error {
	if t.cfg.InPlace {
		return t.memory.write(t.run.src, func(b []byte) { clear(b) })
	}
	if err := t.fill(); err != nil {
		return err
	}
	return t.memory.write(t.dst, poison)
}

// fill writes the operand of this rank.
func (t trial) fill() error {
	return t.memory.write(t.src, func(b []byte) { t.data.fill(b, t.comm.Rank()) })
}

// poison writes values that no call returns.
func poison(b []byte) {
	for i := range b {
		b[i] = 0xa5
	}
}

// plan is the number of timed calls.
type plan struct {
	joined         int // each done before the next is started
	batches, batch int // back to back; 0 where a call is done when Start returns
}

// warmUp runs the calls that are not timed. From their time rank 0 chooses the number of
// timed calls for all ranks.
func (t trial) warmUp() (plan, error) {
	if err := t.repeat(probes); err != nil {
		return plan{}, err
	}
	if err := t.repeat(probes); err != nil {
		return plan{}, err
	}
	slices.Sort(t.times[:probes])
	call, inBatch := quantile(t.times[:probes], 0.5), 0.0
	if t.memory.away() {
		var err error
		if inBatch, _, err = t.stream(2, minBatch); err != nil {
			return plan{}, err
		}
	}
	p := t.cfg.plan(call, time.Duration(inBatch*float64(time.Microsecond)))
	chosen := []int64{int64(p.joined), int64(p.batches), int64(p.batch)}
	if err := together(t.run, backend.Collective{Kind: backend.Broadcast}, chosen); err != nil {
		return plan{}, err
	}
	p = plan{int(chosen[0]), int(chosen[1]), int(chosen[2])}
	return p, t.repeat(max(1, p.joined/5))
}

// plan returns how many calls to time, given the time of one and, if calls can
// be in batches, that of one there; then each way has half of the time.
func (c Config) plan(call, inBatch time.Duration) plan {
	if inBatch <= 0 {
		return plan{joined: c.calls(call, c.Budget)}
	}
	calls := c.calls(inBatch, c.Budget/2)
	batch := min(max(int(batchTime/inBatch), minBatch), maxBatch, calls)
	return plan{joined: c.calls(call, c.Budget/2), batches: calls / batch, batch: batch}
}

// calls returns how many calls to time, given the time of one.
func (c Config) calls(call, budget time.Duration) int {
	if c.Iters > 0 {
		return c.Iters
	}
	return int(min(max(budget/max(call, 1), MinIters), MaxIters))
}

// repeat runs iters calls back to back, each joined before the next is started,
// and notes their times. It reads one clock a call, as programs in C do: time.Now reads two.
func (t trial) repeat(iters int) error {
	ctx := context.Background()
	began, before := time.Now(), time.Duration(0)
	for i := range t.times[:iters] {
		work, err := t.comm.Start(nil, t.cfg.Collective, t.dst, t.src)
		if err != nil {
			return err
		}
		if err := work.Join(ctx); err != nil {
			return err
		}
		now := time.Since(began)
		t.times[i] = now - before
		before = now
	}
	return nil
}

// stream starts batches of calls, and waits after each batch. It returns the
// time of a call and how much of it the host took to start it, in microseconds.
func (t trial) stream(batches, batch int) (call, start float64, err error) {
	var all, starts time.Duration
	for range batches {
		before := time.Now()
		var last backend.Work
		for range batch {
			if last, err = t.comm.Start(nil, t.cfg.Collective, t.dst, t.src); err != nil {
				return 0, 0, err
			}
		}
		starts += time.Since(before)
		if err := Await(last); err != nil {
			return 0, 0, err
		}
		all += time.Since(before)
	}
	n := float64(max(1, batches*batch))
	return micros(all) / n, micros(starts) / n, nil
}

func total(times []time.Duration) time.Duration {
	sum := time.Duration(0)
	for _, d := range times {
		sum += d
	}
	return sum
}

// verify counts the wrong elements of all ranks: of the last timed call, or of
// one more if the calls were in place.
func (t trial) verify() (int, error) {
	if t.cfg.InPlace {
		if err := t.once(); err != nil {
			return 0, err
		}
	}
	bad := []float64{0}
	err := t.memory.read(t.dst, func(b []byte) {
		if len(b) > 0 {
			bad[0] = float64(t.data.wrong(b, t.data.want(t.cfg.Collective, t.comm.Rank(), t.n)))
		}
	})
	if err != nil {
		return 0, err
	}
	err = together(t.run, backend.Collective{Kind: backend.AllReduce}, bad)
	return int(bad[0]), err
}

// once runs one call on the data.
func (t trial) once() error {
	if err := t.memory.write(t.run.src, poison); err != nil {
		return err
	}
	if err := t.fill(); err != nil {
		return err
	}
	return t.repeat(1)
}

// result returns the times that this rank has measured.
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
		Collective: c.Collective.Kind.String(), Backend: t.comm.Capabilities().Backend,
		Ranks: t.comm.Size(),
		DType: c.DType.String(), Bytes: n * c.DType.Size(),
		P50Micros: micros(quantile(times, 0.5)), P99Micros: micros(quantile(times, 0.99)),
		MeanMicros: mean,
		Algorithm:  c.Collective.Algorithm.String(), Alloc: c.Alloc, InPlace: c.InPlace,
		Iters: iters,
		kind:  c.Collective.Kind,
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
