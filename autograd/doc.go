// Package autograd trains one Gorgonia model on many ranks: every rank holds
// the whole model, computes gradients on data of its own, and applies the
// gradients of all ranks, so that the model stays the same everywhere.
//
// # A training loop
//
// Any Gorgonia program and machine; what starts with + is new:
//
//	 	ctx := context.Background()
//	+	comm, err := euryale.Init(ctx)
//	+	defer comm.Close()
//	+	sampler, err := autograd.NewSampler(len(images), batch, comm.Rank(), comm.Size(), seed)
//	 	m := newModel(sampler.Local())        // the graph is for this rank's share of the batch
//	+	dp, err := autograd.New(comm, m.learnables())
//	+	defer dp.Close()
//	 	gorgonia.Grad(m.loss, m.learnables()...)
//	 	vm := gorgonia.NewTapeMachine(m.graph)
//	 	solver := &autograd.Adam{Rate: 0.001} // or a solver of Gorgonia
//	 	for epoch := range epochs {
//	-		for _, samples := range batches(epoch) {
//	+		for _, samples := range sampler.Epoch(epoch) {
//	 			autograd.Rows(m.x, images, samples)
//	 			autograd.Rows(m.y, labels, samples)
//	 			vm.RunAll()
//	-			solver.Step(gorgonia.NodesToValueGrads(m.learnables()))
//	+			grads, err := dp.Sync()
//	+			solver.Step(grads)            // or both at once: dp.Step(solver)
//	 			vm.Reset()
//	 		}
//	+		err = autograd.Mean(comm, &loss)      // of all ranks, to be printed by rank 0
//	+		err = dp.Save(dir, solver, progress{Epoch: epoch + 1})
//	 	}
//
// Errors are left out here; each of these returns one. Every rank makes the same calls in the
// same order: Save, Load, Check, Mean, Sum and Any wait for all ranks, so they never stand
// under "if comm.Rank() == 0".
//
// With one more change per layer the communication overlaps the backward pass:
//
//	 	// a layer
//	-	h := gorgonia.Must(gorgonia.Mul(x, w))
//	+	h := gorgonia.Must(gorgonia.Mul(x, gorgonia.Must(dp.Hook(w))))
//
// # What it computes
//
// Let a batch of B samples be divided into equal shares of B/P for P ranks, and
// let the loss of a rank be the mean over its share. Then the mean of the ranks'
// gradients is the gradient of the mean over the batch:
//
//	1/P sum over r of ( P/B sum over i in share r of g[i] )  =  1/B sum over i of g[i]
//
// so P ranks compute what one rank computes with the whole batch, but for the
// rounding of sums taken in another order. Rate, schedule and solver stay as they were.
//
// Some of Gorgonia's solvers divide gradients by a batch size, gorgonia.WithBatchSize. Leave
// it what it was on one rank: with the size of the graph's batch, which is now B/P, steps
// would be P times larger. The solvers of this package have no such setting.
//
// Shares of different sizes would weigh samples differently, which is why [Sampler] wants the
// number of ranks to divide the batch. Where shares must differ, let the loss be the sum over
// the share, divided by the number of samples on all ranks ([Sum] tells it), and use
// [WithSum].
//
// All ranks get the same bits from each reduction, and solvers are
// deterministic, so parameters that begin equal stay equal, bit for bit.
// [DataParallel.Check] verifies it, and [DataParallel.Hash] gives one line to compare
// trainings by. State that is not a parameter, such as the
// running statistics of a batch normalization or the random numbers of a
// dropout, is each rank's own.
//
// # Solvers
//
// [SGD], [Momentum], [Adam] and [AdamW] work on the host and on devices, with the same bits,
// and show their state to checkpoints. A [Schedule] gives the rate of each step, [ClipNorm] bounds the
// gradients. All solvers of Gorgonia v0.9.18 work on the host, except AdamW, which leaves the
// parameters as they are; only VanillaSolver can be in a checkpoint.
//
// # Micro-batches, evaluation, decisions
//
// [DataParallel.Accumulate] adds up the gradients of several RunAll before anything is sent.
// [Evaluation] divides samples among ranks so that each is seen once, whatever their number,
// and [Sum] adds up what was counted. [Any] lets ranks stop together: early, or when one of
// them is told to end.
//
// # What is found
//
// Sync names parameters that no gradient has reached ([WithUnused] if that is meant), and a
// graph that was run twice with hooks. Close and Save tell if a solver was given gradients and
// Sync was never called. Not found is a graph without hooks that is run several times before
// a Sync, without Accumulate: Gorgonia overwrites the gradients then, or adds them up with
// BindDualValues.
//
// # Buckets
//
// Gradients travel in buckets, large pieces of memory that hold the gradients
// of many parameters of one dtype. Their layout is fixed by New: parameters in
// reverse order, because the backward pass reaches the last layers first. A
// bucket leaves when all its gradients are there and all buckets before it have
// left. So every rank sends the same buckets in the same order, whatever its
// machine does, and each exactly once in a step. Ranks agree on the layout
// before they send anything else; a difference is an error that names it.
//
// Several buckets are under way at once where the communicator gains by it
// (backend.Overlapper), as one of several machines does: while one is exchanged between
// machines, the next is reduced inside them.
//
// The gradients that Sync returns are views of the buckets: nothing is copied
// back. Buckets lie in memory that all ranks reach, so on one machine ranks
// read each other's gradients in place.
//
// # Devices
//
// Where parameters are matters, and nothing else: those in the memory of a device,
// moved there with the ToDevice of the engine that the graph runs with, have
// their gradients there. A bucket is one launch, one all-reduce and nothing else:
// once its last gradient is there, one kernel on the engine's queue packs all of
// them; the bucket is reduced on a queue of its own, ordered after that by an
// event, so that it overlaps the backward pass; and nothing is unpacked, because
// the gradients that Sync returns are tensors of the engine over the bucket. No
// tensor goes through the host. The engine must be of the communicator's device,
// and all ranks must have the same parameters on devices.
//
// Until its bucket is full, a gradient that a hook has caught stays where the
// backward pass has put it. Where that memory is about to be overwritten or
// recycled before (Gorgonia computes in place where it can), the engine tells, and
// the gradient is copied into the bucket by itself.
//
// Scalars and tensors of one element are on the host also in such a model. They
// have buckets of their own, which are copied to the device and back. So is all
// of a model on the host whose ranks communicate on devices: every solver and
// machine works then as without devices.
//
// Gorgonia's solvers set a gradient to zero from the host when they
// have used it, which is a fault for one in the memory of a device: use a [Solver] of this
// package, or one of your own that computes with operations of package tensor.
// The lisp machine and BindDualValues touch such gradients too.
//
// # Fewer bytes
//
// Gradients can travel through a communicator that compresses them, in the same
// training loop ([WithCompression]):
//
//	dp, err := autograd.New(comm, params, autograd.WithCompression(half.Wrap(backend.BF16)))
//	dp, err := autograd.New(comm, params, autograd.WithCompression(sparse.Wrap(sparse.TopK(0.01))))
//
// Parameters are broadcast as they are. Or ranks exchange no gradients: each
// applies its own, and one bucket of parameters is averaged in each step
// ([WithPartial], [DataParallel.Average]).
//
// Gradients that travel as 16-bit floats are rounded in the pass that packs them
// ([backend.Rounder]), unless they are copied to the communicator's device between: on a
// device a bucket is one launch that casts its gradients to 16 bits, side by side, one
// all-reduce of these, and one launch that widens, and scales, what comes of it into the
// bucket, of which the gradients of Sync are views. For each element of f32 that reads and
// writes 6 and 6 bytes beside the all-reduce; to pack, cast and widen would be 8, 6 and 6.
// It takes memory for the gradients in 16 bits beside the buckets. Where the all-reduce
// rounds on its way ([backend.Halver]) a bucket is packed as it is.
//
// # Checkpoints
//
// [DataParallel.Save] and Load keep all that training depends on: parameters, the
// residuals of a compression, and the state of solvers that show it. Training goes on from
// there with the same bits, in a program with the same options, also on another number of
// ranks unless ranks have state of their own. Both are for between steps: after Sync, and
// before the next RunAll.
package autograd
