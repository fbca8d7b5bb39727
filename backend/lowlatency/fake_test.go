package lowlatency

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/backend/fakedevice"
	"github.com/euryale-ml/euryale/backend/host"
	peers "github.com/euryale-ml/euryale/kernels/cuda"
)

// rig is a machine whose devices are parts of one guarded memory: kernels of each
// reach that of each other one, and what was not freed, or is used after it was, is
// an error. Kernels that exchange data are calls of package host.
type rig struct {
	memory *fakedevice.Device

	bus sync.Mutex // held while one rank's kernels touch the memory of another

	mu    sync.Mutex
	pins  int                        // host memory that is not freed
	opens map[uintptr]int            // imports that are not closed, by address
	seen  map[int][]peers.Exchange   // the kernels' last calls, by rank
	wires func(rank, size int) Wires // nil means all are connected
	fault func(rank int, doing string) error
	busy  chan struct{} // the fabric's own copies end once it is closed, if it is not nil

	elsewhere atomic.Uintptr // memory that is of no rank's device
}

// maxSeen is how many calls of a rank are kept: there are tests for what grows.
const maxSeen = 100

func newRig(t testing.TB) *rig {
	t.Helper()
	memory, err := fakedevice.New(host.Device{})
	if err != nil {
		t.Fatal(err)
	}
	g := &rig{memory: memory, seen: map[int][]peers.Exchange{}, opens: map[uintptr]int{}}
	t.Cleanup(func() {
		if err := g.memory.Close(); err != nil {
			t.Error(err)
		}
		if g.pins != 0 || len(g.opens) != 0 {
			t.Errorf("%d pieces of pinned memory and imports %v are left", g.pins, g.opens)
		}
	})
	return g
}

func (g *rig) failing(rank int, doing string) error {
	if g.fault == nil {
		return nil
	}
	return g.fault(rank, doing)
}

func (g *rig) pin(by int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pins += by
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

// fakeDevice is the device of one rank.
type fakeDevice struct {
	*fakedevice.Device
	rig        *rig
	rank, size int
	freeing    chan struct{} // the driver frees memory of the host once it is closed, if it is not nil
}

func (d *fakeDevice) Default() backend.Queue { return &fakeQueue{d.Device.Default(), d} }

func (d *fakeDevice) NewQueue() (backend.Queue, error) {
	q, err := d.Device.NewQueue()
	return &fakeQueue{q, d}, err
}

func (d *fakeDevice) Model() string           { return h200 }
func (d *fakeDevice) Ordinal() int            { return d.rank }
func (d *fakeDevice) Holds(addr uintptr) bool { return addr != d.rig.elsewhere.Load() }
func (d *fakeDevice) Close() error            { return nil }

func (d *fakeDevice) Wires() Wires {
	if d.rig.wires != nil {
		return d.rig.wires(d.rank, d.size)
	}
	return switched(make([]int, d.size)...)[d.rank].with(18)
}

func (w Wires) with(switches int) Wires {
	w.Switches = switches
	return w
}

func (d *fakeDevice) Alloc(nbytes int) (backend.Buffer, error) {
	doing := "alloc"
	if nbytes > smallBytes {
		doing = "alloc much"
	}
	if err := d.rig.failing(d.rank, doing); err != nil {
		return backend.Buffer{}, err
	}
	return d.Device.Alloc(nbytes)
}

func (d *fakeDevice) Free(b backend.Buffer) error {
	if d.rig.opened(b.Addr()) {
		return errors.Join(d.Device.Free(b), fmt.Errorf("%#x was freed while another rank had it open", b.Addr()))
	}
	return d.Device.Free(b)
}

func (d *fakeDevice) Befriend(int) error { return d.rig.failing(d.rank, "befriend") }

func (d *fakeDevice) Export(b backend.Buffer) ([]byte, error) {
	name := binary.LittleEndian.AppendUint64(nil, uint64(b.Addr()))
	return binary.LittleEndian.AppendUint64(name, uint64(b.Len())), d.rig.failing(d.rank, "export")
}

func (d *fakeDevice) Import(name []byte) (backend.Buffer, error) {
	if err := d.rig.failing(d.rank, "import"); err != nil {
		return backend.Buffer{}, err
	}
	at := binary.LittleEndian.Uint64(name)
	d.rig.open(uintptr(at), 1)
	return backend.OnDevice(backend.U8, uintptr(at), int(binary.LittleEndian.Uint64(name[8:]))), nil
}

func (d *fakeDevice) CloseImport(b backend.Buffer) error {
	err := d.rig.failing(d.rank, "close import")
	d.rig.open(b.Addr(), -1)
	return err
}

func (d *fakeDevice) Disown(backend.Buffer) error { return nil }

func (d *fakeDevice) AllocHost(nbytes int) (backend.Buffer, error) {
	if err := d.rig.failing(d.rank, "pin"); err != nil {
		return backend.Buffer{}, err
	}
	d.rig.pin(1)
	return backend.Of(make([]byte, nbytes)), nil
}

func (d *fakeDevice) FreeHost(backend.Buffer) error {
	if d.freeing != nil {
		<-d.freeing
	}
	d.rig.pin(-1)
	return nil
}

// fakeQueue has kernels that exchange data.
type fakeQueue struct {
	backend.Queue
	dev *fakeDevice
}

func (q *fakeQueue) Record() (backend.Event, error) {
	if busy := q.dev.rig.busy; busy != nil {
		e, err := q.Queue.Record()
		return held{e, busy}, err
	}
	return q.Queue.Record()
}

// held is an event that happens late for those who wait only so long, as the fabric does for
// its copies: inner's calls go on.
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
	if err := q.dev.rig.failing(q.dev.rank, "copy"); err != nil {
		return nil // and nothing arrives
	}
	q.dev.rig.bus.Lock()
	defer q.dev.rig.bus.Unlock()
	return q.Queue.Copy(dst, src)
}

