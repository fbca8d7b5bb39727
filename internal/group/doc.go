// Package group is the life of a group of ranks: how ranks agree, how calls are compared,
// how a group ends, and which rank is to blame.
//
// # Which rank is to blame
//
// [Arbiter] decides. It is a pure state machine: events go in, with the time at which they
// happen, and at most one [End] comes out.
//
//	          Found (in doubt), a rank has closed without taking part
//	Working ------------------------------------------------------------> Doubting
//	   |                                                                   |     |
//	   |  a report of another rank                a report of another rank |     | ReportGrace is
//	   +------------------------------> Finishing <------------------------+     | over
//	   |                                   |                                     |
//	   |  Down, Abort, Close, Found,       | what every rank has begun is done,  |
//	   |  nothing goes on for the timeout  | or finishGrace is over              |
//	   +-------------------------------> Ended <---------------------------------+
//
// A rank that is down, Abort, Close and a Found without doubt end the group in every state.
//
// A rank that others wait for may be waiting itself, for one that they have heard and it has not.
// So a rank whose time has passed gives stragglers ReportGrace to report first, unless it
// knows that they wait for nobody: [Look] has what it knows. Ranks may wait in other groups, too:
// the job is asked which rank holds up the stragglers, see [rendezvous.World.Missing].
//
// The rank that finds an end makes a [Report], publishes it on the [Board], and turns it into its
// own error by [Report.Cause]. The others read it there and have the same cause. The first report
// wins: a rank that finds an end a moment later takes it for its own, unless it was told of a lost
// rank, or called Abort. The loss of a rank yields to a report which that rank has published
// ([End.Heeds]). Before its program has the error, a rank leaves a last report with the job, which
// names the rank that it blames, and counts if the program ends at once: see
// [rendezvous.World.LeaveReport].
//
// Reports have ranks of the group. Texts, which users read, have those of the job:
// see [backend.Members].
//
// # What ranks show each other
//
// A [Board] shows the headers of calls, which ranks have closed, the first report, notes, and how
// a group is closed. [Memory] is one in shared memory, [Sockets] one over connections, which
// outlives the rank that serves it. No method but Leave waits for another rank.
// [Health] is the part of a Board that a
// [Member] needs; package host, which compares calls in its own steps, has that alone.
// [StoreHealth] is the Health of a group that runs its calls through other groups, such as a
// hierarchical one.
//
// # One rank
//
// A [Member] is a rank's part in a group. It has the clock, the lock and the first error,
// and tells the arbiter what it sees: when a wait looks ([Member.Check]), when the watchdog
// looks ([Member.Watch]), and when something happens ([Member.Tell], [Member.Ends]).
//
// What a group shares on its devices ends by a [Teardown], also after the group.
//
// # Agreement
//
// Ranks agree by a [Gatherer], which gives every rank the notes of all; then all decide the
// same. It goes over the job's store ([OverStore], [Among]), a board ([Member.OverBoard]) or
// collectives ([Framed]). [Exchange] is one of values, [Gatherer.Vote] finds out whether all
// can go on, [Member.Split] makes parts, [Sharing.Form] makes what ranks need to connect, and
// [Compared] compares the calls of a communicator that has no board.
//
// # Locks
//
// Take locks in this order, and none after one further down:
//
//  1. a leaf's order, held while a call is started and numbered; on the host then busy, held
//     while a call runs
//  2. Member.mu, held while the arbiter takes an event and the end is recorded and published
//  3. a leaf's state, which Config.Ending takes to find out what was done
//  4. the Board's mu: in Memory, held while headers are compared
//
// Nobody waits for another rank with 2, 3 or 4 held. The error of a Member is read without a
// lock. A Member calls Health and Ending with its lock held: they must not call the Member.
package group
