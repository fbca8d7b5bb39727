package rendezvous

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/internal/launchers"
)

// joinKey is the key that the ranks gather under to learn that all have joined.
const joinKey = "euryale/join"

// Join makes the World of this process. It is collective: it returns once all
// ranks have joined, or an error on every rank. It waits until ctx ends, and at
// most e.Timeout. The World's name is the job's name with a random suffix, so
// that a second World of the same job has another name.
//
// Errors name the rank and the problem. A [*MissingError] names the ranks that
// did not join. A [*Failure] names a rank that was lost or does not belong to
// the job: another build, protocol version, job, world size, or a rank number
// that is taken. A wrong token looks like an unauthenticated client's connection, which must
// not end a job, so it is reported only after the timeout.
func Join(ctx context.Context, e Env) (*World, error) {
	if err := e.check(); err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, e.Timeout, timeoutError{e.Timeout})
	defer cancel()
	store, joined, err := connect(ctx, e)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: rank %d: join job %s of %d ranks: %w", e.Rank, e.Job,
			e.Size, err)
	}
	w, err := assemble(ctx, e, store)
	return w, joined(err)
}

// Ended tells a job that the process of one of its ranks has ended. If the rank had not joined, all
// other ranks fail at once with cause in their error; otherwise nothing happens. Ended is for
// launchers, which see processes end and know the Env of the job; e.Rank is ignored. If another
// rank made this one end, cause is a [*Failure] of that rank.
//
// Ended returns once the job knows. Until a rank has begun to join, it waits, until ctx ends or for
// e.Timeout.
func Ended(ctx context.Context, e Env, rank int, cause error) error {
	e.Rank = rank
	if err := e.check(); err != nil {
		return fmt.Errorf("rendezvous: %w", err)
	}
	if e.Size == 1 {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, e.Timeout, timeoutError{e.Timeout})
	defer cancel()
	if err := tellEnd(ctx, e, cause); err != nil {
		return fmt.Errorf("rendezvous: tell job %s of %d ranks how rank %d ended: %w", e.Job,
			e.Size, rank, err)
	}
	return nil
}

func tellEnd(ctx context.Context, e Env, how error) error {
	alone, err := e.onlyThisMachine(ctx)
	if err == nil && alone {
		err = awaitRecordDir(ctx)
	}
	if err != nil {
		return err
	}
	if e.Rank == 0 {
		return recordEnd(ctx, e, alone, how)
	}
	me, err := identify(e)
	if err != nil {
		return err
	}
	me.ended = label(how.Error())
	store, _, err := dialRank0(ctx, e, me, alone)
	if err != nil {
		return err
	}
	return store.Close()
}

// recordEnd publishes the end of rank 0 where ranks of this machine look for its address, until ctx
// ends. Ranks of other machines only notice by their timeout.
func recordEnd(ctx context.Context, e Env, alone bool, how error) error {
	if !alone {
		return nil
	}
	m, err := newJoinRecord(e)
	if err != nil {
		return err
	}
	var first *Failure
	if !errors.As(how, &first) {
		first = &Failure{Rank: e.Rank, Cause: endedEarly(how.Error())}
	}
	word := strings.ReplaceAll(string(first.encode()), "\n", " ")
	if err := m.publish(ctx, recordValue{ended: word[:min(len(word), maxRecord/2)]}); err != nil {
		return err
	}
	defer m.removeRecord()
	<-ctx.Done()
	return nil
}

// endedEarly is the cause of a failure that [Ended] reports.
func endedEarly(how string) error {
	return fmt.Errorf("its process ended with %s before it joined", how)
}

// connect returns this rank's store. The caller calls joined when the ranks have
// joined or failed to: it cleans up, and adds what it knows to the error.
func connect(ctx context.Context, e Env) (store Store, joined func(error) error, err error) {
	if e.Size == 1 {
		return NewMemStore(), func(err error) error { return err }, nil
	}
	alone, err := e.onlyThisMachine(ctx)
	if err != nil {
		return nil, nil, err
	}
	me, err := identify(e)
	if err != nil {
		return nil, nil, err
	}
	if e.Rank == 0 {
		return host(ctx, e, me, alone)
	}
	return dialRank0(ctx, e, me, alone)
}

