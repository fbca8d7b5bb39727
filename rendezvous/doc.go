// Package rendezvous lets the ranks of a job find each other, and detects when
// a rank is lost.
//
// A [World] is one rank's view of the job: its name, its rank and size, its
// place on its machine, a [Store] shared by all ranks, and a failure detector.
//
//   - [Join] makes the World of a process from its [Env], the variables that
//     Euryale's launcher, torchrun, mpirun, mpiexec or srun set ([ReadEnv]).
//   - [Local] makes the Worlds of ranks that are goroutines of one process.
//   - [New] makes the World of a rank over any [Store]: [NewMemStore], or your
//     own.
//   - [Ended] is for launchers: it tells a job that a rank ended before it
//     joined.
//
// # Finding each other
//
// Rank 0 serves the store over TCP, and every rank keeps one connection to it
// open. When all ranks are on one machine the store listens on a free port of
// the loopback interface; address and token reach the other ranks through the
// join record, a file that only the user can read. It is in the first of these
// directories that belongs to the user alone, so all ranks choose the same one:
// $XDG_RUNTIME_DIR/euryale, $TMPDIR/euryale-UID, or one in the user's cache, because
// in /tmp any user can occupy the second. On several machines the store listens on
// MASTER_ADDR:MASTER_PORT, and every rank needs the same EURYALE_TOKEN, of at least
// 16 bytes. If MASTER_ADDR is a loopback address on rank 0, or 0.0.0.0, the store listens
// on all addresses: the other ranks may know its machine by another name.
//
// Over long distances the number of round trips matters. A rank joins in four: one for TCP, two
// for the proofs, and one in which all ranks introduce themselves. TLS adds one. [World.AllGather]
// takes one for any number of ranks.
//
// A launcher's node need not be a machine: two torchrun agents may run on one. So
// the ranks compare host name, boot ID and /dev/shm in Join, and all backends use
// the result, World.Node. Without a token, the ranks of several nodes use the join
// record if MASTER_ADDR is their own machine.
//
// # Unauthenticated clients
//
// Before anything else is read, server and client prove to each other that they know the token,
// without sending it. Then they compare protocol version, build, job and world size. Only a peer
// with a proof can end a job or a rank. A connection without one is closed and has no effect,
// whatever it sends and however many there are. The server keeps a bounded number of unproven
// connections. When there are too many, it drops a random one from the source address that has the
// most; those that have said hello are limited separately. A rank that is dropped this way tries
// again. A mistyped token looks like an unauthenticated client to both sides, so both report it
// after the timeout. Text from peers is escaped before it becomes part of an error.
//
// A rank shows its proof to whoever listens at rank 0's address and, without TLS, to whoever reads
// along. They cannot use the proof, but they can test guesses of the token against it at leisure.
// So between machines the token must be random ("euryale token" prints one): a dictionary finds a
// word, a name or a date of 16 letters.
//
// The proof keeps unauthenticated clients out, but does not protect what follows it: anyone on the
// wire can read and change that. With EURYALE_TLS=1 every connection is TLS 1.3, and the proofs
// hold for that connection only (channel binding, RFC 9266), so there are no keys and no
// certificates to set up.
//
// # Losing each other
//
// A lost connection is a lost rank. The store tells all others: their
// [World.Down] is closed, and their [World.Failure] names the same rank
// everywhere. The death of rank 0 shows as the lost connection itself. A rank
// that gives up calls [World.Fail]; a rank that is done leaves with
// [World.Close]. A rank that is stopped but alive is found by the ranks that wait
// for it: no wait lasts longer than its context or the World's timeout, and the
// error names the missing ranks.
//
// The failure detector is one key of the store, on which every World waits. It
// outlives rank 0: when the rank that serves it leaves, the lowest remaining rank
// takes over, on the address of its connection to the old server. All other
// values of the store end with rank 0.
//
// Connections were chosen over watching processes (pidfd), because they also work
// between containers and machines, and because they distinguish a rank that leaves
// from one that dies. One gap remains: a rank that is stopped for more than a
// second while the failure detector moves is not watched until it continues. If it
// is killed instead, the others find out by their timeout.
package rendezvous
