package hierarchy

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/observe"
	"github.com/euryale-ml/euryale/rendezvous"
)

// patient is the timeout of groups that are not tested for theirs.
const patient = 30 * time.Second

// full says to run every case, and not a sample.
func full() bool { return os.Getenv("EURYALE_FULL") == "1" }

// times returns n in a full run, and some otherwise.
func times(n, some int) int {
	if full() {
		return n
	}
	return some
}

// ranks runs f on every rank of a fresh group.
func ranks(t *testing.T, l Layout, o Options, f func(c *Communicator) error) {
	t.Helper()
	ranksOver(t, l, o, nil, f)
}

func ranksOver(t *testing.T, l Layout, o Options,
	wrap func(backend.Communicator) backend.Communicator, f func(c *Communicator) error) {
	t.Helper()
	g := require.Value(layeredGroup(l, patient, o, wrap))(t)
	defer closeGroup(t, g)
	backendtest.Each(t, g.Comms, func(c backend.Communicator) error { return f(c.(*Communicator)) })
}

// connected returns a group that is closed with the test.
func connected(t *testing.T, l Layout, timeout time.Duration, o Options,
	wrap func(backend.Communicator) backend.Communicator) *backendtest.Group {
	t.Helper()
	g := require.Value(layeredGroup(l, timeout, o, wrap))(t)
	t.Cleanup(func() { closeGroup(t, g) })
	return g
}

func closeGroup(t *testing.T, g *backendtest.Group) {
	t.Helper()
	backendtest.Each(t, g.Comms, backend.Communicator.Close)
	require.NoError(t, g.Close())
}

// integers returns n small integers of a dtype, which depend on the seed and the
// rank. Products of a few of them are exact, too.
func integers(d backend.DType, n int, seed, rank uint64) []byte {
	rng := rand.New(rand.NewPCG(seed, rank))
	values := make([]float32, n)
	for i := range values {
		values[i] = []float32{-2, -1, 1, 2}[rng.IntN(4)]
	}
	out := make([]byte, n*d.Size())
	switch d {
	case backend.F32:
		return slices.Clone(backend.Of(values).Bytes())
	case backend.F16, backend.BF16, backend.F64:
		if err := (kernels.Host{}).Cast(bufferOf(d, out), backend.Of(values)); err != nil {
			panic(err)
		}
	default:
		for i, v := range values {
			var word [8]byte
			binary.LittleEndian.PutUint64(word[:], uint64(int64(v)))
			copy(out[i*d.Size():(i+1)*d.Size()], word[:])
		}
	}
	return out
}

// bufferOf returns bytes as elements of a dtype.
func bufferOf(d backend.DType, b []byte) backend.Buffer { return backend.Of(b).As(d) }

// lengths returns the elements of source and destination, given those of a chunk,
// or of an all-reduce.
func lengths(what backend.Collective, size, count int) (src, dst int) {
	switch what.Kind {
	case backend.ReduceScatter:
		return size * count, count
	case backend.AllGather:
		return count, size * count
	case backend.AllToAll:
		return size * count, size * count
	}
	return count, count
}

// equalsFlat runs a collective hierarchically and flat, and compares every bit of
// the results, and the source with what it was.
func equalsFlat(c *Communicator, what backend.Collective, d backend.DType, count int,
	seed uint64) error {
	nsrc, ndst := lengths(what, c.Size(), count)
	src := integers(d, nsrc, seed, uint64(c.Rank()))
	before := slices.Clone(src)
	got, want := bytes.Repeat([]byte{0xAB}, ndst*d.Size()), make([]byte, ndst*d.Size())
	calls := c.Stats().Calls
	if err := backend.Run(c, what, bufferOf(d, got), bufferOf(d, src)); err != nil {
		return err
	}
	possible := c.plan.Choose(what, d, max(nsrc, ndst)).Hierarchical
	if possible != (c.Stats().Calls == calls+1) {
		return fmt.Errorf("%v of %d %v: hierarchical is %v, want %v", what, count, d, !possible,
			possible)
	}
	if !bytes.Equal(src, before) {
		return fmt.Errorf("%v of %d %v: the source has changed", what, count, d)
	}
	if err := backend.Run(c.Communicator, what, bufferOf(d, want),
		bufferOf(d, before)); err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("%v of %d %v: not the result of the flat call", what, count, d)
	}
	return nil
}

// shapes are the machines and devices of check 15.
var shapes = [][2]int{{1, 4}, {2, 2}, {4, 1}, {2, 4}, {4, 2}, {3, 2}, {2, 3}}

