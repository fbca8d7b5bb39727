package lowlatency

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/backend"
	peers "github.com/euryale-ml/euryale/kernels/cuda"
)

// Communicator runs the calls that it wins by kernels over the devices' memory, and
// leaves the others to inner.
type Communicator struct {
	// What every call reads or writes is together here: behind a launch all of it has to come
	// from slower caches.
	inner   backend.Communicator
	rank    int // inner's
	size    int
	fabric  *fabric // nil if inner does everything
	carrier Carrier
	holder  holder // the device, if it can tell

	// mu is held while a call is started, and guards what follows.
	mu      sync.Mutex
	closing atomic.Bool    // needs no mu
	last    backend.Queue  // where a kernel was started last
	kernels exchanger      // its
	call    peers.Exchange // the one that is being started: here it takes no memory of its own

	launch  func(backend.Queue, uintptr) error // start and outcome, made once
	outcome func(backend.Header) error
	used    [len(algorithmNames)]atomic.Int64
	plan    plan
	limits  limits

	options Options
	part    bool // made by Split
	members backend.Members
	why     string        // there is no fabric
	left    chan struct{} // closed by Close
	watched chan struct{} // closed when nobody watches inner any more
}

var (
	_ backend.Wrapper = (*Communicator)(nil)
)

// limits are thresholds by what they depend on: every call looks them up.
type limits [backend.Scatter + 1][backend.U8 + 1][]limit

// New returns inner with the calls that kernels over the devices' memory win taken
// from it, and owns it. It is collective. Where the group cannot have that, inner
// does everything, on every rank: [Communicator.Refused] says why. An error is one
// of inner, which has failed then and is left to the caller.
func New(inner backend.Communicator, o Options) (*Communicator, error) {
	o, err := o.measured(inner.Rank())
	if err != nil {
		return nil, fmt.Errorf("%s: low-latency kernels: %w", backend.RankOf(inner), err)
	}
	c := &Communicator{inner: inner, rank: inner.Rank(), size: inner.Size(), members: inner.Capabilities().Members, left: make(chan struct{}), watched: make(chan struct{})}
	c.launch, c.outcome = c.start, c.ended
	c.part = o.endings != nil
	if !c.part {
		o.endings = &endings{}
	}
	c.options = o
	var why refusal
	c.fabric, c.plan, err = o.join(inner)
	c.options.Table = c.plan.Table // the parts', too
	if errors.As(err, &why) {
		c.why = why.Error()
		close(c.watched)
		return c, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: low-latency kernels: %w", backend.RankOf(inner), err)
	}
	c.carrier, _ = backend.As[Carrier](inner) // introduce has made sure
	c.holder, _ = inner.Device().(holder)
	for _, k := range backend.Kinds() {
		for _, d := range backend.DTypes() {
			c.limits[k][d] = c.row(k, d).limits()
		}
	}
	go c.watch(c.carrier.Ended())
	return c, nil
}

// watch ends the kernels that are under way once inner has ended, and not before: what
// they leave undone then, inner knows to be undone. It ends inner when one of them has
// given up waiting, so that the other ranks hear of it even if this one does nothing.
func (c *Communicator) watch(ended <-chan struct{}) {
	defer close(c.watched)
	defer c.fabric.stop()
	look := time.NewTicker(lookTime)
	defer look.Stop()
	for {
		select {
		case <-ended:
			return
		case <-c.left:
			return
		case <-look.C:
			if peer := c.fabric.late(); peer >= 0 {
				look.Stop()
				go c.inner.Abort(c.overdue(peer)) // which waits for the kernels
			}
		}
	}
}

// lookTime is how often watch looks for kernels that have given up, which have waited for
// seconds then.
const lookTime = 20 * time.Millisecond

// row is what was measured of a collective on this machine, nil if nothing was.
func (c *Communicator) row(k backend.Kind, d backend.DType) *Row {
	return c.plan.Table.find(c.plan.cards[0].Model, c.plan.Topology.Link, c.Size(), k, d)
}

