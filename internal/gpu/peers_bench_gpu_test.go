//go:build gpu

package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/group"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/observe"
)

// BenchmarkAllReduce times rounds of calls that are started back to back, of NCCL and
// of each way in turn, and reports the medians in microseconds: by the device's clock,
// and "-host" what one start takes the host. "-alloc" is with memory from Alloc,
// "-bare" the kernel alone, without a call, "chosen" what the table chooses, with
// check and trace as Init puts them around, "launch" any kernel, and "plain" the same by the
// plain call of the driver, without programmatic dependent launch. Use -benchtime 200x for 200
// rounds of each, and 4x from 256 MiB on.
func BenchmarkAllReduce(b *testing.B) {
	sizes := []int{4, 16, 1 << 10, 4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10,
		512 << 10, 1 << 20, 2 << 20, 4 << 20, 10 << 20, 16 << 20, 32 << 20, 64 << 20, 256 << 20,
		512 << 20, 1 << 30}
	eachGroup(b, sizes, func(b *testing.B, comms []*Communicator, d backend.DType, nbytes int) {
		race(b, comms, append(together(b, comms, nbytes), ways(len(comms), nbytes)...), d, nbytes,
			false)
	})
}

// BenchmarkStart times each start of such rounds by itself and reports "-start", the medians in
// microseconds, 0.05 of which the clock takes: what one call costs the host. The mean of a round
// has its first calls in it, too, which find caches full of what others did.
func BenchmarkStart(b *testing.B) {
	sizes := []int{1 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 10 << 20, 32 << 20}
	eachGroup(b, sizes, func(b *testing.B, comms []*Communicator, d backend.DType, nbytes int) {
		race(b, comms, together(b, comms, nbytes), d, nbytes, true)
	})
}

// BenchmarkGraph times graphs of twelve sums, as Start records them and the bare kernels, and
// twelve sums that are started one by one: the difference of the first two is what the host
// knows of a replay's progress.
func BenchmarkGraph(b *testing.B) {
	const sums = 12
	eachGroup(b, []int{1 << 10, 64 << 10, 1 << 20}, func(b *testing.B, comms []*Communicator,
		d backend.DType, nbytes int) {
		graphs := make([][2]*backend.Graph, len(comms))
		replay := func(which int, record func(c *Communicator, q backend.Queue,
			x backend.Buffer) error) func(c *Communicator, q backend.Queue,
			x backend.Buffer) error {
			return func(c *Communicator, q backend.Queue, x backend.Buffer) (err error) {
				g := &graphs[c.rank][which]
				if *g == nil {
					*g, err = q.(backend.GraphQueue).Capture(func() error {
						return record(c, q, x)
					})
				}
				if err == nil {
					_, err = (*g).Launch(nil)
				}
				return err
			}
		}
		all := func(c *Communicator, q backend.Queue, x backend.Buffer) error {
			for range sums {
				if _, err := c.startBy(q, byLL, sum, x, x); err != nil {
					return err
				}
			}
			return nil
		}
		bare := func(c *Communicator, q backend.Queue, x backend.Buffer) error {
			c.order.Lock()
			defer c.order.Unlock()
			way := peers.LL
			if nbytes > packetBytes {
				way = peers.LL128
			}
			for range sums {
				c.exchange = peers.PeerCall{Way: way, Dst: x, Src: x}
				if err := c.exchanges(q.(stream), &c.exchange); err != nil {
					return err
				}
			}
			return nil
		}
		race(b, comms, []comparison{{"eager", false, all}, {"graph", false, replay(0, all)},
			{"graph-bare", false, replay(1, bare)}}, d, nbytes, false)
		for _, of := range graphs {
			for _, g := range of {
				require.Report(b, g.Close())
			}
		}
	})
}

func eachGroup(b *testing.B, sizes []int, f func(b *testing.B, comms []*Communicator,
	d backend.DType, nbytes int)) {
	g := needGPUs(b, 2)
	for _, size := range g.sizes() {
		comms := g.group(b, size, forced(byTwoShot))
		for _, d := range []backend.DType{backend.F32, backend.BF16} {
			for _, nbytes := range sizes {
				b.Run(fmt.Sprintf("ranks=%d/%v/bytes=%d", size, d, nbytes), func(b *testing.B) {
					f(b, comms, d, nbytes)
				})
			}
		}
	}
}

// comparison is what is timed in turn.
type comparison struct {
	name  string
	own   bool // memory of Alloc
	start func(c *Communicator, q backend.Queue, x backend.Buffer) error
}

