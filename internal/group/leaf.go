package group

import (
	"fmt"
	"math"
	"slices"
	"sync/atomic"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Leaf is what communicators of host memory have in common.
type Leaf struct {
	Member  *Member     // the group's life
	Verify  atomic.Bool // whether calls are compared
	Closing atomic.Bool
	comm    backend.CheckedStarter
}

// Join makes the rank of a part, for the communicator that has the Leaf.
func (l *Leaf) Join(comm backend.CheckedStarter, part Part, w *rendezvous.World, h Health) {
	l.comm, l.Member = comm, NewMember(Config{Name: part.Name, Rank: part.Rank,
		Members: part.Members, World: w, Health: h})
}

// Name implements [backend.Communicator].
func (l *Leaf) Name() string { return l.Member.Name }

// Rank implements [backend.Communicator].
func (l *Leaf) Rank() int { return l.Member.Rank }

// Size implements [backend.Communicator].
func (l *Leaf) Size() int { return len(l.Member.Members) }

// Err returns the error that ended the communicator, or nil.
func (l *Leaf) Err() error { return l.Member.Err() }

// Gone implements [Presence].
func (l *Leaf) Gone(r int) error { return l.Member.Gone(r) }

// Abort implements [backend.Communicator].
func (l *Leaf) Abort(cause error) { l.Member.Abort(cause) }

// Start implements [backend.Communicator].
func (l *Leaf) Start(q backend.Queue, what backend.Collective, dst,
	src backend.Buffer) (backend.Work, error) {
	count, err := what.Check(l.Member.Rank, len(l.Member.Members), dst, src)
	if err != nil {
		return nil, backend.Refuse(l.comm, err)
	}
	return l.comm.StartChecked(q, what, count, dst, src)
}

// Refused returns why no communicator of host memory starts a call, nil if it may.
func (l *Leaf) Refused(what *backend.Collective, dst, src *backend.Buffer) error {
	switch {
	case dst.Device() || src.Device():
		return fmt.Errorf("%w: %s: %v was given device memory, but backend %s takes host memory "+
			"only", backend.ErrArgument, backend.RankOf(l.comm), *what,
			l.comm.Capabilities().Backend)
	case what.Rows != nil:
		return backend.RefuseRows(l.comm, *what)
	}
	return nil
}

// Gatherer is an exchange over the group itself, for memory of an Alloc, or of a Split that the
// ranks have begun. It matches no call that a program starts.
func (l *Leaf) Gatherer(purpose backend.Purpose) Gatherer {
	exchange := backend.Collective{Kind: backend.AllGather,
		Origin: &backend.Origin{Purpose: purpose}}
	return Framed(math.MaxInt, func(note []byte) ([][]byte, error) {
		all := make([]byte, l.Size()*len(note))
		if err := backend.Run(l.comm, exchange, backend.Of(all), backend.Of(note)); err != nil {
			return nil, err
		}
		return slices.Collect(slices.Chunk(all, len(note))), nil
	})
}