// Name implements [backend.Communicator].
func (c *Communicator) Name() string { return c.inner.Name() }

// Rank implements [backend.Communicator].
func (c *Communicator) Rank() int { return c.rank }

// Size implements [backend.Communicator].
func (c *Communicator) Size() int { return c.size }

// Device implements [backend.Communicator].
func (c *Communicator) Device() backend.Device { return c.inner.Device() }

// Unwrap implements [backend.Wrapper].
func (c *Communicator) Unwrap() []backend.Communicator { return []backend.Communicator{c.inner} }

// Refused returns why inner does everything, "" if it does not.
func (c *Communicator) Refused() string { return c.why }

// Link returns how the devices are connected.
func (c *Communicator) Link() Link { return c.plan.Topology.Link }

// Usage counts the calls of this rank, by algorithm.
type Usage struct{ Inner, LL, LL128TwoShot, OneShot, TwoShot, Mesh, Halved int64 }

// Usage returns the counts so far.
func (c *Communicator) Usage() Usage {
	n := func(a Algorithm) int64 { return c.used[a].Load() }
	return Usage{n(Inner), n(LL), n(LL128TwoShot), n(OneShot), n(TwoShot), n(Mesh), n(Halved)}
}

// Explain says how a call is run, and why: nbytes is the size of the operand, or of
// a chunk where there are chunks.
func (c *Communicator) Explain(what backend.Collective, d backend.DType, nbytes int) string {
	text := fmt.Sprintf("%v of %s %v among %d ranks", what, size(nbytes), d, c.Size())
	if c.fabric == nil {
		return fmt.Sprintf("%s: inner: %s", text, c.why)
	}
	use := c.choose(&what, d, nbytes)
	text = fmt.Sprintf("%s of %s, %v: %v", text, c.plan.cards[0].Model, c.plan.Topology.Link, use)
	switch {
	case !eligible(&what, d):
		return text + ": there are kernels for sums and averages of f32, f16 and bf16, by all-reduce and even reduce-scatter, and for even all-gather"
	case use == Halved:
		return fmt.Sprintf("%s, in 16 bits from %s on", text, size(c.plan.Halved))
	case what.Algorithm != backend.Auto:
		text += ", as the call asks for"
	case c.plan.Force != Inner:
		text += fmt.Sprintf(", where %v is forced", c.plan.Force)
	}
	if used, lacking := c.Windows(); lacking > 0 {
		text += fmt.Sprintf("\nAlloc has used up its %d windows: %s from it are copied on the way to the others", used, size(lacking))
	}
	text += "\n" + c.row(what.Kind, d).explain(nbytes)
	if s := scheduleOf(use, c.Size(), c.plan.Topology.Partners); s != nil && what.Kind == backend.AllReduce {
		text += "\nx operand, y result, shown what others reach:\n" + s.String()
	}
	return text
}

// eligible reports whether there are kernels for a call.
func eligible(what *backend.Collective, d backend.DType) bool {
	switch {
	case what.Splits != nil:
		return false
	case what.Kind == backend.AllReduce, what.Kind == backend.ReduceScatter:
		return peers.Adds(d, what.Op)
	}
	return what.Kind == backend.AllGather && d.Valid()
}

// choose returns the algorithm for a call. It depends on what is the same on every
// rank, and on nothing else: not on where or how aligned the operands are.
func (c *Communicator) choose(what *backend.Collective, d backend.DType, nbytes int) Algorithm {
	if c.fabric == nil || nbytes == 0 || !eligible(what, d) {
		return Inner
	}
	if what.AllowHalf != 0 {
		return c.halve(nbytes)
	}
	use := pick(c.limits[what.Kind][d], nbytes)
	if c.plan.Force != Inner {
		use = c.plan.Force
	}
	switch what.Algorithm {
	case backend.OneShot:
		use = OneShot
	case backend.TwoShot:
		use = TwoShot
	}
	switch mesh := c.Link() == CubeMesh; {
	case mesh && use != Inner && what.Kind == backend.AllReduce:
		return Mesh // whatever was asked for
	case mesh, use == Mesh, use == Halved: // needs what there is not: other kernels, a mesh, leave
		return Inner
	case what.Kind != backend.AllReduce && use != OneShot:
		return Inner // these have one shot, or none
	case use == LL && nbytes > packetBytes && !c.lines():
		return TwoShot
	case use == LL && nbytes > llBytes(c.Size()):
		return LL128TwoShot
	case use == LL128TwoShot && !c.lines():
		return TwoShot
	}
	return use
}

