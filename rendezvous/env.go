package rendezvous

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/exit"
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

// howToStart is the advice in errors about an environment that no launcher has set up.
const howToStart = `start the program with "euryale run -n N PROGRAM", torchrun, mpirun, mpiexec ` +
	`or srun, or set all of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and EURYALE_JOB`

// EnvError is the error of environment variables that do not describe a job. The program was
// started the wrong way, so commands exit with ExitCode.
type EnvError struct {
	Launcher string // whose variables they are
	Err      error
}

// Error names the launcher and the variables.
func (e *EnvError) Error() string {
	return fmt.Sprintf("rendezvous: environment of %s: %v", e.Launcher, e.Err)
}

// Unwrap returns the cause.
func (e *EnvError) Unwrap() error { return e.Err }

// ExitCode is 2, the code of wrong usage.
func (e *EnvError) ExitCode() int { return exit.Usage }

// ReadEnv reads the variables of the launcher that started this process, through getenv, such as
// os.Getenv. An empty variable counts as not set.
//
//	Kubernetes         JOB_COMPLETION_INDEX WORLD_SIZE, without RANK: a pod for each rank
//	Euryale, torchrun  RANK WORLD_SIZE [LOCAL_RANK LOCAL_WORLD_SIZE]
//	                   [TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT]
//	                   [TORCHELASTIC_USE_AGENT_STORE]
//	Open MPI           OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}
//	                   PMIX_NAMESPACE OMPI_MCA_orte_hnp_uri
//	MPICH (Hydra),     PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
//	Intel MPI, MVAPICH or MV2_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}
//	Slurm              SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_NODEID
//	                   SLURM_TASKS_PER_NODE SLURM_JOB_ID SLURM_STEP_ID
//	                   SLURM_JOB_NODELIST SLURM_LAUNCH_NODE_IPADDR
//	PMI_RANK PMI_SIZE  alone: ranks of one machine
//	all of them        MASTER_ADDR MASTER_PORT
//	                   EURYALE_JOB EURYALE_TOKEN EURYALE_TIMEOUT EURYALE_PORT
//	                   EURYALE_TLS
//
// ReadEnv uses the first launcher in this list whose variables are set. If one launcher starts
// another, that is the inner one: euryale run inside srun, torchrun inside sbatch, or mpiexec of
// MPICH, which starts its proxies by srun. Contradictory or incomplete variables are an error.
//
// Ranks of one machine find each other by launcher, user and job. RANK and WORLD_SIZE do
// not name a job, so they need MASTER_PORT or EURYALE_JOB, which must differ between jobs.
// Hydra does not name a job either: its ranks are those that one of its proxies started.
//
// Without a launcher the process is a job of one rank. But variables of a job that this package
// cannot read are an error, because otherwise all its ranks would train alone: PMI_SIZE,
// SLURM_STEP_NUM_TASKS, PBS_TASKNUM, AWS_BATCH_JOB_NUM_NODES, _CONDOR_NPROCS, HOROVOD_SIZE,
// JSM_NAMESPACE_SIZE, NNODES or PET_NNODES above 1, NODE_RANK or PET_NODE_RANK above 0, a TF_CONFIG
// of several tasks, and any PMIX_RANK, PALS_RANKID, FLUX_TASK_RANK, VC_TASK_INDEX or
// JOB_COMPLETION_INDEX. EURYALE_ALONE=1 makes it a job of one rank.
//
// EURYALE_TIMEOUT is a duration, such as 90s or 5m, or a number of seconds.
// EURYALE_TLS=1 encrypts the connections between ranks; it must be set on all of them.
// EURYALE_PORT replaces a MASTER_PORT that the launcher itself listens on. Agents of
// torchrun do, and set TORCHELASTIC_USE_AGENT_STORE: ranks on several machines then use
// another port, computed from MASTER_PORT.
//
// Errors are of type [*EnvError].
func ReadEnv(getenv func(string) string) (Env, error) {
	r := envReader{getenv: getenv}
	var e Env
	switch {
	case !r.has("RANK") && r.has("JOB_COMPLETION_INDEX") && r.has("WORLD_SIZE"):
		e = r.kubernetes()
	case r.has("RANK", "WORLD_SIZE"):
		e = r.torchrun()
	case r.has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
		e = r.openMPI()
	case r.has("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK"):
		e = r.hydra()
	case r.has("SLURM_PROCID") && !r.slurmScript():
		e = r.slurm()
	case r.has("PMI_RANK"):
		e = r.hydra()
	default:
		e = r.alone()
	}
	r.common(&e)
	if err := e.checkAddr(); err != nil {
		r.fail("%w", err)
	}
	if err := e.check(); err != nil {
		r.fail("%w: %s", err, howToStart)
	}
	if r.err != nil {
		return Env{}, &EnvError{e.Launcher, r.err}
	}
	return e, nil
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

// count reads a number of at least 0 from the first of the variables that is set. One must be set.
func (r *envReader) count(names ...env.Count) int {
	var missing []string
	for _, name := range names {
		if r.getenv(string(name)) != "" {
			return r.countOr(0, name)
		}
		missing = append(missing, string(name))
	}
	r.fail("%s is not set: %s", strings.Join(missing, " or "), howToStart)
	return 0
}

// countOr is count with a default for a variable that is not set.
func (r *envReader) countOr(otherwise int, name env.Count) int {
	n, err := name.Read(r.getenv, otherwise)
	if err != nil {
		r.fail("%w: %s", err, howToStart)
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
	e.Job = short(cmp.Or(env.Job.Read(r.getenv), e.Job))
	e.Token = env.Token.Read(r.getenv)
	e.TLS = r.yes(env.TLS)
	if addr := r.first("MASTER_ADDR"); addr != "" {
		e.Addr = addr
	}
	e.Port = r.countOr(e.Port, env.MasterPort)
	if r.first("TORCHELASTIC_USE_AGENT_STORE") == "True" {
		e.Port = portOf(e.Port)
	}
	e.Port = r.countOr(e.Port, env.Port)
	if e.Port > 65535 {
		r.fail("port %d is out of range: ports are 1 to 65535", e.Port)
	}
	timeout, err := env.Timeout.Read(r.getenv, DefaultTimeout)
	if err != nil {
		r.fail("%w", err)
	}
	e.Timeout = timeout
}

// yes reads a variable that is 1 or 0.
func (r *envReader) yes(name env.Flag) bool {
	set, err := name.Read(r.getenv)
	if err != nil {
		r.fail("%w", err)
	}
	return set
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

// alone is the job of a process that no launcher started.
func (r *envReader) alone() Env {
	e := Env{Launcher: "no launcher", Job: "alone", Size: 1, LocalSize: 1}
	if r.yes(env.Alone) {
		return e
	}
	for _, sign := range signs() {
		text := r.first(sign.name)
		if text == "" {
			continue
		}
		if count, err := sign.count(text); err == nil && count <= sign.above {
			continue
		}
		const most = 60 // bytes of a value in the message
		r.fail("%s=%.*s is the sign of a job of several ranks, whose other variables are not "+
			"there or not known, and each of them would train alone: %s; or set EURYALE_ALONE=1 "+
			"if this is a job of one rank",
			sign.name, most, text, howToStart)
	}
	return e
}

// sign is a variable that tells of a job that this package cannot read. A value that it cannot
// parse is a sign, too.
type sign struct {
	name  string
	above int                            // only a greater count is a sign
	count func(text string) (int, error) // counts what the value describes
}

func signs() (all []sign) {
	for _, name := range []string{
		"PMI_SIZE", "SLURM_STEP_NUM_TASKS", "PBS_TASKNUM", "AWS_BATCH_JOB_NUM_NODES",
		"_CONDOR_NPROCS", "HOROVOD_SIZE", "JSM_NAMESPACE_SIZE",
	} {
		all = append(all, sign{name, 1, strconv.Atoi})
	}
	for _, name := range []string{"PET_NNODES", "NNODES"} {
		all = append(all, sign{name, 1, mostNodes})
	}
	for _, name := range []string{"PET_NODE_RANK", "NODE_RANK"} {
		all = append(all, sign{name, 0, strconv.Atoi})
	}
	for _, name := range []string{
		"PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "VC_TASK_INDEX", "JOB_COMPLETION_INDEX",
	} {
		all = append(all, sign{name, -1, strconv.Atoi})
	}
	return append(all, sign{"TF_CONFIG", 1, tasksOf})
}

// mostNodes reads a number of nodes as torchrun takes it: 2, or 1:4 for a range.
func mostNodes(text string) (int, error) {
	if _, most, ok := strings.Cut(text, ":"); ok {
		text = most
	}
	return strconv.Atoi(text)
}

// tasksOf counts the tasks of a TF_CONFIG.
func tasksOf(text string) (tasks int, err error) {
	var config struct {
		Cluster map[string][]string `json:"cluster"`
	}
	err = json.Unmarshal([]byte(text), &config)
	for _, addrs := range config.Cluster {
		tasks += len(addrs)
	}
	return tasks, err
}

func (r *envReader) torchrun() Env {
	e := Env{Launcher: "torchrun"}
	if r.has(string(env.Job)) {
		e.Launcher = "euryale run"
	}
	e.Rank, e.Size = r.count(env.Rank), r.count(env.WorldSize)
	if e.Size > 1 {
		r.needJob("RANK and WORLD_SIZE")
	}
	e.Job = "torchrun"
	for _, name := range []string{"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
		"MASTER_ADDR", "MASTER_PORT"} {
		if v := r.first(name); v != "" {
			e.Job += "-" + v
		}
	}
	switch {
	case r.has("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
		e.LocalRank, e.LocalSize = r.count(env.LocalRank), r.count(env.LocalSize)
	case loopback(r.first("MASTER_ADDR")):
		e.LocalRank, e.LocalSize = e.Rank, e.Size
	default:
		e.LocalSize = 1
	}
	return e
}

// kubernetes reads an indexed job with one rank for each pod. Kubernetes numbers the pods, and the
// manifest says the rest.
func (r *envReader) kubernetes() Env {
	e := Env{Launcher: "Kubernetes", Rank: r.count("JOB_COMPLETION_INDEX"),
		Size: r.count(env.WorldSize), LocalSize: 1}
	if e.Size > 1 && !(r.has("MASTER_ADDR") && r.has("MASTER_PORT")) {
		r.fail("JOB_COMPLETION_INDEX and WORLD_SIZE are set, but not MASTER_ADDR and " +
			"MASTER_PORT: set them in the manifest to the name of the pod of index 0 in its " +
			"headless Service, and to a port")
	}
	e.Job = "kubernetes-" + r.first("MASTER_ADDR") + "-" + r.first("MASTER_PORT")
	return e
}

// needJob requires a variable that tells two jobs apart.
func (r *envReader) needJob(given string) {
	if !r.has(string(env.MasterPort), string(env.Job)) {
		r.fail("%s are set, but neither MASTER_PORT nor EURYALE_JOB, by which the ranks of one "+
			"job find each other: set one of them to the same on all ranks, and to another for "+
			"each job", given)
	}
}

// portOf computes a port from a number that differs between jobs. It is above the range
// of ephemeral ports.
func portOf(number int) int {
	const first, count = 61440, 4096
	return first + number%count
}

// loopback reports whether an address can only mean this machine; an empty one does.
func loopback(addr string) bool {
	ip := net.ParseIP(addr)
	return addr == "" || addr == "localhost" || ip != nil && ip.IsLoopback()
}

// openMPI reads the variables of mpirun, versions 4 and 5. None of them numbers the
// machines: OMPI_COMM_WORLD_NODE_RANK counts within one.
func (r *envReader) openMPI() Env {
	const prefix = "OMPI_COMM_WORLD_"
	e := Env{
		Launcher: "mpirun",
		Rank:     r.count(prefix + "RANK"), Size: r.count(prefix + "SIZE"),
		LocalRank: r.count(prefix + "LOCAL_RANK"), LocalSize: r.count(prefix + "LOCAL_SIZE"),
		Job: "mpirun-" + r.first("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_ID"),
	}
	// The name space may come again in a later run; mpirun's address does not.
	if uri := r.first("OMPI_MCA_orte_hnp_uri"); uri != "" {
		e.Job += "-" + uri
	}
	return e
}