// together are launches, NCCL, and what Init puts together.
func together(b *testing.B, comms []*Communicator, nbytes int) []comparison {
	var whole []backend.Communicator
	var plain []*launcher
	for _, c := range comms {
		c.plan.Force = byNCCL
		whole = append(whole, backend.WithHooks(group.Compared(c), observe.New(c.Rank(), 2048)))
		l := require.Value(newLauncher(c.Device().Default().(*cuda.Queue)))(b)
		b.Cleanup(func() { l.close(b) })
		plain = append(plain, l)
	}
	list := []comparison{
		{"plain", false, func(c *Communicator, q backend.Queue, x backend.Buffer) error {
			return plain[c.rank].zero(x.As(backend.U8).Slice(0, min(16, nbytes)))
		}},
		{"launch", false, func(c *Communicator, q backend.Queue, x backend.Buffer) error {
			return q.Zero(x.As(backend.U8).Slice(0, min(16, nbytes)))
		}},
		{"nccl", false, func(c *Communicator, q backend.Queue, x backend.Buffer) error {
			_, err := c.startBy(q, byNCCL, sum, x, x)
			return err
		}},
	}
	chosen := comparison{"chosen", false, func(c *Communicator, q backend.Queue,
		x backend.Buffer) error {
		_, err := whole[c.rank].Start(q, sum, x, x)
		return err
	}}
	list = append(list, chosen)
	chosen.name, chosen.own = chosen.name+"-alloc", true
	return append(list, chosen)
}

// ways are the algorithms.
func ways(size, nbytes int) (list []comparison) {
	for w := peers.LL; w <= peers.TwoShot; w++ {
		if w == peers.LL && nbytes > packetBytes || w == peers.LL128 && nbytes > llBytes(size) ||
			w == peers.OneShot && nbytes > 16<<20 {
			continue
		}
		way := comparison{w.String(), false, func(c *Communicator, q backend.Queue,
			x backend.Buffer) error {
			e := peers.PeerCall{Way: w, Dst: x, Src: x}
			if w == peers.TwoShot {
				e.Source = c.memory.placeOf(x, x.NBytes())
				e.Target = e.Source
			}
			return c.startWay(q, e)
		}}
		list = append(list, way)
		if w >= peers.OneShot {
			way.name, way.own = way.name+"-alloc", true
			list = append(list, way)
			continue
		}
		list = append(list, comparison{w.String() + "-bare", false,
			func(c *Communicator, q backend.Queue, x backend.Buffer) error {
				c.order.Lock()
				defer c.order.Unlock()
				c.exchange = peers.PeerCall{Way: w, Dst: x, Src: x}
				return c.exchanges(q.(stream), &c.exchange)
			}})
	}
	return list
}

// startWay is start of a sum in a way that is not chosen by the size.
func (c *Communicator) startWay(q backend.Queue, x peers.PeerCall) error {
	c.order.Lock()
	defer c.order.Unlock()
	w, event, err := c.beginCall(q.(stream), &sum, x.Src.Len(), x.Src.DType())
	if err != nil {
		return err
	}
	c.exchange = x
	c.exchange.Event = event
	err = errors.Join(c.follow(q.(stream)), c.exchanges(q.(stream), &c.exchange))
	c.started.Store(w.header.Seq)
	return err
}

// launcher launches kernels on a queue by the driver's plain call.
type launcher struct {
	queue  *cuda.Queue
	loaded *peers.Loaded
	stream *peers.Stream
	kernel peers.Kernels
}

func newLauncher(q *cuda.Queue) (*launcher, error) {
	unbind, err := q.Device().Bind()
	if err != nil {
		return nil, err
	}
	defer unbind()
	loaded, err := peers.Load()
	if err != nil {
		return nil, err
	}
	handle := q.Stream()
	// it is the handle and nothing else
	stream := loaded.Launcher(*(*cu.Stream)(unsafe.Pointer(&handle)))
	return &launcher{q, loaded, stream, peers.New(stream)}, nil
}

func (l *launcher) zero(x backend.Buffer) error {
	l.stream.Forget() // of what it knows nothing it waits for the end
	return l.kernel.Zero(x)
}

func (l *launcher) close(b *testing.B) {
	unbind, err := l.queue.Device().Bind()
	if err != nil {
		b.Error(err)
		return
	}
	defer unbind()
	require.Report(b, l.loaded.Unload())
}