func (q *fakeQueue) Move(dst, src backend.Buffer) error {
	q.dev.rig.bus.Lock()
	defer q.dev.rig.bus.Unlock()
	return q.Queue.Move(dst, src)
}

// Exchange keeps the call.
func (q *fakeQueue) Exchange(_ *peers.Peers, x *peers.Exchange) error {
	g := q.dev.rig
	g.mu.Lock()
	defer g.mu.Unlock()
	seen := g.seen[q.dev.rank]
	g.seen[q.dev.rank] = append(seen[max(len(seen)-maxSeen+1, 0):], *x)
	return nil
}

// last returns the last of a rank's calls.
func (g *rig) last(rank int) peers.Exchange {
	g.mu.Lock()
	defer g.mu.Unlock()
	calls := g.seen[rank]
	return calls[len(calls)-1]
}

// fakeInner is a communicator of the rig that carries calls.
type fakeInner struct {
	*fakedevice.Communicator
	dev   *fakeDevice
	once  *sync.Once
	ended chan struct{}

	ending func()       // is called before it ends
	said   atomic.Int64 // of host memory
}

var _ Carrier = (*fakeInner)(nil)

func newInner(host backend.Communicator, d *fakeDevice) *fakeInner {
	return &fakeInner{Communicator: fakedevice.Over(host, d.Device), dev: d, once: &sync.Once{}, ended: make(chan struct{}), ending: func() {}}
}

func (c *fakeInner) Device() backend.Device { return c.dev }

func plain(q backend.Queue) backend.Queue {
	if own, ok := q.(*fakeQueue); ok {
		return own.Queue
	}
	return q
}

func (c *fakeInner) Start(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	w, err := c.Communicator.Start(plain(q), what, dst, src)
	if err != nil {
		return nil, err
	}
	return fakeWork{w}, nil
}

type fakeWork struct{ backend.Work }

func (w fakeWork) Wait(q backend.Queue) error { return w.Work.Wait(plain(q)) }

