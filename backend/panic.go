package backend

import "fmt"

// AbortOnPanic is what a communicator defers in each call that it starts or runs: if the call
// panics, for a hook or a queue of the user's or for memory that is not there, all ranks end with
// the panic's text, since they wait for this one. The panic goes on. It must be deferred itself,
// and first, so that it comes after what gives locks back.
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
