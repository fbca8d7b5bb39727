// Package workers runs the parts of a task on several cores.
//
//	pool := workers.New(workers.Share(localRanks))
//	defer pool.Close()
//	pool.Do(parts, task) // task.Run(part, worker) for each part
//
// How work is cut into parts must depend on the problem alone, never on the number of workers. Each
// part then computes the same wherever it runs, and results are bitwise identical on one core and
// on many.
//
// A call of [Pool.Do] costs about a microsecond while the workers are awake. They spin for a while
// after a call, since the next one usually follows at once, and then sleep; to wake one takes tens
// of microseconds. A part should take ten microseconds or more, and a problem of less should be one
// part.
package workers