// layouts returns both orders of a grid, and a shuffled one.
func layouts(M, D int) map[string]Layout {
	return map[string]Layout{
		"major": Grid(M, D), "minor": gridOf(M, D, machineMinor), "shuffled": shuffled(
			M, D),
	}
}

func TestEveryLayoutGivesTheFlatResultUnraced(t *testing.T) {
	for _, shape := range shapes {
		for name, l := range layouts(shape[0], shape[1]) {
			t.Run(fmt.Sprintf("%dx%d %s", shape[0], shape[1], name), func(t *testing.T) {
				ranks(t, l, Options{Mode: Always, SliceBytes: 4 << 10, Slots: 2},
					func(c *Communicator) error {
						W := c.Size()
						for i, count := range []int{1, 5, 1024} {
							for _, what := range []backend.Collective{reduceScatter, allGather,
								allToAll, {Kind: backend.ReduceScatter, Op: backend.Avg}} {
								testranks.NoError(equalsFlat(c, what, backend.I32, count,
									uint64(i)))
							}
						}
						for i, n := range []int{0, 1, W - 1, W, W + 1, 5*W - 1, 1024, 4099} {
							testranks.NoError(equalsFlat(c, allReduce, backend.F32, n,
								uint64(i)))
						}
						testranks.NoError(broadcasts(c))
						return inPlace(c)
					})
			})
		}
	}
}

// broadcasts compares broadcasts of every root with flat ones, also in place.
func broadcasts(c *Communicator) error {
	for root := range c.Size() {
		what := backend.Collective{Kind: backend.Broadcast, Root: root}
		for i, n := range []int{1, c.Size() - 1, c.Size(), 1024, 4099} {
			testranks.NoError(equalsFlat(c, what, backend.F32, n, uint64(i)))
		}
		x, want := integers(backend.U8, 5000, 1, uint64(c.Rank())), integers(backend.U8, 5000, 1,
			uint64(root))
		b := bufferOf(backend.U8, x)
		if err := backend.Run(c, what, b, b); err != nil || !bytes.Equal(x, want) {
			return fmt.Errorf("%v in place: not root's operand: %w", what, err)
		}
	}
	return nil
}

// unequal are machines with different numbers of ranks.
var unequal = map[string]Layout{
	"2+1": layoutOf([][]int{{0, 2}, {1}}), "1+2": layoutOf([][]int{{0}, {1, 2}}),
	"3+2": layoutOf([][]int{{0, 1, 2}, {3, 4}}), "2+4+3": layoutOf(
		[][]int{{0, 5}, {1, 8, 2, 7}, {3, 6, 4}}),
}

// Ranks without a rail give what they have to those that are on one.
func TestUnequalMachinesGiveTheFlatResultUnraced(t *testing.T) {
	for name, l := range unequal {
		for how, o := range map[string]Options{
			"exact": {Mode: Always, SliceBytes: 4 << 10, Slots: 2}, "in 16 bits": {Mode: Always,
				SliceBytes: 4 << 10, Slots: 2, Exchange: backend.BF16},
		} {
			t.Run(name+" "+how, func(t *testing.T) {
				ranks(t, l, o, func(c *Communicator) error {
					for i, n := range []int{0, 1, c.Size() - 1, c.Size(), 1024, 4099} {
						for _, what := range []backend.Collective{allReduce,
							{Kind: backend.AllReduce, Op: backend.Max}} {
							testranks.NoError(equalsFlat(c, what, backend.F32, n, uint64(i)))
						}
						// flat
						testranks.NoError(equalsFlat(c, reduceScatter, backend.I32, n,
							uint64(i)))
					}
					x := []float32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
					for i := range x {
						x[i] += float32(c.Rank())
					}
					average := backend.Collective{Kind: backend.AllReduce, Op: backend.Avg}
					testranks.NoError(backend.Run(c, average, backend.Of(x), backend.Of(x)))
					for i := range x {
						if want := float32(i) + float32(c.Size()-1)/2; math.Abs(
							float64(x[i]-want)) > 0.05 {
							return fmt.Errorf("the average in place is %v", x)
						}
					}
					return broadcasts(c)
				})
			})
		}
	}
}

