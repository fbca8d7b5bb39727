package env

import (
	"slices"
	"strings"
)

// The variables of Euryale.
const (
	Alone      Flag    = "EURYALE_ALONE"
	Backend    Text    = "EURYALE_BACKEND"
	Check      Switch  = "EURYALE_CHECK"
	Credential Text    = "EURYALE_CREDENTIAL"
	CUBLAS     Library = "EURYALE_CUBLAS"
	CUDNN      Library = "EURYALE_CUDNN"
	Elastic    Grammar = "EURYALE_ELASTIC"
	Fault      Grammar = "EURYALE_FAULT"
	Full       Flag    = "EURYALE_FULL"
	Hierarchy  Grammar = "EURYALE_HIERARCHY"
	Job        Text    = "EURYALE_JOB"
	Kernels    Grammar = "EURYALE_KERNELS"
	LastCalls  Count   = "EURYALE_LAST_CALLS"
	Lateness   Flag    = "EURYALE_LATENESS"
	LowLatency Grammar = "EURYALE_LOWLATENCY"
	Metrics    Grammar = "EURYALE_METRICS"
	MPI        Library = "EURYALE_MPI"
	NCCL       Library = "EURYALE_NCCL"
	Plan       Grammar = "EURYALE_PLAN"
	Port       Count   = "EURYALE_PORT"
	Report     Text    = "EURYALE_REPORT"
	ShmDir     Text    = "EURYALE_SHM_DIR"
	Terminal   Flag    = "EURYALE_TERMINAL"
	Timeout    Time    = "EURYALE_TIMEOUT"
	TLS        Flag    = "EURYALE_TLS"
	Token      Text    = "EURYALE_TOKEN"
	Topology   Grammar = "EURYALE_TOPOLOGY"
	Trace      Text    = "EURYALE_TRACE"
	Tuning     Text    = "EURYALE_TUNING"
)

// Variables of launchers that several of them set, or that Euryale itself sets.
const (
	Rank       Count = "RANK"
	WorldSize  Count = "WORLD_SIZE"
	LocalRank  Count = "LOCAL_RANK"
	LocalSize  Count = "LOCAL_WORLD_SIZE"
	GroupRank  Count = "GROUP_RANK"
	MasterAddr Text  = "MASTER_ADDR"
	MasterPort Count = "MASTER_PORT"
	Restarts   Text  = "TORCHELASTIC_RESTART_COUNT"
	NCCLHostID Text  = "NCCL_HOSTID"
)

// Variable is what users are told of a variable.
type Variable struct {
	Default string // what holds if it is not set, "" for nothing
	Help    string
	Secret  bool // its value is not to be shown
	Foreign bool // launchers set it, and it is not named like ours

	of kind
}

// Name returns the name.
func (v Variable) Name() string { return v.of.name() }

// Check returns what is wrong with the variable's value, as far as its kind says: only the package
// that uses a [Grammar] or a [Text] knows what it may be.
func (v Variable) Check(getenv func(string) string) error { return v.of.check(getenv) }

// All lists the variables, ours by their names and then those of launchers.
func All() []Variable {
	return slices.Concat(ofUsers(), ofMachines(), ofLaunchers())
}

// Names returns the names of Euryale's own variables.
func Names() (all []string) {
	for _, v := range All() {
		if !v.Foreign {
			all = append(all, v.Name())
		}
	}
	return all
}

// Unread returns the variables of an environment that are named like Euryale's, but that nothing
// reads. Those of tests, EURYALE_TEST_*, are none.
func Unread(environ []string) (all []string) {
	known := Names()
	for _, entry := range environ {
		name, _, _ := strings.Cut(entry, "=")
		ours := strings.HasPrefix(name, "EURYALE_") && !strings.HasPrefix(name, "EURYALE_TEST_")
		if ours && !slices.Contains(known, name) {
			all = append(all, name)
		}
	}
	return all
}

