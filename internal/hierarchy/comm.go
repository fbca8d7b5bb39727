package hierarchy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Communicator runs collectives inside and between machines at once. It passes everything that is
// not hierarchical to the flat communicator.
type Communicator struct {
	backend.Base // flat

	world *rendezvous.World
	key   string // of the group in the world's store

	// The group's life; member and health are nil if flat runs every call.
	member *group.Member
	health *group.StoreHealth
	ending sync.Once       // of all communicators
	ctx    context.Context // over once the group has ended
	cancel context.CancelFunc

	verify atomic.Bool
	passed atomic.Int64 // calls that went to flat, where nothing can be hierarchical

	// mu is held while a call is started, so that every rank starts the phases in
	// one order. It guards the queues and scratch memory of the pipeline, and what follows.
	mu sync.Mutex
	pipeline
	seq    uint64 // number of the last call
	recent recent
	stats  Stats
}

var _ backend.Wrapper = (*Communicator)(nil)

// New returns flat with all-reduces, reduce-scatters, all-gathers, broadcasts and all-to-alls made
// hierarchical where that is faster. w is the world that flat was connected in; flat may be any of
// its groups. Call New once for it. New is collective, and every rank must pass the same layout;
// the options of rank 0 count.
//
// The result owns flat. It makes further communicators with flat.Split: two for the ranks of a
// machine and two for the ranks with the same place on each machine, so that phases of different
// slices do not wait for each other. It also has scratch memory on the device. If nothing can be
// hierarchical (one machine), or nothing is gained by it (Auto, and links between machines as fast
// as inside, or one device each), it has none of these, and [Communicator.Explain] says why.
//
// Errors, on every rank: ErrArgument if the layouts differ or do not fit flat, or the
// options of a rank are wrong; those of Split, of the device and of the world's store.
// flat is still open then.
func New(ctx context.Context, w *rendezvous.World, flat backend.Communicator, l Layout,
	o Options) (*Communicator, error) {
	if err := backend.Given("hierarchy.New", "ctx", ctx, "w", w, "flat", flat); err != nil {
		return nil, err
	}
	c := &Communicator{Base: backend.Wrap(flat), world: w, key: keyOf(flat.Name()),
		pipeline: pipeline{hooks: o.Hooks}}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if err := c.connect(ctx, l, o); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: hierarchy: %w", backend.RankOf(flat), err),
			c.closeParts(), c.release())
	}
	return c, nil
}

// maxName bounds the names of groups in keys of the store, whose length is
// at most 256 bytes: see rendezvous.Store.
const maxName = 128

// keyOf returns what the keys of a group begin with.
func keyOf(name string) string {
	if len(name) > maxName {
		name = fmt.Sprintf("%x", sha256.Sum256([]byte(name)))
	}
	return "hierarchy/" + name
}

// connect makes what New returns. All ranks are told what goes wrong on one rank, so none waits for
// it.
func (c *Communicator) connect(ctx context.Context, l Layout, o Options) error {
	tell, _, err := group.Among(ctx, c.world, c.key+"/connect", c.Communicator)
	if err != nil {
		return err
	}
	ranks, err := c.agree(tell, l, o)
	if err != nil || !c.plan.layered() {
		if flat, ok := c.Communicator.(group.Splitter); ok {
			_, closed := flat.SplitAll(tell, nil, nil)
			err = errors.Join(err, closed)
		}
		return err
	}
	if err := c.open(c.Communicator, tell, ranks); err != nil {
		return err
	}
	c.verify.Store(c.Base.Capabilities().Verify != nil)
	c.health = group.NewStoreHealth(c.world, c.key+"/end")
	c.member = group.NewMember(group.Config{
		Name: c.Name(), Rank: c.Rank(), Members: ranks, World: c.world, Health: c.health,
		Ending:  c.cancel,
		Timeout: math.MaxInt64, // the communicators of the phases decide how long a rank waits
	})
	c.member.Watch(watched{c})
	return nil
}

// terms are what ranks tell each other when they connect.
type terms struct {
	World   int    // rank of the world
	Places  []byte // a hash: all ranks have all that is told, and a layout names all of them
	Options Options
}

// agree makes the plan of all ranks, if they were given the same, and returns their numbers in
// the world.
func (c *Communicator) agree(tell group.Gatherer, l Layout, o Options) (ranks backend.Members,
	err error) {
	o, own := o.filled()
	if l.Size() != c.Size() {
		own = fmt.Errorf("%w: a layout of %d ranks for %d", backend.ErrArgument, l.Size(), c.Size())
	}
	places := sha256.Sum256(fmt.Append(nil, l.at))
	mine := terms{c.world.Rank, places[:], o}
	all, err := group.Agree(tell, c.Capabilities().Members, mine, own)
	if err != nil {
		return nil, err
	}
	c.plan = Plan{Layout: l, Options: all[0].Options, Direct: c.Capabilities().Direct}
	for r, t := range all {
		if !bytes.Equal(t.Places, all[0].Places) {
			return nil, fmt.Errorf("%w: rank %d has another topology than rank 0: give every "+
				"rank the same", backend.ErrArgument, r)
		}
		ranks = append(ranks, t.World)
	}
	c.place = l.at[c.Rank()]
	c.stats.Sent = make([]int64, l.Machines())
	return ranks, nil
}

// Unwrap implements [backend.Wrapper]: flat, and then those of the phases.
func (c *Communicator) Unwrap() []backend.Communicator {
	return append([]backend.Communicator{c.Communicator}, c.others()...)
}

// Layered reports whether calls can be hierarchical: ranks are on several machines.
func (c *Communicator) Layered() bool { return c.layered() }

