package hosted

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Engine moves the data of a group's calls, one call at a time.
type Engine interface {
	// Collect runs a call among two ranks or more, on the calling goroutine. When the group
	// ends it returns soon, with Comm.Failure.
	Collect(k *Call) error
	// Close frees what the engine has, and releases Comm.Board. No call is under way, and
	// the group has ended for this rank: well says that nothing but Close has ended it.
	Close(well bool) error
}

// Call is one collective under way.
type Call struct {
	backend.Collective
	Count    int // see [backend.Collective.Check]
	Dst, Src backend.Buffer
	Header   backend.Header
}

// DType returns the dtype of the call.
func (k *Call) DType() backend.DType { return k.Header.DType }

// Config says what a Comm is made of.
type Config struct {
	Backend string // its name
	World   *rendezvous.World
	Part    group.Part
	Among   group.Sharing // where the group was made
	Board   group.Board
	// Compares says that Collect compares calls between the ranks, unless Verify is
	// false.
	Compares  bool
	Direct    bool // as in [backend.Capabilities]
	Tree      bool // it adds any number of operands in a tree; two have one order
	NewEngine func(*Comm) Engine
	// Connect makes the communicators of parts, at once. It fails on all ranks or on none; a rank
	// in no part gets nil, but takes part. The error is why this rank cannot.
	Connect Connect
	Ready   Ready
}

// Connect is [Config.Connect].
type Connect = func([]group.Part, group.Sharing, error) ([]backend.Communicator, error)

// Ready are communicators of parts that were connected with the group.
type Ready struct {
	Ways  [][]group.Pass // in which the group is split
	Parts []backend.Communicator
}

// Comm is one rank of a group.
type Comm struct {
	group.Leaf
	Config
	Engine Engine

	// order is held while a call is started, so that calls keep their order; it
	// guards what follows.
	order sync.Mutex
	seq   uint64        // number of the last call
	last  backend.Queue // where the last call was started
	done  backend.Work  // the last call, nil if it has finished
	// the last one that ran on its caller, here because engines would have it allocated
	inline Call

	busy sync.Mutex // held while a call runs

	memory    sync.Mutex                 // guards Ready, too
	allocated map[uintptr]backend.Buffer // by Alloc, and not yet freed
}

var (
	_ backend.CheckedStarter = (*Comm)(nil)
	_ group.Splitter         = (*Comm)(nil)
	_ group.Presence         = (*Comm)(nil)
)

// New returns a rank of a connected group.
func New(c Config) *Comm {
	comm := &Comm{Config: c, allocated: map[uintptr]backend.Buffer{}}
	comm.Join(comm, c.Part, c.World, c.Board)
	comm.Engine = c.NewEngine(comm)
	comm.Verify.Store(c.Compares)
	comm.Member.Watch(nil)
	return comm
}

// Device implements [backend.Communicator].
func (c *Comm) Device() backend.Device { return host.Device{} }

// Capabilities implements [backend.Communicator].
func (c *Comm) Capabilities() backend.Capabilities {
	caps := backend.Capabilities{Backend: c.Backend, Members: c.Part.Members, Direct: c.Direct}
	if c.adds() {
		caps.Tree, caps.Branches = backend.DTypes(), c.Tree
	}
	if c.Compares {
		caps.Verify = c.Verify.Store
	}
	return caps
}

// adds reports whether it adds in a tree, as any does two operands.
func (c *Comm) adds() bool { return c.Tree || c.Size() <= 2 }

// Chosen implements [backend.Chooser] by an engine that has several algorithms.
func (c *Comm) Chosen(what *backend.Collective, _ backend.DType, nbytes int) string {
	if e, ok := c.Engine.(interface {
		Chosen(what *backend.Collective, nbytes int) string
	}); ok {
		return e.Chosen(what, nbytes)
	}
	return c.Backend
}

// StartChecked implements [backend.CheckedStarter].
func (c *Comm) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	if err := c.Refused(&what, &dst, &src); err != nil {
		return nil, err
	}
	branches := what.Kind == backend.AllReduce && what.Splits != nil
	if what.Association == backend.Tree && (!c.adds() || branches && !c.Tree) {
		return nil, backend.RefuseTree(c, what, what.DType(dst, src))
	}
	q, err := host.QueueOf(q)
	if err != nil {
		return nil, fmt.Errorf("%s: %v: %w", backend.RankOf(c), what, err)
	}
	c.order.Lock()
	defer c.order.Unlock()
	executor, queued := q.(*host.Queue)
	k := &c.inline
	if queued {
		k = new(Call)
	}
	k.Collective, k.Count, k.Dst, k.Src = what, count, dst, src
	k.Header.Set(&what, c.seq+1, count, what.DType(dst, src))
	if err := c.Failure(k); err != nil {
		return nil, err
	}
	if c.done != nil && c.last != q {
		_ = c.done.Wait(q) // it returns the error of the group, which run looks at
	}
	if queued {
		k.Splits = slices.Clone(k.Splits) // the caller may change them
		w, err := executor.Start(func() error { return c.run(k) })
		if err != nil {
			return nil, err
		}
		c.seq, c.last, c.done = c.seq+1, q, w
		return w, nil
	}
	c.seq, c.last, c.done = c.seq+1, q, nil
	return backend.Finished(c.run(k)), nil
}

