package rendezvous

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// joinKey is what the ranks gather under to know that all are there.
const joinKey = "euryale/join"

// Join makes the World of this process. It is collective: it returns once all
// ranks have joined, or an error on every rank. Ranks wait for each other until
// ctx is over, e.Timeout at most.
//
// Errors name what is wrong and with whom: [*MissingError] the ranks that did
// not come, [*Failure] one that was lost or does not belong (another build,
// protocol version, job, world size, or a rank that is taken).
func Join(ctx context.Context, e Env) (*World, error) {
	if err := e.check(); err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, e.Timeout, timeoutError{e.Timeout})
	defer cancel()
	store, met, err := connect(ctx, e)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: rank %d: join job %s of %d ranks: %w", e.Rank, e.Job, e.Size, err)
	}
	w, err := assemble(ctx, e, store)
	return w, met(err)
}

// connect returns this rank's store. When the ranks have met, or have failed
// to, met cleans up, and returns the error with what it knows about it.
func connect(ctx context.Context, e Env) (store Store, met func(error) error, err error) {
	if e.Size == 1 {
		return NewMemStore(), func(err error) error { return err }, nil
	}
	if e.LocalSize < e.Size {
		if err := e.checkMachines(); err != nil {
			return nil, nil, err
		}
	}
	me, err := identify(e)
	if err != nil {
		return nil, nil, err
	}
	if e.Rank == 0 {
		return host(ctx, e, me)
	}
	return seek(ctx, e, me)
}

// checkMachines finds what several machines lack to meet.
func (e Env) checkMachines() error {
	switch {
	case e.Token == "":
		return errors.New("the ranks are on several machines, so they need a shared secret: set EURYALE_TOKEN to the same random text on all ranks (such as the output of: openssl rand -hex 32)")
	case e.Addr == "" || e.Port == 0:
		return errors.New("the ranks are on several machines: set MASTER_ADDR to the address of rank 0's machine and MASTER_PORT to a free port of it, on all ranks")
	}
	return nil
}

// host is connect on rank 0.
func host(ctx context.Context, e Env, me identity) (Store, func(error) error, error) {
	token := e.Token
	if token == "" {
		token = rand.Text() + rand.Text()
	}
	ln, err := listen(ctx, e)
	if err != nil {
		return nil, nil, err
	}
	s := serve(ln, token, me, e.Timeout)
	end, err := announce(ctx, e, note{ln.Addr().String(), token})
	if err != nil {
		s.stop()
		return nil, nil, err
	}
	met := func(err error) error {
		end()
		s.seal()
		if refused := s.turnedAway(); err != nil && refused != nil {
			return fmt.Errorf("%w; turned away: %w", err, refused)
		}
		return err
	}
	return s.open(), met, nil
}

// announce lets the ranks of one machine find rank 0, until end.
func announce(ctx context.Context, e Env, n note) (end func(), err error) {
	if e.LocalSize < e.Size {
		return func() {}, nil
	}
	if e.Token != "" {
		n.token = "" // they have it
	}
	m, err := newMeeting(e)
	if err == nil {
		err = m.publish(ctx, n)
	}
	if err != nil {
		return nil, err
	}
	return m.end, nil
}

// seek is connect on the other ranks.
func seek(ctx context.Context, e Env, me identity) (Store, func(error) error, error) {
	find, met := e.dialMaster, func(err error) error { return err }
	if e.LocalSize == e.Size {
		m, err := newMeeting(e)
		if err != nil {
			return nil, nil, err
		}
		find = m.find
		met = func(err error) error {
			if err != nil {
				m.clear()
			}
			return err
		}
	}
	c, err := find(ctx, e, me)
	if err != nil {
		return nil, nil, met(err)
	}
	return c, met, nil
}

// lasting reports whether trying again cannot help.
func lasting(err error) bool {
	var r *refusal
	return errors.As(err, &r)
}

// dialMaster connects to rank 0 on another machine, once it is up.
func (e Env) dialMaster(ctx context.Context, _ Env, me identity) (*client, error) {
	var last error
	for {
		c, err := dial(ctx, e.address(), e.Token, me, e.Timeout)
		if err == nil || lasting(err) || errors.Is(err, errToken) {
			return c, err
		}
		if last == nil || ctx.Err() == nil {
			last = err // rather than one that says the time is over
		}
		pause(ctx, retryTime)
		if ctx.Err() != nil {
			return nil, notFound(ctx, last)
		}
	}
}

func (e Env) address() string { return net.JoinHostPort(e.Addr, strconv.Itoa(e.Port)) }

// listen opens rank 0's port: on loopback if no other machine takes part, else
// on the one address that the others know.
func listen(ctx context.Context, e Env) (net.Listener, error) {
	config := net.ListenConfig{KeepAliveConfig: keepAlive()}
	if e.LocalSize == e.Size {
		return config.Listen(ctx, "tcp", "127.0.0.1:0")
	}
	addr, err := e.reachable(ctx)
	if err != nil {
		return nil, err
	}
	ln, err := config.Listen(ctx, "tcp", net.JoinHostPort(addr, strconv.Itoa(e.Port)))
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%w: set MASTER_PORT to a free port of this machine on all ranks, or EURYALE_PORT where the launcher itself holds MASTER_PORT", err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, fmt.Errorf("%w: MASTER_ADDR must be an address of the machine that rank 0 runs on", err)
	}
	return ln, err
}

// reachable returns MASTER_ADDR as an IP address that other machines can reach.
// Many systems resolve their own name to loopback.
func (e Env) reachable(ctx context.Context) (string, error) {
	if net.ParseIP(e.Addr) != nil || e.Addr == "localhost" {
		return e.Addr, nil
	}
	addrs, err := net.DefaultResolver.LookupIPAddr(ctx, e.Addr)
	if err != nil {
		return "", fmt.Errorf("look up MASTER_ADDR: %w: set it to an IP address of rank 0's machine", err)
	}
	for _, a := range addrs {
		if !a.IP.IsLoopback() {
			return a.String(), nil
		}
	}
	return "", fmt.Errorf("MASTER_ADDR %s means loopback on its own machine, which others cannot reach: set it to an IP address of that machine", e.Addr)
}

// assemble waits until all ranks are there. On an error it tells the others.
func assemble(ctx context.Context, e Env, store Store) (*World, error) {
	w, err := New(e, store)
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	machines, err := w.gather(ctx, fmt.Sprintf("join job %s", e.Job), joinKey, []byte(machine()))
	if err != nil {
		w.Fail(err) // in vain if the store is lost, and then everyone knows
		w.Close()
		return nil, err
	}
	if e.Node < 0 {
		w.place(machines)
	}
	return w, nil
}

// machine names this machine, or container, as no other.
func machine() string {
	name, _ := os.Hostname()
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return name + " " + strings.TrimSpace(string(boot))
}

// place numbers the machines in the order of their first ranks, and the ranks
// of each in the order of all.
func (w *World) place(machines [][]byte) {
	nodes := map[string]int{}
	ranksOf := map[string]int{}
	for r, m := range machines {
		name := string(m)
		if _, ok := nodes[name]; !ok {
			nodes[name] = len(nodes)
		}
		if r == w.Rank {
			w.Node, w.LocalRank = nodes[name], ranksOf[name]
		}
		ranksOf[name]++
	}
	w.LocalSize = ranksOf[string(machines[w.Rank])]
}
