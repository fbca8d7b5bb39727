// Package fault injects a failure into one rank of a job, at a call that is chosen beforehand. It
// tests programs, launchers and checkpoints against the loss of a rank.
//
//	EURYALE_FAULT=kill,rank=1,call=400 euryale run -n 2 --max-restarts 1 PROGRAM
//
// euryale.Init wraps the job's communicator in a [Communicator] if EURYALE_FAULT is set, and only
// on the job's first attempt: if TORCHELASTIC_RESTART_COUNT, in which launchers count restarts, is
// unset or 0, and in the first generation of an elastic job. A job that restarts, or goes on,
// therefore runs to its end. Without the variable nothing is wrapped, and calls cost nothing.
//
// In tests with goroutines as ranks, wrap the communicators with [New]. Kill,
// Stop and Exit hit the whole process, with every rank in it; Panic and Abort
// hit one rank. A panic inside a graph ends the process, too: Gorgonia's machines
// run it on their own goroutine.
//
// # What is counted
//
// A rank's collectives are counted in the order in which it starts them, from 1: every Start on the
// communicator, on the groups that Split makes from it, and on their groups in turn. The calls that
// Init, Alloc and Split make themselves are below this package, and are not counted. Calls that are
// refused for their arguments are counted. The "call 23" of an error is another number: it counts a
// group's calls, including those of Init, Alloc and Split.
//
// A collective that is recorded in a [backend.Graph] counts each time the graph is launched, not
// when it is recorded. Launch counts all collectives of the graph before any of them starts.
//
// The fault happens before the call reaches the communicator below, so the other
// ranks find it missing. It happens once.
package fault
