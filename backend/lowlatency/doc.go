// Package lowlatency makes sums of small and middling size fast among the devices of
// one machine, by kernels that read and write the memory of the other devices.
//
// [New] wraps a communicator. Calls for which there are kernels, and which a table of
// measured times says they win, run on them; every other call is inner's. Nobody has
// to know: an all-reduce stays an all-reduce, with the same bits on every rank.
//
//	comm, err := lowlatency.New(inner, lowlatency.Options{})
//	fmt.Println(comm.Refused(), comm.Explain(call, backend.F32, 2<<20), comm.Usage())
//
// Init uses it where the backend is a [Carrier]. Times are those that euryale bench
// --tune has kept for the user, else those of shipped.json.
//
// # Algorithms
//
// Times are a launch and trips over the links, so they differ in trips and in bytes.
//
//   - [LL]: every rank pushes its operand to all others, with flags in it, and
//     adds up what it receives. One trip, no barrier; W-1 times the bytes.
//   - [LL128TwoShot]: every rank pushes one segment to each other one, adds up what
//     it receives, and pushes the sum to all others, with flags in everything. Two
//     trips, no barrier; the bytes that a bandwidth-bound algorithm moves, and a
//     fifteenth more. The next round's operands are under way while sums come in.
//   - [OneShot]: ranks wait until all are there, and read each other's operands.
//   - [TwoShot]: the same data flow without flags in the data, as in NCCL's protocol
//     Simple. Blocks of threads tell each other when a piece is there, which takes longer
//     than flags and leaves the links to the data: the fastest from 64 MiB on among two
//     H200 (bench/results/2026-11-23-h200x2-push.txt). Memory from Alloc saves it the copy
//     of the sums.
//
// LL sends packets (8 bytes of data in 16) up to 128 KiB, and lines (120 in 128)
// beyond; LL128TwoShot sends lines. See allreduce.cu and ll128.cu of kernels/cuda,
// and peers.cuh there for how ranks meet and why nobody overtakes anybody. Lines need
// NVLink, of a V100, an A100, or Hopper and newer; without it, LL ends at 128
// KiB and the two shots are those with barriers.
//
// testdata has their schedules, which the tests simulate.
//
// A call of small size is bound by its launch, not by the links. On Hopper and newer, all
// are launched so that the device may set a kernel up while the one ahead of it still runs,
// and wait for its end there (programmatic dependent launch).
// Such a launch takes the host 0.5 us less, and the kernel begins sooner: calls of 16 bytes
// to 64 KiB took 3.9 to 4.4 us instead of 4.3 to 5.0 among two H200
// (bench/results/2026-11-21-h200x2-lowlatency-launch.txt); in another run, where the launch
// of any kernel took 3.0 to 3.2 us, those of up to 64 KiB took 3.2 to 3.8
// (bench/results/2026-11-21-h200x2-lowlatency.txt). LL sums that fit one grid
// let the next kernel begin at once; see kernels/cuda/system.cuh for why the others do not.
//
// An all-reduce of f32 that may travel as 16 bits ([backend.Collective].AllowHalf, which
// package half uses) has a kernel of its own, Halved: LL128TwoShot with casts on the
// way, which the size of the operand and the links decide about.
//
// Even reduce-scatters and all-gathers are halves of these and run on the same
// kernels, where the table has a row for them or [Options] force it.
//
// # What inner must offer
//
// A [Carrier] runs such a kernel as one of its own calls. So there is one numbering of
// calls, one comparison of headers, one order across queues and one failure detector,
// those of inner. When inner ends, kernels that wait are told to stop through a word in
// host memory; if the host cannot do that any more, they end after [Options].Timeout,
// by the device's clock, and say which rank did not come. Either way the device stays
// usable.
//
// # The end
//
// A kernel that is behind other work on its queue may write to the memory of another rank
// long after that one has closed. So nobody gives back memory that others reach before
// they have closed, too, or their processes have ended (pidfd says so). [Communicator.Close] does not
// wait for that for long: what is left is given back later, which [Communicator.Kept]
// counts. A rank that lives and never closes costs each of the others its pad and staging, 161
// to 165 MiB unless [Options] say otherwise, and what it had from Alloc, until it ends.
//
// # Together or not at all
//
// New exchanges cards over inner (machine, process, device, links), from which every
// rank draws the same conclusion; then ranks share memory, by plain pointers in one
// process and by handles between processes, each writes to each other one and reads it
// back, and all vote. A refusal at any point leaves nothing behind, and inner does
// everything: [Communicator.Refused] says why. Pads and staging belong to one group;
// Split makes new ones.
//
// Nothing but values that all ranks share decides about a call: not where an operand
// is, nor how it is aligned. Memory from Alloc that begins at a multiple of 16 bytes
// and is one long is used where it is; everything else is copied, inside the kernel, to
// memory that others reach.
//
// # Sources, and what is different here
//
// PyTorch's IntraNodeComm (pull request 116125, December 2023) has one-shot and
// two-shot kernels and a cube mesh behind the same kind of selection. Since then its
// users found that the order of additions depended on the rank, so that replicas
// drifted apart; that buffers could be overwritten while another rank still read them;
// that two streams or groups could mix their signals; that thresholds compared elements
// with bytes; that odd sizes, alignments and groups failed; that a dead peer meant
// waiting for ever. Here additions are in rank order in 32 bits, in every algorithm;
// halves alternate by a number that is kept on the device; pads belong to a group, and
// its calls have one order; thresholds are bytes; any size, alignment and number of
// ranks from 2 to 8 goes; and waits end.
//
// Packets and lines with flags are those of NCCL's protocols LL and LL128. Theirs go
// around a ring and are flow-controlled; ours alternate between two inboxes, which is
// enough when everyone sends to everyone.
//
// A cube mesh of eight devices ([Classify] finds it, with partners for each rank) has an
// algorithm of its own, [Mesh], that adds in rank order, too, and uses the memory of
// neighbours only. It was never on such a machine: ranks that share devices test it.
package lowlatency
