package rendezvous

import (
	"crypto/sha256"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
)

// Env is what a rank must know to join its job. [ReadEnv] fills it in.
type Env struct {
	// Launcher says whose variables were read, for messages.
	Launcher string
	// Job identifies the job, the same on all its ranks.
	Job string
	// Rank, Size, LocalRank, LocalSize and Node are those of World. A Node of -1
	// is not known: [Join] then finds it out, with LocalRank and LocalSize.
	Rank, Size, LocalRank, LocalSize, Node int
	// Addr and Port are where rank 0 serves the store when the ranks are on
	// several machines.
	Addr string
	Port int
	// Token is the secret that the ranks share; "" where none was given.
	Token string
	// Timeout bounds every wait for another rank.
	Timeout time.Duration
}

// howToStart ends the messages about an environment that no launcher makes.
const howToStart = `start the program with "euryale run -n N PROGRAM", torchrun, mpirun or srun, or set all of RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE`

// ReadEnv reads the variables of the launcher that started this process, by
// getenv, such as os.Getenv. An empty variable counts as not set.
//
//	Euryale, torchrun  RANK WORLD_SIZE [LOCAL_RANK LOCAL_WORLD_SIZE] [GROUP_RANK]
//	                   [TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT]
//	Open MPI           OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}
//	                   PMIX_NAMESPACE OMPI_MCA_orte_hnp_uri
//	Slurm              SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_NODEID
//	                   SLURM_TASKS_PER_NODE SLURM_JOB_ID SLURM_STEP_ID
//	                   SLURM_JOB_NODELIST SLURM_LAUNCH_NODE_IPADDR
//	all of them        MASTER_ADDR MASTER_PORT
//	                   EURYALE_JOB EURYALE_TOKEN EURYALE_TIMEOUT EURYALE_PORT
//
// The first launcher in this order whose variables are there counts. None at
// all is a world of one rank. EURYALE_TIMEOUT is a duration, such as 90s or 5m,
// or a number of seconds. EURYALE_PORT stands in for a MASTER_PORT that the
// launcher holds itself. Variables that contradict each other, or of which the
// half is missing, are an error.
func ReadEnv(getenv func(string) string) (Env, error) {
	r := envReader{getenv: getenv}
	var e Env
	switch {
	case r.has("RANK", "WORLD_SIZE"):
		e = r.torchrun()
	case r.has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
		e = r.openMPI()
	case r.has("SLURM_PROCID") && !r.slurmScript():
		e = r.slurm()
	default:
		e = Env{Launcher: "no launcher", Job: "alone", Size: 1, LocalSize: 1}
	}
	r.common(&e)
	if err := e.check(); err != nil {
		r.fail("%w: %s", err, howToStart)
	}
	if r.err != nil {
		return Env{}, fmt.Errorf("rendezvous: environment of %s: %w", e.Launcher, r.err)
	}
	return e, nil
}

// MaxRanks bounds the size of a job, so that a wrong number is an error before
// memory is taken for it. It is far more than one store can serve.
const MaxRanks = 1 << 16

// check finds what no job can have.
func (e Env) check() error {
	switch {
	case e.Size < 1:
		return fmt.Errorf("a world of %d ranks: it needs at least 1", e.Size)
	case e.Size > MaxRanks:
		return fmt.Errorf("a world of %d ranks: at most %d are possible", e.Size, MaxRanks)
	case e.Rank < 0 || e.Rank >= e.Size:
		return fmt.Errorf("rank %d is out of range: there are %d ranks, 0 to %d", e.Rank, e.Size, e.Size-1)
	case e.LocalSize < 1 || e.LocalSize > e.Size:
		return fmt.Errorf("rank %d: %d local ranks among %d ranks are not possible", e.Rank, e.LocalSize, e.Size)
	case e.LocalRank < 0 || e.LocalRank >= e.LocalSize:
		return fmt.Errorf("local rank %d is out of range: there are %d local ranks, 0 to %d", e.LocalRank, e.LocalSize, e.LocalSize-1)
	case e.Timeout <= 0:
		return fmt.Errorf("rank %d: a timeout of %v: it must be positive", e.Rank, e.Timeout)
	}
	return nil
}

// envReader reads variables up to the first error.
type envReader struct {
	getenv func(string) string
	err    error
}

// has reports whether one of the variables is set.
func (r *envReader) has(names ...string) bool { return r.first(names...) != "" }

