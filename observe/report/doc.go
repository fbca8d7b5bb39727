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
// docs/report.md says how clocks are aligned, and where a step ends.
package report
