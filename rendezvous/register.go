package rendezvous

import (
	"context"
	"fmt"
	"net"
)

// Register is a store that outlives the processes that use it. The launcher of an elastic job
// serves it, and knows at once when a process has ended. Its clients are processes, not ranks,
// which change. Process numbers are never used again.
type Register struct{ server *server }

// ServeRegister serves the register of a job on a loopback address, or on all addresses. It calls
// lost with the number of each process whose connection has ended, on any goroutine.
func ServeRegister(e Env, everywhere bool, lost func(process int)) (*Register, error) {
	host := loopbackHost
	if everywhere {
		host = ""
	}
	me := identity{size: maxRanks, protocol: protocol, job: label(e.Job), lasting: true, tls: e.TLS}
	ln, err := (&net.ListenConfig{KeepAliveConfig: keepAlive()}).Listen(context.Background(), "tcp",
		net.JoinHostPort(host, "0"))
	if err == nil {
		ln, err = secured(ln, me)
	}
	if err != nil {
		return nil, fmt.Errorf("rendezvous: serve the register of an elastic job: %w", err)
	}
	return &Register{serve(ln, e.Token, me, e.Timeout, lost)}, nil
}

// Addr returns where the register is served.
func (r *Register) Addr() string { return r.server.ln.Addr().String() }

// Store returns the register for the process that serves it.
func (r *Register) Store() Log { return r.server.table.open() }

// Joined reports whether a process has ever connected.
func (r *Register) Joined() (joined bool) {
	r.server.table.tell(func() { joined = len(r.server.table.ranks) > 1 })
	return joined
}

// Close ends the register.
func (r *Register) Close() { r.server.stop() }

// OpenRegister connects a process of a job, whose number is at least 1, to the register at an
// address.
func OpenRegister(ctx context.Context, addr string, e Env, process int) (Log, error) {
	me, err := identify(Env{Job: e.Job, Rank: process, Size: maxRanks, TLS: e.TLS})
	if err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	c, err := dial(ctx, addr, e.Token, me, handshakeTime, e.Timeout)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: process %d: the register of the elastic job %s: %w",
			process, e.Job, err)
	}
	return c, nil
}
