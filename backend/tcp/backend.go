package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/internal/hosted"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Backend connects ranks on any machines by sockets.
type Backend struct {
	// Dir is a tmpfs in which ranks that are all on one machine share their board; empty means
	// /dev/shm. All ranks must use the same one.
	Dir string
}

var _ backend.Backend = Backend{}

// Name returns "tcp".
func (Backend) Name() string { return "tcp" }

// Available returns nil: there is nothing to install.
func (Backend) Available() error { return nil }

var _ group.Connector = Backend{}

// Connect implements [backend.Backend].
func (b Backend) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	return b.ConnectSplit(ctx, w, nil)
}

// ConnectSplit implements [group.Connector].
func (b Backend) ConnectSplit(
	ctx context.Context, w *rendezvous.World, ways [][]group.Pass,
) (backend.Communicator, error) {
	among := group.Sharing{Gather: group.OverStore(ctx, w, "tcp/connect"), Rank: w.Rank, Dir: b.Dir}
	if among.Dir == "" {
		among.Dir = "/dev/shm"
	}
	parts := []group.Part{group.Whole(w)}
	for i, all := range ways {
		parts = append(parts, parts[0].Split(fmt.Sprintf("with%d", i), all))
	}
	made, err := connect(w, parts, among, nil)
	if err != nil {
		return nil, fmt.Errorf("rank %d of %s: backend tcp: %w", w.Rank, w.Name, err)
	}
	if c, ok := made[0].(*hosted.Comm); ok {
		c.Ready = hosted.Ready{Ways: ways, Parts: made[1:]}
	}
	return made[0], nil
}

// connect makes the communicators of several parts of the gathering ranks at once. It uses shared
// memory if the job has several machines and the part is on one of them. It fails on all ranks or
// on none. A rank in no part gets nil, but takes part. problem says why this rank cannot. If ranks
// of a machine cannot share memory, connections replace it.
func connect(
	w *rendezvous.World, parts []group.Part, among group.Sharing, problem error,
) ([]backend.Communicator, error) {
	all, err := connectBy(w, parts, among, problem, true)
	if errors.Is(err, group.ErrNoMemory) {
		all, err = connectBy(w, parts, among, problem, false)
	}
	return all, err
}

// connectBy is connect with shared memory, or without.
func connectBy(
	w *rendezvous.World, parts []group.Part, among group.Sharing, problem error, memory bool,
) ([]backend.Communicator, error) {
	places := new(group.Places)
	meshes, steps := make([]*mesh, len(parts)), []group.Resource{places}
	for i, part := range parts {
		site, err := hosted.NewSite(w, part, among, places, memory)
		if err != nil {
			return nil, err
		}
		meshes[i] = &mesh{
			Site: site, world: w, among: among, name: "tcp " + part.Name,
			came: map[int]*link{}, some: make(chan struct{}, 1),
		}
		steps = append(append(steps, site.Steps()...), meshes[i])
	}
	if err := among.Form(problem, steps...); err != nil {
		return nil, err
	}
	all := make([]backend.Communicator, len(parts))
	for i, m := range meshes {
		if all[i] = m.Local(); m.Across.Rank >= 0 {
			all[i] = m.communicator(among)
		}
	}
	return all, nil
}

// communicator returns the communicator of a part whose ranks are connected.
func (m *mesh) communicator(among group.Sharing) backend.Communicator {
	return hosted.New(hosted.Config{
		Backend: Backend{}.Name(), World: m.world, Part: m.Across, Among: among, Board: m.Board(),
		Compares: true, Direct: true, Tree: true,
		NewEngine: func(c *hosted.Comm) hosted.Engine {
			e := &engine{Comm: c, links: m.links, wait: newWait(m.Site, m.world.TLS),
				heads: make([]header, c.Size()), terms: make([]backend.Buffer, c.Size()),
				branches: make([][]int, c.Size())}
			c.Member.Stragglers = e.stragglers
			return e
		},
		Connect: func(parts []group.Part, among group.Sharing, problem error) (
			[]backend.Communicator, error,
		) {
			return connect(m.world, parts, among, problem)
		},
	})
}

