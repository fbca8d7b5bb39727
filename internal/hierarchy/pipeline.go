package hierarchy

import (
	"context"
	"errors"
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/group"
)

// pipeline is what the phases of a rank's slices run on.
type pipeline struct {
	plan  Plan
	place place
	hooks backend.Hooks // are told of phases, if not nil
	// parts are the communicators of the phases that communicate, with flat for the
	// remainder; nil for the others, and for all if nothing can be hierarchical.
	parts  [phases]backend.Communicator
	queues [phases]backend.Queue // all slices go through each in the same order on every rank
	slots  slots
	onHost bool
}

// layered reports whether anything can be hierarchical.
func (p *pipeline) layered() bool { return p.parts[remainderPhase] != nil }

// open makes all of it, for a communicator of some members. It fails on every rank or on none.
// After a failure, close gives back what it has made.
func (p *pipeline) open(
	flat backend.Communicator, tell group.Gatherer, members backend.Members,
) error {
	all, ok := flat.(group.Splitter)
	if !ok {
		err := p.split(flat)
		if err == nil {
			err = p.prepare(flat.Device())
		}
		return tell.Vote(members, err)
	}
	made, err := all.SplitAll(tell, p.plan.Layout.Ways(), p.prepare(flat.Device()))
	if err != nil {
		return fmt.Errorf("communicators for the phases: %w", err)
	}
	for i, way := range p.plan.Layout.ways() {
		if way != nil {
			p.parts[i], made = made[0], made[1:]
		}
	}
	p.parts[remainderPhase] = flat
	return nil
}

// nowhere is the color of a rank in no part.
const nowhere = -1

// Ways returns what every rank passes to each of the splits that [New] makes.
func (l Layout) Ways() (ways [][]struct{ Color, Key int }) {
	for _, way := range l.ways() {
		if way != nil {
			ways = append(ways, way)
		}
	}
	return ways
}

// ways returns what every rank passes to the split for each phase, nil where there is none.
func (l Layout) ways() (ways [phases][]group.Pass) {
	for _, at := range l.at {
		rail, machine := at.device, at.machine
		if rail >= l.fewest() {
			rail = nowhere
		}
		if len(l.machines[machine]) == 1 {
			machine = nowhere
		}
		inside := group.Pass{Color: machine, Key: at.device}
		between := group.Pass{Color: rail, Key: at.machine}
		if l.most() > 1 {
			ways[reducePhase] = append(ways[reducePhase], inside)
			ways[gatherPhase] = append(ways[gatherPhase], inside)
		}
		ways[exchangePhase] = append(ways[exchangePhase], between)
		ways[broadcastPhase] = append(ways[broadcastPhase], between)
	}
	return ways
}

// split makes the communicators of the phases one by one.
func (p *pipeline) split(flat backend.Communicator) error {
	for i, way := range p.plan.Layout.ways() {
		if way == nil {
			continue
		}
		mine := way[flat.Rank()]
		part, err := flat.Split(mine.Color, mine.Key)
		if err != nil {
			return fmt.Errorf("a communicator for %v: %w", phase(i), err)
		}
		p.parts[i] = part
	}
	p.parts[remainderPhase] = flat
	return nil
}

// prepare makes the queues and the scratch memory: now, because on some devices
// that waits for everything under way, and so for peers.
func (p *pipeline) prepare(d backend.Device) (err error) {
	for i := range p.queues {
		if phase(i) == addPhase {
			continue
		}
		if p.queues[i], err = d.NewQueue(); err != nil {
			return err
		}
	}
	// The broadcast follows the addition at once; on one queue nothing is handed over.
	p.queues[addPhase] = p.queues[broadcastPhase]
	if p.slots, err = newSlots(d, p.plan); err != nil {
		return err
	}
	p.onHost = !p.slots.memory.Device()
	return nil
}

// others are the communicators except flat.
func (p *pipeline) others() (all []backend.Communicator) {
	for _, part := range p.parts[:remainderPhase] {
		if part != nil {
			all = append(all, part)
		}
	}
	return all
}

// drain waits for what the queues have begun, since the caller may free its memory. A queue
// that cannot tell does not keep it from the others.
func (p *pipeline) drain() error {
	var errs []error
	for _, q := range p.queues {
		if q == nil { // closed meanwhile, when it was empty
			continue
		}
		done, err := q.Record()
		if err == nil {
			err = done.Join(context.Background())
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// close closes the queues, and frees the scratch memory of a device.
func (p *pipeline) close(d backend.Device) error {
	var errs []error
	p.queues[addPhase] = nil // it is broadcastPhase's
	for i, q := range p.queues {
		if q != nil {
			errs = append(errs, q.Close())
			p.queues[i] = nil
		}
	}
	return errors.Join(append(errs, p.slots.free(d))...)
}

// admission is the end of a phase as seen by the next one, on queues of the host. It
// makes a failure end all communicators of this rank before the next phase can
// begin, so that nobody is sent what a failed phase has left behind.
type admission struct {
	call *call
	at   slicePhase
	work backend.Work
}

// Join implements [backend.Event]. It returns only the error of ctx: the call has the others.
func (g admission) Join(ctx context.Context) error {
	err := g.work.Join(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		g.call.c.fail(g.call, g.at, err)
	}
	return nil
}

// Done implements [backend.Event].
func (g admission) Done() bool { return g.work.Done() }

// after orders queue q after a work of call k.
func (c *Communicator) after(q backend.Queue, k *call, at slicePhase, w backend.Work) error {
	if c.onHost {
		return q.Wait(admission{k, at, w})
	}
	return w.Wait(q)
}
