// Package rendezvous lets the ranks of a job find each other, and notice when
// one is lost.
//
// A [World] is one rank's view of the job: its name, its rank and size, its
// place on its machine, a [Store] shared by all ranks, and a failure detector.
//
//   - [Join] makes the World of a process from its [Env], the variables that
//     Euryale's launcher, torchrun, mpirun or srun set.
//   - [Local] makes the Worlds of ranks that are goroutines of one process.
//
// # Finding each other
//
// Rank 0 serves the store over TCP and every rank keeps one connection to it
// open. When all ranks are on one machine the store listens on loopback, on a
// port of its own, and address and token reach the other ranks through a file
// that only the user can read. On several machines the store listens on
// MASTER_ADDR:MASTER_PORT and every rank needs the same EURYALE_TOKEN.
// Server and client prove to each other that they know the token, without
// sending it, before anything else is read.
//
// # Losing each other
//
// A lost connection is a lost rank: the store tells all others, whose
// [World.Down] is closed and whose [World.Failure] names the rank. Rank 0's own
// death is the lost connection itself. Waiting never lasts longer than the
// context or the World's timeout, and says who is missing.
package rendezvous