// Carry lets package host do what the kernels are asked for.
func (c *fakeInner) Carry(q backend.Queue, what backend.Collective, count int, dst, src backend.Buffer, launch func(backend.Queue, uintptr) error, outcome func(backend.Header) error) (backend.Work, error) {
	if q == nil {
		q = c.dev.Default()
	}
	if err := launch(q, 0); err != nil {
		return nil, err
	}
	w, err := c.Start(q, what, dst, src)
	if err != nil {
		return nil, err
	}
	return carried{w, func() error { return outcome(what.Header(0, count, src.DType())) }}, nil
}

// carried is a call that is asked what came of it.
type carried struct {
	backend.Work
	outcome func() error
}

func (w carried) Join(ctx context.Context) error {
	if err := w.Work.Join(ctx); err != nil {
		return err
	}
	return w.outcome()
}

func (c *fakeInner) Ended() <-chan struct{} { return c.ended }

func (c *fakeInner) HostMemory(backend.Collective) { c.said.Add(1) }

func (c *fakeInner) end() { c.once.Do(func() { c.ending(); close(c.ended) }) }

func (c *fakeInner) Abort(cause error) {
	c.end()
	c.Communicator.Abort(cause)
}

func (c *fakeInner) Close() error {
	c.end()
	return c.Communicator.Close()
}

func (c *fakeInner) Split(color, key int) (backend.Communicator, error) {
	part, err := c.Communicator.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return newInner(part.(*fakedevice.Communicator).Unwrap()[0], c.dev), nil
}

// options are those of a test: the fake devices, and little memory.
func options() Options {
	return Options{Force: TwoShot, Staging: 4 << 10, Table: prototype(), adapt: func(d backend.Device) (Device, error) {
		fake, ok := d.(*fakeDevice)
		if !ok {
			return nil, errors.New("not a device of the test")
		}
		return fake, nil
	}}
}

// newGroup returns the wrapped ranks of a group; each gets its own options.
func (g *rig) newGroup(size int, timeout time.Duration, of func(rank int) Options) (*backendtest.Group, error) {
	group, err := backendtest.Over(host.New())(size, timeout)
	if err != nil {
		return nil, err
	}
	errs := make([]error, size)
	var all sync.WaitGroup
	for r, c := range group.Comms {
		all.Go(func() {
			inner := newInner(c, &fakeDevice{Device: g.memory, rig: g, rank: r, size: size})
			wrapped, err := New(inner, of(r))
			group.Comms[r], errs[r] = wrapped, err
			if err != nil {
				group.Comms[r] = inner
			}
		})
	}
	all.Wait()
	return group, errors.Join(errs...)
}

// group is newGroup for a test, which closes it.
func (g *rig) group(t testing.TB, size int, of func(rank int) Options) []*Communicator {
	t.Helper()
	group, err := g.newGroup(size, time.Minute, of)
	if err != nil {
		t.Fatal(err)
	}
	comms := make([]*Communicator, size)
	for r := range comms {
		comms[r] = group.Comms[r].(*Communicator)
	}
	t.Cleanup(func() {
		closeAll(t, comms)
		if err := group.Close(); err != nil {
			t.Error(err)
		}
	})
	return comms
}

func closeAll(t testing.TB, comms []*Communicator) {
	t.Helper()
	var all sync.WaitGroup
	for _, c := range comms {
		all.Go(func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

func same(o Options) func(int) Options { return func(int) Options { return o } }

// each runs f on every rank.
func each(t *testing.T, comms []*Communicator, f func(c *Communicator) error) {
	t.Helper()
	var all []backend.Communicator
	for _, c := range comms {
		all = append(all, c)
	}
	backendtest.Each(t, all, func(c backend.Communicator) error { return f(c.(*Communicator)) })
}

// with runs use with device memory that holds x, and reads it back.
func with[T backend.Element](c *Communicator, x []T, use func(b backend.Buffer) error) error {
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
