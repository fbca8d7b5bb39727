package backend

import "fmt"

// AbortOnPanic is deferred by a communicator in each call that it starts or runs. If the call
// panics, because of the user's hook or queue or of invalid memory, all ranks end with the panic's
// text, since they wait for this one. The panic goes on. Defer it directly, and first, so that it
// runs after the deferred calls that release locks.
func AbortOnPanic(comm Communicator, c *Collective) {
	if v := recover(); v != nil {
		Panicked(comm, c, v)
	}
}

// Panicked is AbortOnPanic for a deferred function that has recovered v. It panics with v.
func Panicked(comm Communicator, c *Collective, v any) {
	comm.Abort(fmt.Errorf("%s panicked in %v: %v", RankOf(comm), *c, v))
	panic(v)
}