// inPlace compares calls in place with flat ones.
func inPlace(c *Communicator) error {
	const n = 1000
	W, r := c.Size(), c.Rank()
	for _, what := range []backend.Collective{allReduce, reduceScatter, allGather} {
		x, y := integers(backend.I64, n*W, 1, uint64(r)), integers(backend.I64, n*W, 1, uint64(r))
		lo, hi := 0, n*W // what the result is
		if what.Kind == backend.ReduceScatter {
			lo, hi = r*n, (r+1)*n
		}
		run := func(comm backend.Communicator, memory []byte) error {
			b := bufferOf(backend.I64, memory)
			dst, src := b.Slice(lo, hi), b
			if what.Kind == backend.AllGather {
				src = b.Slice(r*n, (r+1)*n)
			}
			return backend.Run(comm, what, dst, src)
		}
		testranks.NoError(errors.Join(run(c, x), run(c.Communicator, y)))
		if !bytes.Equal(x[8*lo:8*hi], y[8*lo:8*hi]) {
			return fmt.Errorf("%v in place: not the result of the flat call", what)
		}
	}
	return nil
}

func TestAnyCaseGivesTheFlatResultUnraced(t *testing.T) {
	rng := rand.New(rand.NewPCG(15, 6))
	for range times(100, 8) {
		M, D := 1+rng.IntN(4), 1+rng.IntN(3)
		l := []Layout{Grid(M, D), gridOf(M, D, machineMinor),
			shuffled(M, D)}[rng.IntN(3)]
		o := Options{Mode: Always, SliceBytes: 1 << (4 + rng.IntN(10)), Slots: 1 + rng.IntN(4)}
		seed := rng.Uint64()
		ranks(t, l, o, func(c *Communicator) error {
			rng := rand.New(rand.NewPCG(seed, 0)) // the same on every rank
			for i := range 10 {
				what := []backend.Collective{allReduce, allReduce, reduceScatter, allGather,
					allToAll, broadcast}[rng.IntN(6)]
				what.Op = backend.ReduceOps()[rng.IntN(5)]
				d := backend.DTypes()[rng.IntN(7)]
				if err := equalsFlat(c, what, d, rng.IntN(2000), seed+uint64(i)); err != nil {
					return fmt.Errorf("%v with %+v: %w", l, o, err)
				}
			}
			return nil
		})
	}
}

// flight is how many calls a rank starts before it joins the first.
const flight = 12

// Calls of every kind follow each other with delays in every phase, and are joined long
// after: on one queue, and on several that they go round.
func TestBackToBackCallsWithDelaysAreExact(t *testing.T) {
	calls := times(10000, 1000)
	for _, queues := range []int{1, 3} {
		t.Run(fmt.Sprintf("%d queues", queues), func(t *testing.T) {
			var delays atomic.Uint64
			var most atomic.Int64
			hook := func(p *probe, q backend.Queue) (backend.Work, error) {
				rng := rand.New(rand.NewPCG(delays.Add(1), uint64(p.rank)))
				if rng.IntN(16) > 0 {
					return nil, nil
				}
				return nil, q.Wait(delay(time.Duration(rng.IntN(200)) * time.Microsecond))
			}
			l := shuffled(2, 2)
			ranksOver(t, l, Options{Mode: Always, SliceBytes: 512, Slots: 2}, probes(l, hook),
				func(c *Communicator) error {
					n, err := backToBack(c, calls, queues)
					for old := most.Load(); n > old &&
						!most.CompareAndSwap(old, n); old = most.Load() {
					}
					return err
				})
			n := most.Load()
			require.Check(t, n > flight/2, "at most %d calls were in flight, of %d", n, flight)
		})
	}
}

// backToBack keeps calls in flight, round robin on some queues, and returns how many they
// were at most.
func backToBack(c *Communicator, calls, queues int) (most int64, err error) {
	var qs []backend.Queue
	for range queues {
		q, err := c.Device().NewQueue()
		if err != nil {
			return 0, err
		}
		defer q.Close()
		qs = append(qs, q)
	}
	rng := rand.New(rand.NewPCG(3, uint64(c.Rank())))
	under := make([]*numbered, flight)
	for n := range calls + flight {
		if k := under[n%flight]; k != nil {
			if err := k.check(c); err != nil {
				return most, fmt.Errorf("call %d: %w", n-flight, err)
			}
			under[n%flight] = nil
		}
		if n >= calls {
			continue
		}
		if rng.IntN(16) == 0 {
			time.Sleep(time.Duration(rng.IntN(200)) * time.Microsecond)
		}
		k, err := startNumbered(c, qs[n%queues], n)
		if err != nil {
			return most, err
		}
		under[n%flight] = k
		pending := int64(0)
		for _, k := range under {
			if k != nil && !k.work.Done() {
				pending++
			}
		}
		most = max(most, pending)
	}
	return most, nil
}

