package reference

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/rendezvous"
)

// New returns the communicators of a fresh group of size ranks, which compare
// the headers of their calls. timeout bounds every wait for another rank.
func New(name string, size int, timeout time.Duration) []*Communicator {
	w := &world{timeout: timeout}
	members := make(backend.Members, size)
	for r := range members {
		members[r] = r
	}
	g := w.newGroup(name, members)
	comms := make([]*Communicator, size)
	for r := range comms {
		comms[r] = &Communicator{group: g, rank: r, verify: true, allocated: map[uintptr]bool{}}
	}
	return comms
}

// Communicator is one rank of a group.
type Communicator struct {
	group *group
	rank  int

	mu     sync.Mutex // held while a call is started
	verify bool
	seq    uint64
	last   backend.Queue // where the last call was started
	splits int

	allocated map[uintptr]bool // memory from Alloc, by address
}

// Name implements [backend.Communicator].
func (c *Communicator) Name() string { return c.group.name }

// Rank implements [backend.Communicator].
func (c *Communicator) Rank() int { return c.rank }

// Size implements [backend.Communicator].
func (c *Communicator) Size() int { return c.group.size }

// Capabilities implements [backend.Communicator].
func (c *Communicator) Capabilities() backend.Capabilities {
	return backend.Capabilities{Members: c.group.members, Verify: c.Verify, Tree: backend.DTypes(),
		Branches: true}
}

// Device implements [backend.Communicator]: buffers are host memory.
func (c *Communicator) Device() backend.Device { return Device{} }

// Verify switches the comparison of calls on or off. Without it, ranks that
// disagree get wrong numbers.
func (c *Communicator) Verify(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.verify = on
}

// Err implements [backend.Communicator].
func (c *Communicator) Err() error { return c.group.failure(c.rank, "") }

// call is one collective of one rank.
type call struct {
	what     backend.Collective
	header   backend.Header
	verify   bool
	dst, src backend.Buffer
}

// Start implements [backend.Communicator].
func (c *Communicator) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	count, err := what.Check(c.rank, c.group.size, dst, src)
	if err != nil {
		return nil, backend.Refuse(c, err)
	}
	return c.StartChecked(q, what, count, dst, src)
}

// StartChecked implements [backend.CheckedStarter]. It panics where the source of an all-to-all is
// too short.
func (c *Communicator) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	defer backend.AbortOnPanic(c, &what)
	if what.Rows != nil {
		return nil, backend.RefuseRows(c, what)
	}
	if q == nil {
		q = inline{}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.group.failure(c.rank, what.String()); err != nil {
		return nil, err
	}
	if err := c.follow(q); err != nil {
		return nil, err
	}
	c.seq++
	if what.Kind == backend.AllToAll {
		n, from, _ := what.Pair(c.rank, c.group.size-1, c.group.size, count)
		src = src.Slice(0, from+n)
	}
	k := &call{what, what.Header(c.seq, count, what.DType(dst, src)), c.verify, dst, src}
	if queue, ok := q.(*Queue); ok {
		return queue.start(func() error { return c.group.meet(c.rank, k) })
	}
	return backend.Finished(c.group.meet(c.rank, k)), nil
}

// follow orders q after the queue of the call before.
func (c *Communicator) follow(q backend.Queue) error {
	last := c.last
	c.last = q
	if last == nil || last == q {
		return nil
	}
	done, err := last.Record()
	if err != nil {
		return err
	}
	return q.Wait(done)
}

// Alloc implements [backend.Communicator]. The memory is like any other.
func (c *Communicator) Alloc(nbytes int) (backend.Buffer, error) {
	if nbytes < 0 {
		return backend.Buffer{}, fmt.Errorf("%w: %s: alloc of %d bytes", backend.ErrArgument,
			backend.RankOf(c), nbytes)
	}
	all, err := c.exchange(int64(nbytes))
	if err != nil {
		return backend.Buffer{}, err
	}
	for p, n := range all {
		if n != int64(nbytes) {
			return backend.Buffer{}, fmt.Errorf("%w: %s: alloc of %d bytes here, of %d on %s",
				backend.ErrArgument, backend.RankOf(c), nbytes, n, c.group.members.Rank(p))
		}
	}
	memory := backend.Of(make([]byte, nbytes))
	c.mu.Lock()
	defer c.mu.Unlock()
	if nbytes > 0 {
		c.allocated[memory.Addr()] = true
	}
	return memory, nil
}

// Free implements [backend.Communicator].
func (c *Communicator) Free(b backend.Buffer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if b.Len() > 0 && !c.allocated[b.Addr()] {
		return fmt.Errorf("%w: %s: free of memory that Alloc has not returned, or that was freed "+
			"before", backend.ErrArgument, backend.RankOf(c))
	}
	delete(c.allocated, b.Addr())
	return nil
}

// exchange gathers the same number of integers from every rank.
func (c *Communicator) exchange(mine ...int64) ([]int64, error) {
	all := make([]int64, len(mine)*c.group.size)
	return all, backend.Run(c, backend.Collective{Kind: backend.AllGather}, backend.Of(all),
		backend.Of(mine))
}

// Split implements [backend.Communicator].
func (c *Communicator) Split(color, key int) (backend.Communicator, error) {
	all, err := c.exchange(int64(color), int64(key))
	if err != nil {
		return nil, err
	}
	c.splits++
	if color < 0 {
		return nil, nil
	}
	var members []int
	for r := range c.group.size {
		if all[2*r] == int64(color) {
			members = append(members, r)
		}
	}
	slices.SortStableFunc(members, func(a, b int) int {
		return cmp.Compare(all[2*a+1], all[2*b+1])
	})
	rank := slices.Index(members, c.rank)
	for i, r := range members {
		members[i] = c.group.members[r]
	}
	part := c.group.world.groupOf(fmt.Sprintf("%s/%d.%d", c.group.name, c.splits, color), members)
	return &Communicator{group: part, rank: rank, verify: c.verify, allocated: map[uintptr]bool{}},
		nil
}

// Abort implements [backend.Communicator].
func (c *Communicator) Abort(cause error) {
	if cause == nil {
		cause = errors.New("no cause given")
	}
	c.group.fail(c.rank, fmt.Errorf("%w: %w", backend.ErrAborted, cause))
}

// Close implements [backend.Communicator].
func (c *Communicator) Close() error {
	g := c.group
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed[c.rank] = true
	g.wake()
	return nil
}

// Lose ends every group that this one was split into or came from, as the loss
// of a rank of the job does.
func (c *Communicator) Lose(rank int, cause error) {
	c.group.world.lose(&rendezvous.Failure{Rank: rank, Cause: cause})
}