// race times a list in turn, by rounds or by single starts.
func race(b *testing.B, comms []*Communicator, list []comparison, d backend.DType, nbytes int,
	singly bool) {
	var all []backend.Communicator
	for _, c := range comms {
		all = append(all, c)
	}
	times, hosts, starts := make([][]time.Duration, len(list)), make([][]time.Duration, len(list)),
		make([][]time.Duration, len(list))
	b.SetBytes(int64(nbytes))
	backendtest.Each(b, all, func(comm backend.Communicator) error {
		c := comm.(*Communicator)
		plain := testranks.Must(c.Device().Alloc(nbytes))
		own := testranks.Must(c.Alloc(nbytes)) // together, after everyone has its memory
		q := c.Device().Default()
		timer := testranks.Must(bench.NewTimer(q.(backend.TimedQueue)))
		for range b.N {
			for i, x := range list {
				memory := plain
				if x.own {
					memory = own
				}
				var each *[]time.Duration
				if singly && c.Rank() == 0 {
					each = &starts[i]
				}
				took, host, err := x.round(c, timer, memory.As(d), each)
				if err != nil {
					return fmt.Errorf("%s: %w", x.name, err)
				}
				if c.Rank() == 0 {
					times[i], hosts[i] = append(times[i], took), append(hosts[i], host)
				}
			}
		}
		return errors.Join(timer.Close(), c.Device().Free(plain))
	})
	median := func(x []time.Duration) float64 {
		slices.Sort(x)
		return float64(x[len(x)/2].Nanoseconds()) / 1e3
	}
	for i, x := range list {
		b.ReportMetric(median(times[i]), x.name)
		b.ReportMetric(median(hosts[i]), x.name+"-host")
		if singly {
			b.ReportMetric(median(starts[i]), x.name+"-start")
		}
	}
	b.ReportMetric(0, "ns/op")
}

// round returns the time of one call of many, on the device and on the host, and appends what
// each start takes the host to each, unless that is nil.
func (x comparison) round(c *Communicator, timer *bench.Timer, memory backend.Buffer,
	each *[]time.Duration) (took, host time.Duration, err error) {
	// Ranks do not begin at the same time: many calls make little of that.
	calls := time.Duration(min(200, max(50, 64<<20/memory.NBytes())))
	q := c.Device().Default()
	// The first call brings the ranks together.
	if err := errors.Join(x.start(c, q, memory), drain(context.Background(), q), backend.Barrier(c),
		timer.Start()); err != nil {
		return 0, 0, err
	}
	began := time.Now()
	last := began
	for range calls {
		if err := x.start(c, q, memory); err != nil {
			return 0, 0, err
		}
		if each != nil {
			now := time.Now()
			*each = append(*each, now.Sub(last))
			last = now
		}
	}
	host = time.Since(began)
	if err := errors.Join(timer.Stop(), drain(context.Background(), q)); err != nil {
		return 0, 0, err
	}
	took, err = timer.Elapsed()
	return took / calls, host / calls, err
}

// BenchmarkExchanges prints a table of reduce-scatters, all-gathers and all-to-alls among two
// GPUs by every algorithm, some with fewer blocks or less staging, of operands that have up to 256
// MiB: microseconds of a call by the device's clock, medians of rounds in turn, calls back to back
// and in graphs. "-alloc": with memory from Alloc; "/32": of 32 blocks; "<8": with 8 MiB in each
// half of staging. b.N is the number of rounds: use -benchtime 9x.
func BenchmarkExchanges(b *testing.B) {
	g := needGPUs(b, 2)
	comms := g.group(b, 2, Options{Timeout: 30 * time.Second})
	const most = 256 << 20
	for _, kind := range []backend.Kind{backend.AllToAll, backend.ReduceScatter,
		backend.AllGather} {
		b.Run(kind.String(), func(b *testing.B) {
			each(b, comms, func(c *Communicator) error {
				plain := testranks.Must(c.Device().Alloc(2 * most)).As(backend.F32)
				window := testranks.Must(c.Alloc(2 * most)).As(backend.F32)
				err := assemble(c)
				for n := 1 << 10; n <= most && err == nil; n *= 4 {
					err = raceExchange(b, c, backend.Collective{Kind: kind}, plain, window, n)
				}
				return errors.Join(err, assemble(c), c.Device().Free(plain), c.Free(window))
			})
			b.ReportMetric(0, "ns/op")
		})
	}
}

// exchangeWay is how an exchange is started.
type exchangeWay struct {
	name            string
	use             Algorithm
	alloc           bool
	blocks, staging int // 0 for all
	graph           bool
}

