package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/kernels"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/rendezvous"
)

// rig is a machine without GPUs: NCCL is a fake, and so are devices, whose kernels that exchange
// data do what NCCL would.
type rig struct {
	*fake
	*fakedevice.Host

	mu      sync.Mutex
	said    map[int]int              // how often a rank was told of host memory
	seen    map[int][]peers.PeerCall // the kernels' last calls, by ordinal of the device
	groups  map[uintptr]*ring        // of kernels, by the pads of the ranks
	wires   func(rank int) wiring    // nil means all are connected
	fault   func(rank int, doing string) error
	driver  peers.Launcher        // is asked to launch the kernels, too, if it is not nil
	process func(rank int) string // where a rank is, if not in this process
}

// apart is a process for each rank.
func apart(rank int) string { return fmt.Sprint("process ", rank) }

// quickBytes is what ranks measure as they connect.
const quickBytes = 64 << 10

// maxSeen is how many calls of a rank are kept: there are tests for what grows.
const maxSeen = 100

func newRig(t testing.TB) *rig {
	t.Helper()
	machine := require.Value(fakedevice.NewHost(host.Device{}))(t)
	g := &rig{fake: newFake(machine), Host: machine, said: map[int]int{},
		seen: map[int][]peers.PeerCall{}, groups: map[uintptr]*ring{}}
	machine.Fail, machine.Exchange = g.failing, g.exchange
	t.Cleanup(func() {
		require.NoError(t, machine.Close())
	})
	return g
}

// openDevices opens devices whose queues are not those of a part of a test, then.
func (g *rig) openDevices(t testing.TB, n int) {
	for ordinal := range n {
		require.NoError(t, require.Err(g.device(ordinal)))
	}
}

// device opens a device once.
func (g *rig) device(ordinal int) (Device, error) {
	w := switched(make([]int, 16)...)[ordinal].with(18)
	if g.wires != nil {
		w = g.wires(ordinal)
	}
	p := fakedevice.Properties{Product: h200, Bus: w.Bus, Capability: 90, Reach: w.Reach,
		Direct: w.Direct, Switches: w.Switches}
	if w.Tears {
		p.Capability = 89
	}
	d, err := g.GPU(ordinal, p)
	if err != nil {
		return nil, err // and not a Device that is nil inside
	}
	return d, nil
}

// backend returns the backend of one rank or all of them.
func (g *rig) backend(o Options) *Backend {
	b := New(g.device)
	b.Options = &o
	b.driver = func() error { return nil }
	b.load = func() (library, error) { return g.fake, nil }
	b.scratch = 48 << 10 // more blocks, and less to warm up with
	b.quick = quick{time.Minute, quickBytes}
	return b
}

// nccl is a backend whose ranks share no memory.
func (g *rig) nccl() *Backend { return g.backend(Options{Off: true}) }

// ranked is a backend for each rank.
type ranked []*Backend

func (r ranked) Name() string     { return r[0].Name() }
func (r ranked) Available() error { return nil }
func (r ranked) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	return r[w.Rank].Connect(ctx, w)
}

// newGroup returns the ranks of a group; each gets its own options.
func (g *rig) newGroup(size int, timeout time.Duration,
	of func(rank int) Options) (*backendtest.Group, error) {
	all := make(ranked, size)
	for r := range all {
		all[r] = g.backend(of(r))
		all[r].Notice = func(string) {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.said[r]++
		}
		if g.process != nil {
			all[r].process = func() string { return g.process(r) }
		}
	}
	return backendtest.Over(all)(size, timeout)
}

// group is newGroup for a test, which closes it.
func (g *rig) group(t testing.TB, size int, of func(rank int) Options) []*Communicator {
	t.Helper()
	return g.groupWithin(t, size, time.Minute, of)
}

// groupWithin is group with a timeout.
func (g *rig) groupWithin(t testing.TB, size int, timeout time.Duration,
	of func(rank int) Options) []*Communicator {
	t.Helper()
	group := require.Value(g.newGroup(size, timeout, of))(t)
	comms := make([]*Communicator, size)
	for r := range comms {
		comms[r] = group.Comms[r].(*Communicator)
	}
	t.Cleanup(func() {
		each(t, comms, (*Communicator).Close)
		require.NoError(t, group.Close())
	})
	return comms
}

// options are for tests: little memory, and what is measured does not matter.
func options() Options { return Options{Force: byTwoShot, Staging: 4 << 10, Table: prototype()} }

func same(o Options) func(int) Options { return func(int) Options { return o } }

// each runs f on every rank.
func each(t testing.TB, comms []*Communicator, f func(c *Communicator) error) {
	t.Helper()
	var all []backend.Communicator
	for _, c := range comms {
		all = append(all, c)
	}
	backendtest.Each(t, all, func(c backend.Communicator) error { return f(c.(*Communicator)) })
}

// holding runs use with device memory that holds x, and reads it back.
func holding[T backend.Element](c *Communicator, x []T, use func(b backend.Buffer) error) error {
	b, err := c.Device().Alloc(backend.Of(x).NBytes())
	if err != nil {
		return err
	}
	typed := b.As(backend.DTypeOf[T]())
	a := c.Device().Default()
	err = a.Move(typed, backend.Of(x))
	if err == nil {
		err = testranks.Ended(func() error { return use(typed) })
	}
	return errors.Join(err, a.Move(backend.Of(x), typed), drain(context.Background(),
		c.Device().Default()), c.Device().Free(b))
}

