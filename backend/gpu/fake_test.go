package gpu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/fakedevice"
	"github.com/euryale-ml/euryale/backend/host"
	peers "github.com/euryale-ml/euryale/kernels/cuda"
	"github.com/euryale-ml/euryale/rendezvous"
)

// rig is a machine without GPUs: NCCL is a fake, and devices are parts of one guarded memory,
// so that kernels of each reach that of each other one. What was not freed, or is used after it
// was, is an error.
type rig struct {
	*fake
	memory *fakedevice.Device

	mu      sync.Mutex
	devices map[int]*fakeDevice
	said    map[int]int                // how often a rank was told of host memory
	pins    int                        // host memory that is not freed
	opens   map[uintptr]int            // imports that are not closed, by address
	seen    map[int][]peers.Exchange   // the kernels' last calls, by ordinal of the device
	groups  map[uintptr]*ring          // of kernels, by the pads of the ranks
	words   map[uintptr]backend.Buffer // pinned, by address
	wires   func(rank int) Wires       // nil means all are connected
	fault   func(rank int, doing string) error
	busy    chan struct{} // copies of whoever waits only so long end once it is closed, if it is not nil

	driver  peers.Launcher        // is asked to launch the kernels, too, if it is not nil
	freeing chan struct{}         // the driver frees memory of the host once it is closed, if it is not nil
	process func(rank int) string // where a rank is, if not in this process
}

// apart is a process for each rank.
func apart(rank int) string { return fmt.Sprint("process ", rank) }

// maxSeen is how many calls of a rank are kept: there are tests for what grows.
const maxSeen = 100

func newRig(t testing.TB) *rig {
	t.Helper()
	memory, err := fakedevice.New(host.Device{})
	if err != nil {
		t.Fatal(err)
	}
	g := &rig{fake: newFake(), memory: memory, devices: map[int]*fakeDevice{}, said: map[int]int{}, seen: map[int][]peers.Exchange{}, opens: map[uintptr]int{}, groups: map[uintptr]*ring{}, words: map[uintptr]backend.Buffer{}}
	t.Cleanup(func() {
		g.closeDevices(t)
		if err := g.memory.Close(); err != nil {
			t.Error(err)
		}
		if g.pins != 0 || len(g.opens) != 0 {
			t.Errorf("%d pieces of pinned memory and imports %v are left", g.pins, g.opens)
		}
	})
	return g
}

// openDevices opens devices whose queues are not those of a part of a test, then.
func (g *rig) openDevices(t testing.TB, n int) {
	for ordinal := range n {
		if _, err := g.device(ordinal); err != nil {
			t.Fatal(err)
		}
	}
}

func (g *rig) closeDevices(t testing.TB) {
	for _, d := range g.devices {
		if err := d.main.Close(); err != nil {
			t.Error(err)
		}
	}
	clear(g.devices)
}

// device opens a device once.
func (g *rig) device(ordinal int) (Device, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	d := g.devices[ordinal]
	if d == nil {
		d = &fakeDevice{Device: g.memory, rig: g, ordinal: ordinal}
		q, err := d.NewQueue()
		if err != nil {
			return nil, err
		}
		d.main = q.(*fakeQueue)
		g.devices[ordinal] = d
	}
	return d, nil
}

// move copies between the host and any device.
func (g *rig) move(dst, src backend.Buffer) error {
	return g.memory.Default().Move(dst, src)
}

// backend returns the backend of one rank or all of them.
func (g *rig) backend(o Options) *Backend {
	b := New(g.device)
	b.Options = &o
	b.driver = func() error { return nil }
	b.load = func() (library, error) { return g.fake, nil }
	b.scratch = 48 << 10 // more blocks, and less to warm up with
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
func (g *rig) newGroup(size int, timeout time.Duration, of func(rank int) Options) (*backendtest.Group, error) {
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
func (g *rig) groupWithin(t testing.TB, size int, timeout time.Duration, of func(rank int) Options) []*Communicator {
	t.Helper()
	group, err := g.newGroup(size, timeout, of)
	if err != nil {
		t.Fatal(err)
	}
	comms := make([]*Communicator, size)
	for r := range comms {
		comms[r] = group.Comms[r].(*Communicator)
	}
	t.Cleanup(func() {
		each(t, comms, (*Communicator).Close)
		if err := group.Close(); err != nil {
			t.Error(err)
		}
	})
	return comms
}

// options are those of a test: little memory, and what is measured does not matter.
func options() Options { return Options{Force: TwoShot, Staging: 4 << 10, Table: prototype()} }

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
		err = use(typed)
	}
	return errors.Join(err, a.Move(backend.Of(x), typed), drain(context.Background(), c.Device().Default()), c.Device().Free(b))
}

func (g *rig) failing(rank int, doing string) error {
	if g.fault == nil {
		return nil
	}
	return g.fault(rank, doing)
}

// open counts the imports of memory.
func (g *rig) open(addr uintptr, by int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.opens[addr] += by; g.opens[addr] == 0 {
		delete(g.opens, addr)
	}
}

