// Command soak runs random jobs, with a random failure in most of them, until its
// time is over, and says which did not end as they should:
//
//	make soak MINUTES=5 SEED=1        # go run ./internal/soak -minutes 5 -seed 1
//	make soak SEED=1 JOB=17           # job 17 of this seed again, with its output
//
// The last line is
//
//	jobs=N hangs=0 unnamed=0 left=0
//
// # A job
//
// Two to eight ranks are started as processes by hand, as one agent or two of
// torchrun would, as processes by package launch, or as goroutines by euryale.Run. All run the same random program:
// collectives of all kinds, sizes and dtypes, on queues and without, on groups
// from Split and on the job itself, memory from Alloc, and trainings. Every result
// is compared with one that is computed apart. To one rank something may happen,
// at a random moment: see the list in job.go. While ranks look for each other,
// strangers may connect to every port that the job listens on.
//
// All of this follows from the seed and the job's number. Times do not: a job that
// failed once may have to be run again some times to fail again.
//
// # What is checked
//
//   - hangs: the job ends within its EURYALE_TIMEOUT and the margin. The timeout is
//     short only where nothing else can tell that a rank is missing (it was
//     stopped, or never came); elsewhere it is longer than the job may take, so
//     that failures must be noticed without it.
//   - unnamed: the first rank that the error of each survivor blames is the one
//     that it happened to, and so does the launcher, with the exit code.
//   - left: no process, and no file in the job's TMPDIR and EURYALE_SHM_DIR.
//   - wrong, which the last line has only if there are any: results are right,
//     jobs without a failure succeed, and ranks end by their own error, not by a
//     fault or a panic.
package main