// numbered is a call whose operands follow from its number.
type numbered struct {
	number int
	what   backend.Collective
	dst    []int64
	work   backend.Work
}

// startNumbered starts a call of the kind whose turn it is; some are too small to be
// hierarchical. Element i of what rank r gives is number*(r+1) + i.
func startNumbered(c *Communicator, q backend.Queue, number int) (*numbered, error) {
	k := &numbered{number: number, what: []backend.Collective{allReduce, reduceScatter, allGather,
		allReduce, allReduce}[number%5]}
	count := 67
	switch {
	case number%35 == 0:
		count = 3
	case k.what.Kind == backend.AllReduce:
		count = 259
	}
	nsrc, ndst := lengths(k.what, c.Size(), count)
	x := make([]int64, nsrc)
	for i := range x {
		x[i] = int64(number*(c.Rank()+1) + i)
	}
	k.dst = make([]int64, ndst)
	var err error
	k.work, err = c.Start(q, k.what, backend.Of(k.dst), backend.Of(x))
	return k, err
}

// check joins the call and compares its result among four ranks.
func (k *numbered) check(c *Communicator) error {
	if err := k.work.Join(context.Background()); err != nil {
		return err
	}
	for i, got := range k.dst {
		want := k.number*(1+2+3+4) + 4*i
		switch k.what.Kind {
		case backend.ReduceScatter:
			want += 4 * c.Rank() * len(k.dst)
		case backend.AllGather:
			chunk := len(k.dst) / c.Size()
			want = k.number*(i/chunk+1) + i%chunk
		}
		if got != int64(want) {
			return fmt.Errorf("%v: element %d is %d, want %d", k.what, i, got, want)
		}
	}
	return nil
}

// The doc says the order of additions: devices inside a machine, then
// machines.
func TestFloatsAreAddedInTheDocumentedOrder(t *testing.T) {
	const n = 600
	for name, l := range layouts(3, 2) {
		t.Run(name, func(t *testing.T) {
			ranks(t, l, always(), func(c *Communicator) error {
				values := func(r int) []float32 {
					rng := rand.New(rand.NewPCG(8, uint64(r)))
					x := make([]float32, n)
					for i := range x {
						x[i] = float32(rng.NormFloat64() * math.Pow(2, rng.NormFloat64()*8))
					}
					return x
				}
				var total []float32
				for m := range 3 {
					machine := values(l.Rank(m, 0))
					for i, v := range values(l.Rank(m, 1)) {
						machine[i] += v
					}
					if total == nil {
						total = machine
						continue
					}
					for i, v := range machine {
						total[i] += v
					}
				}
				y := make([]float32, n)
				testranks.NoError(backend.Run(c, allReduce, backend.Of(y),
					backend.Of(values(c.Rank()))))
				if !slices.Equal(y, total) {
					return errors.New("another order of additions")
				}
				return nil
			})
		})
	}
}

func TestNaNsSurviveMinAndMax(t *testing.T) {
	ranks(t, Grid(2, 2), always(), func(c *Communicator) error {
		x, y := make([]float32, 8), make([]float32, 8)
		x[2*c.Rank()] = float32(math.NaN())
		for _, op := range []backend.ReduceOp{backend.Min, backend.Max} {
			testranks.NoError(backend.Run(c, backend.Collective{Kind: backend.AllReduce, Op: op},
				backend.Of(y), backend.Of(x)))
			for i, v := range y {
				if (v != v) != (i%2 == 0) {
					return fmt.Errorf("%v: element %d is %v", op, i, v)
				}
			}
		}
		return nil
	})
}