// exchangeWays returns the ways to exchange operands of n bytes by a kind of collective.
func exchangeWays(c *Communicator, k backend.Kind, n int) (all []exchangeWay) {
	chunk := n / c.Size()
	all = append(all, exchangeWay{name: "nccl"})
	if chunk <= llBytes(c.Size()) {
		all = append(all, exchangeWay{name: "ll", use: byLL})
		if chunk >= 64<<10 {
			all = append(all, exchangeWay{name: "ll/32", use: byLL, blocks: 32},
				exchangeWay{name: "ll/64", use: byLL, blocks: 64})
		}
	}
	all = append(all, exchangeWay{name: "push", use: byPush})
	if k != backend.ReduceScatter {
		all = append(all, exchangeWay{name: "push-alloc", use: byPush, alloc: true})
	}
	if chunk >= 2<<20 {
		for _, blocks := range []int{16, 64} {
			all = append(all, exchangeWay{name: fmt.Sprintf("push-alloc/%d", blocks), use: byPush,
				alloc: true, blocks: blocks})
		}
		for _, staging := range []int{16, 32} {
			all = append(all, exchangeWay{name: fmt.Sprintf("push<%d", staging), use: byPush,
				staging: staging << 20})
		}
	}
	for _, w := range all {
		w.graph = true
		all = append(all, w)
	}
	if k != backend.AllToAll && chunk >= 64<<10 {
		all = append(all, exchangeWay{name: "copy-engines", use: byCopyEngines, alloc: true,
			graph: true})
	}
	return all
}

// raceExchange times the ways of exchanging operands of n bytes, and logs a row.
func raceExchange(b *testing.B, c *Communicator, what backend.Collective, plain,
	window backend.Buffer, n int) error {
	const recorded = 10
	q := c.Device().Default().(*cuda.Queue)
	timer, err := bench.NewTimer(q)
	if err != nil {
		return err
	}
	calls := min(100, max(10, 512<<20/n)) / recorded * recorded
	ways := exchangeWays(c, what.Kind, n)
	times := make([][]float64, len(ways))
	blocks, staging := c.memory.peers.Blocks, c.memory.peers.Staging
	starts := make([]func() error, len(ways))
	for i, w := range ways {
		memory := plain
		if w.alloc {
			memory = window
		}
		whole, other := memory.Slice(0, n/4), memory.Slice(n/4, n/2)
		dst, src := other, whole
		switch what.Kind {
		case backend.ReduceScatter:
			dst = other.Slice(0, other.Len()/c.Size())
		case backend.AllGather:
			src = whole.Slice(0, whole.Len()/c.Size())
		}
		start := func() error {
			if w.blocks > 0 {
				c.memory.peers.Blocks = w.blocks
			}
			if w.staging > 0 {
				c.memory.peers.Staging = w.staging
			}
			_, err := c.startBy(q, w.use, what, dst, src)
			c.memory.peers.Blocks, c.memory.peers.Staging = blocks, staging
			return err
		}
		starts[i] = func() error {
			var errs []error
			for range recorded {
				errs = append(errs, start())
			}
			return errors.Join(errs...)
		}
		if !w.graph {
			continue
		}
		graph, err := q.Capture(starts[i])
		if err != nil {
			return fmt.Errorf("%s of %d bytes: %w", w.name, n, err)
		}
		defer graph.Close()
		starts[i] = func() error { return require.Err(graph.Launch(q)) }
	}
	for range b.N {
		for i, start := range starts {
			err := errors.Join(start(), drain(context.Background(), q), assemble(c), start(),
				timer.Start())
			for range calls / recorded {
				err = errors.Join(err, start())
			}
			err = errors.Join(err, timer.Stop(), drain(context.Background(), q))
			took, problem := timer.Elapsed()
			if err = errors.Join(err, problem); err != nil {
				return fmt.Errorf("%s of %d bytes: %w", ways[i].name, n, err)
			}
			times[i] = append(times[i], float64(took.Nanoseconds())/1e3/float64(calls))
		}
	}
	if c.Rank() == 0 {
		text := fmt.Sprintf("%v %9d:", what.Kind, n)
		for i, w := range ways {
			slices.Sort(times[i])
			if i > 0 && w.graph && !ways[i-1].graph {
				text += "  | graphs:"
			}
			text += fmt.Sprintf("  %s %.2f", w.name, times[i][len(times[i])/2])
		}
		b.Log(text)
	}
	return timer.Close()
}
