// Package check makes ranks that disagree fail, rather than hang or get wrong
// numbers.
//
// [New] wraps a communicator. Before each call the ranks exchange its
// [backend.Header] (sequence number, kind, op, root, dtype, splits, count, and where in the
// program it comes from: purpose, ordinal, shape), [backend.HeaderSize] bytes, and compare.
// Where they differ every rank gets a
// [*backend.MismatchError] that names both sides, now and for every later call.
//
// # Cost
//
// A communicator that compares headers as part of its own protocol (Verify of
// [backend.Capabilities]), as package host's does, is told to do so and returned as
// it is: nothing is added to its calls. For any other, each call costs one more
// all-gather of [backend.HeaderSize] bytes per rank.
//
// # Queues
//
// The exchange runs on the queue of the call, just before it. Where the queue
// has done it by the time Start looks, as one that runs on the caller has, the
// call itself is started only if the headers agree. On any other queue Start
// does not wait: the call is started right behind the exchange, a goroutine
// compares when that is over, and a mismatch aborts the communicator, which
// ends the call. Its Work then reports the mismatch; what the call has left in
// its destination until then means nothing.
package check
