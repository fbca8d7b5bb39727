package rendezvous

import (
	"context"
	"fmt"
	"net"
	"time"
)

// Register is a store that outlives the processes that use it: the launcher of an elastic job
// serves it, and knows at once when a process has ended. Its clients are processes, by numbers that
// are never used again, and not ranks, which change.
type Register struct{ server *server }

// ServeRegister serves a register on a loopback address. lost is called with the number of each
// process whose connection has ended, on any goroutine.
func ServeRegister(job, token string, timeout time.Duration,
	lost func(process int)) (*Register, error) {
	ln, err := (&net.ListenConfig{KeepAliveConfig: keepAlive()}).Listen(context.Background(), "tcp",
		net.JoinHostPort(loopbackHost, "0"))
	if err != nil {
		return nil, fmt.Errorf("rendezvous: serve the register of an elastic job: %w", err)
	}
	me := identity{size: maxRanks, protocol: protocol, job: label(job), lasting: true}
	return &Register{serve(ln, token, me, timeout, lost)}, nil
}

// Addr returns where the register is served.
func (r *Register) Addr() string { return r.server.ln.Addr().String() }

// Store returns the register for the process that serves it.
func (r *Register) Store() Store { return r.server.table.open() }

// Close ends the register.
func (r *Register) Close() { r.server.stop() }

// OpenRegister connects a process, whose number is at least 1, to the register at an address.
func OpenRegister(ctx context.Context, addr, job, token string, process int,
	timeout time.Duration) (Store, error) {
	me, err := identify(Env{Job: job, Rank: process, Size: maxRanks})
	if err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	c, err := dial(ctx, addr, token, me, handshakeTime, timeout)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: process %d: the register of the elastic job %s: %w",
			process, job, err)
	}
	return c, nil
}
