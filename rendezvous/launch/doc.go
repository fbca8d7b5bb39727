// Package launch starts the ranks of a job on this machine and watches over
// them: it is "euryale run" as a library.
//
// [Run] starts Job.Ranks processes of one program, with the variables that
// rendezvous.ReadEnv reads, and returns when all have ended.
//
//   - Output. With several ranks every line is prefixed with "[rank] "; lines
//     are never mixed. Of a line that is rewritten with carriage returns, such
//     as a progress bar, the last state is kept. On a terminal, the lines of
//     rank 0 are rewritten in place; it learns that from EURYALE_TERMINAL=1
//     (see rendezvous.Terminal), for its own output goes into a pipe. A single
//     rank writes to the outputs itself. Job.LogDir adds a file for each rank.
//     If an output takes no more, that is the launcher's own failure: it ends
//     the job and says so.
//   - Input. Rank 0 gets the input, the others have none.
//   - Failure. When a rank fails, the others have a second to report what they
//     see of it; then they get SIGTERM, then SIGKILL. The error, a [*Failed],
//     names the rank that failed first, how, and its last lines on standard
//     error. Which one that is does not follow from the order of the ends alone:
//     the errors of ranks name the rank that they are due to, and the kernel
//     knows which rank is stopped. Ranks that wait for one which ended before it
//     joined are told (rendezvous.Ended), and end too.
//   - Restarts. After a failure all ranks are started anew, Job.MaxRestarts times
//     at most, as a job with a name and a token of its own.
//     TORCHELASTIC_RESTART_COUNT counts the attempts from 0. There is no restart
//     after a signal, nor if every rank ended with exit status 2 without a crash,
//     as for a wrong command line.
//   - Signals go to the ranks. What is alive after Job.Grace is killed; a second
//     signal kills at once. After SIGQUIT ranks have five seconds at least, for
//     their stacks; before those they print their last collectives, as
//     EURYALE_LAST_CALLS tells them.
//   - No orphans. Each rank leads a process group of its own, which is killed
//     when the rank ends. If the launcher itself is killed, the kernel kills the
//     ranks and the go command; this holds for them, not for processes that they
//     started. The next launcher removes the directory where it built.
//
// The files: launch.go has the job and its attempts, program.go finds or builds
// the program in the directory of scratch.go, watch.go follows one attempt and
// rank.go one process, whose end tell.go tells the others, output.go and logs.go have what ranks print, verdict.go
// says which rank failed first, and failed.go says it in words.
package launch
