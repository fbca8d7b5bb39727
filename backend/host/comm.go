package host

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/shm"
	"github.com/euryale-ml/euryale/rendezvous"
)

// comm is one rank of a group.
type comm struct {
	group.Leaf
	rank, size int
	shm        string // where Alloc and Split make shared memory
	spin       spinBudget

	// order is held while a call is started, so that calls keep their order, and while it runs on
	// its caller; it guards the fields below.
	order sync.Mutex
	seq   uint64        // number of the last call
	last  backend.Queue // where the last call was started
	done  backend.Event // the end of the last call, nil if it has finished
	now   call          // the last one that ran on its caller: in place, because it is large

	// busy is held while a call runs on a queue; a goroutine that takes both takes order first.
	// Calls run one after the other, each with one of the two held, which guards the fields below;
	// see hold.
	busy     sync.Mutex
	region   region
	step     uint64 // the last step begun
	adaptive adaptiveSpin
	operands []backend.Buffer // scratch of a reduction
	branches [][]int          // of the current reduction: the terms of each rank's operands
	terms    []int            // in branches; none if each rank has one operand
	shown    []operand        // scratch of a direct all-reduce
	windows  []window

	health health
}

// call is one collective under way.
type call struct {
	c        backend.Collective
	count    int // see Collective.Check
	dst, src backend.Buffer
	seq      uint64 // for the header, like dtype
	dtype    backend.DType
	digest   uint64 // of its header, from the first step on
	first    bool   // before the first step

	announce backend.Announce // nil once it was called, or if there is none
	id       uint64           // its result
}

// tell announces the call, unless it was announced or nobody wants to know.
func (k *call) tell() {
	if k.announce != nil {
		k.id = k.announce(&k.c, k.count, &k.dst, &k.src)
		k.announce = nil
	}
}

// Device implements [backend.Communicator].
func (c *comm) Device() backend.Device { return Device{} }

// Capabilities implements [backend.Communicator]. Calls are compared from the start.
func (c *comm) Capabilities() backend.Capabilities {
	return backend.Capabilities{Backend: Backend{}.Name(), Members: c.Member.Members,
		Verify: c.Verify.Store, Direct: true, Tree: backend.DTypes(), Branches: true}
}

// StartChecked implements [backend.CheckedStarter].
func (c *comm) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	q, err := QueueOf(q)
	if err != nil {
		return nil, fmt.Errorf("%s: %v: %w", backend.RankOf(c), what, err)
	}
	c.order.Lock()
	defer func() { c.unlock(recover(), &what) }()
	return c.startNext(q, &what, count, &dst, &src)
}

// unlock ends the start of a call, even if it panicked.
func (c *comm) unlock(panicked any, what *backend.Collective) {
	c.order.Unlock()
	if panicked != nil {
		backend.Panicked(c, what, panicked)
	}
}

// StartAnnounced implements [backend.Announcer].
func (c *comm) StartAnnounced(a backend.Announce, what backend.Collective, count int, dst,
	src backend.Buffer) (id uint64, w backend.Work, err error) {
	c.order.Lock()
	defer func() { c.unlock(recover(), &what) }()
	k := &c.now
	k.announce = a
	w, err = c.startNext(inline{}, &what, count, &dst, &src)
	k.tell() // for a call that was refused
	return k.id, w, err
}

// startNext starts a call. order is held.
func (c *comm) startNext(q backend.Queue, what *backend.Collective, count int, dst,
	src *backend.Buffer) (backend.Work, error) {
	executor, queued := q.(*Queue)
	k := &c.now
	if queued {
		k = new(call)
	}
	k.set(what, c.seq+1, count, dst, src)
	if err := c.Refused(what, dst, src); err != nil {
		return nil, err
	}
	if c.Member.Err() != nil {
		return nil, c.failure(k)
	}
	if c.done != nil && c.last != q {
		k.tell()
		if err := q.Wait(c.done); err != nil {
			return nil, err
		}
	}
	if queued {
		return c.enqueue(executor, k)
	}
	c.seq, c.last, c.done = c.seq+1, q, nil
	return backend.Finished(c.run(k)), nil
}