// halve is choose for calls that may travel as 16 bits.
func (c *Communicator) halve(nbytes int) Algorithm {
	if c.lines() && c.plan.Halved > 0 && nbytes >= c.plan.Halved {
		return Halved
	}
	return Inner
}

// Capabilities implements [backend.Communicator].
func (c *Communicator) Capabilities() backend.Capabilities {
	caps := c.inner.Capabilities()
	caps.Rounded, caps.StartRounded = nil, nil
	caps.Transport = func(what backend.Collective, d backend.DType, count int) backend.DType {
		if d == backend.F32 && what.Kind == backend.AllReduce && c.Halves(what, count) {
			return what.AllowHalf
		}
		return d
	}
	return caps
}

// Halves reports whether a call of F32 makes use of AllowHalf.
func (c *Communicator) Halves(what backend.Collective, count int) bool {
	return what.AllowHalf != 0 && count <= math.MaxInt/backend.F32.Size() && c.choose(&what, backend.F32, count*backend.F32.Size()) == Halved
}

// lines reports whether 128 bytes that a warp writes at once arrive at once: NVLink
// does that with most devices, PCIe may not.
func (c *Communicator) lines() bool { return c.plan.lines }

// Start implements [backend.Communicator].
func (c *Communicator) Start(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	count, err := what.Check(c.Rank(), c.Size(), dst, src)
	use := Inner
	if d := what.DType(dst, src); err == nil && count <= math.MaxInt/d.Size() {
		use = c.choose(&what, d, count*d.Size())
	}
	if use == Inner {
		w, err := c.inner.Start(q, what, dst, src) // which finds what Check has found
		if err == nil {
			c.used[Inner].Add(1)
		}
		return w, err
	}
	if !dst.Device() || !src.Device() {
		return c.staged(q, use, what, count, dst, src)
	}
	return c.carry(q, use, &what, count, dst, src)
}

// carry starts a call on device memory. Once a kernel has given up waiting, it is an error that
// names the rank; until watch has seen that, a call begins, does nothing, and Join returns that error.
func (c *Communicator) carry(q backend.Queue, use Algorithm, what *backend.Collective, count int, dst, src backend.Buffer) (backend.Work, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing.Load() {
		return nil, c.over(what, errClosedHere)
	}
	if err := c.foreign(what, dst, src); err != nil && (c.usable(what) == nil || c.closing.Load()) {
		return nil, err // else Carry says why the group has ended
	}
	c.describe(use, what, dst, src)
	w, err := c.carrier.Carry(q, *what, count, dst, src, c.launch, c.outcome)
	if err == nil {
		c.used[use].Add(1)
		return w, nil
	}
	if peer := c.fabric.overdue(); peer >= 0 { // inner knows that this rank has ended it, not why
		return nil, c.failure(peer, what.String())
	}
	return nil, err
}

