// Command soak runs random jobs, most of them with a random failure, for a given time, and
// reports the jobs that did not end as they should:
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
// Two to eight ranks are started as processes, as one or two agents of torchrun would, as
// processes by package launch, or as goroutines by euryale.Run. All run the same random program:
// collectives of all kinds, sizes and dtypes, with and without queues, on the job and on groups
// from Split, memory from Alloc, and trainings. Every result is compared with one that is computed
// separately. One rank may fail at a random moment: see the list in job.go. While ranks join,
// strangers may connect to every port of the job.
//
// All of this is a function of the seed and the job's number, except times: a job that failed once
// may have to run several times to fail again.
//
// # What is checked
//
//   - hangs: the job ends within its EURYALE_TIMEOUT and a margin. The timeout is short only if
//     nothing else can detect the failure (a rank was stopped, or never came). Otherwise it is longer
//     than the job may take, so that failures must be detected without it.
//   - unnamed: the first rank that the error of each survivor blames is the one that failed. The
//     launcher names the same rank and exits with its code.
//   - left: no process is left, and no file in the job's TMPDIR and EURYALE_SHM_DIR.
//   - wrong, printed only if there are any: results are correct, jobs without a failure succeed, and
//     ranks end by their own error, not by a fault or a panic.
package main