// ofUsers are the variables by which users say how a job runs.
func ofUsers() []Variable {
	return []Variable{
		{of: Backend, Help: "use this backend only: host, tcp, mpi or nccl"},
		{of: Timeout, Default: "60s", Help: "how long to wait for another rank: 90s, 5m or a " +
			"number of seconds"},
		{of: Check, Default: "on", Help: "off on every rank: do not compare their calls"},
		{of: Trace, Help: "write a Chrome trace of the last collectives to this file, with " +
			".RANK.json appended, or .gGENERATION.RANK.json in an elastic job, when the " +
			"communicator closes or a rank is lost"},
		{of: LastCalls, Default: "0; euryale run sets 10",
			Help: "how many of its last collectives a rank " +
				"prints to standard error on SIGQUIT, before the stacks"},
		{of: Lateness, Default: "0", Help: "1: rank 0 names stragglers and their causes, at " +
			"the end and on SIGUSR1; see docs/observing.md"},
		{of: Metrics, Help: ":9090, or ADDRESS:9090: where a program with package metrics " +
			"serves Prometheus, each rank of a machine on the next port; on loopback unless " +
			"there is an address"},
		{of: Credential, Secret: true, Help: "what clients of EURYALE_METRICS must show at an " +
			"address other than loopback, and what euryale top shows",
			Default: "derived from EURYALE_TOKEN; see docs/observing.md"},
		{of: Plan, Help: "write the plan of a vm.Machine to this .txt, .svg or .json file when " +
			"it is made; the name for an evaluation has .eval before the extension"},
		{of: Fault, Help: "kill, stop, panic, exit or abort, and ,rank=R,call=N: inject this " +
			"fault into " +
			"rank R at its N-th collective, on the job's first attempt; see package fault"},
		{of: Topology, Help: "machines x devices (2x4, 2x4:minor, or the machine of each rank, " +
			"0,0,1,1) instead of what the ranks find out; see package hierarchy"},
		{of: Hierarchy, Default: "auto; always if a topology is declared",
			Help: "always, never or auto: when collectives go machine by machine; and how, after " +
				"commas: exchange=bf16 sends sums in 16 bits between machines, spans=4096 times " +
				"phases; see hierarchy.ParseOptions"},
		{of: LowLatency, Default: "auto", Help: "off, auto, or the algorithm to use wherever it " +
			"can be (ll, ll128-two-shot, one-shot, two-shot); see package gpu"},
		{of: Job, Help: "the job's name, and so which ranks belong together; launchers set it"},
		{of: Token, Secret: true, Help: "the job's secret; needed on several machines, 16 bytes " +
			"or more"},
		{of: TLS, Default: "0", Help: "1 on every rank: encrypt the connections between ranks"},
		{of: Port, Help: "the port of the ranks' store on several machines, if MASTER_PORT is " +
			"taken"},
		{of: Alone, Default: "0", Help: "1: a job of one rank, unless a launcher has numbered " +
			"this process completely; see rendezvous.ReadEnv"},
	}
}

// ofMachines are the variables that say what a machine has, and those that Euryale and its tests
// set themselves.
func ofMachines() []Variable {
	return []Variable{
		{of: ShmDir, Default: "/dev/shm", Help: "the tmpfs for shared memory"},
		{of: Tuning, Default: "euryale/tuning.json in the user's cache directory",
			Help: "the file of what was measured on this machine; off: nothing is read, " +
				"measured or kept, and algorithms are chosen by built-in timings"},
		{of: Kernels, Help: "sm_70: use the GPU kernels of an older compute capability; or a " +
			"directory of PTX to use instead of the embedded kernels, to compare compilers"},
		{of: CUBLAS, Help: "the cuBLAS to open: a file, or the directory of libcublas.so; off " +
			"uses none"},
		{of: CUDNN, Help: "the cuDNN to open: a file, or the directory of libcudnn.so; off uses " +
			"none"},
		{of: NCCL, Help: "the NCCL to open: a file, or the directory of libnccl.so.2"},
		{of: MPI, Help: "the MPI library to open: a file, or the directory of libmpi_abi.so or " +
			"libmpi.so; see package mpi"},
		{of: Report, Help: "set by euryale run on several machines: the pipe on which ranks say " +
			"that the job has lost a rank"},
		{of: Elastic, Help: "set by euryale run --elastic: where a process finds the others of " +
			"its job, and how many there may be"},
		{of: Terminal, Default: "0", Help: "set by euryale run on the rank whose standard error " +
			"is shown on a terminal, so that it may draw a progress bar"},
		{of: Full, Default: "0", Help: "1: tests run the full product of their cases"},
	}
}

// ofLaunchers are the variables of launchers that any job may have. Package launchers has what each
// launcher sets beside them.
func ofLaunchers() []Variable {
	return []Variable{
		{of: Rank, Foreign: true, Help: "the number of this rank, from 0"},
		{of: WorldSize, Foreign: true, Help: "how many ranks the job has"},
		{of: LocalRank, Foreign: true, Help: "the number of this rank on its machine, from 0"},
		{of: LocalSize, Foreign: true, Help: "how many ranks this machine has"},
		{of: GroupRank, Foreign: true, Help: "the number of this machine, from 0"},
		{of: MasterAddr, Foreign: true, Help: "a name or an IP address of rank 0's machine"},
		{of: MasterPort, Foreign: true, Help: "a free port of rank 0's machine, another for each " +
			"job"},
		{of: Restarts, Foreign: true, Help: "number of restarts so far; torchrun and euryale run " +
			"set it"},
		{of: NCCLHostID, Foreign: true, Help: "what NCCL takes for the machine's name: ranks of " +
			"one machine with different ones count as on several"},
	}
}
