// Package rendezvous lets the ranks of a job find each other, and notice when
// one is lost.
//
// A [World] is one rank's view of the job: its name, its rank and size, its
// place on its machine, a [Store] shared by all ranks, and a failure detector.
//
//   - [Join] makes the World of a process from its [Env], the variables that
//     Euryale's launcher, torchrun, mpirun or srun set.
//   - [Local] makes the Worlds of ranks that are goroutines of one process.
//   - [New] makes the World of a rank over any [Store]: those of this package,
//     [NewMemStore] and [NewFileStore], or one from outside.
//
// # Finding each other
//
// Rank 0 serves the store over TCP and every rank keeps one connection to it
// open. When all ranks are on one machine the store listens on loopback, on a
// port of its own, and address and token reach the other ranks through a file
// that only the user can read. On several machines the store listens on
// MASTER_ADDR:MASTER_PORT and every rank needs the same EURYALE_TOKEN.
// Server and client prove to each other that they know the token, without
// sending it, before anything else is read; then they compare protocol version,
// build, job and world size.
//
// # Losing each other
//
// A lost connection is a lost rank: the store tells all others, whose
// [World.Down] is closed and whose [World.Failure] names the rank, the same on
// all of them. Rank 0's own death is the lost connection itself. A rank that
// gives up says so with [World.Fail]; one that is done leaves with
// [World.Close]. A rank that is stopped but not dead is found by those that wait
// for it: waiting never lasts longer than the context or the World's timeout,
// and the error says who is missing.
//
// The failure detector is one key of the store, on which every World waits.
package rendezvous
