package tcp

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/kernels"
	"github.com/euryale-ml/euryale/rendezvous"
)

// comm is one rank of a group.
type comm struct {
	name       string
	rank, size int
	members    backend.Members
	world      *rendezvous.World
	shm        string // where ranks of one machine share their board
	verify     atomic.Bool

	// order is held while a call is started, so that calls keep their order; it
	// guards what follows.
	order sync.Mutex
	seq   uint64        // number of the last call
	last  backend.Queue // where the last call was started
	done  backend.Work  // the last call, nil if it is over

	// busy is held while a call runs; it guards what follows.
	busy  sync.Mutex
	links []*link // by rank; nil for this one
	wait  wait
	relay relay
	heads []header         // of the call under way, by rank
	terms []backend.Buffer // scratch of a reduction
	room  []byte           // where operands of other ranks arrive
	sum   []byte           // where sums are made that another rank wants

	memory sync.Mutex
	given  map[uintptr]backend.Buffer // by Alloc, and not yet freed

	board   group.Board
	member  *group.Member // the group's life
	closing atomic.Bool
}

type header = [backend.HeaderSize]byte

// call is one collective under way.
type call struct {
	c        backend.Collective
	count    int // see Collective.Check
	dst, src backend.Buffer
	header   backend.Header
}

func (k *call) dtype() backend.DType { return k.header.DType }

func (c *comm) Name() string           { return c.name }
func (c *comm) Rank() int              { return c.rank }
func (c *comm) Size() int              { return c.size }
func (c *comm) Device() backend.Device { return host.Device{} }

// Capabilities implements [backend.Communicator]. Calls are compared from the start.
func (c *comm) Capabilities() backend.Capabilities {
	return backend.Capabilities{Backend: Backend{}.Name(), Members: c.members, Verify: c.verify.Store, Direct: true}
}

// Err returns the error that ended the communicator, or nil.
func (c *comm) Err() error { return c.member.Err() }

// Start implements [backend.Communicator].
func (c *comm) Start(q backend.Queue, what backend.Collective, dst, src backend.Buffer) (backend.Work, error) {
	count, err := what.Check(c.rank, c.size, dst, src)
	if err != nil {
		return nil, backend.Refuse(c, err)
	}
	return c.StartChecked(q, what, count, dst, src)
}

// StartChecked implements [backend.CheckedStarter].
func (c *comm) StartChecked(q backend.Queue, what backend.Collective, count int, dst, src backend.Buffer) (backend.Work, error) {
	if dst.Device() || src.Device() {
		return nil, fmt.Errorf("%w: %s: %v was given device memory, but backend tcp takes host memory only", backend.ErrArgument, backend.RankOf(c), what)
	}
	q, err := host.QueueOf(q)
	if err != nil {
		return nil, fmt.Errorf("%s: %v: %w", backend.RankOf(c), what, err)
	}
	c.order.Lock()
	defer c.order.Unlock()
	k := call{c: what, count: count, dst: dst, src: src}
	k.header.Set(&what, c.seq+1, count, what.DType(dst, src))
	if err := c.failure(&k); err != nil {
		return nil, err
	}
	if c.done != nil && c.last != q {
		_ = c.done.Wait(q) // its error is that of the group, which run looks at
	}
	if executor, ok := q.(*host.Queue); ok {
		k.c.Splits = slices.Clone(k.c.Splits) // the caller may change them
		w, err := executor.Start(func() error { return c.run(&k) })
		if err != nil {
			return nil, err
		}
		c.seq, c.last, c.done = c.seq+1, q, w
		return w, nil
	}
	c.seq, c.last, c.done = c.seq+1, q, nil
	return backend.Finished(c.run(&k)), nil
}

// run runs a call on the calling goroutine.
func (c *comm) run(k *call) error {
	c.busy.Lock()
	defer c.busy.Unlock()
	if err := c.failure(k); err != nil {
		return err
	}
	if c.size == 1 {
		return kernels.Host{}.Copy(k.dst, k.src)
	}
	c.board.Post(&k.header, false) // for the timeout: headers are compared with the data
	return c.collect(k)
}

// failure returns the group's error as that of call k, or nil.
func (c *comm) failure(k *call) error {
	if c.member.Err() == nil {
		return nil
	}
	return c.member.Failure(k.header.String())
}

// Abort implements [backend.Communicator].
func (c *comm) Abort(cause error) { c.member.Abort(cause) }

// Close implements [backend.Communicator].
func (c *comm) Close() error {
	if c.closing.Swap(true) {
		return nil
	}
	c.member.Close()
	c.member.Leave()
	c.busy.Lock() // a call under way has ended
	defer c.busy.Unlock()
	var errs []error
	if c.board != nil {
		errs = append(errs, c.board.Release()) // first: a rank that loses a connection asks the board why
	}
	for _, l := range c.links {
		if l != nil {
			errs = append(errs, l.close())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s: close: %w", backend.RankOf(c), err)
	}
	return nil
}

// Alloc implements [backend.Communicator]. The memory is like any other of the host: sockets
// take all alike.
func (c *comm) Alloc(nbytes int) (backend.Buffer, error) {
	if nbytes < 0 {
		return backend.Buffer{}, fmt.Errorf("%w: %s: alloc of %d bytes", backend.ErrArgument, backend.RankOf(c), nbytes)
	}
	memory, err := host.Device{}.Alloc(nbytes)
	if _, disagreed := c.member.AgreeOnAlloc(c.gatherer(backend.ForAlloc), nbytes, nil); disagreed != nil {
		return backend.Buffer{}, disagreed
	}
	if err != nil || nbytes == 0 {
		return memory, err
	}
	c.memory.Lock()
	defer c.memory.Unlock()
	c.given[memory.Addr()] = memory
	return memory, nil
}

// Free implements [backend.Communicator].
func (c *comm) Free(b backend.Buffer) error {
	if b.Len() == 0 || c.closing.Load() {
		return nil
	}
	c.memory.Lock()
	defer c.memory.Unlock()
	if _, ok := c.given[b.Addr()]; !ok {
		return fmt.Errorf("%w: %s: free of memory that Alloc has not returned, or that was freed before", backend.ErrArgument, backend.RankOf(c))
	}
	delete(c.given, b.Addr())
	return nil
}

// gatherer is an exchange over the group itself, for memory of an Alloc, or of a Split that
// the ranks have begun.
func (c *comm) gatherer(purpose backend.Purpose) group.Gatherer {
	exchange := backend.Collective{Kind: backend.AllGather, Origin: &backend.Origin{Purpose: purpose}}
	return group.Framed(math.MaxInt, func(note []byte) ([][]byte, error) {
		all := make([]byte, c.size*len(note))
		if err := backend.Run(c, exchange, backend.Of(all), backend.Of(note)); err != nil {
			return nil, err
		}
		return slices.Collect(slices.Chunk(all, len(note))), nil
	})
}

// Split implements [backend.Communicator]: the ranks of each part connect anew.
func (c *comm) Split(color, key int) (backend.Communicator, error) {
	gather := c.gatherer(backend.ForSplit)
	part, err := c.member.Split(gather, color, key)
	if err != nil {
		return nil, err
	}
	among := group.Sharing{Gather: gather, Rank: c.rank, Members: c.members, Dir: c.shm}
	p, err := connect(c.world, part, among)
	if err != nil {
		return nil, fmt.Errorf("%s: split: %w", backend.RankOf(c), err)
	}
	return p, nil
}
