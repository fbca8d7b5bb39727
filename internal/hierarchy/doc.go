// Package hierarchy runs collectives over machines with several devices each, so
// that every byte crosses the network between machines as rarely as possible.
//
//	layout, err := hierarchy.Parse("2x4", flat.Size()) // or Discover
//	comm, err := hierarchy.New(ctx, world, flat, layout, hierarchy.Options{})
//	fmt.Print(comm.Explain(backend.Collective{Kind: backend.AllReduce}, backend.F32, 25<<20))
//
// [New] wraps a flat communicator of all ranks, over any backend, and passes to it everything that
// is not hierarchical. For the rest it makes communicators by Split: one for the D ranks of each
// machine, and one, a rail, for the M ranks with the same place on each machine.
//
// # How it works
//
// An all-reduce of S bytes has five phases:
//
//	reduce-scatter inside   each device has the machine's sum of 1/D of the operand
//	exchange on the rail    each machine gets 1/M of that from every machine
//	add                     in the order of the machines
//	broadcast on the rail   the sums, to every machine
//	all-gather inside       the shards, to every device
//
// Between machines each rank sends 2(M-1)/M * S/D bytes in 2(M-1) messages: the exchange sends to
// each machine directly, the broadcast is an all-gather of the inner communicator. A ring over all
// W = M*D ranks moves 2(W-1)/W * S bytes over its busiest link, in 2(W-1) steps. Flat calls that
// send to each rank directly (backend tcp) send 2(W-D)/W * S bytes from each rank to other
// machines.
//
// A reduce-scatter ends with the addition, an all-gather begins with the broadcast. A broadcast
// spreads the operand inside root's machine, sends the shards on the rails, and gathers them inside
// the other machines: S/D bytes from each of root's machine to every other one. An all-to-all
// exchanges inside first, so that each rank sends every machine one message. It sends as many bytes
// between machines as a flat one and copies everything three times more, and is chosen where
// messages are many and small (2DH of Hwang et al., Tutel, MLSys 2023).
//
// Operands are cut into slices. Each phase runs on its own queue; the addition shares the
// broadcast's. Each phase that communicates has its own communicator. So while one slice is
// on the network, the next is inside the machine. Events order the queues, and the host
// waits for nothing. All ranks start everything in one order.
//
// The model chooses the number of slices. If the phases of an operand take x seconds on the slower
// kind of link and y on the other one, and each slice costs a more on the slower one, n slices take
// about x + y/n + n*a. For 25 MiB that gives 2 to 4 slices, between machines that are linked by
// NVLink or by a network ten times slower.
//
// Any numbering of the ranks works: r = m*D+d, as launchers number, r = d*M+m, or another. Where
// needed, the chunks of a reduce-scatter or an all-gather are packed and unpacked. The last n mod W
// elements of an all-reduce, which the ranks cannot divide, run flat at the same time.
//
// File by file:
//
//	layout.go    Layout: which rank is where
//	links.go     Links: how fast they are, and what the user's tuning file says about it
//	options.go   Options, and how EURYALE_HIERARCHY spells them
//	model.go     Plan: the choice between flat and hierarchical, and the model behind it
//	comm.go      Communicator: how ranks agree on a Plan, and everything but calls
//	call.go      call: a collective, started and joined; recent: which calls overlap
//	slice.go     the phases of a slice; scratch.go: the memory that it works in
//	pipeline.go  pipeline: communicators, queues and memory of all phases
//	failure.go   what a failure of a phase is to the group, and how all communicators end
//	stats.go     Stats: what this rank has sent
//
// Locks: Communicator.mu is held while a call is started. Communicator.ending, which is held while
// all communicators are ended, comes after it.
//
// # What runs flat
//
// These always run flat: other kinds; uneven chunks; operands of fewer elements than ranks; one
// machine; averages of f16 if the number of devices is not a power of two, or on more than 256
// machines, which kernels of GPUs cannot take.
//
// Machines may have different numbers of ranks. Then there are as many rails as the smallest
// machine has ranks, and ranks beyond that have empty shards: all-reduces and broadcasts are
// hierarchical, while reduce-scatters, all-gathers, all-to-alls and averages of f16 run flat.
//
// These run flat unless Options.Mode asks otherwise: machines of one device; links that are as fast
// between machines as inside; and whatever the model predicts to be faster flat ([Plan.Choose],
// [Plan.Explain]). The choice follows from values that are the same on every rank.
//
// The model has a latency and a bandwidth for each kind of link. A rank sends one message at a time
// over each, and a message costs both (Hockney's model with one port, as in Thakur, Rabenseifner
// and Gropp, Optimization of Collective Communication Operations in MPICH, 2005). A test compares
// it with a simulation of every message. euryale bench --tune measures links and keeps them in the
// user's file ([Measured]); without a measurement the model has round numbers. euryale explain
// prints what follows from these, or from other numbers.
//
// # Numbers
//
// Floats are added first inside each machine, as the inner communicator adds them (package host in
// the order of the places), and then in the order of the machines: ((x[0,0] + x[0,1] + ...) +
// (x[1,0] + ...)) + ... The last n mod W elements of an all-reduce are added as the flat
// communicator adds them. So results are bitwise identical on every rank and, where sums are
// exact, the bits of other communicators.
//
// 16-bit floats are added in 32 bits and rounded twice, once in a machine and once between
// machines, and an average of bf16 once more where it is divided. An average divides the sum
// once, at the end. If the operand or the exchange is f16, the sum could overflow, so each machine
// averages first and the machines' averages are averaged. [Options].Exchange rounds f32 to 16 bits
// on the network.
//
// # Memory
//
// Sources do not change. All-reduces receive in their destination and need no scratch memory.
// Reduce-scatters and all-gathers, and all calls with one device for each machine, go through
// scratch memory: Options.Slots times Options.SliceBytes, by default 4 times 8 MiB; twice that with
// one device for each machine, and 1/D more if the exchange is rounded.
//
// # Calls
//
// As always, work that is started later on a queue waits for the call. Calls on different queues
// overlap if they share no memory, though each ends after those before it: buckets of gradients
// profit from two to four queues. On GPUs that takes more hardware queues than a device has by
// default: programs that are linked against this module's libcuda.a ask for 32
// (CUDA_DEVICE_MAX_CONNECTIONS).
//
// [Communicator.Stats] counts the bytes on the links inside machines and from this machine to
// each other one. [Options].Hooks are told of phases: an observe.Recorder puts them on the
// timeline of its rank, by the device's clock. backend.As finds the Communicator below other
// wrappers.
//
// # Failures
//
// An error of any phase of any slice is the error of the call, and names the phase and the
// slice. It ends the communicators of all phases, on every rank: the first rank that fails
// says why in the world's store, which every rank watches, idle or not. All ranks report that
// reason.
//
// On the host, no phase begins on a rank where one before it has failed, so a call that ends
// well has the right result. On a device the queues go on after a failure, as those of CUDA do:
// a call under way when another rank fails may end well and be wrong, and the next one reports
// the failure. After a failure, discard every result that was not joined on every rank before it.
//
// Calls are compared across ranks if the inner communicator compares its own: each hierarchical
// call also makes a call on flat, often an empty one, that carries its fingerprint.
//
// # Several machines on one
//
// EURYALE_TOPOLOGY=2x2 declares machines; data then moves between them as it does inside them. A
// job that declares them runs what it can hierarchically, unless EURYALE_HIERARCHY says otherwise
// ([ParseOptions]). NCCL takes processes with different NCCL_HOSTID for different machines, and so
// does Euryale; between these NCCL goes over sockets, and their ranks may share a GPU. To use two
// GPUs as two machines of two:
//
//	EURYALE_BACKEND=nccl euryale run -n 4 sh -c 'NCCL_HOSTID=$((RANK/2)) exec ./train'
//
// # Source
//
// The phases follow fairring's hierarchical reduce-scatter and all-reduce.
package hierarchy
