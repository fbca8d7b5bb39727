package gpu

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/spinwait"
	"github.com/euryale-ml/euryale/rendezvous"
)

const (
	// scratchBytes is what a composed reduction combines at a time, over all ranks.
	scratchBytes = 8 << 20
	// progressBytes is a word by which the device tells how far a replay has come.
	progressBytes = 4
	// eventSlots is how many calls may be under way.
	eventSlots = 512
	// worksAtOnce is how many works are allocated together.
	worksAtOnce = 64
)

// groupState is what a rank's group has in common with its parts.
type groupState struct {
	world      *rendezvous.World
	dir        string // where Split makes shared memory
	timeout    time.Duration
	lib        library
	dev        Device
	notice     func(text string) // is said once
	scratchLen int               // bytes of each group's scratch memory
	quick      quick
	teardowns  teardowns

	asked settings      // of rank 0
	limit time.Duration // how long kernels wait
}

// Communicator is one rank of a group. NCCL runs its calls, and kernels of ours those that
// they win.
type Communicator struct {
	name    string
	members backend.Members
	part    bool // made by Split

	// What every call reads or writes is together here: behind a launch all of it has to come
	// from slower caches.
	*groupState
	*choice    // of the algorithm of each call
	rank, size int
	main       stream // the device's default queue, nil if that is none
	verify     atomic.Bool
	// order is held while a call is started, so that calls keep their order. It
	// guards what follows, up to err.
	order   sync.Mutex
	last    stream        // where the last call was started
	works   []work        // not handed out yet
	past    uint64        // calls up to this one are known to be done
	seq     atomic.Uint64 // number of the last call; may be read without
	started atomic.Uint64 // number of the last call whose event is recorded; may be read without
	// that of call s is events[s%eventSlots]; written while state is held, too
	events []uintptr
	member *group.Member // the group's life
	board  group.Board

	kernelsOf stream                       // where a kernel of ours was started last
	kernels   exchanger                    // its
	exchange  peers.PeerCall               // the one that is being started
	used      [algorithmCount]atomic.Int64 // calls; may be read without

	// order guards these, too.
	engine   ncclComm // nil before connect
	scratch  backend.Buffer
	memory   *peerMemory
	call     call // the one that is being started, kept here so that it is not allocated
	steps    []ncclStep
	operands []backend.Buffer
	gather   group.Gatherer // over the board

	// a graph that calls are recorded in; others may be, too. nil if there is none
	recording *backend.Recording
	graphs    graphs   // that calls were recorded in
	progress  progress // of the replay that runs

	// state guards what follows, and is held for a moment only.
	state sync.Mutex
	done  uint64 // calls up to this one are done
	fixed bool   // done is, since the group has ended

	kill  sync.Once
	dead  chan struct{} // closed when the engine has been aborted
	freed chan struct{} // closed when what NCCL used is freed, too

	status   status                // of our kernels
	waits    atomic.Pointer[waits] // of graphs; nil if kernels wait there, too, because
	flagless string                // of this

	closing atomic.Bool
	// closed at the end of an attempt to share memory; nil if there was none
	dismantled <-chan struct{}
}

// newComm returns a group that is not connected.
func newComm(b *groupState, part group.Part, board group.Board, by *choice) *Communicator {
	size := len(part.Members)
	c := &Communicator{
		groupState: b, choice: by, name: part.Name, rank: part.Rank, size: size,
		members: part.Members, board: board,
		steps: make([]ncclStep, 0, 2*size+1), operands: make([]backend.Buffer, 0, size),
		dead: make(chan struct{}), freed: make(chan struct{}),
	}
	c.main, _ = b.dev.Default().(stream)
	c.memory = &peerMemory{c: c}
	c.member = group.NewMember(group.Config{Name: part.Name, Rank: part.Rank, Members: part.Members,
		World: b.world, Health: board, Ending: c.ending})
	// the watchdog has the short time, for calls
	c.gather = c.member.OverBoard(board, initTime(c.timeout))
	c.verify.Store(true)
	c.member.Watch(watched{c})
	return c
}