// run runs a call on the calling goroutine.
func (c *Comm) run(k *Call) error {
	defer backend.AbortOnPanic(c, &k.Collective)
	c.busy.Lock()
	defer c.busy.Unlock()
	if err := c.Failure(k); err != nil {
		return err
	}
	if c.Size() == 1 {
		return kernels.Host{}.Copy(k.Dst, k.Src)
	}
	return c.Engine.Collect(k)
}

// Failure returns the group's error as that of call k, or nil.
func (c *Comm) Failure(k *Call) error {
	if c.Member.Err() == nil {
		return nil
	}
	return c.Member.Failure(k.Header.String())
}

// Close implements [backend.Communicator].
func (c *Comm) Close() error {
	if c.Closing.Swap(true) {
		return nil
	}
	well := c.Member.Err() == nil
	c.Member.Close()
	c.Member.Leave()
	c.busy.Lock() // a call under way has ended
	defer c.busy.Unlock()
	if err := errors.Join(CloseAll(c.takeReady().Parts), c.Engine.Close(well)); err != nil {
		return fmt.Errorf("%s: close: %w", backend.RankOf(c), err)
	}
	return nil
}

// Alloc implements [backend.Communicator]. The memory is like any other of the host.
func (c *Comm) Alloc(nbytes int) (backend.Buffer, error) {
	if nbytes < 0 {
		return backend.Buffer{}, fmt.Errorf("%w: %s: alloc of %d bytes", backend.ErrArgument,
			backend.RankOf(c), nbytes)
	}
	memory, err := host.Device{}.Alloc(nbytes)
	if _, disagreed := c.Member.AgreeOnAlloc(c.Gatherer(backend.ForAlloc), nbytes,
		nil); disagreed != nil {
		return backend.Buffer{}, disagreed
	}
	if err != nil || nbytes == 0 {
		return memory, err
	}
	c.memory.Lock()
	defer c.memory.Unlock()
	c.allocated[memory.Addr()] = memory
	return memory, nil
}

// Free implements [backend.Communicator].
func (c *Comm) Free(b backend.Buffer) error {
	if b.Len() == 0 || c.Closing.Load() {
		return nil
	}
	c.memory.Lock()
	defer c.memory.Unlock()
	if _, ok := c.allocated[b.Addr()]; !ok {
		return fmt.Errorf("%w: %s: free of memory that Alloc has not returned, or that was freed "+
			"before", backend.ErrArgument, backend.RankOf(c))
	}
	delete(c.allocated, b.Addr())
	return nil
}

// Split implements [backend.Communicator]: the ranks of each part connect anew.
func (c *Comm) Split(color, key int) (backend.Communicator, error) {
	gather := c.Gatherer(backend.ForSplit)
	part, err := c.Member.Split(gather, color, key)
	if err != nil {
		return nil, err
	}
	parts, err := c.connect(gather, nil, part)
	if err != nil {
		return nil, err
	}
	return parts[0], nil
}

// SplitAll implements [group.Splitter].
func (c *Comm) SplitAll(
	g group.Gatherer, ways [][]group.Pass, problem error,
) ([]backend.Communicator, error) {
	ready := c.takeReady()
	if len(ways) > 0 && reflect.DeepEqual(ready.Ways, ways) {
		if err := g.Vote(c.Part.Members, problem); err != nil {
			return nil, errors.Join(backend.Refuse(c, fmt.Errorf("split: %w", err)),
				CloseAll(ready.Parts))
		}
		return ready.Parts, nil
	}
	if err := CloseAll(ready.Parts); err != nil || len(ways) == 0 {
		return nil, err
	}
	var parts []group.Part
	for _, all := range ways {
		parts = append(parts, c.Member.PartOf(all))
	}
	return c.connect(g, problem, parts...)
}

// takeReady returns what is ready, once.
func (c *Comm) takeReady() Ready {
	c.memory.Lock()
	defer c.memory.Unlock()
	ready := c.Ready
	c.Ready = Ready{}
	return ready
}

// CloseAll closes parts, of which those that this rank is not in are nil.
func CloseAll(parts []backend.Communicator) (err error) {
	for _, part := range parts {
		if part != nil {
			err = errors.Join(err, part.Close())
		}
	}
	return err
}

// connect connects the ranks of parts, over a gatherer of this communicator's ranks.
func (c *Comm) connect(
	g group.Gatherer, problem error, parts ...group.Part,
) ([]backend.Communicator, error) {
	among := group.Sharing{Gather: g, Rank: c.Rank(), Members: c.Part.Members, Dir: c.Among.Dir,
		Gone: c.Member.Gone}
	made, err := c.Connect(parts, among, problem)
	if err != nil {
		return nil, backend.Refuse(c, fmt.Errorf("split: %w", err))
	}
	return made, nil
}
