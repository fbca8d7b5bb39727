// Package ops has the collectives as differentiable operations of Gorgonia
// graphs: [AllReduce], [AllGather], [AllToAll] and the others take a node and
// return a node, and gorgonia.Grad differentiates through them.
//
// Every rank builds the same graph with its communicator, and runs it in its own
// machine:
//
//	g := gorgonia.NewGraph()
//	shape, name := gorgonia.WithShape(8, 16), gorgonia.WithName("x")
//	x := gorgonia.NewMatrix(g, gorgonia.Float32, shape, name)
//	y, err := ops.AllToAll(comm, 1, 0, x) // [8, 16] becomes [8*P, 16/P]
//
// Operations work on tensors with any number of axes, and on scalars if the operation has no axis.
// They work on Float64, Float32, Int, Int64, Int32 and Byte, in the tape machine, in the lisp
// machine, and in plans of package vm. Shapes are checked when the graph is built: constructors
// return errors that wrap [ErrShape], [ErrDType] or [backend.ErrArgument]. Errors at run time wrap
// those of [backend.Communicator]. Gorgonia's machines hide them in their own errors; [Cause]
// returns the error of this package.
//
// # What must be the same on all ranks
//
// Every rank must run the same collectives in the same order. Machines run the nodes of a graph in
// the order in which the program added them. So ranks that run the same building code agree,
// whatever the order of the graph's branches. Grad also adds the backward collectives in a fixed
// order.
//
// Each call of a constructor is one collective when the graph runs. Gorgonia
// merges equal nodes, but not these: whether two operands are equal can depend on
// the rank, and a rank that merged two collectives would make one call too few. To
// communicate once, use the node twice.
//
// Ranks compare their collectives. If these differ, every rank gets
// backend.ErrMismatch with both sides. Ranks compare:
//
//   - the operation, the dtype, the shape of x (its total if lengths differ by rank)
//     and the axes;
//   - the position of the collective among those of its graph on its communicator, so other nodes
//     of the graphs may differ between ranks;
//   - if the collective combines operands and x is an input node, the name of x, so that two sums
//     of the same shape are not confused. Give such a node the same name on every rank.
//
// In a group of one rank, constructors return x, unless a factor other than 1 scales their
// gradients. In all other cases results are new tensors in row-major order, and operands are never
// written to. Operands may be transposed or sliced. An identity (such as the forward of
// [CopyToParallel]) costs a copy, because Gorgonia's machines write into results that have no other
// reader; in a plan of package vm it is free, and so is the forward of
// [SplitForwardGatherBackward].
//
// Ranks that are goroutines of one process must build their graphs one at a
// time, under one lock: Gorgonia's graph building is not safe for concurrent
// use. They can run at the same time.
//
// # Devices
//
// The same graph runs on a GPU in a machine of package vm whose device is the communicator's.
// Operations are steps of its plan: they work in the plan's memory, cutting and joining along an
// axis is one kernel each, and a collective is part of the machine's CUDA graph, except
// [SparseAllReduce], which runs between graphs. Nothing goes through the host.
//
// Gorgonia's machines compute on the host, so operations take host tensors there, even where ranks
// communicate on devices: operands and results of a collective are then copied to the device and
// back, and the host waits. A tensor that is not in host memory is an error.
//
// # Gradients
//
// The total loss is the sum of the ranks' losses. The gradient of x on rank r is then the
// derivative of that sum with respect to rank r's x, and the gradient of every linear operation is
// its adjoint:
//
//	forward                     gradient
//	AllReduce Sum, Avg          AllReduce Sum, Avg
//	ReduceScatter Sum           AllGather
//	ReduceScatter Avg           AllGather, divided by P
//	AllGather                   ReduceScatter Sum
//	AllToAll s→g                AllToAll g→s
//	Broadcast                   Reduce Sum; zeros on ranks other than root
//	Reduce Sum                  Broadcast
//	Reduce Avg                  Broadcast, divided by P
//	Gather                      Scatter
//	Scatter                     Gather; zeros on ranks other than root
//	Max, Min of any of these    to the lowest rank that holds the extremum
//	Prod of any of these        none: ErrGradient
//	SparseAllReduce Sum, Avg    AllReduce Sum, Avg; zeros where nothing was sent
//
// Results of Reduce and Gather on ranks other than root are zeros of the full shape, so each row is
// a linear map between all ranks' x and all ranks' y. Gradients can be differentiated again: to get
// the gradient of a gradient, read the row from right to left.
//
// # Conventions for divided work
//
// Often all ranks together compute what one rank could compute alone: each has a
// part of a sequence, or of the weights, and the loss at the end is the same
// number on every rank. The table above counts that loss P times, which makes some
// gradients P times too large. The usual solution is to choose the gradients of the
// operations at the border. These are separate constructors, because they are exact
// only under their assumptions:
//
//	forward                     gradient                    exact if
//	GatherForwardSplitBackward  k * own chunk of dy         dy is the same on every rank, k = Up
//	SplitForwardGatherBackward  k * AllGather               x is one tensor that all ranks share,
//	                                                        k = Unscaled
//	CopyToParallel              AllReduce Sum               x is one tensor that all ranks share
//	ReduceFromParallel          dy                          the loss behind it is counted once
//
// Where [Up] and [Down] come from: the exact gradient of AllGather is ReduceScatter, the sum of P
// gradients. If the ranks have computed the same dy, that sum is P times the rank's own chunk of
// dy; Up is this factor P. For the sum of the ranks' losses, the exact gradient of a split of a
// shared x is the concatenation of the ranks' gradients; Down, which is 1/P, turns it into the
// gradient of their mean. Take a part of a network that starts with a split with Down and ends with
// a gather with Up, and whose loss every rank computes alike. It has exactly the gradients of one
// device if the gradients of its parameters are averaged over the ranks. Without the scales they
// would be P times too small. The factors are P and 1/P even where lengths are uneven: scaling by a
// rank's share of the length would bias the gradients.
//
// Sequence parallelism, as an example: x [batch, sequence, heads, width] is the same on every rank;
// attention needs the whole sequence, but one head at a time; everything else works on one position
// at a time.
//
//	x, err := ops.SplitForwardGatherBackward(comm, 1, ops.Down(comm), x) // [B, N/P, H, D]
//	... // per position: projections
//	q, err := ops.AllToAll(comm, 2, 1, q) // [B, N, H/P, D], likewise k and v
//	... // attention
//	o, err := ops.AllToAll(comm, 1, 2, o) // [B, N/P, H, D]
//	... // per position: projection, MLP
//	y, err := ops.GatherForwardSplitBackward(comm, 1, ops.Up(comm), o) // [B, N, H, D]
//
// The gathered axis must hold only the sequence: reshape [B*N/P, ...] to [B, N/P, ...] first, or
// batches and positions are mixed.
//
// Tensor parallelism: each rank has some columns of A and the same rows of B, and
// x is the same on every rank.
//
//	x, err := ops.CopyToParallel(comm, x)
//	...                                       // h = f(x A), y = h B
//	y, err := ops.ReduceFromParallel(comm, y)
//
// # Uneven lengths
//
// An axis that does not divide evenly among the ranks is an error when the graph is built, unless
// [Splits] or [AllToAllSplits] give every rank's length. 7 heads and a sequence of 9, on 2 ranks:
//
//	q, err := ops.AllToAll(comm, 2, 1, q, ops.AllToAllSplits([]int{4, 3}, []int{5, 4}))
//
// A length may be 0. The operations of this package take and return tensors without
// elements, but most of Gorgonia's operations and the lisp machine panic on them: a
// rank with an empty part must pass it directly to the next operation of this
// package.
package ops
