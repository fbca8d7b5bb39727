package group

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/shm"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Sharing is the ranks that share memory, as one of them knows them.
type Sharing struct {
	Gather  Gatherer
	Rank    int // this one
	Members backend.Members
	Dir     string // the tmpfs
	// Gone returns why nothing comes from a rank any more, nil if something may. It is nil where
	// nobody can tell.
	Gone func(r int) error
}

// Lost is Gone, nil where nobody can tell.
func (s Sharing) Lost(r int) error {
	if s.Gone == nil {
		return nil
	}
	return s.Gone(r)
}

// errUnseen says that a rank cannot open its leader's file through /proc.
var errUnseen = errors.New("the ranks do not see each other's processes")

// HandOver maps nbytes of shared memory, made by rank leader, on every rank, or
// fails on every rank. A rank that is its own leader and asks for nothing gets
// nothing, but takes part. Several groups may do so at once over one Gatherer,
// each with its leader.
//
// If this rank alone ends in between, because another goroutine closes the group, others may have
// all that they need, and wait for it in what the memory is for: leave, if it is not nil, shows
// them there that this rank has left.
func (s Sharing) HandOver(leader, nbytes int, leave func(*shm.Share)) (*shm.Share, error) {
	h := handover{Sharing: s, leader: leader, nbytes: nbytes}
	err := h.byProcess()
	if errors.Is(err, errUnseen) {
		err = h.byName()
	}
	if err != nil {
		if h.share != nil && leave != nil {
			leave(h.share)
		}
		return nil, errors.Join(err, h.discard())
	}
	if h.share != nil {
		h.share.Release()
	}
	return h.share, nil
}

// Board makes the boards of the parts of a group, one for each: in memory where the ranks of
// a part share a machine, else over connections. It fails on every rank or on none. A rank in
// no part gets no board, but takes part.
func (s Sharing) Board(w *rendezvous.World, part Part) (Board, error) {
	if w.LocalSize == w.Size {
		return s.memory(part)
	}
	type place struct {
		Node int
		Addr string
	}
	mine := place{Node: w.Node}
	var b *Sockets
	var err error
	if part.Rank >= 0 {
		if b, err = NewSockets(w, part.Name, part.Members, part.Rank); err == nil {
			mine.Addr = b.Addr()
		}
	}
	err = s.Gather.Vote(s.Members, err)
	var all []place
	if err == nil {
		all, err = Exchange(s.Gather, s.Members, mine)
	}
	apart := err == nil && slices.ContainsFunc(part.Ranks, func(r int) bool { return all[r].Node != w.Node })
	if b != nil && !apart {
		err = errors.Join(err, b.Release())
	}
	if err != nil {
		return nil, err
	}
	if !apart {
		return s.memory(part)
	}
	if _, err := s.HandOver(s.Rank, 0, nil); err != nil { // that of other parts
		b.Close()
		return nil, errors.Join(err, b.Release())
	}
	addrs := make([]string, len(part.Ranks))
	for i, r := range part.Ranks {
		addrs[i] = all[r].Addr
	}
	b.Open(addrs)
	return b, nil
}

// memory is Board where no rank of this one's part is on another machine.
func (s Sharing) memory(part Part) (Board, error) {
	leader, nbytes := s.Rank, 0 // a rank in no part makes nothing, for nobody
	if part.Rank >= 0 {
		leader, nbytes = part.Ranks[0], MemoryBytes(len(part.Ranks))
	}
	share, err := s.HandOver(leader, nbytes, func(share *shm.Share) {
		NewMemory(share, part.Rank, len(part.Ranks)).Close()
	})
	if err != nil || share == nil {
		return nil, err
	}
	return NewMemory(share, part.Rank, len(part.Ranks)), nil
}

// handover is what one rank knows of it.
type handover struct {
	Sharing
	leader int
	nbytes int
	share  *shm.Share
	offer  shm.Offer // of the leader
}

func (h *handover) discard() error {
	if h.share == nil {
		return nil
	}
	return h.share.Unmap()
}

// byProcess makes the memory, which the others open in the leader's process. Every rank
// has the same error.
func (h *handover) byProcess() error {
	var mine shm.Offer
	var err error
	if h.leader == h.Rank && h.nbytes > 0 {
		if h.share, err = shm.New(h.Dir, h.nbytes); err == nil {
			mine, err = h.share.Offer()
		}
	}
	if h.offer, err = ask(h, mine, err); err == nil && h.leader != h.Rank {
		if h.share, err = h.offer.Open(h.nbytes); err != nil {
			err = fmt.Errorf("%w: %w", errUnseen, err)
		}
	}
	return h.vote(err)
}

// byName gives the memory a name in the directory while those open it that could not.
func (h *handover) byName() error {
	var name string
	var err error
	if h.leader == h.Rank && h.share != nil {
		if name, err = h.share.Link(h.Dir); err == nil {
			defer os.Remove(filepath.Join(h.Dir, name))
		}
	}
	if name, err = ask(h, name, err); err == nil && h.leader != h.Rank && h.share == nil {
		h.share, err = h.offer.OpenNamed(filepath.Join(h.Dir, name), h.nbytes)
		if err != nil {
			err = fmt.Errorf("%w: %w: they must share the directory (EURYALE_SHM_DIR) then", errUnseen, err)
		}
	}
	return h.vote(err)
}

// lost is an error of the Gatherer, after which nobody asks again.
type lost struct{ error }

func (l lost) Unwrap() error { return l.error }

// ask returns what this rank's leader tells.
func ask[T any](h *handover, mine T, err error) (theirs T, _ error) {
	type told struct {
		What    T
		Problem string
	}
	t := told{What: mine}
	if err != nil {
		t.Problem = err.Error()
	}
	all, err := Exchange(h.Gather, h.Members, t)
	if err != nil {
		return theirs, lost{err}
	}
	if problem := all[h.leader].Problem; problem != "" {
		return theirs, fmt.Errorf("%s made none: %s", h.Members.Rank(h.leader), problem)
	}
	return all[h.leader].What, nil
}

func (h *handover) vote(mine error) error {
	if errors.As(mine, new(lost)) {
		return mine
	}
	return h.Gather.Vote(h.Members, mine)
}
