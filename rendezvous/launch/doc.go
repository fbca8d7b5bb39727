// Package launch starts the ranks of a job on this machine and watches over
// them: it is "euryale run" as a library.
//
// [Run] starts Job.Ranks processes of one program, with the variables that
// rendezvous.ReadEnv reads, and returns when all have ended.
//
//   - Output. With several ranks every line is prefixed with "[rank] "; lines
//     are never mixed. Of a line that is rewritten with carriage returns, such
//     as a progress bar, the last state is kept. On a terminal, the lines of
//     rank 0 are rewritten in place; it learns that from EURYALE_TERMINAL=1,
//     for its own output goes into a pipe. A single rank writes to the outputs
//     itself.
//   - Input. Rank 0 gets the input, the others have none.
//   - Failure. When a rank fails, the others have a second to report what they
//     see of it; then they get SIGTERM, then SIGKILL. The error, a [*Failed],
//     names the rank that failed first and its last lines on standard error.
//   - Signals go to the ranks. What is alive one second later is killed; a
//     second signal kills at once.
//   - No orphans. Each rank leads a process group of its own, which is killed
//     when the rank ends. If the launcher itself is killed, the kernel kills the
//     ranks; this holds for the ranks, not for processes that they started.
package launch
