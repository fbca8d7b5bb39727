// Package nccl runs collectives on GPUs with NCCL.
//
//	b := nccl.New(func(ordinal int) (nccl.Device, error) { return cuda.Open(ordinal) })
//	if err := b.Available(); err != nil { ... } // says what is missing
//	comm, err := b.Connect(ctx, world)
//
// NCCL is opened when it is first needed; programs start without it. It is
// looked for in the file or directory that EURYALE_NCCL names, on the library
// path, and where pip puts NVIDIA's wheels (also of a virtual environment).
// The package needs build tag gpu.
//
// # State
//
// Not finished, and not used by euryale.Init. What follows was seen of an earlier
// state; this one has run on a library that stands in for NCCL, and not on a GPU.
// On two H200s its process tests pass (a killed rank is named and the other's device goes on; disagreement;
// early close). Package backendtest's suite does not yet: with ranks as
// goroutines of one process some calls wait for the other rank until they time
// out.
//
// # Ranks and devices
//
// Each rank has a device of its own: the one whose number is its local rank. All
// ranks are on one machine for now.
//
// Buffers are memory of the rank's device. Host memory is [backend.ErrArgument]:
// copy it to the device first (Kernels of a queue, Move), so that the cost of the
// detour is seen where it arises.
//
// # Numbers
//
// Sum and Prod of floats are NCCL's, in an order of its own, which depends on
// the number of elements: equal to other backends where sums are exact, and the
// same bits on every rank. 16-bit floats are rounded after each addition.
//
// What NCCL does otherwise than [backend.ReduceOp] says is put together from
// what it does alike:
//
//   - Avg of floats among a power of two of ranks is NCCL's, which divides
//     before it adds: the same bits but for subnormal numbers. Otherwise it is a
//     Sum and a division, and of f16, whose sum could overflow, a composed
//     reduction.
//   - Avg of integers is a Sum and a division that truncates towards zero.
//   - Min and Max of floats are composed reductions, because NCCL's lose a NaN.
//
// A composed reduction moves chunks to the ranks that own them, combines them
// there in rank order, and collects the results: the traffic of an all-reduce,
// in blocks that fit a scratch buffer of 8 MiB.
//
// [backend.Algorithm] is left to NCCL.
//
// # Calls
//
// Start puts the call on the caller's stream; there is no other one. When the
// queue changes, the new one is ordered after the old by an event. The host never
// waits inside the driver: Join looks, at growing intervals.
//
// # Checks and failures
//
// Each rank posts the header of each call to shared memory: a few stores. Join,
// and a goroutine that looks every few milliseconds, compare the headers of all
// ranks; where they differ, every rank fails with a [*backend.MismatchError].
// Join therefore returns once every rank has started the call. A rank that is
// more than a thousand calls ahead of another is not compared until that one
// comes near.
//
// The same goroutine sees a rank that is lost, one that has aborted or closed,
// errors that NCCL reports, and calls that make no progress for the World's
// timeout. It then aborts NCCL's communicator, which ends kernels that wait for a
// peer, and the device can be used again.
//
// NCCL's calls are made in a communicator that blocks, since one that does not
// makes a thread for each call; connecting and splitting, which wait for peers,
// are done in one that does not block.
package nccl