// failing is asked before a device does something.
func (g *rig) failing(rank int, doing string, nbytes int) error {
	if g.fault == nil {
		return nil
	}
	switch {
	case doing == "alloc" && nbytes == quickBytes:
		doing = "alloc to measure"
	case doing == "alloc" && nbytes > smallBytes:
		doing = "alloc much"
	case doing == "pin" && nbytes == progressBytes:
		doing = "pin progress"
	}
	return g.fault(rank, doing)
}

func (w wiring) with(switches int) wiring {
	w.Switches = switches
	return w
}

// exchange keeps the call, and does what the kernel does: by the fake's mail.
func (g *rig) exchange(ordinal int, stream uintptr, p *peers.Peers, x *peers.PeerCall) error {
	var driver peers.Launcher
	g.look(func() { driver = g.driver })
	if driver != nil {
		if err := peers.New(driver).Exchange(p, x); err != nil {
			return err
		}
	}
	if x.Way == peers.AllToAll { // as kernels do
		what := backend.Collective{Kind: backend.AllToAll, Splits: x.Splits, Rows: x.Rows}
		if _, err := what.Check(p.Rank, p.Size, x.Dst, x.Src); err != nil {
			return err
		}
	}
	e := g.kernel(p)
	g.mu.Lock()
	seen := g.seen[ordinal]
	g.seen[ordinal] = append(seen[max(len(seen)-maxSeen+1, 0):], *x)
	g.mu.Unlock()
	s := kernelStep(x)
	call := *x
	call.Splits = slices.Clone(x.Splits) // which the caller may use again
	err := g.Submit(stream, func() {
		switch {
		case e.stopped():
		case call.Way == peers.AllToAll:
			e.permute(&call, p.Size)
		case call.Way == peers.AllGather && call.Splits != nil:
			e.gather(&call)
		default:
			e.group([]ncclStep{s})
		}
	})
	if err != nil || x.Event == 0 {
		return err
	}
	return g.RecordEvent(stream, x.Event)
}

// kernelStep is what NCCL would do in the place of a kernel.
func kernelStep(x *peers.PeerCall) ncclStep {
	s := ncclStep{what: stepAllReduce, dtype: ncclType(x.Src.DType()), op: ncclOp(x.Op),
		src: x.Src.Addr(), dst: x.Dst.Addr(), count: uint64(x.Src.Len())}
	switch x.Way {
	case peers.ReduceScatter:
		s.what, s.count = stepReduceScatter, uint64(x.Dst.Len())
	case peers.AllGather:
		s.what = stepAllGather
	}
	return s
}

// permute is an all-to-all of pieces in rows.
func (e *fakeEngine) permute(x *peers.PeerCall, size int) {
	what := backend.Collective{Kind: backend.AllToAll, Splits: x.Splits, Rows: x.Rows}
	if what.Rows == nil {
		even := slices.Repeat([]int{1}, size)
		what.Rows = &backend.Rows{Src: even, Dst: even}
	}
	count, err := what.Check(e.rank, size, x.Dst, x.Src)
	d := x.Src.DType()
	packed, received := make([]byte, x.Src.NBytes()), make([]byte, x.Dst.NBytes())
	err = errors.Join(err, fakedevice.Pack(kernels.Host{}, what, e.rank, size, count,
		backend.Of(packed).As(d), backend.Of(e.read(x.Src.Addr(), len(packed))).As(d)))
	for p := range size {
		n, from, _ := what.Pair(e.rank, p, size, count)
		e.post(p, packed[from*d.Size():(from+n)*d.Size()])
	}
	for p := range size {
		n, _, to := what.Pair(p, e.rank, size, count)
		piece, ok := e.receive(p)
		if !ok {
			return
		}
		copy(received[to*d.Size():], fit(piece, n*d.Size()))
	}
	y := make([]byte, len(received))
	err = errors.Join(err, fakedevice.Join(kernels.Host{}, what, e.rank, size, count,
		backend.Of(y).As(d), backend.Of(received).As(d)))
	if err != nil {
		panic(err)
	}
	e.write(x.Dst.Addr(), y)
}

// gather is an all-gather of uneven chunks.
func (e *fakeEngine) gather(x *peers.PeerCall) {
	own := e.read(x.Src.Addr(), x.Src.NBytes())
	for p := range x.Splits {
		e.post(p, own)
	}
	y := make([]byte, 0, x.Dst.NBytes())
	for p, n := range x.Splits {
		chunk, ok := e.receive(p)
		if !ok {
			return
		}
		y = append(y, fit(chunk, n*x.Src.DType().Size())...)
	}
	e.write(x.Dst.Addr(), y)
}

// kernel is one rank's kernel among those of its group, which the pads tell.
func (g *rig) kernel(p *peers.Peers) *fakeEngine {
	g.mu.Lock()
	defer g.mu.Unlock()
	var r *ring
	for _, pad := range p.Pads {
		if found := g.groups[pad]; found != nil && r == nil {
			r = found
		}
	}
	if r == nil {
		r = &ring{size: p.Size, mail: map[[2]int][][]byte{}}
	}
	for _, pad := range p.Pads[:p.Size] {
		if pad != 0 {
			g.groups[pad] = r
		}
	}
	s := &status{words: g.Pinned(p.Status)}
	return &fakeEngine{fake: g.fake, move: g.Move, ring: r, rank: p.Rank, stopped: func() bool {
		return s.flag(0).Load() != 0
	}}
}

// last returns the last of a rank's calls.
func (g *rig) last(rank int) peers.PeerCall {
	g.mu.Lock()
	defer g.mu.Unlock()
	calls := g.seen[rank]
	return calls[len(calls)-1]
}