// onlyThisMachine reports whether the ranks meet on this machine alone. Several nodes of a launcher
// may be one machine. So without a token, which other machines would need, the ranks of rank 0's
// machine meet there; ranks elsewhere learn that they need a token.
func (e Env) onlyThisMachine(ctx context.Context) (bool, error) {
	switch {
	case e.LocalSize == e.Size:
		return true, nil
	case e.Token == "" && e.Addr != "" && isHere(ctx, e.Addr):
		return true, nil
	case e.Token == "":
		return false, fmt.Errorf("the ranks are on several machines, so they need a shared "+
			"secret: set EURYALE_TOKEN to the same random text on all ranks (such as the output "+
			"of: %s)", makeToken)
	case e.Addr == "" || e.Port == 0:
		return false, errors.New("the ranks are on several machines: set MASTER_ADDR to the " +
			"address of rank 0's machine and MASTER_PORT to a free port there, on all ranks")
	case len(e.Token) < minToken && !launchers.Loopback(e.Addr):
		return false, fmt.Errorf("EURYALE_TOKEN has %d bytes, so it can be guessed: for "+
			"several machines set it to %d bytes or more, the same on all ranks (such as the "+
			"output of: %s)", len(e.Token), minToken, makeToken)
	}
	return false, nil
}

// minToken is the minimum length of a token between machines, in bytes.
const minToken = 16

// makeToken is a command that prints a token.
const makeToken = "euryale token"

// isHere reports whether an address is one of this machine.
func isHere(ctx context.Context, addr string) bool {
	ips, err := net.DefaultResolver.LookupIPAddr(ctx, addr)
	if err != nil {
		return false // dialling it will report the error
	}
	mine, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	return slices.ContainsFunc(ips, func(ip net.IPAddr) bool {
		return ip.IP.IsLoopback() || slices.ContainsFunc(mine, func(a net.Addr) bool {
			n, ok := a.(*net.IPNet)
			return ok && n.IP.Equal(ip.IP)
		})
	})
}

// host is connect on rank 0.
func host(ctx context.Context, e Env, me identity, alone bool) (Store, func(error) error, error) {
	token := e.Token
	if token == "" {
		token = rand.Text() + rand.Text()
	}
	ln, err := listen(ctx, e, alone)
	if err == nil {
		ln, err = secured(ln, me)
	}
	if err != nil {
		return nil, nil, err
	}
	s := serve(ln, token, me, e.Timeout, nil)
	end, where := func() {}, ""
	if alone {
		if end, where, err = announce(ctx, e, recordValue{addr: ln.Addr().String(),
			token: token}); err != nil {
			s.stop()
			return nil, nil, err
		}
	}
	joined := func(err error) error {
		end()
		s.ln.Close() // all ranks have joined, or none can any more
		if refused := s.turnedAway(); err != nil && refused != nil && !strings.Contains(err.Error(),
			errors.Unwrap(refused).Error()) {
			err = fmt.Errorf("%w; turned away: %w", err, refused)
		}
		if errors.As(err, new(*MissingError)) && alone {
			err = fmt.Errorf("%w; the others look for rank 0's address in %s", err, where)
		}
		if at := ln.Addr().(*net.TCPAddr); err != nil && e.LocalSize < e.Size &&
			at.IP.IsLoopback() {
			err = fmt.Errorf("%w; ranks on other machines cannot reach %v: if there are any, set "+
				"MASTER_ADDR to an IP address of rank 0's machine, and EURYALE_TOKEN to %d bytes "+
				"or more", err, at, minToken)
		}
		return err
	}
	return s.open(), joined, nil
}

// announce publishes the join record of rank 0 until end is called, and returns where.
func announce(ctx context.Context, e Env, v recordValue) (end func(), where string, err error) {
	if e.Token != "" {
		v.token = "" // every rank has it
	}
	m, err := newJoinRecord(e)
	if err == nil {
		err = m.publish(ctx, v)
	}
	if err != nil {
		return nil, "", err
	}
	return m.removeRecord, m.where(), nil
}