// opened reports whether somebody has memory open.
func (g *rig) opened(addr uintptr) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.opens[addr] > 0
}

// fakeDevice is the device of one rank: a queue, and what its kernels compute in guarded memory.
type fakeDevice struct {
	*fakedevice.Device
	rig     *rig
	ordinal int
	main    *fakeQueue
	mu      sync.Mutex
	own     []backend.Buffer // memory of this device among those of the rig
}

func (d *fakeDevice) Name() string           { return fmt.Sprintf("fake:%d", d.ordinal) }
func (d *fakeDevice) Ordinal() int           { return d.ordinal }
func (d *fakeDevice) Bind() (func(), error)  { return func() {}, nil }
func (d *fakeDevice) Default() backend.Queue { return d.main }
func (d *fakeDevice) Close() error           { return d.main.Close() }

func (d *fakeDevice) NewQueue() (backend.Queue, error) {
	q, err := d.Device.NewQueue()
	if err != nil {
		return nil, err
	}
	s := &fakeQueue{Queue: q, dev: d}
	d.rig.with(func() { s.id = d.rig.handle(); d.rig.streams[s.id] = s })
	return s, nil
}

func (d *fakeDevice) Alloc(nbytes int) (backend.Buffer, error) {
	doing := "alloc"
	if nbytes > smallBytes {
		doing = "alloc much"
	}
	if err := d.rig.failing(d.ordinal, doing); err != nil {
		return backend.Buffer{}, err
	}
	b, err := d.Device.Alloc(nbytes)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.own = append(d.own, b)
	return b, err
}

func (d *fakeDevice) Holds(addr uintptr) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.ContainsFunc(d.own, func(b backend.Buffer) bool { return addr >= b.Addr() && addr < b.Addr()+uintptr(b.Len()) })
}

func (d *fakeDevice) Free(b backend.Buffer) error {
	d.rig.mu.Lock()
	delete(d.rig.groups, b.Addr())
	d.rig.mu.Unlock()
	d.mu.Lock()
	d.own = slices.DeleteFunc(d.own, func(own backend.Buffer) bool { return own.Addr() == b.Addr() })
	d.mu.Unlock()
	if d.rig.opened(b.Addr()) {
		return errors.Join(d.Device.Free(b), fmt.Errorf("%#x was freed while another rank had it open", b.Addr()))
	}
	return d.Device.Free(b)
}

func (d *fakeDevice) read(addr uintptr, n int) []byte {
	x := make([]byte, n)
	if err := d.rig.move(backend.Of(x), backend.OnDevice(backend.U8, addr, n)); err != nil {
		panic(err)
	}
	return x
}

func (d *fakeDevice) write(addr uintptr, x []byte) {
	if err := d.rig.move(backend.OnDevice(backend.U8, addr, len(x)), backend.Of(x)); err != nil {
		panic(err)
	}
}

func (d *fakeDevice) Model() string        { return h200 }
func (d *fakeDevice) Multiprocessors() int { return 0 }
func (d *fakeDevice) Retain() error        { return nil }
func (d *fakeDevice) Release() error       { return nil }

// connections are those that the test wants, or all to all.
func (d *fakeDevice) connections() Wires {
	if d.rig.wires != nil {
		return d.rig.wires(d.ordinal)
	}
	return switched(make([]int, 16)...)[d.ordinal].with(18)
}

func (d *fakeDevice) PCIBusID() string         { return d.connections().Bus }
func (d *fakeDevice) Reachable() []string      { return d.connections().Reach }
func (d *fakeDevice) NVLinks() ([]string, int) { w := d.connections(); return w.Direct, w.Switches }

func (d *fakeDevice) ComputeCapability() int {
	if d.connections().Tears {
		return 89
	}
	return 90
}

func (w Wires) with(switches int) Wires {
	w.Switches = switches
	return w
}

func (d *fakeDevice) EnablePeerAccess(int) error { return d.rig.failing(d.ordinal, "peer access") }

func (d *fakeDevice) Export(b backend.Buffer) ([]byte, error) {
	name := binary.LittleEndian.AppendUint64(nil, uint64(b.Addr()))
	return binary.LittleEndian.AppendUint64(name, uint64(b.Len())), d.rig.failing(d.ordinal, "export")
}

func (d *fakeDevice) Import(name []byte) (backend.Buffer, error) {
	if err := d.rig.failing(d.ordinal, "import"); err != nil {
		return backend.Buffer{}, err
	}
	at := binary.LittleEndian.Uint64(name)
	d.rig.open(uintptr(at), 1)
	return backend.OnDevice(backend.U8, uintptr(at), int(binary.LittleEndian.Uint64(name[8:]))), nil
}

func (d *fakeDevice) CloseImport(b backend.Buffer) error {
	err := d.rig.failing(d.ordinal, "close import")
	d.rig.open(b.Addr(), -1)
	return err
}

func (d *fakeDevice) Disown(backend.Buffer) error { return nil }

