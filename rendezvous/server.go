package rendezvous

import (
	"context"
	"errors"
	"net"
	"time"
)

const (
	// waiting bounds the concurrent Gets of one rank.
	waiting = 1024
	// linger is how long a server waits for the others to leave first, if no rank has failed.
	linger = 2 * time.Second
	// spreadTime is how long rank 0 reports a failure to the others before it learns of it itself:
	// its program may then end at once, and the store with it.
	spreadTime = 200 * time.Millisecond
)

// server holds the store of a job, in the process of rank 0, and drives its core by connections.
type server struct {
	gate
	token   string
	me      identity
	timeout time.Duration
	table   *table
	ended   chan struct{} // closed when the core has ended
	// in a Register, lost is told which member's connection has ended. Otherwise nil
	lost func(rank int)
}

// serve holds a store on ln, which it owns. lost is for a Register, nil for the store of a job.
func serve(ln net.Listener, token string, me identity, timeout time.Duration,
	lost func(rank int)) *server {
	s := &server{lost: lost, token: token, me: me, timeout: timeout, ended: make(chan struct{})}
	s.table = &table{core: newCore(me, lost != nil), carry: s.carry}
	s.start(ln, s.serveConn)
	return s
}

// carry carries out what the core says about other processes.
func (s *server) carry(a action) {
	switch a := a.(type) {
	case send:
		if a.reports {
			a.frame.sent = func() { s.table.tell(func() { s.table.wrote(a.to, a.frame.kind) }) }
		}
		a.to.link.push(a.frame)
	case drop:
		a.from.link.end(ErrClosed)
	case seal:
		s.ln.Close()
	case remind:
		time.AfterFunc(a.after, func() { s.table.tell(func() { s.table.due(a.turn) }) })
	case end:
		for _, m := range s.table.members {
			m.link.end(ErrClosed)
		}
		close(s.ended)
	}
}

// serveConn serves a connection.
func (s *server) serveConn(conn net.Conn) {
	m, err := s.welcome(conn)
	s.unproven.giveUp(conn)
	if err != nil || m == nil {
		conn.Close()
		return
	}
	err = s.converse(m)
	if s.lost != nil {
		s.lost(m.rank)
	}
	s.table.tell(func() { s.table.left(m, err) })
	<-m.link.written
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// welcome makes a member of a connection. A launcher that only reports the end of a rank does not
// become one.
func (s *server) welcome(conn net.Conn) (m *member, err error) {
	stop := context.AfterFunc(s.over, func() { conn.Close() })
	defer stop()
	id, err := s.receive(conn, s.token, s.me, func(id identity, welcome frame) (err error) {
		if !s.unproven.giveUp(conn) {
			return errors.New("it was dropped for newer connections just when it had proven the " +
				"token")
		}
		conn.SetDeadline(time.Time{})
		s.table.tell(func() {
			if m, err = s.table.admit(id); m != nil {
				m.link = newLink(conn, s.timeout)
				m.link.push(welcome)
			}
		})
		if m == nil && err == nil {
			err = welcome.writeTo(conn) // before the failure, which may end this process
			s.table.tell(func() { s.table.core.ended(id) })
		}
		return err
	})
	if err != nil {
		s.table.tell(func() { s.table.turnAway(conn.RemoteAddr().String(), id, err) })
	}
	return m, err
}

// turnedAway returns the error of a connection that did not become a member, or nil. If there were
// several, it prefers the last one without the token, then the last one.
func (s *server) turnedAway() (err error) {
	s.table.tell(func() { err = s.table.refused })
	return err
}

// converse serves a member until it says goodbye.
func (s *server) converse(m *member) error {
	for {
		f, err := readFrame(m.link.conn, maxBody)
		if err != nil {
			if cause := context.Cause(m.link.over); cause != nil {
				return cause
			}
			return err
		}
		if f.kind == kindBye {
			return nil
		}
		s.table.tell(func() { err = s.table.hear(m, f) })
		if err == nil {
			err = m.link.room(s.over)
		}
		if err != nil {
			return err
		}
	}
}

// stop ends the server as the core does.
func (s *server) stop() {
	s.table.tell(s.table.core.stop)
	<-s.ended
	s.end()
	s.running.Wait()
}

func (s *server) connected() (all []*member) {
	s.table.tell(func() { all = s.table.core.connected() })
	return all
}

// hostStore is the store of rank 0.
type hostStore struct {
	*memStore
	server *server
}

func (s *server) open() Store { return &hostStore{s.table.open(), s} }

func (h *hostStore) dissolve() { h.server.table.tell(h.server.table.core.dissolve) }

// Close ends rank 0's own calls at once and then stops the server.
func (h *hostStore) Close() error {
	if h.closed.Err() == nil {
		h.memStore.Close()
		h.server.stop()
	}
	return nil
}