// dialRank0 is connect on the other ranks.
func dialRank0(ctx context.Context, e Env, me identity, alone bool) (Store, func(error) error,
	error) {
	at := recordValue{addr: e.address()}
	read, where := func() (recordValue, bool) { return at, true }, e.address
	joined := func(err error) error { return err }
	if alone {
		m, err := newJoinRecord(e)
		if err != nil {
			return nil, nil, err
		}
		read, where = m.read, m.where
		joined = func(err error) error {
			if err != nil {
				m.clear()
			}
			return err
		}
	}
	c, err := findServer(ctx, e, me, read, where)
	if err != nil {
		return nil, nil, joined(err)
	}
	return c, joined, nil
}

// lasting reports whether an error is permanent: another attempt cannot help.
func lasting(err error) bool {
	var r *refusal
	var f *Failure
	return errors.As(err, &r) || errors.As(err, &f)
}

// telling returns the more informative error of two attempts. A peer without the
// token says more than a timeout.
func telling(over bool, last, next error) error {
	if last == nil || !over && (errors.Is(next, errToken) ||
		!errors.Is(last, errToken)) {
		return next
	}
	return last
}

func (e Env) address() string { return net.JoinHostPort(e.Addr, strconv.Itoa(e.Port)) }

// listen opens rank 0's port: on loopback if no other machine takes part, else on the one address
// that the others know. Rank 0 may see a loopback address where a service's name leads the others
// to it: it then listens on all addresses, if the token cannot be guessed.
func listen(ctx context.Context, e Env, alone bool) (net.Listener, error) {
	config := net.ListenConfig{KeepAliveConfig: keepAlive()}
	if alone {
		return config.Listen(ctx, "tcp", "127.0.0.1:0")
	}
	addr, err := e.reachable(ctx)
	if err != nil {
		return nil, err
	}
	if ip := net.ParseIP(addr); ip.IsUnspecified() || ip.IsLoopback() && len(e.Token) >= minToken {
		addr = ""
	}
	ln, err := config.Listen(ctx, "tcp", net.JoinHostPort(addr, strconv.Itoa(e.Port)))
	switch {
	case errors.Is(err, errAddrInUse):
		return nil, fmt.Errorf("%w: set MASTER_PORT to a free port of this machine on all ranks "+
			"(with euryale run, the port in --rendezvous), or set EURYALE_PORT if the launcher "+
			"chooses MASTER_PORT or listens on it", err)
	case errors.Is(err, errAddrNotAvail):
		return nil, fmt.Errorf("%w: MASTER_ADDR must be an address of the machine that rank 0 "+
			"runs on", err)
	}
	return ln, err
}

// lookupPause is how long to wait before looking up an unknown name again.
const lookupPause = 250 * time.Millisecond

// reachable returns MASTER_ADDR as an IP address, if possible one that other machines can reach.
// Many systems resolve their own name to loopback.
func (e Env) reachable(ctx context.Context) (string, error) {
	addrs, err := net.DefaultResolver.LookupIPAddr(ctx, e.Addr)
	for err != nil && ctx.Err() == nil { // a pod's name appears a while after the pod
		time.Sleep(lookupPause)
		addrs, err = net.DefaultResolver.LookupIPAddr(ctx, e.Addr)
	}
	if err != nil {
		return "",
			fmt.Errorf("look up MASTER_ADDR: %w: set it to an IP address of rank 0's machine", err)
	}
	i := slices.IndexFunc(addrs, func(a net.IPAddr) bool { return !a.IP.IsLoopback() })
	return addrs[max(i, 0)].String(), nil
}

