// Package gpu runs collectives on GPUs: by NCCL, or by Euryale's kernels where they are faster.
//
//	b := gpu.New(gpu.Open)
//	if err := b.Available(); err != nil { ... } // says what is missing
//	comm, err := b.Connect(ctx, world)
//
// NCCL is opened when it is first needed; programs start without it. It is
// looked for in the file or directory that EURYALE_NCCL names, on the library
// path, and where pip puts NVIDIA's wheels (also of a virtual environment).
// That takes build tag gpu; without it, Available says so. Its name as a backend is "nccl".
//
// The oldest version that works is 2.10. One before 2.18 does all but Split, and a rank
// that gives up while it connects leaves a thread that waits for the others.
//
// # How it works, file by file
//
//   - network.go: the network interface between machines.
//   - backend.go, rankinfo.go: ranks tell each other what they have (rankInfo), and all draw the
//     same conclusion (decide). topology.go classifies the links.
//   - start.go: a call, from Start to Join. It is checked once, gets its algorithm, its number and
//     its header, and is started by the algorithm's launch.
//   - choose.go: what each algorithm can do, and the choice. table.go has the measured times:
//     those of the user (tuningfile.go) before those of shipped.json; tune.go measures them.
//   - measure.go: ranks measure as they connect what the table lacks.
//   - nccl.go, ncclcalls.go: launch by NCCL; library.go and libnccl_gpu.go are NCCL itself.
//   - capture.go: calls that are recorded in CUDA graphs, and their replays.
//   - kernel.go: launch by our kernels; status.go: the words by which the host stops them.
//   - peermemory.go: the memory that ranks reach, among it that of Alloc; device.go: what
//     a device has to do for it.
//   - comm.go, group.go, failure.go, teardown.go: connect, Alloc, Split; the end.
//
// # Ranks and devices
//
// Each rank has its own device: the one whose number is its local rank. Ranks on
// several machines find each other by NCCL's sockets, over the network interface of the route to
// rank 0 unless NCCL_SOCKET_IFNAME, or a file of NCCL's, names another, and compare
// calls over connections: see Sockets of internal/group. With EURYALE_TLS NCCL encrypts its
// traffic, too, by a key derived from the job's token: from 2.32 on, if it is built with TLS. This
// has only been tested with several machines simulated on one, and encryption with no NCCL that is.
//
// Several machines can be tried on one: processes that set NCCL_HOSTID to different
// names are on different machines for NCCL, which then goes over sockets between them.
// Such ranks may share a GPU, which then time-slices between them. The tests of package
// hierarchy use two GPUs as two machines of two ranks, and one as four of one.
//
// Buffers are memory of the rank's device. Host memory works, too: it is copied to
// the device and back through pinned memory, and Start returns when the call is
// done. That is slow, and said once (Notice of [Backend]).
//
// Our kernels reach memory from Alloc on every rank. It is not registered with NCCL, because
// NCCL 2.28 hangs if only some ranks pass registered memory (seen with an all-gather of 8 MiB),
// and nothing keeps callers from doing so. Registration would gain 8 to 11 % in
// all-gathers from 16 MiB, nothing in other reductions, and cost up to 63 % in
// broadcasts (four H200, bench/results/2026-11/2026-11-21-h200x4-nccl-registration.txt).
//
// # Algorithms
//
// Our kernels sum f32, f16 and bf16 in rank order, in 32 bits, and so give bitwise identical
// results on every rank and by every algorithm. They differ in trips over the links and in bytes:
//
//   - LL: every rank pushes its operand to all others, with flags in it, and adds up what it
//     receives. One trip, no barrier; W-1 times the bytes. Up to 128 KiB the operand travels in
//     packets (8 bytes of data in 16), beyond that in lines (120 in 128). Reduce-scatters,
//     all-gathers and all-to-alls push to each rank what is for it, in lines.
//   - LL128TwoShot: every rank pushes one segment to each other one, adds up what it receives,
//     and pushes the sum to all others, in lines. Two trips, no barrier.
//   - OneShot: ranks wait until all are there, and read each other's operands.
//   - TwoShot: each rank adds up one segment of all operands, and pushes the sum to all others.
//   - Mesh: for a cube mesh of eight devices, whose ranks use the memory of neighbours only.
//   - Halved: LL128TwoShot of f32 that travels as 16 bits, where a call allows that.
//   - Push: all-to-alls, also with Rows, and all-gathers: one kernel reads each piece where it lies
//     in the source, and writes it where it belongs in the destination. That is the other rank's
//     own, if it is memory from Alloc; else the piece goes through that rank's staging, in rounds
//     of which two are under way. Reduce-scatters push chunks to the staging of the ranks that add
//     them up.
//
// Sums of f32 in the association [backend.Tree] run by one shot or two. Others, and where NCCL does
// everything, are composed reductions, as are sums of branches. Those of 16 bits among more than
// two ranks are refused: they would be rounded more than once.
//
// All-to-alls with Rows never go by NCCL where NVLink connects every pair, or ranks share a device:
// LL runs short ones, Push the others. Neither takes memory beside the staging.
//
// Lines need NVLink, of a V100, an A100, or Hopper and newer; without it, LL is for all-reduces
// alone and ends at 128 KiB, and the two shots are those with barriers. Packets and lines come from
// NCCL's protocols LL and LL128; ours alternate between two inboxes, which is enough when everyone
// sends to everyone. allreduce.cu, ll128.cu and peers.cuh of internal/kernels/cuda say how ranks
// meet and why nobody overtakes anybody.
//
// Nothing but values that all ranks share decides about a call: not where an operand
// is, nor how it is aligned. Memory from Alloc that begins at a multiple of 16 bytes
// and is one long is used where it is, and any as a destination of Push; everything else is copied,
// inside the kernel, to memory that others reach.
//
// Ranks take the memory together or not at all: they exchange what they have, share memory by
// plain pointers in one process and by handles between processes, each writes to each other
// one and reads it back, and all vote. A refusal leaves nothing behind, and NCCL does
// everything: [Communicator.Refused] says why. A part that Split makes has its own memory.
//
// # Measured times
//
// Of the algorithms that can run a call, a [Table] chooses the fastest: the user's, which euryale
// bench --tune has measured, and below it [Shipped]. A row of it is for devices of one compute
// capability, links and number of ranks, as a [Survey] has them; the row of the devices' own model
// comes first. Where no row serves the devices of the group, the ranks measure in Connect, by the
// same races ([Communicator.Tune]) with fewer rounds, every fourth size from 1 KiB to 64 MiB, and
// f32 for all types. Rank 0 decides before each race whether there is time for it, of half a
// second in all. Rank 0 keeps the rows in the user's file, or else in its process. Calls of parts
// with fewer ranks go by NCCL where the table has nothing for them.
//
// All ranks go by the table of rank 0. An error of the measurement is none of Connect: ranks go by
// NCCL, and [Communicator.Explain] says why. If it has ended the group, they connect once more.
// Ranks do not measure where EURYALE_TUNING is off, or [Options] have a Table or force an
// algorithm.
//
// # Numbers of NCCL
//
// Sum and Prod of floats are NCCL's, in its own order, which depends on
// the number of elements: equal to other backends where sums are exact, and
// bitwise identical on every rank. 16-bit floats are rounded after each addition.
//
// What NCCL does otherwise than [backend.ReduceOp] says is put together from
// what it does alike:
//
//   - Avg of floats among a power of two of ranks is NCCL's, which divides
//     before it adds: bitwise identical except for subnormal numbers. Otherwise it is a
//     Sum and a division, and of f16, whose sum could overflow, a composed
//     reduction.
//   - Avg of integers is a Sum and a division that truncates towards zero.
//   - Min and Max of floats are composed reductions, because NCCL's lose a NaN.
//
// A composed reduction moves chunks to the ranks that own them, combines them
// there in rank order or in a tree, and collects the results: the traffic of an all-reduce,
// in blocks that fit a scratch buffer of 8 MiB.
//
// # Calls
//
// Start puts the call on the caller's stream; there is no other one. When the
// queue changes, the new one is ordered after the old by an event. The host never
// waits inside the driver: Join looks, at growing intervals.
//
// Each rank posts the header of each call to shared memory: a few stores. Join,
// and a goroutine that looks every few milliseconds, compare the headers of all
// ranks; where they differ, every rank fails with a [*backend.MismatchError].
// Join therefore returns once every rank has started the call. A rank that is
// about a thousand calls ahead of another is not compared until that one
// comes near.
//
// # Failures
//
// Package internal/group decides which rank is to blame: it sees a rank that is lost, one that has
// aborted or closed, errors that NCCL reports, and calls that make no progress for the World's
// timeout. NCCL's sockets break when a rank on another machine ends, so an error that NCCL finds
// waits a moment for news of that rank. Then which calls were done is fixed, kernels that wait are
// told to stop through a word in host memory, and NCCL's communicator is aborted, which ends its
// kernels. If the host cannot do that any more, our kernels end after [Options].Timeout, by the
// device's clock, and say which rank did not come. Either way the device can be used again.
//
// # The end
//
// The driver waits for a device's kernels before it frees memory there
// (bench/results/2026-11/2026-11-21-h200x2-driver-waits.txt), and among
// ranks of one process NCCL frees that of all when the last one leaves. So closing a part
// finishes in the background; otherwise a rank could block in Close while another rank on
// the same device waits for it. Closing the whole group waits for all parts.
// A rank that closes a group that is well waits a moment for the others to close
// too, and then all end NCCL's communicator in peace; an abort takes NCCL a second.
//
// A kernel that is behind other work on its queue may write to the memory of another rank
// long after that one has closed. So nobody gives back memory that others reach before
// they have closed, too, or their processes have ended (pidfd says so). [Communicator.Close]
// does not wait for that for long: what is left is given back later, which
// [Communicator.Kept] counts.
//
// NCCL's calls are made in a communicator that blocks, since one that does not
// makes a thread for each call; connecting and splitting, which wait for peers,
// are done in one that does not block.
//
// # CUDA graphs
//
// Start on a queue that is being captured records the call, whatever its algorithm, and a replay
// of the graph runs it:
//
//	graph, err := q.Capture(func() error {
//		w, err := comm.Start(side, sum, y, x) // side has waited for an event of q
//		if err != nil {
//			return err
//		}
//		...                                   // work on q, beside the call
//		return w.Wait(q)
//	})
//	w, err := graph.Launch(nil)
//	err = w.Join(ctx)
//
// Arguments are checked in the capture; there is no header, no number, and nothing to join, since
// nothing runs. The Work of a recorded call orders queues within the graph. What the host would
// have to do for each replay is refused there with an ErrArgument: calls on host memory, Alloc,
// Free and Split.
//
// A replay is one call of the communicator: it has one number, one header and one event, which
// Launch makes, once for each communicator with calls in the graph. The header has the number
// of the replay and a digest of the calls that were recorded, so ranks that replay different
// graphs, or one at another place of their calls, get a MismatchError. Our kernels read the number
// of their round from the memory of the device, and NCCL's do alike. So replays, those of several
// graphs, and other calls may follow each other in any order that is the same on all ranks.
//
// The watchdog watches a replay like any call. In a graph of several calls a kernel that writes one
// word follows each call. By it the host knows how far the replay has come, and an
// error names the collective: "replay 17 of a graph of 12 collectives, at collective 5:
// allreduce(sum) of 1048576 f32". A replay as a whole must end within the World's timeout.
//
// NCCL's communicator ends only after all graphs with calls of it. When the group ends, kernels are
// told to stop, then its graphs are freed, then NCCL is aborted or closed. Launch returns the
// group's error from then on, also for the other communicators of the graph.
//
// # Locks
//
// Launch holds the lock of the [backend.Graph], then order of each communicator in it, by the names
// of the groups: a group comes before its parts. order (a call is being started) comes before the
// lock of the group's Member, and that before state (which calls are done). status.mu, graphs.mu
// and teardowns.mu are taken last, and nothing under them.
//
// # Tests
//
// The tests without tag gpu run the communicator on a stand-in for NCCL, on devices of guarded
// memory. The directory emulator holds a libnccl.so.2 whose devices are the host: make
// gpu-emulated runs the GPU's tests on it, down to NCCL's calls.
package gpu
