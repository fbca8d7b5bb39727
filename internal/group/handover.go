package group

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

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

// Attended returns ctx ending when another rank is gone, with why: a step waits no longer.
func (s Sharing) Attended(ctx context.Context) (context.Context, func()) {
	return attended(ctx, s.Gone, s.Rank, len(s.Members))
}

// ErrNoMemory says that ranks of one machine cannot share memory, which connections can replace.
var ErrNoMemory = errors.New("no shared memory")

// errUnseen says that a rank cannot open its leader's file through /proc.
var errUnseen = fmt.Errorf("%w: the ranks do not see each other's processes", ErrNoMemory)

// HandOver maps nbytes of shared memory, made by rank leader, on every rank, or
// fails on every rank. A rank that is its own leader and asks for nothing gets
// nothing, but takes part. Several groups may do so at once over one Gatherer,
// each with its leader.
//
// If this rank alone ends in between, because another goroutine closes the group, others may have
// all that they need, and wait for it in what the memory is for: leave, if it is not nil, shows
// them there that this rank has left.
func (s Sharing) HandOver(leader, nbytes int, leave func(*shm.Share)) (*shm.Share, error) {
	h := s.Handover(leader, nbytes, leave)
	if err := s.Form(nil, h); err != nil {
		return nil, err
	}
	return h.Share(), nil
}

// Board makes the boards of the parts of a group, one for each: in memory where the ranks of
// a part share a machine, else over connections. It fails on every rank or on none. A rank in
// no part gets no board, but takes part.
func (s Sharing) Board(w *rendezvous.World, part Part) (Board, error) {
	nodes, err := w.Nodes(context.Background())
	if err != nil {
		return nil, err
	}
	b := s.Boarding(w, part, part.Together(nodes))
	if err := s.Form(nil, b.Steps()...); err != nil {
		return nil, err
	}
	return b.Board(), nil
}

// Boarding makes the board of a part.
type Boarding struct {
	part    Part
	memory  *Handover
	sockets *connected
}

// Boarding returns what makes the board of a part, or nothing for a rank in none: in memory, or
// over connections.
func (s Sharing) Boarding(w *rendezvous.World, part Part, memory bool) *Boarding {
	b := &Boarding{part: part, memory: s.Handover(s.Rank, 0, nil), sockets: &connected{world: w}}
	switch {
	case part.Rank >= 0 && memory:
		b.memory = s.Handover(part.Ranks[0], MemoryBytes(len(part.Ranks)), func(share *shm.Share) {
			NewMemory(share, part.Rank, len(part.Ranks)).Close()
		})
	case part.Rank >= 0:
		b.sockets.part = part
	}
	return b
}

// Steps returns the steps of making it.
func (b *Boarding) Steps() []Resource { return []Resource{b.memory, b.sockets} }

// Board returns the board once the steps were taken, nil where there is none.
func (b *Boarding) Board() Board {
	switch {
	case b.memory.share != nil:
		return NewMemory(b.memory.share, b.part.Rank, len(b.part.Ranks))
	case b.sockets.board != nil:
		return b.sockets.board
	}
	return nil
}

// connected is the step of a board over connections.
type connected struct {
	world *rendezvous.World
	part  Part // none if there is no such board
	board *Sockets
}

func (c *connected) Offer(pass int) (any, error) {
	if pass > 0 || c.part.Ranks == nil {
		return "", nil
	}
	b, err := NewSockets(c.world, c.part.Name, c.part.Members, c.part.Rank)
	if err != nil {
		return "", err
	}
	c.board = b
	return b.Addr(), nil
}

func (c *connected) Take(pass int, offers Offers) error {
	if pass > 0 || c.board == nil {
		return nil
	}
	all, err := Read[string](offers)
	if err != nil {
		return err
	}
	addrs := make([]string, len(c.part.Ranks))
	for i, r := range c.part.Ranks {
		addrs[i] = all[r]
	}
	c.board.Open(addrs)
	return nil
}

func (c *connected) End(outcome error) error {
	if outcome == nil || c.board == nil {
		return nil
	}
	c.board.Close() // ranks that have all they need are not to wait for this one
	return c.board.Release()
}

// Handover is the step of sharing memory that one rank has made.
type Handover struct {
	Sharing
	leader int
	nbytes int
	leave  func(*shm.Share) // nil for nothing
	share  *shm.Share
	offer  shm.Offer // of the leader
	link   string    // the path of the memory, while it has one
}

// Handover returns the step of [Sharing.HandOver].
func (s Sharing) Handover(leader, nbytes int, leave func(*shm.Share)) *Handover {
	return &Handover{Sharing: s, leader: leader, nbytes: nbytes, leave: leave}
}

// Share returns the memory once the step was taken, nil where there is none.
func (h *Handover) Share() *shm.Share { return h.share }

// offered is what a leader tells: its offer, and in the second pass a name in the directory, for
// those that could not open the offer.
type offered struct {
	Memory shm.Offer
	Name   string
}

// Offer implements [Resource].
func (h *Handover) Offer(pass int) (any, error) {
	var mine offered
	if h.leader != h.Rank || h.nbytes == 0 {
		return mine, nil
	}
	var err error
	if pass == 0 {
		if h.share, err = shm.New(h.Dir, h.nbytes); err == nil {
			mine.Memory, err = h.share.Offer()
		}
	} else if mine.Name, err = h.share.Link(h.Dir); err == nil {
		h.link = filepath.Join(h.Dir, mine.Name)
	}
	if err != nil {
		return mine, fmt.Errorf("%w: %w", ErrNoMemory, err)
	}
	return mine, nil
}

// Take implements [Resource].
func (h *Handover) Take(pass int, offers Offers) error {
	all, err := Read[offered](offers)
	if err != nil || h.leader == h.Rank || h.share != nil {
		return err
	}
	if pass == 0 {
		h.offer = all[h.leader].Memory
		h.share, err = h.offer.Open(h.nbytes)
		if errors.Is(err, shm.ErrProcesses) { // no name of the file would help
			return fmt.Errorf("%w: %w", ErrNoMemory, err)
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errUnseen, err)
		}
		return nil
	}
	h.share, err = h.offer.OpenNamed(filepath.Join(h.Dir, all[h.leader].Name), h.nbytes)
	if err != nil {
		return fmt.Errorf("%w: %w: they must share the directory (EURYALE_SHM_DIR) then",
			errUnseen, err)
	}
	return nil
}

// End implements [Resource].
func (h *Handover) End(outcome error) error {
	if h.link != "" {
		os.Remove(h.link)
	}
	if h.share == nil {
		return nil
	}
	if outcome == nil {
		h.share.Release()
		return nil
	}
	if h.leave != nil {
		h.leave(h.share)
	}
	defer func() { h.share = nil }()
	return h.share.Unmap()
}