// assemble waits until all ranks have joined. On an error it tells the others.
func assemble(ctx context.Context, e Env, store Store) (*World, error) {
	w, err := New(e, store)
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	mine := packString(packString(packString(nil, rand.Text()[:8]), self()), e.Note)
	told, err := w.allGather(ctx, fmt.Sprintf("join job %s", e.Job), joinKey, mine)
	if err != nil {
		w.Fail(err) // fails if the store is lost, which all ranks notice
		w.Close()
		return nil, err
	}
	selves, notes := make([]string, len(told)), make([]string, len(told))
	for r := range told {
		u := unpacker{rest: told[r]}
		unique := u.string()
		if selves[r], notes[r] = u.string(), u.string(); r == 0 {
			w.Name += "-" + unique
		}
	}
	w.notes = notes
	if machines := w.readSelves(selves); e.LocalSize < e.Size {
		w.numberMachines(machines)
		err = w.findOut()
	}
	if err != nil {
		w.Fail(err)
		w.Close()
		return nil, err
	}
	return w, nil
}

// hostKey holds the address by which other machines reach rank 0's.
const hostKey = "euryale/host"

// findOut finds out where other machines reach this rank, once all have joined. Ranks of rank 0's
// machine may have come to it by loopback: rank 0 tells them by which address the others came.
func (w *World) findOut() error {
	ctx := context.Background() // World.Timeout bounds it
	if s, ok := w.inner.(*hostStore); ok {
		w.host = s.server.outward()
		return w.Store.Set(ctx, hostKey, []byte(w.host))
	}
	if w.LocalSize == w.Size || w.Node != w.nodes[0] || !net.ParseIP(w.host).IsLoopback() {
		return nil
	}
	host, err := w.Store.Get(ctx, hostKey)
	w.host = string(host)
	if c, ok := w.inner.(*client); ok {
		c.host.Store(&w.host)
	}
	return err
}

// outward returns the address by which members have come from other machines, or else from this
// one.
func (s *server) outward() string {
	host := hostOf(s.ln.Addr())
	if ip := net.ParseIP(host); !ip.IsUnspecified() {
		return host
	}
	host = loopbackHost
	for _, m := range s.connected() {
		if at := hostOf(m.link.conn.LocalAddr()); !net.ParseIP(at).IsLoopback() {
			host = at
		}
	}
	return host
}

// machine returns a unique name of this machine or container. It alone decides whether two ranks
// share a machine: World.Node comes from it. No part is enough alone:
//
//   - the host name is the same wherever images are cloned;
//   - the boot ID is the same for all containers of a machine, and for machines that were
//     resumed from one snapshot;
//   - the device of /dev/shm tells apart containers with one name that share no memory.
func machine() string {
	name, _ := os.Hostname()
	boot, memory := bootID()
	return fmt.Sprintf("%s %s %d", name, boot, memory)
}

// numberMachines numbers the machines in the order of their first ranks, and the ranks of each
// machine in rank order.
func (w *World) numberMachines(machines []string) {
	numbers := map[string]int{}
	ranksOf := map[string]int{}
	for r, name := range machines {
		if _, ok := numbers[name]; !ok {
			numbers[name] = len(numbers)
		}
		w.nodes = append(w.nodes, numbers[name])
		if r == w.Rank {
			w.Node, w.LocalRank = numbers[name], ranksOf[name]
		}
		ranksOf[name]++
	}
	w.LocalSize = ranksOf[machines[w.Rank]]
}

// Nodes returns the Node of every rank. A World from [Join] knows them. In any other World whose
// ranks are on several machines, the first call is collective.
func (w *World) Nodes(ctx context.Context) ([]int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.nodes != nil {
		return slices.Clone(w.nodes), nil
	}
	if w.LocalSize == w.Size {
		return slices.Repeat([]int{w.Node}, w.Size), nil
	}
	const what = "tell the others on which machine it is"
	told, err := w.allGather(ctx, what, "euryale/nodes", strconv.AppendInt(nil, int64(w.Node), 10))
	if err != nil {
		return nil, err
	}
	nodes := make([]int, w.Size)
	for r, text := range told {
		if nodes[r], err = strconv.Atoi(string(text)); err != nil {
			return nil, w.wrap(what, fmt.Errorf("rank %d says %q", r, text))
		}
	}
	w.nodes = nodes
	return slices.Clone(nodes), nil
}