// mesh is the step that makes the connections of one rank of a part across machines: it dials the
// ranks before it, and those behind dial it.
type mesh struct {
	*hosted.Site
	world    *rendezvous.World
	among    group.Sharing
	name     string
	listener *rendezvous.Listener // nil for a rank in no such part
	links    []*link              // by rank of the part, once all are there

	mu    sync.Mutex
	came  map[int]*link // by rank of the job
	wrong error
	some  chan struct{} // a connection has come, or has failed
}

// Offer implements [group.Resource]: it listens for the others, and tells them the address.
func (m *mesh) Offer(pass int) (any, error) {
	if pass > 0 || m.Across.Rank < 0 {
		return "", nil
	}
	var err error
	if m.listener, err = m.world.Listen(m.name, m.accept); err != nil {
		return "", err
	}
	return m.listener.Addr(), nil
}

// Take implements [group.Resource].
func (m *mesh) Take(pass int, offers group.Offers) error {
	if pass > 0 || m.Across.Rank < 0 {
		return nil
	}
	addrs, err := group.Read[string](offers)
	if err != nil {
		return err
	}
	return m.dial(addrs)
}

// End implements [group.Resource].
func (m *mesh) End(outcome error) error {
	err := m.close()
	if outcome != nil {
		err = errors.Join(err, m.discard())
	}
	return err
}

// accept takes a connection that another rank has made.
func (m *mesh) accept(rank int, conn net.Conn) {
	l, err := newLink(conn)
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

// dial connects to the ranks of the part before this one, all at once, and waits for those behind
// it. addrs has one entry for each rank that gathers.
func (m *mesh) dial(addrs []string) error {
	part := m.Across
	m.links = make([]*link, len(part.Ranks))
	ctx, cancel := context.WithTimeout(context.Background(), m.world.Timeout)
	defer cancel()
	ctx, over := m.among.Attended(ctx)
	defer over()
	failed := make(chan error, 1)
	keep := func(at int, l *link, err error) {
		if m.links[at] = l; err == nil {
			return
		}
		select {
		case failed <- err:
			cancel() // the others need not wait
		default: // follows from that failure
		}
	}
	var all sync.WaitGroup
	for at := range part.Rank {
		all.Go(func() {
			l, err := m.reach(ctx, part.Members[at], addrs[part.Ranks[at]])
			keep(at, l, err)
		})
	}
	for at := part.Rank + 1; at < len(part.Ranks); at++ {
		l, err := m.wait(ctx, part.Members[at])
		keep(at, l, err)
	}
	all.Wait()
	select {
	case err := <-failed:
		return err
	default:
		return nil
	}
}

// reach returns a connection to a rank of the job.
func (m *mesh) reach(ctx context.Context, rank int, addr string) (*link, error) {
	conn, err := m.world.Dial(ctx, m.name, rank, addr)
	if err != nil {
		return nil, err
	}
	return newLink(conn)
}

// wait returns the connection that a rank of the job has made. It waits until ctx ends.
func (m *mesh) wait(ctx context.Context, rank int) (*link, error) {
	for {
		if l, err := m.takeLink(rank); l != nil || err != nil {
			return l, err
		}
		select {
		case <-m.some:
		case <-m.world.Down():
			return nil, m.world.Failure()
		case <-ctx.Done():
			if why := context.Cause(ctx); !errors.Is(why, context.DeadlineExceeded) {
				return nil, why
			}
			return nil, fmt.Errorf("%w: no connection from rank %d for %v", backend.ErrTimeout,
				rank, m.world.Timeout)
		}
	}
}

func (m *mesh) takeLink(rank int) (*link, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.came[rank]
	delete(m.came, rank)
	return l, m.wrong
}

// close stops taking connections.
func (m *mesh) close() error {
	if m.listener == nil {
		return nil
	}
	err := m.listener.Close()
	for _, l := range m.came { // those that nobody has waited for
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
