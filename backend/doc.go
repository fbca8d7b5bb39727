// Package backend is the contract of Euryale: what a collective is, and what
// anything that runs collectives must offer.
//
// In one sentence: a [Backend] turns a [rendezvous.World] into a [Communicator], which
// starts [Collective]s on [Buffer]s, in the order of a [Queue], and returns [Work]. The
// Queue does the arithmetic in between.
//
// # The nouns
//
//   - Collective is a small value (kind, op, root, splits, ...), the same on every rank. One table
//     derives everything else from it: its length rule, its adjoint, its header, its trace line,
//     its bandwidth factor.
//   - Buffer names memory, on the host or on a device, without owning it.
//   - Queue is where work happens in order: a CUDA stream, a host executor, or the calling
//     goroutine. It embeds [Arithmetic], the operations that it computes.
//   - Event is a point in a queue, and Work a started collective. A queue waits for either one by
//     Wait, and the host by Join; Done asks without waiting.
//   - Communicator is a group of ranks that run collectives together. Its
//     [Capabilities] say what it is made of and what it offers beyond the
//     interface.
//
// # Promises every Communicator keeps
//
//   - The result is bitwise identical on every rank, always.
//   - Inputs are left untouched unless the call is in place.
//   - Argument errors ([ErrArgument], [ErrUnsupported]) are found before a byte
//     moves and leave the communicator usable.
//   - Communication errors ([*Error]) name the rank, the collective and the
//     cause, are sticky, and wake every rank within a second.
//   - Nothing waits for ever: a wait ends by result, timeout, failure of a
//     rank, Abort or Close.
//   - Any goroutine may call Abort and Close at any moment: calls under way end
//     with ErrAborted or ErrClosed, and host memory from Alloc stays addressable.
//   - Errors name ranks by their numbers in the job; in a group that Split made, the rank's number
//     in the group follows in brackets.
//
// # A backend of your own
//
// Implement [Backend] and pass it to euryale.Init. A communicator of host memory has the device and
// the queues of package backend/host; one of other memory has its own, with all of [Arithmetic].
// Packages ops and vm compute everything else on a device as programs, so their queue must be a
// Queue of kernels/fuse, too. A leaf checks each call by [Collective.Check]. Package backendtest
// proves the promises for any implementation, inside this module or outside.
//
// # Wrappers
//
// An algorithm over a communicator is itself a Communicator. It embeds [Base], which forwards
// everything, and declares the methods that it changes. It owns the communicator below it, and [As]
// finds one layer among several. A wrapper that starts its own kernels keeps calls in order by a
// [Sequence]. It checks the calls that it changes and passes all others on unchanged.
//
// Code that only watches is not a wrapper: traces and counters are [Hooks], which [WithHooks]
// attaches to a communicator and its parts.
package backend