// Between returns the communicator of this rank's rail, which has a rank of each machine, nil if
// this rank is on none. Call collectives on it only for measurements: the Communicator must be
// idle, on every rank.
func (c *Communicator) Between() backend.Communicator { return c.parts[broadcastPhase] }

// Inside returns the communicator of this rank's machine, nil if it has one device. Use it like
// [Communicator.Between].
func (c *Communicator) Inside() backend.Communicator { return c.parts[gatherPhase] }

// Plan returns what the choice between flat and hierarchical depends on.
func (c *Communicator) Plan() Plan { return c.plan }

// Chosen implements [backend.Chooser].
func (c *Communicator) Chosen(what *backend.Collective, d backend.DType, nbytes int) string {
	if c.layered() && c.plan.Choose(*what, d, nbytes/d.Size()).Hierarchical {
		return "hierarchical"
	}
	if inner, ok := backend.As[backend.Chooser](c.Communicator); ok {
		return inner.Chosen(what, d, nbytes)
	}
	return what.Algorithm.String()
}

// Explain is [Plan.Explain] of this communicator.
func (c *Communicator) Explain(what backend.Collective, d backend.DType, nbytes int) string {
	return c.plan.Explain(what, d, nbytes)
}

// inFlight is how many calls keep links inside and between machines busy, though each phase of a
// call uses only one of them: for 64 buckets of 25 MiB, among two machines of two over sockets,
// four calls at a time take 0.78 of the time of one at a time (part 4 of
// bench/results/2026-11/2026-11-21-h200x2-hierarchy-machines.txt).
const inFlight = 4

// Capabilities implements [backend.Communicator]. If nothing is hierarchical, flat runs every call.
func (c *Communicator) Capabilities() backend.Capabilities {
	caps := c.Base.Capabilities()
	if caps.Verify != nil {
		caps.Verify = c.switchVerify
	}
	caps.InFlight = 1
	if c.layered() {
		caps.InFlight, caps.Transport, caps.Rows = inFlight, nil, nil
	}
	return caps
}

// switchVerify switches the comparison of calls on or off. Every hierarchical call then has a part
// on flat, if only an empty one, whose header stands for the call.
func (c *Communicator) switchVerify(on bool) {
	for _, inner := range c.Unwrap() {
		if verify := inner.Capabilities().Verify; verify != nil {
			verify(on)
			c.verify.Store(on)
		}
	}
}

// Alloc implements [backend.Communicator].
func (c *Communicator) Alloc(nbytes int) (backend.Buffer, error) {
	if err := c.failure("alloc"); err != nil {
		return backend.Buffer{}, err
	}
	b, err := c.Base.Alloc(nbytes)
	return b, c.seen(err, "alloc")
}

// Split implements [backend.Communicator]. A part that spans machines is hierarchical, too.
func (c *Communicator) Split(color, key int) (backend.Communicator, error) {
	if err := c.failure("split"); err != nil {
		return nil, err
	}
	part, err := c.Base.Split(color, key)
	if err != nil || part == nil {
		return nil, c.seen(err, "split")
	}
	if c.plan.Layout.Machines() == 1 {
		return part, nil
	}
	layered, err := c.over(part)
	if err != nil {
		// the group ends: who is to blame is said in a moment
		if c.ctx.Err() != nil && c.member != nil {
			<-c.member.Over()
		}
		if sticky := c.failure("split"); sticky != nil {
			part.Abort(sticky) // ranks that wait in the part hear why this one leaves
			err = sticky
		}
		part.Close()
		return nil, err
	}
	return layered, nil
}

// over makes a part hierarchical.
func (c *Communicator) over(part backend.Communicator) (*Communicator, error) {
	tell, ranks, err := group.Among(c.ctx, c.world, keyOf(part.Name())+"/split", part)
	if err != nil {
		return nil, err
	}
	members, err := group.Exchange(tell, ranks, c.Rank())
	if err != nil {
		return nil, backend.Refuse(c, fmt.Errorf("split: %w", err))
	}
	o := c.plan.Options
	o.Hooks = c.hooks
	return New(c.ctx, c.world, part, c.plan.Layout.of(members), o)
}

// Err returns the error that ended the communicator, or nil.
func (c *Communicator) Err() error {
	if err := c.failure(""); err != nil {
		return err
	}
	return c.Communicator.Err()
}

// Close implements [backend.Communicator].
func (c *Communicator) Close() (err error) {
	c.ending.Do(func() { // who sees a phase end because of this waits until all have
		if c.member != nil {
			c.member.Close()
		}
		err = errors.Join(c.closeParts(), c.Communicator.Close())
	})
	if err := errors.Join(err, c.closeParts(), c.Communicator.Close(), c.release()); err != nil {
		return fmt.Errorf("%s: close: %w", backend.RankOf(c), err)
	}
	return nil
}

// closeParts closes the communicators except flat, which may wait for what they free. It closes
// them at once: each may wait a while for a peer that is lost, and the caller must report that.
func (c *Communicator) closeParts() error {
	parts := c.others()
	errs := make([]error, len(parts))
	var all sync.WaitGroup
	for i, part := range parts {
		all.Go(func() { errs[i] = part.Close() })
	}
	all.Wait()
	return errors.Join(errs...)
}

// release frees what belongs to the communicator alone. Calls under way have ended with the
// communicators of their phases, or there are none yet, after a New that has failed.
func (c *Communicator) release() error {
	c.cancel()
	if c.member != nil {
		c.member.Leave()
		c.health.Release()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.close(c.Device())
}