func TestBytesBetweenMachinesAreTheFormulaUnraced(t *testing.T) {
	const chunk = 1024
	for _, shape := range shapes {
		M, D := shape[0], shape[1]
		for name, l := range layouts(M, D) {
			t.Run(fmt.Sprintf("%dx%d %s", M, D, name), func(t *testing.T) {
				ranksOver(t, l, always(), probes(l, nil), func(c *Communicator) error {
					W := M * D
					for i, what := range []backend.Collective{reduceScatter, allGather, allReduce,
						allToAll} {
						if what.Kind == backend.AllToAll && D == 1 {
							continue // is flat
						}
						before := c.Stats()
						count := chunk
						if what.Kind == backend.AllReduce {
							count = chunk * W
						}
						testranks.NoError(equalsFlat(c, what, backend.F32, count, 1))
						if M == 1 {
							continue // all of it is flat
						}
						after, ways := c.Stats(), []int64{1, 1, 2, 1}[i]
						between, inside := after.Between()-before.Between(),
							after.Inside()-before.Inside()
						want := ways * int64((M-1)*chunk*4)
						if what.Kind == backend.AllToAll {
							want *= int64(D) // what is sent is all the rank's own
						}
						if between != want {
							return fmt.Errorf("%v: %d bytes between machines, want %d", what,
								between, want)
						}
						if want := ways * int64((D-1)*M*chunk*4); inside != want {
							return fmt.Errorf("%v: %d bytes inside the machine, want %d", what,
								inside, want)
						}
						for m, sent := range after.Sent {
							if m != after.Machine && sent-before.Sent[m] != between/int64(M-1) {
								return fmt.Errorf("%v: %d bytes to machine %d", what,
									sent-before.Sent[m], m)
							}
						}
						model := l.layeredTraffic(what.Kind, W*chunk*4)
						if int64(model.Between) != between || int64(model.Inside) != inside {
							return fmt.Errorf("%v: the model says %+v", what, model)
						}
					}
					if p := probeOf(c); M > 1 && p.between() != c.Stats().Between() {
						return fmt.Errorf("%d bytes are counted between machines, but %d were sent",
							c.Stats().Between(), p.between())
					}
					return nil
				})
			})
		}
	}
}

// Averages that f16 has are exchanged as such, though their sums are none.
func TestAveragesAsF16AreNotInfinite(t *testing.T) {
	for _, shape := range [][2]int{{2, 2}, {4, 1}, {2, 3}} {
		o := always()
		o.Exchange = backend.F16
		ranks(t, Grid(shape[0], shape[1]), o, func(c *Communicator) error {
			x, y := make([]float32, 7200), make([]float32, 7200)
			for i := range x {
				x[i] = float32([]int{40000, -65504, 12}[i%3])
			}
			for _, kind := range []backend.Kind{backend.AllReduce, backend.ReduceScatter} {
				y := y
				if kind == backend.ReduceScatter {
					y = y[:len(x)/c.Size()]
				}
				testranks.NoError(backend.Run(c, backend.Collective{Kind: kind, Op: backend.Avg},
					backend.Of(y), backend.Of(x)))
				for i, got := range y {
					if want := x[i]; got != want { // chunks begin at multiples of 3
						return fmt.Errorf("%v of %v: element %d of the average is %v, want %v",
							kind, shape, i, got, want)
					}
				}
			}
			return nil
		})
	}
}

// Where nothing can be gained, nothing is spent.
func TestEqualLinksTakeNoMemory(t *testing.T) {
	same := tenth()
	same.Between = same.Inside
	for _, test := range []struct {
		layout Layout
		o      Options
		none   bool
	}{
		{Grid(2, 2), Options{Links: same}, true},
		{Grid(3, 1), Options{Links: tenth()}, true},
		{Grid(2, 2), Options{Links: tenth()}, false},
		{Grid(2, 2), Options{Mode: Always, Links: same}, false},
	} {
		ranks(t, test.layout, test.o, func(c *Communicator) error {
			x := backend.Of(make([]float32, 4))
			testranks.NoError(backend.Run(c, allReduce, x, x))
			if none := c.slots.memory.Len() == 0 && len(c.others()) == 0; none != test.none {
				return fmt.Errorf("%v, mode %v: %d bytes and %d communicators", test.layout,
					modes[test.o.Mode], c.slots.memory.Len(), len(c.others()))
			}
			if s := c.Stats(); test.none && (s.Flat != 1 || s.Calls != 0) {
				return fmt.Errorf("%v: %+v", test.layout, s)
			}
			return nil
		})
	}
}

