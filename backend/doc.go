// Package backend is the contract of Euryale: what a collective is, and what
// anything that runs collectives must offer.
//
// In one sentence: a [rendezvous.World] is turned by a [Backend] into a
// [Communicator], which starts [Collective]s on [Buffer]s, in the order of a
// [Queue], and returns [Work]. The Queue does the arithmetic in between.
//
// # The nouns
//
//   - Collective is a small value (kind, op, root, splits, ...), the same on
//     every rank. Everything that is true of a collective is a function of it,
//     kept in one table: its length rule, its adjoint, its header on the wire,
//     its trace line, its bandwidth factor.
//   - Buffer names memory, on the host or on a device, without owning it.
//   - Queue is where work happens in order: a CUDA stream, a host executor, or
//     the calling goroutine.
//   - Work is a started collective: order a queue after it, or wait for it.
//   - Communicator is a group of ranks that run collectives together. An
//     algorithm over communicators is itself a Communicator that wraps another
//     one (package observe); [As] finds a wrapped one.
//
// # Promises every Communicator keeps
//
//   - The result has the same bits on every rank, always.
//   - Inputs are left untouched unless the call is in place.
//   - Argument errors ([ErrArgument], [ErrUnsupported]) are found before a byte
//     moves and leave the communicator usable.
//   - Communication errors ([*Error]) name the rank, the collective and the
//     cause, are sticky, and wake every rank within a second.
//   - Nothing waits for ever: a wait ends by result, timeout, failure of a
//     rank, Abort or Close.
//   - Any goroutine may call Abort and Close at any moment: calls under way end
//     with ErrAborted or ErrClosed, and host memory from Alloc stays addressable.
//   - Errors name ranks by their numbers in the job; in a group that Split made the
//     group's number follows in brackets.
//
// Package backendtest holds the suite that proves these promises for any
// implementation, inside this module or outside.
package backend
