// Package gpu runs collectives on GPUs with NCCL.
//
//	b := gpu.New(func(ordinal int) (gpu.Device, error) { return cuda.Open(ordinal) })
//	if err := b.Available(); err != nil { ... } // says what is missing
//	comm, err := b.Connect(ctx, world)
//
// NCCL is opened when it is first needed; programs start without it. It is
// looked for in the file or directory that EURYALE_NCCL names, on the library
// path, and where pip puts NVIDIA's wheels (also of a virtual environment).
// That takes build tag gpu; without it, Available says so.
//
// The oldest version that works is 2.10. One before 2.18 does all but Split, and a rank
// that gives up while it connects leaves a thread that waits for the others.
//
// # Ranks and devices
//
// Each rank has a device of its own: the one whose number is its local rank. Ranks on
// several machines find each other by NCCL's sockets (NCCL_SOCKET_IFNAME), and compare
// calls over connections: see Sockets of internal/group. That was run on machines that
// are one only.
//
// Several machines can be tried on one: processes that set NCCL_HOSTID to different
// names are on different machines for NCCL, which then goes over sockets between them.
// They may share a device, whose ranks take turns of milliseconds: two GPUs are two
// machines of two for the tests of package hierarchy.
//
// Buffers are memory of the rank's device. Host memory works, too: it is copied to
// the device and back through pinned memory, and Start returns when the call is
// done. That is slow, and said once (Notice of [Backend]).
//
// Memory from Alloc is not registered with NCCL. All ranks would have to pass
// registered memory then, or none: where some do, NCCL 2.28 waits for ever (seen
// with an all-gather of 8 MiB), and callers may mix. It would gain 8 to 11 % in
// all-gathers from 16 MiB, nothing in other reductions, and cost up to 63 % in
// broadcasts (four H200, 2026-11-21, bench/results).
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
// about a thousand calls ahead of another is not compared until that one
// comes near.
//
// The same goroutine sees a rank that is lost, one that has aborted or closed,
// errors that NCCL reports, and calls that make no progress for the World's
// timeout. It then aborts NCCL's communicator, which ends kernels that wait for a
// peer, and the device can be used again.
//
// The driver waits for a device's kernels before it frees memory there, and among
// ranks of one process NCCL frees that of all when the last one leaves. So the end
// of a part goes on in the background, until the group's Close waits for it: a
// rank may close it while another waits on the same device for that very rank.
//
// A rank that closes a group that is well waits a moment for the others to close
// too, and then all end NCCL's communicator in peace; an abort takes NCCL a second.
//
// NCCL's calls are made in a communicator that blocks, since one that does not
// makes a thread for each call; connecting and splitting, which wait for peers,
// are done in one that does not block.
//
// # Tests
//
// The tests without tag gpu run the communicator on a stand-in for this package's
// own interface to NCCL. The directory emulator holds a libnccl.so.2 whose devices
// are the host: make gpu-emulated runs the GPU's tests on it, down to NCCL's calls.
package gpu
