package rendezvous

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/launchers"
)

// Env holds what a rank must know to join its job. [ReadEnv] fills it in.
type Env struct {
	// Launcher is the launcher whose variables were read, for messages.
	Launcher string
	// Job identifies the job, the same on all its ranks.
	Job string
	// Rank, Size, LocalRank, LocalSize and Node mean the same as in World. If LocalSize is less
	// than Size, [Join] asks the machines for the last three, since the nodes of a launcher need
	// not be machines.
	Rank, Size, LocalRank, LocalSize, Node int
	// Addr and Port are where rank 0 serves the store if the ranks are on several machines.
	Addr string
	Port int
	// Token is the secret that the ranks share; "" if none was given.
	Token string
	// TLS encrypts the connections between ranks.
	TLS bool
	// Timeout bounds every wait for another rank.
	Timeout time.Duration
	// Note is what the rank tells all others as it joins: see [World.Notes].
	Note string
}

// envError is the error of environment variables that do not describe a job. The program was
// started the wrong way, so commands exit with ExitCode.
type envError struct {
	Launcher string // whose variables they are
	Err      error
}

// Error names the launcher and the variables.
func (e *envError) Error() string {
	if e.Launcher == launchers.None {
		return fmt.Sprintf("rendezvous: %v", e.Err)
	}
	return fmt.Sprintf("rendezvous: environment of %s: %v", e.Launcher, e.Err)
}

// Unwrap returns the cause.
func (e *envError) Unwrap() error { return e.Err }

// ExitCode is 2, the code of wrong usage.
func (e *envError) ExitCode() int { return exit.Usage }

// ReadEnv reads the variables of the launcher that started this process, through getenv, such as
// os.Getenv. An empty variable counts as not set. The launchers and their variables are in the
// table of docs/running.md.
//
// If one launcher starts another, the inner one counts: euryale run inside srun, torchrun inside
// sbatch, or mpiexec of MPICH, which starts its proxies by srun. A program that a launcher starts
// once on each machine is the one rank there. Contradictory or incomplete variables are an error,
// and so is a job of this machine alone where another launcher has started programs on several:
// all would train alone. Without a launcher the process is a job of one rank, and with
// EURYALE_ALONE=1 whatever launchers of machines say.
//
// MASTER_ADDR and MASTER_PORT say for any launcher where the ranks of several machines meet.
// Ranks of one machine find each other by launcher, user and job. RANK and WORLD_SIZE do
// not name a job, so they need MASTER_PORT or EURYALE_JOB, which must differ between jobs.
// Hydra does not name a job either: its ranks are those that one of its proxies started.
//
// EURYALE_TIMEOUT is a duration, such as 90s or 5m, or a number of seconds.
// EURYALE_TLS=1 encrypts the connections between ranks; it must be set on all of them.
// EURYALE_PORT replaces a MASTER_PORT that the launcher itself listens on. Agents of
// torchrun do, and set TORCHELASTIC_USE_AGENT_STORE: ranks on several machines then use
// another port, computed from MASTER_PORT.
//
// Errors: variables that do not describe a job. Their method ExitCode returns 2, the status of
// wrong usage.
func ReadEnv(getenv func(string) string) (Env, error) {
	found, err := launchers.Rank(getenv)
	e := Env{Launcher: found.Launcher(), Job: short(cmp.Or(env.Job.Read(getenv), found.Job)),
		Rank: found.Rank, Size: found.Size, LocalRank: found.LocalRank, LocalSize: found.LocalSize,
		Addr: found.Addr, Port: found.Port, Token: env.Token.Read(getenv)}
	var tlsErr, timeoutErr error
	e.TLS, tlsErr = env.TLS.Read(getenv)
	e.Timeout, timeoutErr = env.Timeout.Read(getenv, DefaultTimeout)
	err = cmp.Or(err, tlsErr, timeoutErr)
	if err == nil && e.Job == "" {
		e.Job, err = nameJob(found)
	}
	if err == nil {
		err = e.checkAddr()
	}
	if wrong := e.check(); err == nil && wrong != nil {
		err = fmt.Errorf("%w: %s", wrong, launchers.HowToStart)
	}
	if err != nil {
		return Env{}, &envError{e.Launcher, err}
	}
	return e, nil
}

