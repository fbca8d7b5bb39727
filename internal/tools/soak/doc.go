//go:build linux

// Command soak runs random jobs, most of them with a random failure, for a given time, and
// reports the jobs that did not end as they should:
//
//	make soak MINUTES=5 SEED=1        # go run ./internal/tools/soak -minutes 5 -seed 1
//	make soak SEED=1 JOB=17           # job 17 of this seed again, with its output
//
// The last lines are the number of jobs of each kind, which is how they are started, and of each
// failure, and
//
//	jobs=N hangs=0 unnamed=0 wrong=0 late=0 left=0
//
// # A job
//
// Two to eight ranks are started as processes, as one or two agents of torchrun would, as processes
// by package launch, or as goroutines by euryale.Run. All run the same random program: collectives
// of all kinds, sizes and dtypes, with and without queues, on the job and on groups from Split,
// memory from Alloc, and trainings. Every result is compared with one that is computed separately.
// One rank may fail at a random moment: see the list in job.go. In half of the jobs the others then
// end at once, without Close. While ranks join, unauthenticated clients may connect to every port
// of the job.
//
// Other kinds of jobs:
//
//   - machines: two or three machines, which are network namespaces (where they cannot
//     be made, EURYALE_TOPOLOGY declares them), of one to three ranks. One of them may be cut off.
//   - far: each rank reaches rank 0 over a relay, with a round trip of 50 ms, and 3,000
//     unauthenticated clients come in a second, 1,500 with TLS.
//   - saves: two jobs train and save to one directory, which also has files of the user's. A rank
//     of one may be killed in a Save. A third job resumes.
//
// All of this is a function of the seed and the job's number, except times: a job that failed once
// may have to run several times to fail again.
//
// # What is checked
//
//   - hangs: the job ends within its EURYALE_TIMEOUT and a margin. The timeout is short only if
//     nothing else can detect the failure (a rank was stopped, or never came). Otherwise it is
//     longer than the job may take, so that failures must be detected without it.
//   - unnamed: the first rank that the error of each survivor blames is the one that failed. The
//     launcher names the same rank and exits with its code.
//   - wrong: results are correct, jobs without a failure succeed, and ranks end by their own error,
//     not by a fault or a panic. A panic in a collective is printed. A job that resumes goes on
//     with the bits of the checkpoint that was saved last. Of two jobs that save to one directory,
//     one may end with the error of the lock. Files of the user's stay as they are.
//   - late: survivors say what they lost within a second of a death, or of the timeout where only
//     that tells (two timeouts and two and a half seconds if a machine is cut off during Init, and
//     a second more for rank 0, which serves the others until they have left). To this is added
//     what six wake-ups take on this machine at this time, since a soak may share it.
//   - left: no process is left, and no file in the job's TMPDIR and EURYALE_SHM_DIR.
package main
