// Package fault injects a failure into one rank of a job, at a call that is
// chosen beforehand: it is how programs, launchers and checkpoints are tested
// against the loss of a rank.
//
//	EURYALE_FAULT=kill,rank=1,call=400 euryale run -n 2 --max-restarts 1 PROGRAM
//
// euryale.Init wraps the job's communicator in a [Communicator] if EURYALE_FAULT
// is set, and only on the job's first attempt: where TORCHELASTIC_RESTART_COUNT,
// which launchers count restarts in, is unset or 0, and in the first generation of
// an elastic job. A job that is restarted, or goes on, therefore runs to its end.
// Without the variable nothing is wrapped, and calls cost nothing.
//
// In tests with goroutines as ranks, wrap the communicators with [New]. Kill,
// Stop and Exit hit the whole process, with every rank in it; Panic and Abort
// hit one rank. A panic inside a graph ends the process, too: Gorgonia's machines
// run it on their own goroutine.
//
// # What is counted
//
// A rank's collectives are counted in the order in which it starts them, from 1: every Start
// on the communicator, on the groups that Split makes from it, and on their groups in turn. Init
// makes its own calls below this package, as do Alloc and Split, and they are not counted. Calls
// that are refused for their arguments are. The "call 23" of an error is another number: a group's
// calls with those of Init, Alloc and Split.
//
// A collective that is recorded in a [backend.Graph] counts each time the graph is launched, not
// when it is recorded. Launch counts all collectives of the graph before any of them starts.
//
// The fault happens before the call reaches the communicator below, so the other
// ranks find it missing. It happens once.
package fault