func TestExchangeIn16BitsHalvesTheTrafficAndAddsIn32(t *testing.T) {
	for _, shape := range [][2]int{{2, 2}, {4, 1}, {3, 2}} {
		l := Grid(shape[0], shape[1])
		t.Run(l.String(), func(t *testing.T) {
			o := always()
			o.Exchange = backend.BF16
			ranks(t, l, o, func(c *Communicator) error {
				W := c.Size()
				// 1 + 1/128 is exact in bf16, and a sum of several only in 32 bits.
				x, y := make([]float32, 12000), make([]float32, 12000)
				for i := range x {
					x[i] = float32(i % 5)
				}
				for _, what := range []backend.Collective{{Op: backend.Sum}, {Op: backend.Avg},
					{Op: backend.Max}, {Op: backend.Avg, Exact: true}} {
					what.Kind = backend.AllReduce
					op := what.Op
					before := c.Stats().Between()
					testranks.NoError(backend.Run(c, what, backend.Of(y), backend.Of(x)))
					scale, size := W, 2
					if op != backend.Sum {
						scale = 1
					}
					if op == backend.Max || what.Exact {
						size = 4
					}
					for i, v := range y {
						if v != float32(scale*(i%5)) {
							return fmt.Errorf("%v: element %d is %v, want %d", op, i, v,
								scale*(i%5))
						}
					}
					if got, want := c.Stats().Between()-before,
						int64(2*(shape[0]-1)*len(x)/W*size); got != want {
						return fmt.Errorf("%v: %d bytes between machines, want %d", op, got, want)
					}
				}
				// 256 and ones: bf16 would lose each one, and 256 + 4 is exact again.
				one := float32(1)
				if c.place.machine == 0 {
					one = 256 / float32(shape[1])
				}
				x = slices.Repeat([]float32{one}, W*16)
				z := make([]float32, 16)
				testranks.NoError(backend.Run(c, reduceScatter, backend.Of(z), backend.Of(x)))
				if want := float32(256 + (shape[0]-1)*shape[1]); z[3] != want {
					return fmt.Errorf("the sum is %v, want %v", z[3], want)
				}
				return nil
			})
		})
	}
}

func TestRanksMustAgreeOnTheTopology(t *testing.T) {
	var n atomic.Int32
	_, err := groupOf(func(int) Layout { return gridOf(2, 2, numbering(n.Add(1)%2)) }, 4, patient,
		Options{}, nil)
	require.Fails(t, "groupOf", err, backend.ErrArgument, "another topology than rank 0")
	_, err = groupOf(func(int) Layout { return Grid(2, 1) }, 4, patient,
		Options{}, nil)
	require.Fails(t, "groupOf", err, backend.ErrArgument, "layout of 2 ranks for 4")
}

func TestPartsAreHierarchicalToo(t *testing.T) {
	ranks(t, Grid(2, 3), always(), func(c *Communicator) error {
		color := c.Rank() % 3 / 2 // two devices of each machine, and the other ones
		devices := 2 - color
		part := testranks.Must(c.Split(color, -c.Rank()))
		defer part.Close()
		layered, ok := part.(*Communicator)
		if !ok || layered.plan.Layout.Machines() != 2 ||
			layered.plan.Layout.Devices() != devices {
			return fmt.Errorf("%d devices of each machine are a %T", devices, part)
		}
		testranks.NoError(equalsFlat(layered, allReduce, backend.F32, 1000, 1))
		machine := testranks.Must(part.Split(c.place.machine, 0))
		defer machine.Close()
		x := []int64{1}
		if err := backend.Run(machine, allReduce, backend.Of(x), backend.Of(x)); err != nil ||
			x[0] != int64(devices) {
			return fmt.Errorf("one machine counts %d ranks, want %d: %w", x[0], devices, err)
		}
		return nil
	})
}

