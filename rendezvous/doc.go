// Package rendezvous lets the ranks of a job find each other, and notice when
// one is lost.
//
// A [World] is one rank's view of the job: its name, its rank and size, its
// place on its machine, a [Store] shared by all ranks, and a failure detector.
//
//   - [Join] makes the World of a process from its [Env], the variables that
//     Euryale's launcher, torchrun, mpirun, mpiexec or srun set ([ReadEnv]).
//   - [Local] makes the Worlds of ranks that are goroutines of one process.
//   - [New] makes the World of a rank over any [Store]: those of this package,
//     [NewMemStore] and [NewFileStore], or one from outside.
//   - [Ended] is for launchers: it tells a job that a rank ended before it
//     joined.
//
// # Finding each other
//
// Rank 0 serves the store over TCP and every rank keeps one connection to it
// open. When all ranks are on one machine the store listens on loopback, on a
// port of its own, and address and token reach the other ranks through a file
// that only the user can read. On several machines the store listens on
// MASTER_ADDR:MASTER_PORT and every rank needs the same EURYALE_TOKEN, of 16
// bytes or more.
//
// Launchers speak of nodes, of which one machine can have several: two agents of
// torchrun, say. So whether two ranks share a machine is asked of the machines,
// in Join, and World.Node is the answer that all backends use. Without a token
// the ranks of several nodes meet by the file if MASTER_ADDR is their own
// machine.
//
// # Strangers
//
// Server and client prove to each other that they know the token, without
// sending it, before anything else is read; then they compare protocol version,
// build, job and world size. Only what comes with a proof can end a job or a
// rank. A connection without one is closed, and changes nothing: neither its
// text nor its number. There is room for a few such connections; when another
// comes, the oldest goes. A rank that is turned away in this way tries again. A
// mistyped token looks like a stranger on both sides, so both report it when
// their time is over. Text of peers is escaped before it becomes part of an
// error.
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
// The failure detector is one key of the store, on which every World waits. It
// outlives rank 0: when the rank that serves it leaves, the lowest rank that
// stays serves it, at the address by which it reached the last one. Connections
// were chosen over watching processes (pidfd), because they work between
// containers and machines alike, and because they tell a rank that leaves from
// one that dies. A rank that is stopped while the failure detector moves, for
// more than a second, is watched by nobody until it goes on: if it is killed
// instead, others find out by the timeout. The other values of the store are gone
// with rank 0.
package rendezvous
