package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Backend connects ranks on any machines by sockets.
type Backend struct {
	// Dir is a tmpfs where ranks that are all on one machine share their board; empty means
	// /dev/shm. All ranks must use the same.
	Dir string
}

// New returns the backend with its defaults.
func New() Backend { return Backend{} }

var _ backend.Backend = Backend{}

// Name returns "tcp".
func (Backend) Name() string { return "tcp" }

// Available returns nil: there is nothing to install.
func (Backend) Available() error { return nil }

// Connect implements [backend.Backend].
func (b Backend) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	ctx, cancel := context.WithTimeout(ctx, w.Timeout)
	defer cancel()
	among := group.Sharing{Gather: group.OverStore(ctx, w, "tcp/connect"), Rank: w.Rank, Dir: b.Dir}
	if among.Dir == "" {
		among.Dir = "/dev/shm"
	}
	c, err := connect(w, group.Whole(w), among)
	if err != nil {
		return nil, fmt.Errorf("rank %d of %s: backend tcp: %w", w.Rank, w.Name, err)
	}
	return c, nil
}

// end is what a rank tells the others of itself.
type end struct {
	Addr  string
	Node  int
	Place group.Place
}

// connect makes the communicator of a part of the ranks that gather: in shared memory if the job
// has several machines and the part is on one of them. It fails on all ranks or on none. A rank
// in no part gets nil, but takes part.
func connect(w *rendezvous.World, part group.Part, among group.Sharing) (backend.Communicator, error) {
	m := &mesh{world: w, name: "tcp " + part.Name, came: map[int]*link{}, some: make(chan struct{}, 1)}
	mine := end{Node: w.Node, Place: group.Here()}
	var err error
	if part.Rank >= 0 {
		if m.listener, err = w.Listen(m.name, m.accept); err == nil {
			mine.Addr = m.listener.Addr()
		}
	}
	err = among.Gather.Vote(among.Members, err)
	var all []end
	if err == nil {
		all, err = group.Exchange(among.Gather, among.Members, mine)
	}
	if err != nil {
		return nil, errors.Join(err, m.close())
	}
	here, me := neighbours(part, all)
	inside, across := part, part
	if w.LocalSize < w.Size && len(here) == len(part.Ranks) {
		across = group.Part{Rank: -1}
	} else {
		inside = group.Part{Rank: -1}
	}
	err = among.Gather.Vote(among.Members, m.dial(across, all))
	err = errors.Join(err, m.close())
	var board group.Board
	if err == nil {
		board, err = among.Board(w, across)
	}
	var local backend.Communicator
	if err == nil {
		local, err = host.Join(w, inside, among, here)
	}
	switch {
	case err != nil:
		return nil, errors.Join(err, m.discard())
	case across.Rank >= 0:
		return newComm(w, part, among, m.links, board, newWait(here, me, w.TLS)), nil
	}
	return local, nil
}

// neighbours returns the places of the ranks of a part that are on this rank's machine, and
// which of them is this one.
func neighbours(part group.Part, all []end) (here []group.Place, me int) {
	for i, r := range part.Ranks {
		if all[r].Node != all[part.Ranks[part.Rank]].Node {
			continue
		}
		if i == part.Rank {
			me = len(here)
		}
		here = append(here, all[r].Place)
	}
	return here, me
}

// newComm returns a rank of a connected group.
func newComm(w *rendezvous.World, part group.Part, among group.Sharing, links []*link, board group.Board, how wait) *comm {
	size := len(part.Members)
	c := &comm{
		name: part.Name, rank: part.Rank, size: size, members: part.Members, world: w, shm: among.Dir,
		links: links, board: board, wait: how, heads: make([]header, size), terms: make([]backend.Buffer, size),
		given: map[uintptr]backend.Buffer{},
	}
	c.member = group.NewMember(group.Config{Name: part.Name, Rank: part.Rank, Members: part.Members, World: w, Health: board})
	c.verify.Store(true)
	c.member.Watch(nil)
	return c
}

// mesh makes the connections of one rank of a part: to the ranks before it, from those behind.
type mesh struct {
	world    *rendezvous.World
	name     string
	listener *rendezvous.Listener // nil for a rank in no part
	links    []*link              // by rank of the part, once all are there

	mu    sync.Mutex
	came  map[int]*link // by rank of the job
	wrong error
	some  chan struct{} // a connection has come, or has failed
}

// accept takes a connection that another rank has made.
func (m *mesh) accept(rank int, conn net.Conn) {
	l, err := take(conn)
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case err != nil:
		m.wrong = err
	case m.came[rank] != nil:
		m.wrong = errors.Join(fmt.Errorf("rank %d has connected twice", rank), l.close())
	default:
		m.came[rank] = l
	}
	select {
	case m.some <- struct{}{}:
	default:
	}
}

// dial connects to the ranks of the part before this one, and waits for those behind it.
func (m *mesh) dial(part group.Part, all []end) error {
	if part.Rank < 0 {
		return nil
	}
	m.links = make([]*link, len(part.Ranks))
	ctx, cancel := context.WithTimeout(context.Background(), m.world.Timeout)
	defer cancel()
	for at := range part.Rank {
		conn, err := m.world.Dial(ctx, m.name, part.Members[at], all[part.Ranks[at]].Addr)
		if err != nil {
			return err
		}
		if m.links[at], err = take(conn); err != nil {
			return err
		}
	}
	for at := part.Rank + 1; at < len(part.Ranks); at++ {
		var err error
		if m.links[at], err = m.wait(ctx, part.Members[at]); err != nil {
			return err
		}
	}
	return nil
}

// wait returns the connection that a rank of the job has made.
func (m *mesh) wait(ctx context.Context, rank int) (*link, error) {
	for {
		if l, err := m.given(rank); l != nil || err != nil {
			return l, err
		}
		select {
		case <-m.some:
		case <-m.world.Down():
			return nil, m.world.Failure()
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: no connection from rank %d for %v", backend.ErrTimeout, rank, m.world.Timeout)
		}
	}
}

func (m *mesh) given(rank int) (*link, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.came[rank]
	delete(m.came, rank)
	return l, m.wrong
}

// close takes no more connections.
func (m *mesh) close() error {
	if m.listener == nil {
		return nil
	}
	err := m.listener.Close()
	for _, l := range m.came { // that nobody has waited for
		err = errors.Join(err, l.close())
	}
	m.came = nil
	return err
}

// discard closes the connections.
func (m *mesh) discard() (err error) {
	for _, l := range m.links {
		if l != nil {
			err = errors.Join(err, l.close())
		}
	}
	return err
}
