package tcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/backend/internal/hosted"
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

// connect makes the communicator of a part of the ranks that gather: in shared memory if the job
// has several machines and the part is on one of them. It fails on all ranks or on none. A rank
// in no part gets nil, but takes part.
func connect(w *rendezvous.World, part group.Part, among group.Sharing) (backend.Communicator, error) {
	m := &mesh{world: w, name: "tcp " + part.Name, came: map[int]*link{}, some: make(chan struct{}, 1)}
	addr, err := m.listen(part)
	err = among.Gather.Vote(among.Members, err)
	var site hosted.Site
	if err == nil {
		site, err = hosted.Locate(w, part, among, addr)
	}
	if err != nil {
		return nil, errors.Join(err, m.close())
	}
	err = among.Gather.Vote(among.Members, m.dial(site, among))
	err = errors.Join(err, m.close())
	var board group.Board
	if err == nil {
		board, err = among.Board(w, site.Across)
	}
	var local backend.Communicator
	if err == nil {
		local, err = host.Join(w, site.Inside, among, site.Here)
	}
	if err != nil {
		if board != nil { // ranks that have all they need are not to wait for this one
			board.Close()
			err = errors.Join(err, board.Release())
		}
		return nil, errors.Join(err, m.discard())
	}
	if site.Across.Rank < 0 {
		return local, nil
	}
	return hosted.New(hosted.Config{
		Backend: Backend{}.Name(), World: w, Part: part, Among: among, Board: board, Compares: true, Direct: true, Tree: true,
		NewEngine: func(c *hosted.Comm) hosted.Engine {
			e := &engine{Comm: c, links: m.links, wait: newWait(site, w.TLS),
				heads: make([]header, c.Size()), terms: make([]backend.Buffer, c.Size())}
			c.Member.Late = e.late
			return e
		},
		Connect: func(part group.Part, among group.Sharing) (backend.Communicator, error) {
			return connect(w, part, among)
		},
	}), nil
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

// listen returns where this rank listens for the others of its part.
func (m *mesh) listen(part group.Part) (addr string, err error) {
	if part.Rank < 0 {
		return "", nil
	}
	if m.listener, err = m.world.Listen(m.name, m.accept); err != nil {
		return "", err
	}
	return m.listener.Addr(), nil
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
func (m *mesh) dial(site hosted.Site, among group.Sharing) error {
	part := site.Across
	if part.Rank < 0 {
		return nil
	}
	m.links = make([]*link, len(part.Ranks))
	ctx, cancel := context.WithTimeout(context.Background(), m.world.Timeout)
	defer cancel()
	for at := range part.Rank {
		conn, err := m.world.Dial(ctx, m.name, part.Members[at], site.Addrs[at])
		if err != nil {
			return err
		}
		if m.links[at], err = take(conn); err != nil {
			return err
		}
	}
	for at := part.Rank + 1; at < len(part.Ranks); at++ {
		var err error
		gone := func() error { return among.Lost(part.Ranks[at]) }
		if m.links[at], err = m.wait(ctx, part.Members[at], gone); err != nil {
			return err
		}
	}
	return nil
}

// goneLook is between two looks whether the rank that is to connect may still do so.
const goneLook = 10 * time.Millisecond

// wait returns the connection that a rank of the job has made, if it may still come.
func (m *mesh) wait(ctx context.Context, rank int, gone func() error) (*link, error) {
	tick := time.NewTicker(goneLook)
	defer tick.Stop()
	for {
		err := gone() // before the look for what it may have sent
		l, wrong := m.given(rank)
		if err = cmp.Or(wrong, err); l != nil || err != nil {
			return l, err
		}
		select {
		case <-m.some:
		case <-tick.C:
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
