// Package euryale is the front door: it connects this process to the other
// ranks of its job.
//
//	comm, err := euryale.Init(ctx)
//	if err != nil { ... }
//	defer comm.Close()
//
// Init returns a [backend.Communicator]. Pass it to package ops, which has the
// collectives as differentiable nodes of a Gorgonia graph, or to package autograd,
// which trains a model data-parallel, or start collectives on it directly.
//
// Start the program with `euryale run -n 4 PROGRAM`, or with torchrun, mpirun,
// mpiexec or srun. Without a launcher it is a job of one rank, and the same
// program works. [Run] starts ranks as goroutines of one process instead.
//
// # Close and Abort
//
// Any goroutine may call Close and Abort at any moment, for example in a signal
// handler. Calls of other goroutines then end with [backend.ErrClosed] or
// [backend.ErrAborted]. With GPUs Close also closes the rank's device, so
// close machines on it before.
//
// # What Init composes
//
// Init joins the job ([rendezvous.Join]). The ranks choose the first backend that all
// of them can use, connect it, and wrap it: in package hierarchy, which runs
// collectives machine by machine, on several machines; in package fault, if
// EURYALE_FAULT is set; in package observe, which records the last calls. Calls are
// compared between ranks, by the backend or by a wrapper. docs/architecture.md has
// the details.
//
// # Environment
//
//	EURYALE_BACKEND     use this backend only: host, tcp, mpi or nccl
//	EURYALE_TIMEOUT     how long to wait for another rank: 90s, 5m or a number of seconds
//	                    (default: 60s)
//	EURYALE_CHECK       off on every rank: do not compare their calls (default: on)
//	EURYALE_TRACE       write a Chrome trace of the last collectives to this file, with
//	                    .RANK.json appended, or .gGENERATION.RANK.json in an elastic job,
//	                    when the communicator closes or a rank is lost
//	EURYALE_LAST_CALLS  how many of its last collectives a rank prints to standard error on
//	                    SIGQUIT, before the stacks (default: 0; euryale run sets 10)
//	EURYALE_LATENESS    1: rank 0 names stragglers and their causes, at the end and on
//	                    SIGUSR1; see docs/observing.md (default: 0)
//	EURYALE_METRICS     :9090, or ADDRESS:9090: where a program with package metrics serves
//	                    Prometheus, each rank of a machine on the next port; on loopback
//	                    unless there is an address
//	EURYALE_CREDENTIAL  what clients of EURYALE_METRICS must show at an address other than
//	                    loopback, and what euryale top shows (default: derived from
//	                    EURYALE_TOKEN; see docs/observing.md)
//	EURYALE_PLAN        write the plan of a vm.Machine to this .txt, .svg or .json file when
//	                    it is made; the name for an evaluation has .eval before the extension
//	EURYALE_FAULT       kill, stop, panic, exit or abort, and ,rank=R,call=N: inject this
//	                    fault into rank R at its N-th collective, on the job's first attempt;
//	                    see package fault
//	EURYALE_TOPOLOGY    machines x devices (2x4, 2x4:minor, or the machine of each rank,
//	                    0,0,1,1) instead of what the ranks find out; see package hierarchy
//	EURYALE_HIERARCHY   always, never or auto: when collectives go machine by machine; and
//	                    how, after commas: exchange=bf16 sends sums in 16 bits between
//	                    machines, spans=4096 times phases; see hierarchy.ParseOptions
//	                    (default: auto; always if a topology is declared)
//	EURYALE_LOWLATENCY  off, auto, or the algorithm to use wherever it can be (ll,
//	                    ll128-two-shot, one-shot, two-shot); see package gpu (default: auto)
//	EURYALE_JOB         the job's name, and so which ranks belong together; launchers set it
//	EURYALE_TOKEN       the job's secret; needed on several machines, 16 bytes or more
//	EURYALE_TLS         1 on every rank: encrypt the connections between ranks (default: 0)
//	EURYALE_PORT        the port of the ranks' store on several machines, if MASTER_PORT is
//	                    taken
//	EURYALE_ALONE       1: a job of one rank, unless a launcher has numbered this process
//	                    completely; see rendezvous.ReadEnv (default: 0)
//	EURYALE_SHM_DIR     the tmpfs for shared memory (default: /dev/shm)
//	EURYALE_TUNING      the file of what was measured on this machine; off: nothing is read,
//	                    measured or kept, and algorithms are chosen by built-in timings
//	                    (default: euryale/tuning.json in the user's cache directory)
//	EURYALE_KERNELS     sm_70: use the GPU kernels of an older compute capability; or a
//	                    directory of PTX to use instead of the embedded kernels, to compare
//	                    compilers
//	EURYALE_CUBLAS      the cuBLAS to open: a file, or the directory of libcublas.so; off
//	                    uses none
//	EURYALE_CUDNN       the cuDNN to open: a file, or the directory of libcudnn.so; off uses
//	                    none
//	EURYALE_NCCL        the NCCL to open: a file, or the directory of libnccl.so.2
//	EURYALE_MPI         the MPI library to open: a file, or the directory of libmpi_abi.so or
//	                    libmpi.so; see package mpi
//	EURYALE_REPORT      set by euryale run on several machines: the pipe on which ranks say
//	                    that the job has lost a rank
//	EURYALE_ELASTIC     set by euryale run --elastic: where a process finds the others of its
//	                    job, and how many there may be
//	EURYALE_TERMINAL    set by euryale run on the rank whose standard error is shown on a
//	                    terminal, so that it may draw a progress bar (default: 0)
//	EURYALE_FULL        1: tests run the full product of their cases (default: 0)
package euryale
