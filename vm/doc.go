// Package vm runs graphs of Gorgonia. A [Machine] is a gorgonia.VM: it takes the place of
// gorgonia.NewTapeMachine, and the rest of the program stays as it is.
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
// New reads the graph once and makes a plan: equal values are computed once, values that
// nobody wants are not computed, reshapes, transpositions, slices and broadcasts are views
// instead of copies, chains of element-wise operations and reductions are single loops
// (package kernels/fuse), and all values lie in one arena, in which memory is used again as
// soon as its value is not needed any more. [Machine.Plan] prints the plan, and EURYALE_PLAN=FILE
// writes it to a file, plan.svg with a drawing of the arena. Plans of [Eval] go to plan.eval.svg.
//
// Build the graph, with gorgonia.Grad and gorgonia.Read, before New. Where nodes are added later,
// RunAll is an error; a machine of [Eval] may be made before gorgonia.Grad.
//
// # Values
//
// After RunAll, the targets of gorgonia.Read, the roots of the graph, the cost given to
// gorgonia.Grad and the terms that it is the sum of, the gradients of
// variables, and the nodes given to [Keep] are host tensors. The machine writes into the same
// tensors in each run, so copy what must outlive the next one. The Value of every other
// computed node is nil: never stale. Gradients that gorgonia.Grad makes on the way and that
// nobody has asked for, such as those of the images, are not roots in this sense, and are not
// computed.
//
// The values of variables are those that gorgonia.Let, gorgonia.WithValue or a solver have
// given them. RunAll returns an error with both shapes if one does not have the shape that the
// graph was built for.
//
// Node.Grad works without gorgonia.BindDualValues. Gradients are overwritten by each run. To add
// up the gradients of several runs, add them up. A solver of Gorgonia sets gradients to zero in
// its Step. Here they are the Values of the nodes that gorgonia.Grad returned, so read these
// before Step. (In the tape machine with BindDualValues they are copies, which stay.)
//
// Machines share the parameters of the graphs they run: those for training and evaluation, or
// for several shapes of a batch, may be made for one graph, or for several graphs whose
// variables have the same tensors. A device has one copy of each, which lives as long as one of the
// machines is open. Machines that share parameters do not run at the same time. [Eval] makes a
// machine whose dropout and batch normalisation work as in evaluation.
//
// # Training
//
// With [WithSolver] each run ends with a step of a solver of package autograd, as part of the
// plan:
//
//	m, err := vm.New(g, device, vm.WithSolver(solver, learnables...))
//	err = m.RunAll()
//
// This takes the place of a call of the solver after each run:
//
//	m, err := vm.New(g, device)
//	err = m.RunAll()
//	err = solver.Step(gorgonia.NodesToValueGrads(learnables))
//
// The bits are the same. A Step that is left in is an error, since gradients have no value then.
// Learnables and what the solver keeps are updated where they are: on a device they stay there, and
// gradients are not copied to the host. Other machines of the device that share them see each step.
// [Machine.Pull] and Close write learnables back to their host tensors: read or write these after
// Pull, and a program is right on every device. Machines elsewhere read the host tensors, so Pull
// before they run.
//
// With [WithDataParallel] the ranks of a communicator train together, in place of
// autograd.DataParallel and its Sync:
//
//	m, err := vm.New(g, comm.Device(), vm.WithSolver(solver, learnables...),
//		vm.WithDataParallel(comm))
//
// The plan then sends each bucket of gradients as soon as it is computed, and the rest of the
// backward pass runs beside the all-reduce. [ClipNorm] bounds the norm of the gradients, and
// [Accumulate] makes one step of several runs. [WithMemory] bounds what all of it takes, and
// [Summarize] says that before there is a machine. [WithLossTiles] keeps the logits of a large
// vocabulary out of memory. With [WithTree] the bits of a training do not
// depend on the number of ranks, and with [WithElastic] not on how many of them die and are
// replaced.
//
// # Devices
//
// On a device, the arena and copies of the variables are in its memory. Each run uploads the
// variables that have changed, so that solvers and gorgonia.Let may write to their host tensors,
// and copies the results back in one batch. Loops run as kernels that are made for the plan, matrix
// products on what the device has for them: on GPUs cuBLAS, or kernels of Euryale. Convolutions are
// one operation: on the host products of patches that stay in the cache, on GPUs cuDNN, or kernels
// of Euryale that write no patches. If the device has CUDA graphs, consecutive steps that do not
// need the host are captured in the second run, and later runs launch each graph with one call.
// Where memory runs out, New says for what, and which values and parameters take most of it.
//
// On the host a machine has workers: the cores that Go may use (GOMAXPROCS, which respects the
// quota of a container and the affinity of the process) divided by the ranks of the job on this
// computer, as the communicator of [WithDataParallel] or the launcher's variables say. The bits do
// not depend on their number.
//
// Package kernels multiplies matrices on the host: the BLAS of gorgonia.Use is not used. Of the
// tape machine's options, WithPointerWatch has no counterpart: no step of a plan writes over a
// value that another one still reads.
//
// # Proof
//
// New proves each plan before it runs: a run on paper finds, for each operand of each step, that
// the value lies there which the graph says. This costs about a tenth of planning. A plan that
// cannot be proven is a fault of this package: the machine then computes one value at a time, in
// memory of its own for each, and New reports it ([Notice]). In a test (testing.Testing) New
// returns the reason as an error.
//
// # Precision
//
// [WithPrecision] lets products and convolutions of Float32 round their operands: [TF32] on GPUs,
// [BF16] everywhere. Graph, learnables and solver stay as they are. [Machine.Profile] says which
// steps take how long, and [Machine.Exposed] how long they wait for exchanges.
//
// # Operations
//
// The operations of Gorgonia v0.9.18 are read as what their callers wrote. A pool with uneven
// padding, for example, begins at the padding north and west, although Gorgonia's own machines
// begin at the other side. The graph is taken as it is: where Gorgonia has merged nodes or built a
// wrong gradient, every machine is wrong. New reports each kind of these once ([Notice]), with
// what to use instead, and says whether every machine is wrong or only Gorgonia's own are.
// Otherwise results equal those of the tape machine except for rounding, where Gorgonia is right:
// docs/ops.md says where it is not.
//
// Operations without an entry in package vm/internal/read, and those of other packages, run by
// their Do method on host tensors, always and in the order of the graph. The plan says host_ops=
// for them. Of Gorgonia's own, these are rare ones, such as CTCLoss, Sparsemax, YOLOv3, Dropout
// and random numbers. Each Do gets its own operands: what it writes into them, and how it
// reshapes or transposes them, is lost after the call. An operation that is a [DeviceOp] runs in
// the memory of the device instead, and may be part of a CUDA graph. Collectives of package ops
// are DeviceOps, so models whose ranks exchange activations stay on their devices.
//
// Operations on integers that Gorgonia implements for floats only, and tensors of size 0, are
// errors of New.
//
// Operations of package ops/nn are typed, too: activations, norms, pools, dropout and the
// cross-entropy are made of element-wise operations and reductions, which planning fuses. In a
// typed cross-entropy, a label that is out of range makes the loss NaN and is no error. An index of
// Embedding or ByIndices that is out of range is an error of RunAll, unless the graph computes its
// indices: their rows are NaN then, and get no gradient.
//
// NaN and infinities go through operations as in PyTorch: a pool or a maximum of NaN is NaN,
// Rectify of -Inf is 0, and a row that a cross-entropy ignores contributes nothing, whatever it
// holds. docs/ops.md has the conventions that differ, such as the gradient of Rectify at 0.
//
// The operation of a gorgonia.BatchNorm has the moving averages after each step of training, for
// Stats and for machines of any kind. Other than in Gorgonia, machines for training do not begin
// by throwing the averages away. With [WithDataParallel] they are the mean over all ranks, in each
// step, and checkpoints keep them. A batch norm normalises the share of its rank, or with
// [SyncBatchNorm] the batches of all ranks together. Batch norms of another graph have averages of
// their own, also if the variables are the same: carry them over by Stats and SetStats.
//
// Graphs have static shapes. For a last batch that is smaller, make a second graph and machine
// whose variables have the same tensors, with the same solver: see the example of New.
//
// # Files
//
// machine.go is the Machine, solver.go the solver in its plan, parallel.go the exchange with other
// ranks, clip.go the norm of gradients, accumulate.go micro-batches, norm.go the averages of batch
// norms, syncnorm.go batch norms over all ranks, random.go what else changes between runs, warn.go
// what it reports, memory.go what it takes, precision.go how it multiplies, planfile.go the file of
// EURYALE_PLAN, values.go its host tensors, opaque.go the operations that only the graph knows.
// internal/read makes a program of a graph, internal/ir is the language of programs, internal/plan
// makes a plan of a program, and internal/exec runs plans.
package vm