// nameJob names a job that no variable names.
func nameJob(found *launchers.Found) (string, error) {
	name := found.Launcher()
	if !found.Proxy || found.LocalSize < found.Size { // MASTER_PORT tells jobs apart
		return name, nil
	}
	parent, err := launcherProcess(strconv.Itoa(found.Rank)) // it is the proxy of all ranks
	if err != nil {
		return "", fmt.Errorf("find the process that started this rank: %w: set EURYALE_JOB to "+
			"the same text on all ranks, and to another for each job", err)
	}
	return name + "-" + parent, nil
}

// maxRanks bounds the size of a job, so that a wrong size is an error before anything is allocated
// for it. It is far more than one store can serve.
const maxRanks = 1 << 16

// check returns an error for values that no job can have.
func (e Env) check() error {
	switch {
	case e.Size < 1:
		return fmt.Errorf("a world of %d ranks: it needs at least 1", e.Size)
	case e.Size > maxRanks:
		return fmt.Errorf("a world of %d ranks: at most %d are possible", e.Size, maxRanks)
	case e.Rank < 0 || e.Rank >= e.Size:
		return fmt.Errorf("rank %d is out of range: there are %d ranks, 0 to %d", e.Rank, e.Size,
			e.Size-1)
	case e.LocalSize < 1 || e.LocalSize > e.Size:
		return fmt.Errorf("rank %d: %d local ranks among %d ranks are not possible", e.Rank,
			e.LocalSize, e.Size)
	case e.LocalRank < 0 || e.LocalRank >= e.LocalSize:
		return fmt.Errorf("local rank %d is out of range: there are %d local ranks, 0 to %d",
			e.LocalRank, e.LocalSize, e.LocalSize-1)
	case e.Timeout <= 0:
		return fmt.Errorf("rank %d: a timeout of %v: it must be positive", e.Rank, e.Timeout)
	}
	return nil
}

// checkAddr returns an error for a MASTER_ADDR that nobody could dial, where it is needed.
func (e Env) checkAddr() error {
	addr := e.Addr
	if addr == "" || e.LocalSize >= e.Size {
		return nil
	}
	ip, err := netip.ParseAddr(addr)
	switch {
	case err == nil && ip.IsUnspecified() && e.Rank != e.LocalRank: // not on rank 0's machine
		return fmt.Errorf("rank 0 can listen on MASTER_ADDR=%s, but rank %d cannot connect to it: "+
			"set it to the name or address of rank 0's machine", addr, e.Rank)
	case err == nil:
		return nil
	}
	if _, rest, ok := strings.Cut(addr, "://"); ok {
		addr = strings.TrimRight(rest, "/")
	}
	instead := "MASTER_ADDR=" + addr
	if host, port, err := net.SplitHostPort(addr); err == nil {
		addr, instead = host, fmt.Sprintf("MASTER_ADDR=%s and MASTER_PORT=%s", host, port)
	} else if ip, ok := strings.CutPrefix(addr, "["); ok {
		addr = strings.TrimSuffix(ip, "]")
		instead = "MASTER_ADDR=" + addr
	}
	_, err = netip.ParseAddr(addr)
	noName := strings.ContainsAny(addr, " \t/,;@[]:") || strings.Trim(addr, "0123456789.") == ""
	switch {
	case err != nil && noName:
		return fmt.Errorf("MASTER_ADDR=%q is neither a name nor an IP address: "+
			"set it to the name or address of rank 0's machine, and MASTER_PORT to a free port "+
			"there", e.Addr)
	case addr != e.Addr:
		return fmt.Errorf("MASTER_ADDR=%q is not a name or an IP address alone: write %s", e.Addr,
			instead)
	}
	return nil
}

// short makes a job's name printable and short enough for a handshake, and keeps it
// distinct from others.
func short(job string) string {
	printable := strings.Map(func(c rune) rune {
		if c <= ' ' || c > '~' {
			return '_'
		}
		return c
	}, job)
	if printable == job && len(job) <= maxLabel {
		return job
	}
	const kept = 40
	return fmt.Sprintf("%s-%.8x", printable[:min(len(printable), kept)], sha256.Sum256([]byte(job)))
}