// set initialises k to a call that has not begun.
func (k *call) set(what *backend.Collective, seq uint64, count int, dst, src *backend.Buffer) {
	k.c, k.seq, k.count, k.dst, k.src, k.first = *what, seq, count, *dst, *src, true
	k.dtype = src.DType()
	if what.Kind != backend.AllReduce {
		k.dtype = what.DType(*dst, *src)
	}
}

// enqueue starts a call on a queue that has a goroutine. Nothing changes if the queue refuses.
func (c *comm) enqueue(q *Queue, k *call) (backend.Work, error) {
	k.c.Splits = slices.Clone(k.c.Splits) // the caller may change them
	w, err := q.start(func() error {
		defer backend.AbortOnPanic(c, &k.c)
		c.busy.Lock()
		defer c.busy.Unlock()
		if c.Member.Err() != nil {
			return c.failure(k)
		}
		return c.run(k)
	})
	if err != nil {
		return nil, err
	}
	c.seq, c.last, c.done = c.seq+1, q, w.event
	return w, nil
}

// run runs a call on the calling goroutine, which holds order or busy.
func (c *comm) run(k *call) error {
	if c.size == 1 {
		k.tell()
		return kernels.Host{}.Copy(k.dst, k.src)
	}
	return c.collect(k)
}

// hold waits until the current call ends, and keeps others from running until release.
func (c *comm) hold() {
	c.order.Lock()
	c.busy.Lock()
}

func (c *comm) release() {
	c.busy.Unlock()
	c.order.Unlock()
}

