package bench_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
)

// onRanks runs f as P ranks in this process and returns their errors.
func onRanks(P int, f func(backend.Communicator) error) error {
	return testranks.Join(testranks.Run(P, func(w *rendezvous.World) (backend.Communicator, error) {
		return host.Backend{}.Connect(context.Background(), w)
	}, f))
}

// measure returns the results of rank 0.
func measure(t *testing.T, P int, c bench.Config, wrap wrap) []bench.Result {
	t.Helper()
	var results []bench.Result
	require.NoError(t, onRanks(P, func(comm backend.Communicator) error {
		return bench.Measure(wrap(comm), c, func(r bench.Result) error {
			if comm.Rank() == 0 {
				results = append(results, r)
			}
			return nil
		})
	}))
	return results
}

func asIs(c backend.Communicator) backend.Communicator { return c }

// wrap makes the communicator that a rank measures.
type wrap func(backend.Communicator) backend.Communicator

// guarded wraps ranks in memory that the host cannot touch, as a GPU's is. At the
// end everything must have been freed.
func guarded(t *testing.T) wrap {
	return func(c backend.Communicator) backend.Communicator {
		return fakedevice.Over(c, newGuard(t))
	}
}

func newGuard(t *testing.T) *fakedevice.Device {
	d, err := fakedevice.New(host.Device{})
	if err != nil {
		panic(err) // ranks call this, and Fatal would let the others wait
	}
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

// queued is guarded on a device whose default queue does not stop the caller.
func queued(t *testing.T) wrap {
	return func(c backend.Communicator) backend.Communicator {
		d := newGuard(t)
		q, err := d.NewQueue()
		if err != nil {
			panic(err)
		}
		t.Cleanup(func() { require.NoError(t, q.Close()) })
		return later{fakedevice.Over(c, d), laterDevice{d, q}}
	}
}

type laterDevice struct {
	*fakedevice.Device
	queue backend.Queue
}

func (d laterDevice) Default() backend.Queue { return d.queue }

type later struct {
	*fakedevice.Communicator
	device laterDevice
}

func (l later) Device() backend.Device { return l.device }

func (l later) Start(q backend.Queue, c backend.Collective, dst, src backend.Buffer) (backend.Work,
	error) {
	if q == nil {
		q = l.device.queue
	}
	return l.Communicator.Start(q, c, dst, src)
}

func config(k backend.Kind) bench.Config {
	return bench.Config{
		Collective: backend.Collective{Kind: k}, DType: backend.F32,
		Min: 64, Max: 4096, Factor: 8, Iters: 3,
	}
}

func TestEveryCollectiveIsRight(t *testing.T) {
	for place, wrap := range map[string]wrap{"host": asIs, "device": guarded(t),
		"queue": queued(t)} {
		for _, k := range backend.Kinds() {
			for _, P := range []int{1, 2, 3} {
				for _, inPlace := range []bool{false, true} {
					c := config(k)
					c.InPlace, c.Alloc = inPlace, P == 2
					c.Collective.Root = P - 1
					if c.Check(P) != nil {
						continue
					}
					results := measure(t, P, c, wrap)
					require.Check(t, len(results) == 3, "%v on %d ranks: %d sizes, want 3", k, P,
						len(results))
					for _, r := range results {
						wrong := implausible(r, place != "host")
						require.Check(t, wrong == "", "%v on %d ranks, %s, in place %v: %s: %+v", k,
							P, place, inPlace, wrong, r)
					}
				}
			}
		}
	}
}

// implausible says what no result of three calls is.
func implausible(r bench.Result, device bool) string {
	switch {
	case r.Wrong != 0:
		return "wrong elements"
	case r.P50Micros <= 0 || r.P99Micros < r.P50Micros || r.MeanMicros <= 0 || r.AlgBW <= 0 ||
		r.Iters != 3:
		return "times"
	case device != (r.StreamMicros > 0) || device != (r.HostMicros > 0) ||
		r.HostMicros > r.StreamMicros:
		return "times of a batch"
	}
	per := r.MeanMicros
	if device {
		per = r.StreamMicros
	}
	if bw := float64(r.Bytes) / per / 1e3; r.AlgBW < bw*0.999 || r.AlgBW > bw*1.001 {
		return "bandwidth"
	}
	return ""
}

func TestBatchesFitTheTime(t *testing.T) {
	c := config(backend.AllReduce)
	c.Iters, c.Budget, c.Max = 0, 4*time.Millisecond, 64
	for _, r := range measure(t, 2, c, queued(t)) {
		require.Check(t,
			r.Iters >= bench.MinIters && r.Iters <= bench.MaxIters && r.StreamMicros > 0, "%+v", r)
	}
}

var errBroken = errors.New("broken")

func TestAwaitReturnsWhatJoinReturns(t *testing.T) {
	for _, want := range []error{nil, errBroken, fmt.Errorf("aborted: %w", context.Canceled)} {
		require.Equal(t, "Await", bench.Await(backend.Finished(want)), want)
	}
	soon := &looked{after: 5}
	if err := bench.Await(soon); err != errBroken || soon.looks != 5 {
		t.Errorf("error is %v after %d looks", err, soon.looks)
	}
}

// looked is done when it was looked at often enough.
type looked struct{ after, looks int }

func (l *looked) Done() bool {
	l.looks++
	return l.looks >= l.after
}

func (l *looked) Join(context.Context) error { return errBroken }

func TestOnDeviceAsksTheMemory(t *testing.T) {
	away, err := bench.OnDevice(host.Device{})
	require.Check(t, !away && err == nil, "host: %v, %v", away, err)
	d := newGuard(t)
	if away, err := bench.OnDevice(d); !away || err != nil {
		t.Errorf("device: %v, %v", away, err)
	}
}

func TestEveryTypeAndReductionIsRight(t *testing.T) {
	for _, d := range backend.DTypes() {
		for _, op := range backend.ReduceOps() {
			c := config(backend.AllReduce)
			c.Collective.Op, c.DType, c.Max = op, d, 512
			for _, P := range []int{3, 5} {
				for _, r := range measure(t, P, c, asIs) {
					require.Check(t, r.Wrong == 0, "%v of %v on %d ranks: %d wrong of %d bytes", op,
						d, P, r.Wrong, r.Bytes)
				}
			}
		}
	}
}

// liar changes the first byte of every result on its rank 1.
type liar struct{ backend.Communicator }

func (l liar) Start(q backend.Queue, c backend.Collective, dst, src backend.Buffer) (backend.Work,
	error) {
	w, err := l.Communicator.Start(q, c, dst, src)
	if err == nil && l.Rank() == 1 && dst.DType() == backend.F32 {
		dst.Bytes()[0] ^= 1
	}
	return w, err
}

// spoiler zeroes an element of every result of its rank 1, by a kernel.
type spoiler struct{ backend.Communicator }

func (s spoiler) Start(q backend.Queue, c backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	w, err := s.Communicator.Start(q, c, dst, src)
	if err == nil && s.Rank() == 1 && dst.DType() == backend.F32 {
		err = s.Device().Default().Zero(dst.Slice(3, 4))
	}
	return w, err
}

func TestWrongElementsOnADeviceAreCounted(t *testing.T) {
	wrap := guarded(t)
	for _, r := range measure(t, 2, config(backend.AllReduce),
		func(c backend.Communicator) backend.Communicator { return spoiler{wrap(c)} }) {
		require.Check(t, r.Wrong == 1, "%d wrong, want 1", r.Wrong)
	}
}

func TestWrongElementsAreCounted(t *testing.T) {
	for _, k := range []backend.Kind{backend.AllReduce, backend.AllToAll, backend.Scatter} {
		for _, r := range measure(t, 2, config(k),
			func(c backend.Communicator) backend.Communicator { return liar{c} }) {
			require.Check(t, r.Wrong == 1, "%v: %d wrong, want 1", k, r.Wrong)
		}
	}
}

// lazy moves nothing.
type lazy struct{ backend.Communicator }

func (l lazy) Start(q backend.Queue, c backend.Collective, dst, src backend.Buffer) (backend.Work,
	error) {
	if dst.DType() != backend.U8 {
		return l.Communicator.Start(q, c, dst, src)
	}
	return backend.Finished(nil), nil
}

func TestNoResultIsWrongEverywhere(t *testing.T) {
	c := config(backend.AllGather)
	c.DType = backend.U8
	for _, r := range measure(t, 3, c, func(c backend.Communicator) backend.Communicator {
		return lazy{c}
	}) {
		// 0xa5 is the right value of some elements.
		all := 3 * r.Bytes
		require.Check(t, r.Wrong >= all*9/10 && r.Wrong <= all, "%d wrong of %d", r.Wrong, all)
	}
}

func TestRankZeroChoosesHowManyCalls(t *testing.T) {
	c := config(backend.AllReduce)
	c.Iters, c.Budget = 0, time.Millisecond
	for _, r := range measure(t, 2, c, asIs) {
		require.Check(t, r.Iters >= bench.MinIters && r.Iters <= bench.MaxIters, "%d calls",
			r.Iters)
	}
}

func TestErrorsOfTheCommunicatorEndIt(t *testing.T) {
	cause := errors.New("enough")
	err := onRanks(2, func(comm backend.Communicator) error {
		if comm.Rank() == 1 {
			comm.Abort(cause)
			return nil
		}
		return bench.Measure(comm, config(backend.AllReduce), func(bench.Result) error {
			return nil
		})
	})
	require.Fails(t, "onRanks", err, "enough")
}

func TestBytesAreThoseOfNCCLTests(t *testing.T) {
	for _, test := range []struct {
		kind  backend.Kind
		bytes int
	}{
		{backend.AllReduce, 1000}, {backend.Broadcast, 1000}, {backend.Reduce, 1000},
		{backend.AllGather, 996}, {backend.ReduceScatter, 996}, {backend.AllToAll, 996},
		{backend.Gather, 996}, {backend.Scatter, 996},
	} {
		c := config(test.kind)
		c.Min, c.Max = 1000, 1000
		r := measure(t, 3, c, asIs)[0]
		require.Check(t, r.Bytes == test.bytes, "%v: %d bytes, want %d", test.kind, r.Bytes,
			test.bytes)
		require.Equal(t, fmt.Sprintf("%v: bus bandwidth", test.kind), r.BusBW,
			r.AlgBW*test.kind.BusFactor(3))
	}
}

func TestTinySizesAreRoundedUpOnce(t *testing.T) {
	c := config(backend.AllGather)
	c.Min, c.Max, c.Factor = 1, 32, 2
	var sizes []int
	for _, r := range measure(t, 2, c, asIs) {
		sizes = append(sizes, r.Bytes)
	}
	require.Check(t, len(sizes) == 3 && sizes[0] == 8 && sizes[2] == 32, "sizes %v, want 8, 16, 32",
		sizes)
}

func TestBadConfigsSayWhatIsWrong(t *testing.T) {
	for want, change := range map[string]func(*bench.Config){
		"unknown collective": func(c *bench.Config) { c.Collective.Kind = 99 },
		"unknown reduction":  func(c *bench.Config) { c.Collective.Op = 99 },
		"root 2 is out of range": func(c *bench.Config) {
			c.Collective.Kind, c.Collective.Root = backend.Reduce, 2
		},
		"even chunks":           func(c *bench.Config) { c.Collective.Splits = []int{1, 2} },
		"unknown dtype":         func(c *bench.Config) { c.DType = 0 },
		"at least 1":            func(c *bench.Config) { c.Min = 0 },
		"is below the smallest": func(c *bench.Config) { c.Max = 1 },
		"at least 2":            func(c *bench.Config) { c.Factor = 1 },
		"timed calls":           func(c *bench.Config) { c.Iters = -1 },
		"must be positive":      func(c *bench.Config) { c.Iters = 0 },
		"cannot be in place": func(c *bench.Config) {
			c.Collective.Kind, c.InPlace = backend.AllToAll, true
		},
	} {
		c := config(backend.AllReduce)
		change(&c)
		require.Fails(t, "Check", c.Check(2), want)
	}
}

func TestSizesReadAndPrint(t *testing.T) {
	for text, want := range map[string]bench.Size{"1": 1, "1000": 1000, "1k": 1 << 10,
		"64KiB": 64 << 10, "3MB": 3 << 20, "2G": 2 << 30} {
		var s bench.Size
		err := s.UnmarshalText([]byte(text))
		require.Check(t, err == nil && s == want, "%q reads as %d, %v; want %d", text, s, err, want)
		var again bench.Size
		err = again.UnmarshalText([]byte(s.String()))
		require.Check(t, err == nil && again == s, "%d prints as %v", s, s)
	}
	for _, text := range []string{"", "K", "-1", "1.5M", "1T", "99999999999G"} {
		var s bench.Size
		err := s.UnmarshalText([]byte(text))
		require.Check(t, err != nil, "%q reads as %d", text, s)
	}
}

func TestJSONLineHasTheAgreedKeys(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, measure(t, 2, config(backend.AllReduce), asIs)[0].WriteJSON(&out))
	require.Check(t, strings.Count(out.String(), "\n") == 1, "not one line: %q", out.String())
	var keys map[string]any
	require.NoError(t, json.Unmarshal(out.Bytes(), &keys))
	for _, key := range []string{"collective", "backend", "ranks", "dtype", "bytes", "p50_us",
		"p99_us", "algbw_gbps", "busbw_gbps", "wrong"} {
		_, ok := keys[key]
		require.Check(t, ok, "no key %q in %s", key, out.String())
	}
}

func TestTableColumnsLineUp(t *testing.T) {
	for _, device := range []bool{false, true} {
		wrap := wrap(asIs)
		if device {
			wrap = guarded(t)
		}
		var out bytes.Buffer
		require.NoError(t, bench.WriteTitles(&out, device))
		for _, k := range []backend.Kind{backend.AllReduce, backend.AllGather} {
			require.NoError(t, measure(t, 2, config(k), wrap)[0].WriteRow(&out))
		}
		lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
		for _, l := range lines {
			if len(l) != len(lines[0]) {
				t.Errorf("rows differ in length:\n%s", out.String())
				break
			}
		}
		require.Check(t, strings.Contains(lines[0], "stream") == device,
			"on a device: %v, but the titles are %s", device, lines[0])
	}
}
