// Package vm runs graphs of Gorgonia. A [Machine] is a gorgonia.VM: use it instead of
// gorgonia.NewTapeMachine, and leave the rest of the program unchanged.
//
//	// In place of gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(learnables...)):
//	m, err := vm.New(g, nil)
//	defer m.Close()
//	for ... {
//		gorgonia.Let(x, images)
//		err = m.RunAll()
//		solver.Step(gorgonia.NodesToValueGrads(learnables))
//		m.Reset()
//	}
//
// New reads the graph once and makes a plan. Equal values are computed once, and values that nobody
// wants not at all. Reshapes, transpositions, slices and broadcasts are views instead of copies.
// Chains of element-wise operations and reductions are single loops (package kernels/fuse). All
// values lie in one arena, which reuses memory as soon as its value is no longer needed.
// [Machine.Plan] prints the plan, and EURYALE_PLAN=FILE writes it to a file, plan.svg with a
// drawing of the arena. Plans of [Eval] go to plan.eval.svg.
//
// Build the graph, with gorgonia.Grad and gorgonia.Read, before New. If nodes are added later,
// RunAll returns an error; a machine of [Eval] may be made before gorgonia.Grad.
//
// # Values
//
// After RunAll, these are host tensors: the targets of gorgonia.Read, the roots of the graph, the
// cost given to gorgonia.Grad and the terms that it sums, the gradients of variables, and the nodes
// given to [Keep]. The machine writes into the same tensors in each run, so copy values that must
// outlive the next one. The Value of every other computed node is nil: never stale. Intermediate
// gradients of gorgonia.Grad that nobody asked for, such as those of the images, do not count as
// roots, and are not computed.
//
// Variables have the values that gorgonia.Let, gorgonia.WithValue or a solver gave them. RunAll
// returns an error with both shapes if a value does not have the shape that the graph was built
// for.
//
// Node.Grad works without gorgonia.BindDualValues. Each run overwrites the gradients, so the
// program must add up those of several runs. A Gorgonia solver sets gradients to zero in its Step.
// Here they are the Values of the nodes that gorgonia.Grad returned, so read these before Step.
// (The tape machine with BindDualValues returns copies, which keep their values.)
//
// Machines share the parameters of the graphs they run. Machines for training and evaluation, or
// for several shapes of a batch, may run one graph, or several graphs whose variables have the same
// tensors. A device has one copy of each parameter, which lives as long as one of the machines is
// open. Machines that share parameters must not run at the same time. [Eval] makes a machine whose
// dropout and batch normalisation work as in evaluation.
//
// # Training
//
// With [WithSolver] each run ends with a step of a solver of package autograd/solver, as part of
// the plan:
//
//	m, err := vm.New(g, device, vm.WithSolver(solver, learnables...))
//	err = m.RunAll()
//
// This replaces a call of the solver after each run:
//
//	m, err := vm.New(g, device)
//	err = m.RunAll()
//	err = solver.Step(gorgonia.NodesToValueGrads(learnables))
//
// The bits are the same. A Step left in the program is an error, because gradients then have no
// value. Learnables and the solver's state are updated in place: on a device they stay there, and
// gradients are not copied to the host. Other machines on the device that share them see each step.
// [Machine.Pull] and Close write learnables back to their host tensors. A program that reads or
// writes these only after Pull is right on every device. Until then the first and the last element
// there are NaN, by which machines elsewhere, autograd and models refuse them.
//
// With [WithDataParallel] the ranks of a communicator train together, without autograd.DataParallel
// and its Sync:
//
//	m, err := vm.New(g, comm.Device(), vm.WithSolver(solver, learnables...),
//		vm.WithDataParallel(comm))
//
// The plan then sends each bucket of gradients as soon as it is computed, and the rest of the
// backward pass runs beside the all-reduce. [ClipNorm] bounds the norm of the gradients, and
// [Accumulate] makes one step of several runs. [WithMemory] bounds the memory of all this, and
// [Summarize] reports it before there is a machine. [WithLossTiles] keeps the logits of a large
// vocabulary out of memory. With [WithTree] the bits of a training do not depend on the number of
// ranks. With [WithElastic] they do not depend on how many ranks die and are replaced either.
// docs/combinations.md has a table of which of these features go together: New refuses the others.
//
// # Devices
//
// On a device, the arena and copies of the variables lie in device memory. Each run uploads the
// variables that have changed, so that solvers and gorgonia.Let may write to their host tensors,
// and copies the results back in one batch. Loops run as kernels made for the plan. On GPUs, matrix
// products use cuBLAS, or kernels of Euryale. A convolution is one operation: the host multiplies
// patches that stay in the cache, and GPUs use cuDNN, or kernels of Euryale that write no patches.
// If the device has CUDA graphs, consecutive steps that do not need the host are captured in the
// second run, and later runs launch each graph with one call. If memory runs out, the error of New
// says what needed it, and which values and parameters take most of it.
//
// On the host a machine has workers. Their number is the cores that Go may use (GOMAXPROCS, which
// respects the quota of a container and the affinity of the process) divided by the ranks of the
// job on this computer, which the communicator of [WithDataParallel] or the launcher's variables
// give. The bits do not depend on the number of workers.
//
// Package kernels multiplies matrices on the host: the BLAS of gorgonia.Use is not used. The tape
// machine's option WithPointerWatch has no counterpart, because no step of a plan writes over a
// value that another step still reads.
//
// # Proof
//
// New proves each plan before it runs: it traces the plan symbolically and checks that each operand
// of each step holds the value that the graph says. This costs about a tenth of planning. A plan
// that cannot be proven is a fault of this package: the machine then computes one value at a time,
// each in separate memory, and New reports the fault ([Notice]). In a test (testing.Testing) New
// returns the reason as an error.
//
// # Precision
//
// [WithPrecision] lets matrix multiplications and convolutions of Float32 round their operands:
// [TF32] on GPUs, [BF16] everywhere. Graph, learnables and solver stay as they are.
// [Machine.Profile] says how long each step takes, and [Machine.Exposed] how long steps wait for
// exchanges.
//
// # Operations
//
// New reads the operations of Gorgonia v0.9.18 as their callers wrote them. A pool with uneven
// padding, for example, begins at the padding north and west, although Gorgonia's own machines
// begin at the other side. New takes the graph as it is: where Gorgonia has merged nodes or built a
// wrong gradient, every machine is wrong. New reports each kind of defect once ([Notice]), with
// what to use instead, and says whether every machine is wrong or only Gorgonia's own are.
// Otherwise, where Gorgonia is right, results equal those of the tape machine except for rounding.
// docs/ops.md says where it is not.
//
// Operations without an entry in package internal/vm/read, and those of other packages, run by
// their Do method on host tensors, always and in the order of the graph. The plan counts them as
// host_ops=. Few of Gorgonia's own operations are among them, such as CTCLoss, Sparsemax, YOLOv3,
// Dropout and random numbers. Each Do gets its own operands: anything it writes into them, and any
// reshape or transposition of them, is lost after the call. An operation that is a [DeviceOp] runs
// in the memory of the device instead, and may be part of a CUDA graph. Collectives of package ops
// are DeviceOps, so models whose ranks exchange activations stay on their devices.
//
// New returns an error for operations on integers that Gorgonia implements for floats only, and for
// tensors of size 0 that others than the collectives of package ops take or give.
//
// Operations of package ops/nn are typed, too: activations, norms, pools, dropout and the
// cross-entropy are made of element-wise operations and reductions, which planning fuses.
//
// Indices, labels and lengths that are out of range make RunAll return an error if they are
// variables. If the graph computes them, which is too late for an error, they make NaN of
// everything that they would have changed: of the row of an Embedding or a cross-entropy, of a
// whole table that an index may have named anywhere, in ScatterAdd, in IndexCopy and in the
// gradient of an Embedding, and of the entry of an attention.
//
// NaN and infinities propagate as in PyTorch: a pool or a maximum of NaN is NaN, Rectify of -Inf is
// 0, and a row that a cross-entropy ignores contributes nothing, whatever it holds. docs/ops.md
// lists the conventions that differ, such as the gradient of Rectify at 0.
//
// After each training step, the operation of a gorgonia.BatchNorm has the running statistics, for
// Stats and for machines of any kind. New begins averages that are zeros, which nothing has
// trained, with the mean 0 and the variance 1, as PyTorch does. Unlike in Gorgonia, machines for
// training do not start by discarding the averages. With [WithDataParallel] they are the mean over
// all ranks, in each step, and checkpoints keep them. A batch norm normalises its rank's share of
// the batch, or with [SyncBatchNorm] the batches of all ranks together; a batch of one value per
// channel is an error of New. Batch norms of another graph have separate averages, even if the
// variables are the same: carry them over with Stats and SetStats.
//
// Graphs have static shapes. For a smaller last batch, make a second graph and machine whose
// variables have the same tensors, with the same solver: see the example of New.
//
// # Files
//
// machine.go is the Machine, solver.go the solver in its plan, parallel.go the exchange with other
// ranks, clip.go the norm of gradients, accumulate.go micro-batches, norm.go the averages of batch
// norms, syncnorm.go batch norms over all ranks, random.go other state that changes between runs,
// warn.go its notices, memory.go its memory, precision.go the precision of its products,
// planfile.go the file of EURYALE_PLAN, values.go its host tensors, opaque.go the operations that
// only the graph knows. In internal/vm, read turns a graph into a program, ir is the language of
// programs, lower rewrites them, plan turns a program into a plan, and exec runs plans.
package vm