// connect makes the engine that begin begins, and everything that must not be
// made while other ranks wait on their devices. It fails on every rank or on none.
func (c *Communicator) connect(ctx context.Context, begin func() (ncclComm, error)) error {
	if err := c.prepare(ctx, begin); err != nil {
		return c.ended(c.member.Broken(err), "connect")
	}
	c.order.Lock()
	_, err := c.gather(nil)
	if err == nil {
		err = c.share()
	}
	c.order.Unlock()
	return c.ended(c.member.Broken(err), "connect")
}

func (c *Communicator) prepare(ctx context.Context, begin func() (ncclComm, error)) error {
	c.order.Lock()
	defer c.order.Unlock()
	err := c.bound(func() (err error) { c.engine, err = begin(); return err })
	if err != nil {
		return err
	}
	if c.scratch, err = c.dev.Alloc(c.scratchLen); err != nil {
		return err
	}
	word, err := c.dev.AllocHost(progressBytes)
	if err != nil {
		return err
	}
	c.progress.set(word)
	events := make([]uintptr, eventSlots)
	for i := range events {
		if events[i], err = c.dev.NewEvent(); err != nil {
			return err
		}
	}
	c.state.Lock()
	c.events = events
	c.state.Unlock()
	if err := c.await(ctx, c.engine.ready); err != nil {
		return err
	}
	return c.warm(ctx)
}

// bound runs f with the device's context current.
func (c *Communicator) bound(f func() error) error {
	unbind, err := c.dev.Bind()
	if err != nil {
		return err
	}
	defer unbind()
	return f()
}

// await asks ready until it is, or the group ends.
func (c *Communicator) await(ctx context.Context, ready func() (bool, error)) error {
	for wait := (spinwait.Wait{}); ; wait.Pause() {
		if ok, err := ready(); ok || err != nil {
			return err
		}
		if err := c.member.Failure(""); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("%w: the other ranks did not connect in time: check their "+
				"output, or raise EURYALE_TIMEOUT", context.Cause(ctx))
		}
	}
}

// warm uses every way that NCCL has at every size, because it connects on first
// use: that would wait for peers, and take memory, in the middle of a program.
func (c *Communicator) warm(ctx context.Context) error {
	q, ok := c.dev.Default().(stream)
	if !ok {
		return fmt.Errorf("%w: the device's default queue is a %T, not a stream",
			backend.ErrArgument, c.dev.Default())
	}
	c.last = q
	half := c.scratch.Len() / 2
	for nbytes := 1 << 10; nbytes <= half; nbytes *= 8 {
		if err := c.warmAt(ctx, q, nbytes/4/c.size, half); err != nil {
			return fmt.Errorf("first use of NCCL: %w", err)
		}
	}
	return nil
}

// warmAt starts every kind on chunks of n elements.
func (c *Communicator) warmAt(ctx context.Context, q stream, n, half int) error {
	src, dst := c.scratch.Slice(0, half).As(backend.F32), c.scratch.Slice(half, 2*half).As(
		backend.F32)
	for _, kind := range backend.Kinds() {
		what := backend.Collective{Kind: kind}
		k := call{what: what, count: n, dtype: backend.F32, rank: c.rank, P: c.size,
			dst: dst.Slice(0, n*c.size), src: src.Slice(0, n*c.size)}
		switch kind {
		case backend.AllGather, backend.Gather:
			k.src = src.Slice(0, n)
		case backend.ReduceScatter, backend.Scatter:
			k.dst = dst.Slice(0, n)
		}
		err := c.bound(func() error { return c.run(q, k.steps(c.steps[:0]), c.events[0]) })
		if err == nil {
			err = c.await(ctx, func() (bool, error) { return c.dev.EventDone(c.events[0]) })
		}
		if err != nil {
			return fmt.Errorf("%v of %d elements: %w", kind, n, err)
		}
	}
	return nil
}

// Name implements [backend.Communicator].
func (c *Communicator) Name() string { return c.name }

// Rank implements [backend.Communicator].
func (c *Communicator) Rank() int { return c.rank }

// Size implements [backend.Communicator].
func (c *Communicator) Size() int { return c.size }

