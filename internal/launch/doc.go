// Package launch starts the ranks of a job on this machine and watches over
// them: it is "euryale run" as a library.
//
// [Run] starts Job.Ranks processes of one program, with the variables that
// rendezvous.ReadEnv reads, and returns when all have ended.
//
//   - Output. With several ranks every line is prefixed with "[rank] ", and
//     lines are never mixed. If a line is rewritten with carriage returns, such as
//     a progress bar, its last state is kept. On a terminal, the lines of
//     rank 0 are rewritten in place. Its output goes through a pipe, so
//     EURYALE_TERMINAL=1 tells it of the terminal (see rendezvous.Terminal). A
//     single rank writes to the outputs directly. Job.LogDir adds a file for each
//     rank. If writing to an output fails, the launcher ends the job with that error.
//   - Input. Rank 0 gets the input, the others have none.
//   - Failure. When a rank fails, the others have a second to report what they
//     see of it; then they get SIGTERM, then SIGKILL. The error, a [*Failed],
//     names the rank that failed first, how it failed, and its last lines on
//     standard error. The order of the ends alone does not tell which rank was
//     first: the errors of ranks name the rank that caused them, and the kernel
//     knows which rank is stopped. If a rank ends before it has joined, the
//     launcher tells the ranks that wait for it (rendezvous.Ended).
//   - Restarts. After a failure all ranks are restarted, at most Job.MaxRestarts
//     times, as a job with a new name and token. TORCHELASTIC_RESTART_COUNT
//     counts the attempts from 0. There is no restart after a signal, nor if the
//     rank that failed first ended with exit status 2 without a crash, as for a
//     wrong command line.
//   - Signals go to the ranks. Ranks that are alive after Job.Grace are killed; a
//     second signal kills at once. After SIGQUIT ranks have at least five seconds
//     to print their stacks. They first print their last collectives, because the
//     launcher sets EURYALE_LAST_CALLS.
//   - Ranks that SIGKILL does not end, such as those of a frozen cgroup, and ranks whose
//     output nobody reads. After 5 seconds they are named, with their state in the kernel.
//     After 15 more, or at the next signal, the launcher ends without them.
//   - Several machines. Each launcher sees only its own ranks, but they tell it over a
//     pipe (EURYALE_REPORT) when the job loses a rank. It ends those that are still running
//     EURYALE_TIMEOUT later: they hang. It also ends its ranks when one has been
//     stopped, or held in the kernel, for twice as long: the others have given up on it.
//   - Hosts. With Job.Hosts, Run starts a launcher on each host with the system's ssh client,
//     over one connection. It first copies this program and Job.Program, unless the host has
//     files with the same content. Over the connection Run tells the host to start and signal
//     processes, and hears what they print and how they end ([Serve]). The hosts' ranks end
//     with the connection. Both ends send every half second: a host that is silent for
//     4 seconds is lost, and one that hears nothing for 2 seconds more than EURYALE_TIMEOUT ends
//     its ranks. After a failure, Run restarts all ranks, and a standby replaces a lost host.
//   - Elastic jobs. With Job.Elastic, Run replaces processes that end, and serves the register
//     from which the others learn of it. On Hosts, a process replaces one of the same host, or
//     of a lost host.
//   - No orphans. Each rank leads its own process group, which is killed when the
//     rank ends. If the launcher itself is killed, the kernel kills the ranks and
//     the go command (on Linux), and a shell that the launcher has started kills
//     their groups and removes the build directory. If that is killed, too, the
//     next launcher removes the directory. A process that has left its group, as
//     by setsid, goes on in either case.
//
// The decisions are simulated: sim_test.go runs whole jobs from seeds, with their launchers, hosts,
// connections and clock. The files of testdata are jobs with what is said in them.
//
// The files:
//
//	launch.go          the job and its attempts
//	program.go         finds or builds the program, in the directory of scratch.go
//	script.go          says what runs a script
//	supervisor.go      decides what to do in one attempt, elastic.go in that of an elastic job: a
//	                   pure state machine, without clock, process or connection
//	watch.go, rank.go  carry that out, for an attempt and a rank; process.go is what runs one
//	guard_unix.go      ends what a killed launcher leaves
//	report.go          hears from ranks that the job has lost a rank
//	tell.go            tells joining ranks of a rank that has ended
//	output.go, logs.go what ranks print
//	stuck.go, oom.go   say where a rank hangs, and whether memory ran out
//	hosts.go           lists of hosts
//	across.go          runs a job on hosts; remote.go is one of them, behind ssh
//	serve.go           is a host's end of it; protocol.go is what the two tell each other
//	kit.go, cache.go   prepare the files that hosts get, and hold them there
//	verdict.go         decides which rank failed first; failed.go words it
package launch