// first returns the first of the variables that is set.
func (r *envReader) first(names ...string) string {
	for _, name := range names {
		if v := r.getenv(name); v != "" {
			return v
		}
	}
	return ""
}

// count reads a number of at least 0 that must be there, from the first of the
// variables that is set.
func (r *envReader) count(names ...string) int {
	for _, name := range names {
		if r.getenv(name) != "" {
			return r.countOr(0, name)
		}
	}
	r.fail("%s is not set: %s", strings.Join(names, " or "), howToStart)
	return 0
}

// countOr is count with a value for a variable that is not set.
func (r *envReader) countOr(otherwise int, name string) int {
	text := r.getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		r.fail("%s=%q is not a number of 0 or more: %s", name, text, howToStart)
		return otherwise
	}
	return n
}

func (r *envReader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, args...)
	}
}

// common reads what all launchers share.
func (r *envReader) common(e *Env) {
	if job := r.first("EURYALE_JOB"); job != "" {
		e.Job = job
	}
	e.Job = short(e.Job)
	e.Token = r.first("EURYALE_TOKEN")
	if addr := r.first("MASTER_ADDR"); addr != "" {
		e.Addr = addr
	}
	e.Port = r.countOr(e.Port, "MASTER_PORT")
	e.Port = r.countOr(e.Port, "EURYALE_PORT")
	if e.Port > 65535 {
		r.fail("port %d is out of range: ports are 1 to 65535", e.Port)
	}
	timeout, err := ReadTimeout(r.getenv)
	if err != nil {
		r.fail("%w", err)
	}
	e.Timeout = timeout
}

// ReadTimeout reads EURYALE_TIMEOUT by getenv: [DefaultTimeout] if it is not set.
func ReadTimeout(getenv func(string) string) (time.Duration, error) {
	text := getenv("EURYALE_TIMEOUT")
	if text == "" {
		return DefaultTimeout, nil
	}
	d, err := time.ParseDuration(text)
	if seconds, secondsErr := strconv.ParseFloat(text, 64); secondsErr == nil {
		d, err = time.Duration(seconds*float64(time.Second)), nil
	}
	if err != nil || d <= 0 {
		return 0, fmt.Errorf("EURYALE_TIMEOUT=%q is not a time above 0: write 90s, 5m or a number of seconds", text)
	}
	return d, nil
}

// short keeps a job's name printable and small enough for a handshake, and
// still different from others.
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

func (r *envReader) torchrun() Env {
	e := Env{Launcher: "torchrun"}
	if r.has("EURYALE_JOB") {
		e.Launcher = "euryale run"
	}
	e.Rank, e.Size = r.count("RANK"), r.count("WORLD_SIZE")
	e.Job = "torchrun"
	for _, name := range []string{"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"} {
		if v := r.first(name); v != "" {
			e.Job += "-" + v
		}
	}
	switch {
	case r.has("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
		e.LocalRank, e.LocalSize = r.count("LOCAL_RANK"), r.count("LOCAL_WORLD_SIZE")
		e.Node = r.countOr(-1, "GROUP_RANK")
		if e.LocalSize == e.Size {
			e.Node = 0
		}
	case loopback(r.first("MASTER_ADDR")):
		e.LocalRank, e.LocalSize = e.Rank, e.Size
	default:
		e.LocalSize, e.Node = 1, -1
	}
	return e
}

// loopback reports whether an address, or none, can only mean this machine.
func loopback(addr string) bool {
	ip := net.ParseIP(addr)
	return addr == "" || addr == "localhost" || ip != nil && ip.IsLoopback()
}

// openMPI reads the variables of mpirun, versions 4 and 5. They do not say
// which machine is which: OMPI_COMM_WORLD_NODE_RANK is a number within one.
func (r *envReader) openMPI() Env {
	const prefix = "OMPI_COMM_WORLD_"
	e := Env{
		Launcher: "mpirun", Node: -1,
		Rank: r.count(prefix + "RANK"), Size: r.count(prefix + "SIZE"),
		LocalRank: r.count(prefix + "LOCAL_RANK"), LocalSize: r.count(prefix + "LOCAL_SIZE"),
		Job: "mpirun-" + r.first("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_ID"),
	}
	// The name space may come again in a later run; mpirun's address does not.
	if uri := r.first("OMPI_MCA_orte_hnp_uri"); uri != "" {
		e.Job += "-" + uri
	}
	if e.LocalSize == e.Size {
		e.Node = 0
	}
	return e
}
