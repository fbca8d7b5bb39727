// Package report makes one page of what a job has left: the logs and traces of all its ranks.
//
//	job, err := report.Read("logs")
//	err = job.WriteHTML(w)
//
// [Read] looks at every file below a directory and knows by its name or beginning what it is:
//
//	attempt_0/rank_0.log      the output of a rank, attempt_0/launcher_0.log that of euryale run
//	trace.0.json              the trace of rank 0, by EURYALE_TRACE=DIR/trace
//	plan.json                 the plan of a machine, by EURYALE_PLAN=DIR/plan.json
//	epochs.jsonl, epochs.csv  what fit.Log writes by fit.JSONLines and fit.CSV
//
// # Clocks
//
// A collective in which every rank needs the data of all others is a round trip: none ends before
// the last one has begun. So each bounds how far the clock of one rank is ahead of that of
// another, from both sides, and many bound it closely. Where the bounds allow it the clocks count
// as one, as on one machine. Elsewhere the middle is taken, anew every few hundred calls, since
// clocks drift.
//
// # Steps
//
// Traces have calls and no steps. The first bucket of gradients is sent once a step; where there is
// none, a step is what repeats. It ends with the call before the longest pause.
package report