// Device implements [backend.Communicator].
func (c *Communicator) Device() backend.Device { return c.dev }

// Err returns the error that ended the communicator, or nil.
func (c *Communicator) Err() error { return c.member.Err() }

var _ group.Presence = (*Communicator)(nil)

// Gone returns why nothing comes from rank r any more, because it has closed the communicator or
// that has ended, or nil.
func (c *Communicator) Gone(r int) error { return c.member.Gone(r) }

// Capabilities implements [backend.Communicator]. Calls are compared from the start.
func (c *Communicator) Capabilities() backend.Capabilities {
	return backend.Capabilities{Backend: (*Backend)(nil).Name(), Members: c.members,
		Verify: c.verify.Store, Transport: c.transport, Tree: c.trees(), Branches: true,
		Rows: c.runsRows}
}

const (
	// settleTime is how long Close waits for this rank's kernels, which have been told
	// to stop: what is before them on their queue may take some time.
	settleTime = 2 * time.Second
	// closeTime is how long Close waits for the other ranks, which usually close at the same time.
	closeTime = 100 * time.Millisecond
)

// Close implements [backend.Communicator]. Memory that another rank's kernels may still
// write to is not given back before that rank has closed, too, or its process has ended.
// Close waits up to 100 ms for that, and up to 2 s for this rank's kernels that are behind
// other work. Then it returns, and the memory is given back when that has come:
// [Communicator.Kept] says how much is left. The device may be closed before. Close of the
// group waits for NCCL's end, also that of the parts, and returns what went wrong.
func (c *Communicator) Close() error {
	if c.closing.Swap(true) {
		c.member.Leave()
		return nil
	}
	well := c.well()
	c.member.Close()
	c.finish(well)
	c.member.Leave()
	settle(c.kernelQueue(), settleTime)
	awaited := []*teardown{c.teardowns.beginPart(c.freed, c.release)}
	if !c.part {
		c.teardowns.engines()
		awaited = c.teardowns.all() // a part may have memory where the group has none
	}
	if err := errors.Join(c.teardowns.wait(closeTime, awaited...), c.memory.keep()); err != nil {
		return fmt.Errorf("%s: close: %w", backend.RankOf(c), err)
	}
	return nil
}

// kernelQueue is where a kernel of ours was started last, nil if there was none.
func (c *Communicator) kernelQueue() backend.Queue {
	c.order.Lock()
	defer c.order.Unlock()
	if c.kernelsOf == nil {
		return nil
	}
	return c.kernelsOf
}

// well reports whether all calls are done, the same on every rank.
func (c *Communicator) well() bool {
	if c.member.Err() != nil {
		return false
	}
	done, err := c.settled(c.seq.Load())
	return done && err == nil
}

// release frees what the rank has, after the engine's end: first what is its own, then what
// others reach.
func (c *Communicator) release() error {
	<-c.dead
	err := c.freeDevice()
	if c.memory.dev == nil {
		err = errors.Join(err, c.memory.freeAll())
	}
	close(c.freed)
	err = errors.Join(err, c.freeProgress())
	if c.memory.dev != nil {
		err = errors.Join(err, c.memory.giveBack(c.kernelQueue()))
	}
	if c.dismantled != nil { // it needs the board
		<-c.dismantled
	}
	return errors.Join(err, c.board.Release())
}

// Kept returns how many bytes of the device this rank has not given back after Close,
// because kernels of ranks that have not closed may write there.
func (c *Communicator) Kept() int { return int(c.memory.held.Load()) }

// freeDevice frees what the rank has on its device. Nothing is under way there.
func (c *Communicator) freeDevice() error {
	c.order.Lock()
	defer c.order.Unlock()
	var errs []error
	c.state.Lock()
	events := c.events
	c.events = nil
	c.state.Unlock()
	for _, e := range events {
		if e != 0 {
			errs = append(errs, c.dev.FreeEvent(e))
		}
	}
	if c.scratch.Len() > 0 {
		errs = append(errs, c.dev.Free(c.scratch))
	}
	return errors.Join(errs...)
}