func TestEmptyAndOtherCallsPassToFlat(t *testing.T) {
	ranks(t, Grid(2, 2), always(), func(c *Communicator) error {
		x := []int64{int64(c.Rank()), 1, 2, 3}
		y := make([]int64, 4)
		for _, what := range []backend.Collective{{Kind: backend.Gather}, {Kind: backend.Scatter},
			{Kind: backend.Reduce}, {Kind: backend.AllReduce}} {
			n, some := 4, 4
			switch what.Kind {
			case backend.AllReduce:
				n, some = 0, 0
			case backend.Gather:
				some = 1
			case backend.Scatter:
				n = 1
			}
			testranks.NoError(backend.Run(c, what, backend.Of(y[:n]), backend.Of(x[:some])))
		}
		if s := c.Stats(); s.Flat != 4 || s.Calls != 0 || s.Between() != 0 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

func TestWithoutComparingNothingRunsFlatInVain(t *testing.T) {
	l := Grid(2, 2)
	ranksOver(t, l, always(), probes(l, nil), func(c *Communicator) error {
		for _, on := range []bool{true, false} {
			c.Capabilities().Verify(on)
			for _, n := range []int{4000, 4003} {
				want := 0
				if on || n%4 > 0 {
					want = 1 // to compare the call, or for what is left
				}
				x := backend.Of(make([]float32, n))
				before := probeOf(c).number()
				testranks.NoError(backend.Run(c, allReduce, x, x))
				if got := probeOf(c).number() - before; got != want {
					return fmt.Errorf("comparing %v: %d elements take %d flat calls, want %d", on,
						n, got, want)
				}
			}
		}
		return nil
	})
}

func TestLayersAreFoundBelowWrappers(t *testing.T) {
	ranks(t, Grid(2, 1), always(), func(c *Communicator) error {
		wrapped := backend.WithHooks(group.Compared(c), observe.New(c.Rank(), 10))
		if found, ok := backend.As[*Communicator](wrapped); !ok || found != c {
			return errors.New("the communicator is not found")
		}
		if name := wrapped.Capabilities().Backend; name != "host" {
			return fmt.Errorf("the backend is %q", name)
		}
		if n := len(c.Unwrap()); n != 3 {
			return fmt.Errorf("it is made of %d communicators, want flat and two of the rail", n)
		}
		return nil
	})
}

// unsplittable refuses its third Split.
type unsplittable struct {
	backend.Communicator
	splits int
}

func (u *unsplittable) Split(color, key int) (backend.Communicator, error) {
	if u.splits++; u.splits == 3 {
		return nil, errInjected
	}
	return u.Communicator.Split(color, key)
}

func TestNewThatFailsLeavesNothingBehind(t *testing.T) {
	before := goleak.IgnoreCurrent()
	_, err := layeredGroup(Grid(2, 2), patient, always(),
		func(c backend.Communicator) backend.Communicator { return &unsplittable{Communicator: c} })
	require.Fails(t, "New", err, errInjected, "a communicator for broadcast between machines")
	require.NoError(t, goleak.Find(before))
}

// poor is a communicator whose device refuses memory or queues.
type poor struct {
	backend.Communicator
	device backend.Device
}

func (p poor) Device() backend.Device { return p.device }

type noMemory struct{ backend.Device }

func (noMemory) Alloc(int) (backend.Buffer, error) { return backend.Buffer{}, errInjected }

type noQueues struct{ backend.Device }

func (noQueues) NewQueue() (backend.Queue, error) { return nil, errInjected }

// Nobody waits for a rank that knows at once that it cannot go on.
func TestProblemOfOneRankEndsNewOnAllAtOnce(t *testing.T) {
	const culprit = 1
	good := Grid(2, 2)
	for name, test := range map[string]struct {
		layout Layout
		o      Options
		device func(backend.Device) backend.Device
		want   error
		say    string
	}{
		"slots": {layout: good, o: Options{Slots: -1}, want: backend.ErrArgument, say: "-1 slots"},
		"links": {layout: good, o: Options{Links: &Links{}}, want: backend.ErrArgument,
			say: "bandwidths must be positive"},
		"layout": {layout: Grid(3, 1), want: backend.ErrArgument,
			say: "a layout of 3 ranks for 4"},
		"memory": {layout: good, o: always(), device: func(d backend.Device) backend.Device {
			return noMemory{d}
		}, say: errInjected.Error()},
		"queues": {layout: good, o: always(), device: func(d backend.Device) backend.Device {
			return noQueues{d}
		}, say: errInjected.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			worlds := require.Value(rendezvous.Local(4, patient))(t)
			began := time.Now()
			errs := testranks.Each(len(worlds), func(r int) error {
				l, o := good, always()
				wrap := func(c backend.Communicator) backend.Communicator { return c }
				if r == culprit {
					l, o = test.layout, test.o
					if test.device != nil {
						wrap = func(c backend.Communicator) backend.Communicator {
							return poor{c, test.device(c.Device())}
						}
					}
				}
				_, err := connect(worlds[r], l, o, wrap)
				return err
			})
			took := time.Since(began)
			require.Check(t, took <= soon, "it took %v", took)
			for r, err := range errs {
				if err == nil || !strings.Contains(err.Error(), test.say) ||
					!errors.Is(err, test.want) && test.want != nil {
					t.Errorf("rank %d: the error is %v", r, err)
				} else if r != culprit && !strings.Contains(err.Error(), "rank 1 failed: ") {
					t.Errorf("rank %d does not name the culprit: %v", r, err)
				}
				require.Report(t, worlds[r].Close())
			}
			require.NoError(t, goleak.Find(before))
		})
	}
}

// A call that reads what an earlier one on another queue writes waits for it,
// whichever of both is hierarchical.
func TestCallsThatShareMemoryKeepTheirOrder(t *testing.T) {
	ranks(t, Grid(2, 2), always(), func(c *Communicator) error {
		var qs []backend.Queue
		for range 3 {
			q := testranks.Must(c.Device().NewQueue())
			defer q.Close()
			qs = append(qs, q)
		}
		x := make([]int64, 4000)
		for round := range times(200, 20) {
			for i := range x {
				x[i] = 1
			}
			want, last := int64(1), backend.Work(nil)
			for call := range 12 {
				n := len(x)
				if call%3 == 2 {
					n = 3 // flat
				}
				var err error
				if last, err = c.Start(qs[(call+round)%3], allReduce, backend.Of(x[:n]),
					backend.Of(x[:n])); err != nil {
					return err
				}
				want *= 4
			}
			testranks.NoError(last.Join(context.Background()))
			if x[0] != want || x[3999] != 1<<16 {
				return fmt.Errorf("round %d: %d and %d, want %d and %d", round, x[0], x[3999], want,
					1<<16)
			}
		}
		return nil
	})
}

// What one queue has waited for, another has not: the all-reduce needs what the broadcast
// writes, which only the queue of the all-gather has been ordered after.
func TestEveryQueueIsOrderedAfterWhatItNeeds(t *testing.T) {
	ranks(t, Grid(2, 2), always(), func(c *Communicator) error {
		var qs [3]backend.Queue
		for i := range qs {
			var err error
			if qs[i], err = c.Device().NewQueue(); err != nil {
				return err
			}
			defer qs[i].Close()
		}
		x, total, chunk, all := make([]int64, 400), make([]int64, 400), make([]int64, 100),
			make([]int64, 400)
		if c.Rank() == 0 {
			for i := range x {
				x[i] = 1
			}
		}
		testranks.NoError(qs[0].Wait(delay(20 * time.Millisecond)))
		var w backend.Work
		for i, call := range []struct {
			what     backend.Collective
			dst, src []int64
		}{{backend.Collective{Kind: backend.Broadcast}, x, x}, {allGather, all, chunk},
			{allReduce, total, x}} {
			var err error
			if w, err = c.Start(qs[i], call.what, backend.Of(call.dst),
				backend.Of(call.src)); err != nil {
				return err
			}
		}
		testranks.NoError(w.Join(context.Background()))
		if total[0] != 4 || total[399] != 4 {
			return fmt.Errorf("the sums are %d and %d, want 4", total[0], total[399])
		}
		return nil
	})
}

func TestCallsInFlightAreForSeveralMachines(t *testing.T) {
	for _, tt := range []struct {
		layout Layout
		mode   Mode
		want   int
	}{
		{Grid(2, 2), Always, inFlight},
		{Grid(2, 2), Auto, inFlight},
		{Grid(2, 2), Never, 1},
		{Grid(1, 4), Auto, 1},
	} {
		ranks(t, tt.layout, Options{Mode: tt.mode}, func(c *Communicator) error {
			if n := c.Capabilities().InFlight; n != tt.want {
				return fmt.Errorf("%v, %v: %d in flight, want %d", tt.layout, tt.mode, n, tt.want)
			}
			return nil
		})
	}
}

// More operands than the kernels of a device take are added in rounds, in their order.
func TestAnyNumberOfMachinesIsAddedInOrder(t *testing.T) {
	for _, n := range []int{1, 2, maxTerms, maxTerms + 1, 3*maxTerms - 2, 3 * maxTerms} {
		all, want := make([]backend.Buffer, n), float32(0)
		for i := range all {
			x := float32(1) / float32(i+3) // a sum depends on its order
			all[i] = backend.Of([]float32{x})
			want += x
		}
		got, most := []float32{0}, 0
		q := fewTerms{host.Device{}.Default(), &most}
		if err := reduceAll(q, backend.Sum, backend.Of(got), all); err != nil || got[0] != want ||
			most > maxTerms {
			t.Errorf("%d operands: %v, %v, want %v; %d at once", n, got[0], err, want, most)
		}
	}
}

// fewTerms notes how many operands a Reduce has, at most.
type fewTerms struct {
	backend.Queue
	most *int
}

func (c fewTerms) Reduce(op backend.ReduceOp, dst backend.Buffer, srcs ...backend.Buffer) error {
	*c.most = max(*c.most, len(srcs))
	return c.Queue.Reduce(op, dst, srcs...)
}