func (d *fakeDevice) AllocHost(nbytes int) (backend.Buffer, error) {
	doing := "pin"
	if nbytes == progressBytes {
		doing = "pin progress"
	}
	if err := d.rig.failing(d.ordinal, doing); err != nil {
		return backend.Buffer{}, err
	}
	b := backend.Of(make([]byte, nbytes))
	d.rig.mu.Lock()
	defer d.rig.mu.Unlock()
	d.rig.pins++
	d.rig.words[b.Addr()] = b
	return b, nil
}

func (d *fakeDevice) FreeHost(b backend.Buffer) error {
	if d.rig.freeing != nil {
		<-d.rig.freeing
	}
	d.rig.mu.Lock()
	defer d.rig.mu.Unlock()
	d.rig.pins--
	delete(d.rig.words, b.Addr())
	return nil
}

// fakeQueue is a queue of the host under a guard, with a number, and with kernels that
// exchange data.
type fakeQueue struct {
	backend.Queue
	dev *fakeDevice
	id  uintptr
}

var _ backend.GraphQueue = (*fakeQueue)(nil)

func (q *fakeQueue) Stream() uintptr       { return q.id }
func (q *fakeQueue) Unwrap() backend.Queue { return q.Queue }

func (q *fakeQueue) Recording() *backend.Recording {
	return q.Queue.(backend.GraphQueue).Recording()
}

func (q *fakeQueue) Capture(f func() error) (*backend.Graph, error) {
	return fakedevice.Capture(q, q.Queue, f)
}

// Fill writes to pinned memory, too.
func (q *fakeQueue) Fill(dst backend.Buffer, value float64) error {
	q.dev.rig.mu.Lock()
	words, pinned := q.dev.rig.words[dst.Addr()]
	q.dev.rig.mu.Unlock()
	if !pinned {
		return q.Queue.Fill(dst, value)
	}
	s := &status{words: words}
	return q.submit(func() { s.flag(0).Store(uint32(value)) })
}

// submit runs f on the queue: it waits for an event that runs f when asked.
func (q *fakeQueue) submit(f func()) error { return q.Queue.Wait(task(f)) }

type task func()

func (task) Done() bool { return false }

func (t task) Join(context.Context) error { t(); return nil }

func (q *fakeQueue) Record() (backend.Event, error) {
	e, err := q.Queue.Record()
	if busy := q.dev.rig.busy; busy != nil {
		return held{e, busy}, err
	}
	return e, err
}

// held is an event that happens late for those who wait only so long, as the group does for
// the copies that it begins with.
type held struct {
	backend.Event
	busy chan struct{}
}

func (h held) Join(ctx context.Context) error {
	if _, limited := ctx.Deadline(); limited {
		select {
		case <-h.busy:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return h.Event.Join(ctx)
}

// Copy fails where a link does not work.
func (q *fakeQueue) Copy(dst, src backend.Buffer) error {
	if err := q.dev.rig.failing(q.dev.ordinal, "copy"); err != nil {
		return nil // and nothing arrives
	}
	return q.Queue.Copy(dst, src)
}

// Exchange keeps the call, and does what the kernel does: by the fake's mail.
func (q *fakeQueue) Exchange(p *peers.Peers, x *peers.Exchange) error {
	g, d := q.dev.rig, q.dev
	var driver peers.Launcher
	g.look(func() { driver = g.driver })
	if driver != nil {
		if err := peers.New(driver).Exchange(p, x); err != nil {
			return err
		}
	}
	e := g.kernel(d, p)
	g.mu.Lock()
	seen := g.seen[d.ordinal]
	g.seen[d.ordinal] = append(seen[max(len(seen)-maxSeen+1, 0):], *x)
	g.mu.Unlock()
	s := kernelStep(x)
	m := &mark{}
	g.with(func() {
		if x.Event != 0 {
			g.events[x.Event] = m
		}
	})
	return q.submit(func() {
		if !e.stopped() {
			e.group([]step{s})
		}
		g.with(func() { m.done = true })
	})
}

// kernelStep is what NCCL would do in the place of a kernel.
func kernelStep(x *peers.Exchange) step {
	s := step{what: stepAllReduce, dtype: ncclType(x.Src.DType()), op: ncclOp(x.Op), src: x.Src.Addr(), dst: x.Dst.Addr(), count: uint64(x.Src.Len())}
	switch x.Way {
	case peers.ReduceScatter:
		s.what, s.count = stepReduceScatter, uint64(x.Dst.Len())
	case peers.AllGather:
		s.what = stepAllGather
	}
	return s
}

// kernel is one rank's kernel among those of its group, which the pads tell.
func (g *rig) kernel(d *fakeDevice, p *peers.Peers) *fakeEngine {
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
	s := &status{words: g.words[p.Status]}
	return &fakeEngine{fake: g.fake, dev: d, ring: r, rank: p.Rank, stopped: func() bool { return s.flag(0).Load() != 0 }}
}

// last returns the last of a rank's calls.
func (g *rig) last(rank int) peers.Exchange {
	g.mu.Lock()
	defer g.mu.Unlock()
	calls := g.seen[rank]
	return calls[len(calls)-1]
}