// Enqueue puts the kernel of a call on a queue and does nothing else: the call is not
// numbered, compared or watched, and there is nothing to join. That is what a CUDA
// graph can capture (cuda.Queue.Capture), and launch as often as the other ranks do:
// every rank must run the same kernels in the same order, those of Start among them.
// Operands are memory of the device.
//
// So what Start does for its calls is up to the caller. Kernels of Enqueue, and graphs, are
// to be on one queue with each other and with those of Start, or ordered by events. After
// Close or Abort a graph must not be launched any more, since the memory that it names may
// be somebody else's; those that were are to be done, or on the queue of the last Start or
// Enqueue, when Close is called.
//
// Errors: ErrUnsupported if the call would be inner's; ErrClosed after Close, ErrAborted
// once the communicator has failed.
func (c *Communicator) Enqueue(q backend.Queue, what backend.Collective, dst, src backend.Buffer) error {
	count, err := what.Check(c.Rank(), c.Size(), dst, src)
	if err != nil {
		return fmt.Errorf("%s: %w", backend.RankOf(c), err)
	}
	use := c.choose(&what, what.DType(dst, src), count*dst.DType().Size())
	if use == Inner || !dst.Device() || !src.Device() {
		return fmt.Errorf("%w: %s: %v of this size and place has no kernel to enqueue: Explain says what it uses", backend.ErrUnsupported, backend.RankOf(c), what)
	}
	if q == nil {
		q = c.Device().Default()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.usable(&what); err != nil {
		return err
	}
	if err := c.foreign(&what, dst, src); err != nil {
		return err
	}
	c.describe(use, &what, dst, src)
	return c.start(q, 0)
}

// foreign returns an error for memory that is not of this rank's device, where the device can
// tell: this rank's kernels may not reach it.
func (c *Communicator) foreign(what *backend.Collective, dst, src backend.Buffer) error {
	if c.holder == nil || c.holder.Holds(dst.Addr()) && (src.Addr() == dst.Addr() || c.holder.Holds(src.Addr())) {
		return nil
	}
	return fmt.Errorf("%w: %s: %v of memory that is not of this rank's device, %s: copy it there first, or allocate it there", backend.ErrArgument, backend.RankOf(c), *what, c.Device().Name())
}

// usable returns an error once kernels must not be started any more. mu is held.
func (c *Communicator) usable(what *backend.Collective) error {
	if c.closing.Load() {
		return c.over(what, errClosedHere)
	}
	if peer := c.fabric.overdue(); peer >= 0 {
		return c.failure(peer, what.String())
	}
	select {
	case <-c.carrier.Ended():
		return c.over(what, errEnded)
	default:
		return nil
	}
}

var (
	errClosedHere = fmt.Errorf("%w: Close was called on this rank", backend.ErrClosed)
	errEnded      = fmt.Errorf("%w: the communicator has failed: Start says why", backend.ErrAborted)
)

func (c *Communicator) over(what *backend.Collective, cause error) error {
	return &backend.Error{Comm: c.Name(), Members: c.members, Rank: c.Rank(), Peer: -1, Call: what.String(), Cause: cause}
}

// describe makes c.call the call as the kernels know it. mu is held.
func (c *Communicator) describe(use Algorithm, what *backend.Collective, dst, src backend.Buffer) {
	x := &c.call
	x.Op, x.Dst, x.Src, x.Source, x.Target, x.Half = what.Op, dst, src, 0, 0, 0
	switch {
	case what.Kind == backend.ReduceScatter:
		x.Way, x.Source = peers.ReduceScatter, c.fabric.place(src, dst.NBytes())
	case what.Kind == backend.AllGather:
		x.Way, x.Source = peers.AllGather, c.fabric.place(src, src.NBytes())
	case use == Mesh:
		x.Way = peers.Mesh
	case use == LL && src.NBytes() <= packetBytes:
		x.Way = peers.LL
	case use == LL:
		x.Way = peers.LL128
	case use == LL128TwoShot:
		x.Way = peers.LL128TwoShot
	case use == Halved:
		x.Way, x.Half = peers.Halved, what.AllowHalf
	case use == TwoShot:
		x.Way, x.Target = peers.TwoShot, c.fabric.place(dst, dst.NBytes())
	default:
		x.Way = peers.OneShot
		if dst.Addr() != src.Addr() {
			x.Source = c.fabric.place(src, src.NBytes())
		}
	}
}

// start launches c.call, and records event behind it. mu is held.
func (c *Communicator) start(q backend.Queue, event uintptr) error {
	if q != c.last {
		k, ok := q.(exchanger)
		if !ok {
			return fmt.Errorf("%w: a %T cannot exchange data", backend.ErrUnsupported, q)
		}
		c.last, c.kernels = q, k
	}
	c.call.Event = event
	return c.kernels.Exchange(&c.fabric.peers, &c.call)
}

// staged runs a call that was given host memory, to its end, and returns its error at once:
// the other ranks cannot know of the memory, so it takes the same algorithm.
func (c *Communicator) staged(q backend.Queue, use Algorithm, what backend.Collective, count int, dst, src backend.Buffer) (w backend.Work, err error) {
	if q == nil {
		q = c.Device().Default()
	}
	if n, ok := c.carrier.(noticer); ok {
		n.HostMemory(what)
	}
	x, y, free, err := c.twins(src, dst)
	defer func() { err = errors.Join(err, free()) }()
	if err == nil && !src.Device() {
		err = q.Move(x, src)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %v of host memory: %w", backend.RankOf(c), what, err)
	}
	carried, err := c.carry(q, use, &what, count, y, x)
	if err != nil {
		return nil, err
	}
	if err := carried.Join(context.Background()); err != nil {
		return nil, err
	}
	if !dst.Device() {
		if err := errors.Join(q.Move(dst, y), drain(context.Background(), q)); err != nil {
			return nil, fmt.Errorf("%s: %v to host memory: %w", backend.RankOf(c), what, err)
		}
	}
	return carried, nil
}

// twins returns device memory in place of the host's, which free gives back.
func (c *Communicator) twins(src, dst backend.Buffer) (x, y backend.Buffer, free func() error, err error) {
	var taken []backend.Buffer
	twin := func(b backend.Buffer) backend.Buffer {
		if b.Device() || err != nil {
			return b
		}
		var t backend.Buffer
		if t, err = c.Device().Alloc(b.NBytes()); err == nil {
			taken = append(taken, t)
		}
		return t.As(b.DType())
	}
	x, y = twin(src), twin(dst)
	return x, y, func() error {
		var errs []error
		for _, t := range taken {
			errs = append(errs, c.Device().Free(t))
		}
		return errors.Join(errs...)
	}, err
}

// ended returns the error of a call that inner finds nothing wrong with: a kernel that has
// given up has ended, too.
func (c *Communicator) ended(h backend.Header) error {
	if peer := c.fabric.late(); peer >= 0 {
		return c.failure(peer, h.String())
	}
	return nil
}

// failure returns the error of a call once a kernel has given up waiting for a rank, and
// tells the others.
func (c *Communicator) failure(peer int, call string) error {
	cause := c.overdue(peer)
	c.Abort(cause)
	return &backend.Error{Comm: c.Name(), Members: c.members, Rank: c.Rank(), Peer: peer, Call: call, Cause: cause}
}

func (c *Communicator) overdue(peer int) error {
	return fmt.Errorf("%w: %s did not take part within %v, as the device has seen", backend.ErrTimeout, c.members.Rank(peer), c.options.limit())
}

// Windows returns how many windows Alloc has used, of 63, and the bytes that it has given
// out since without one: they are memory like any other, copied on the way to the others.
func (c *Communicator) Windows() (used, lacking int) {
	if c.fabric == nil {
		return 0, 0
	}
	return int(c.fabric.used.Load()), int(c.fabric.lacking.Load())
}

// Alloc implements [backend.Communicator]. Calls on the memory need no copy on the
// way to the other ranks if they begin at a multiple of 16 bytes and are one long.
//
// That goes for 63 windows, of which each Alloc of more than 1 MiB takes one; smaller ones
// share them. Later memory works like that of the device, at its speed: take a
// few large pieces rather than many. [Communicator.Windows] and Explain say when windows
// have run out. The memory is there until Free
// or Close.
func (c *Communicator) Alloc(nbytes int) (backend.Buffer, error) {
	if c.fabric == nil {
		return c.inner.Alloc(nbytes)
	}
	if nbytes < 0 {
		return backend.Buffer{}, fmt.Errorf("%w: %s: alloc of %d bytes", backend.ErrArgument, backend.RankOf(c), nbytes)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing.Load() {
		return backend.Buffer{}, &backend.Error{Comm: c.Name(), Members: c.members, Rank: c.Rank(), Peer: -1, Call: "alloc", Cause: errClosedHere}
	}
	b, err := c.fabric.alloc(nbytes)
	if err != nil {
		var sticky *backend.Error
		if errors.As(err, &sticky) {
			return b, err // it says everything
		}
		return b, fmt.Errorf("%s: alloc of %d bytes: %w", backend.RankOf(c), nbytes, err)
	}
	return b, nil
}

// Free implements [backend.Communicator]. A window is free for another Alloc once all
// pieces of it are. After a failure, memory is left to Close.
func (c *Communicator) Free(b backend.Buffer) error {
	if c.fabric == nil {
		return c.inner.Free(b)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if b.Len() == 0 || c.closing.Load() {
		return nil
	}
	if err := c.fabric.release(b); err != nil {
		return fmt.Errorf("%s: free: %w", backend.RankOf(c), err)
	}
	return nil
}

// Split implements [backend.Communicator]. Each part has memory of its own, if it
// can.
func (c *Communicator) Split(color, key int) (backend.Communicator, error) {
	part, err := c.inner.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	wrapped, err := New(part, c.options)
	if err != nil {
		return nil, errors.Join(err, part.Close())
	}
	return wrapped, nil
}

// Abort implements [backend.Communicator]. Kernels that wait are told to stop when inner
// has ended: see watch.
func (c *Communicator) Abort(cause error) { c.inner.Abort(cause) }

const (
	// stuckTime is how long Close waits for this rank's kernels, which have been told
	// to stop: what is before them on their queue may take some time.
	stuckTime = 2 * time.Second
	// patience is how long it waits for the others. Usually all ranks close at a time.
	patience = 100 * time.Millisecond
)

// Close implements [backend.Communicator]. Memory that another rank's kernels may still
// write to is not given back before that rank has closed, too, or its process has ended.
// Close waits up to 100 ms for that, for parts that were closed, too, and up to 2 s for
// kernels of its own that are behind other work. Then it returns, and the memory is given
// back when that has come: [Communicator.Kept] says how much is left. The device may be
// closed before.
func (c *Communicator) Close() error {
	if c.closing.Swap(true) {
		<-c.watched
		return nil
	}
	err := c.inner.Close() // the kernels of this rank end, and the others learn that it is gone
	close(c.left)
	<-c.watched
	if failed := c.leave(); failed != nil {
		err = errors.Join(err, fmt.Errorf("%s: close: %w", backend.RankOf(c), failed))
	}
	return err
}

// leave begins to give back what this rank has, and waits for that, and for the parts', up to
// 100 ms. Parts may have memory where the group has none.
func (c *Communicator) leave() error {
	e := c.options.endings
	var awaited []*ending
	if c.fabric != nil {
		c.mu.Lock() // nothing is started any more
		last := c.last
		c.mu.Unlock()
		settle(last, stuckTime)
		awaited = append(awaited, e.begin(func() error { return c.fabric.leave(last) }))
	}
	if !c.part {
		awaited = e.all()
	}
	err := e.wait(patience, awaited...)
	if c.fabric != nil {
		err = errors.Join(err, c.fabric.keep())
	}
	return err
}

// Kept returns how many bytes of the device this rank has not given back after Close,
// because kernels of ranks that have not closed may write there.
func (c *Communicator) Kept() int {
	if c.fabric == nil {
		return 0
	}
	return int(c.fabric.held.Load())
}