// Close implements [backend.Communicator].
func (c *comm) Close() error {
	if c.Closing.Swap(true) {
		return nil
	}
	c.Member.Close()
	c.Member.Leave()
	c.hold()
	defer c.release()
	errs := []error{c.region.share.Retire()} // somebody may still check whether the group has ended
	for _, w := range c.windows {
		if w.share != nil {
			errs = append(errs, w.share.Retire()) // the caller may be using it
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s: close: %w", backend.RankOf(c), err)
	}
	return nil
}

// Alloc implements [backend.Communicator]. Each call maps its own window.
func (c *comm) Alloc(nbytes int) (backend.Buffer, error) {
	if nbytes < 0 || nbytes > math.MaxInt/c.size-page {
		return backend.Buffer{}, fmt.Errorf("%w: %s: alloc of %d bytes", backend.ErrArgument,
			backend.RankOf(c), nbytes)
	}
	if err := c.agree(nbytes); err != nil {
		return backend.Buffer{}, err
	}
	stride := (nbytes + page - 1) / page * page
	if stride == 0 {
		return backend.Of([]byte{}), nil
	}
	s, err := c.sharing().HandOver(0, c.size*stride, nil)
	if err != nil {
		return backend.Buffer{}, fmt.Errorf("%s: alloc of %d bytes: %w", backend.RankOf(c),
			nbytes, err)
	}
	c.hold()
	defer c.release()
	if c.Closing.Load() {
		return backend.Buffer{}, errors.Join(fmt.Errorf("%s: alloc: %w", backend.RankOf(c),
			backend.ErrClosed), s.Unmap())
	}
	i := slices.IndexFunc(c.windows, func(w window) bool { return w.share == nil })
	if i < 0 {
		i, c.windows = len(c.windows), append(c.windows, window{})
	}
	c.windows[i] = window{share: s, stride: stride}
	return backend.Of(c.windows[i].shareOf(c.rank)[:nbytes]), nil
}

// Free implements [backend.Communicator]. The memory of this rank's part is freed at once, its
// addresses at the next Alloc. After a failure both are left to Close: other ranks may still read
// for a call that failed here.
func (c *comm) Free(b backend.Buffer) error {
	c.hold()
	defer c.release()
	if b.Len() == 0 || c.Closing.Load() {
		return nil
	}
	for i := range c.windows {
		w := &c.windows[i]
		if w.share != nil && !w.freed && b.Addr() == backend.Of(w.shareOf(c.rank)).Addr() {
			w.freed = true
			if c.Member.Err() != nil {
				return nil
			}
			return shm.Discard(w.shareOf(c.rank))
		}
	}
	return fmt.Errorf(
		"%w: %s: free of memory that Alloc has not returned, or that was freed before",
		backend.ErrArgument, backend.RankOf(c))
}

// agree fails on every rank, with the communicator still usable, if the size of an Alloc is not the
// same everywhere. It gives back the windows that every rank has freed. All ranks do so at the same
// point of their calls, so that the other windows keep the same numbers.
func (c *comm) agree(nbytes int) error {
	var mine []byte
	c.hold()
	for _, w := range c.windows {
		mine = append(mine, w.state())
	}
	c.release()
	states, err := c.Member.AgreeOnAlloc(c.Gatherer(backend.ForAlloc), nbytes, mine)
	if states == nil {
		return err
	}
	if err := c.reclaim(states); err != nil {
		return fmt.Errorf("%s: alloc: %w", backend.RankOf(c), err)
	}
	return err
}

// reclaim unmaps the windows that are freed according to the states on all ranks.
func (c *comm) reclaim(states [][]byte) error {
	c.hold()
	defer c.release()
	if c.Closing.Load() { // Close has reclaimed them
		return nil
	}
	var errs []error
	for i := range c.windows {
		if slices.ContainsFunc(states, func(state []byte) bool { return state[i] != freed }) {
			continue
		}
		errs = append(errs, c.windows[i].share.Unmap())
		c.windows[i] = window{}
	}
	return errors.Join(errs...)
}

// sharing says how the group makes shared memory.
func (c *comm) sharing() group.Sharing {
	return group.Sharing{Gather: c.Gatherer(backend.ForAlloc), Rank: c.rank,
		Members: c.Member.Members, Dir: c.shm}
}

// Split implements [backend.Communicator].
func (c *comm) Split(color, key int) (backend.Communicator, error) {
	part, err := c.Member.Split(c.Gatherer(backend.ForSplit), color, key)
	if err != nil {
		return nil, err
	}
	region := Region(part, c.sharing())
	if err := c.sharing().Form(nil, region); err != nil {
		return nil, backend.Refuse(c, fmt.Errorf("split: %w", err))
	}
	if color < 0 {
		return nil, nil
	}
	return newComm(part, c.Member.World, c.shm, c.spin, region.Share()), nil
}

func newComm(part group.Part, w *rendezvous.World, dir string, p spinBudget, s *shm.Share) *comm {
	size := len(part.Members)
	c := &comm{
		rank: part.Rank, size: size, shm: dir, spin: p, region: newRegion(s, part.Rank, size),
		operands: make([]backend.Buffer, size), branches: make([][]int, size),
		shown: make([]operand, 0, size),
	}
	c.health = health{&c.region}
	c.Join(c, part, w, c.health)
	c.Verify.Store(true)
	c.Member.Watch(nil)
	return c
}

// window is memory from Alloc: a part of it for each rank, mapped by all.
type window struct {
	share  *shm.Share // nil if there is none any more
	stride int
	freed  bool // by this rank
}

// The states of a window, as a rank reports them.
const (
	inUse = iota
	freed
)

func (w window) state() byte {
	if w.freed {
		return freed
	}
	return inUse
}

func (w window) shareOf(r int) []byte { return w.share.Mem[r*w.stride : (r+1)*w.stride] }

// locate returns where a buffer is in the windows: 0 if it is in none; otherwise 1 + the window's
// number in the upper 16 bits, and the offset in this rank's part in the others.
func (c *comm) locate(b backend.Buffer) uint64 {
	for i, w := range c.windows {
		if w.share == nil {
			continue
		}
		part := backend.Of(w.shareOf(c.rank))
		if b.Addr() >= part.Addr() && b.Addr()+uintptr(b.NBytes()) <= part.Addr()+uintptr(
			part.Len()) {
			return uint64(i+1)<<48 | uint64(b.Addr()-part.Addr())
		}
	}
	return 0
}

// at returns nbytes bytes of rank r's memory at a place from locate on r.
func (c *comm) at(r int, place uint64, nbytes int) []byte {
	w, offset := c.windows[place>>48-1], int(place&(1<<48-1))
	return w.shareOf(r)[offset : offset+nbytes]
}
