// Package group is the life of a group of ranks: how ranks agree, how calls are compared,
// how a group ends, and who is to blame.
//
// # Who is to blame
//
// [Machine] decides. It is a pure state machine: events go in, with the time at which they
// happen, and at most one [End] comes out.
//
//	          Found (in doubt), a rank has closed without taking part
//	Working ------------------------------------------------------------> Doubting
//	   |                                                                   |     |
//	   |  a report of another rank                a report of another rank |     | reportGrace is over
//	   +------------------------------> Finishing <------------------------+     |
//	   |                                   |                                     |
//	   |  Down, Abort, Close, Found,       | what every rank has begun is done,  |
//	   |  nothing goes on for the timeout  | or finishGrace is over              |
//	   +-------------------------------> Ended <---------------------------------+
//
// A rank that is down, Abort, Close and a Found without doubt end the group in every state.
//
// The rank that finds an end makes a [Report], publishes it on the [Board], and turns it
// into its own error by [Report.Cause]. The others read it there and have the same cause.
// The first report wins.
//
// Reports have ranks of the group. Texts, which users read, have those of the job:
// see [backend.Members].
//
// # What ranks show each other
//
// A [Board] shows the headers of calls, who has closed, the first report, notes, and how
// a group is closed. [Memory] is one in shared memory, [Sockets] one over connections, which
// outlives the rank that serves it. No method but Leave waits for another rank.
package group
