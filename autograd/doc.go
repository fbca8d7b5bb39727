// Package autograd trains a Gorgonia model data-parallel: every rank holds the whole model,
// computes gradients on its own data, and applies the mean of all ranks' gradients, so that
// the model stays the same on all ranks.
//
// # A training loop
//
// The loop works for any Gorgonia program and machine. Lines with + are new:
//
//	 	ctx := context.Background()
//	+	comm, err := euryale.Init(ctx)
//	+	defer comm.Close()
//	+	sampler, err := autograd.NewSampler(comm, len(images), batch, seed)
//	 	m := newModel(sampler.Local())        // the graph is for this rank's share of the batch
//	+	dp, err := autograd.New(comm, m.learnables())
//	+	defer dp.Close()
//	 	gorgonia.Grad(m.loss, m.learnables()...)
//	 	vm := gorgonia.NewTapeMachine(m.graph)
//	 	adam := &solver.Adam{Rate: 0.001} // or a solver of Gorgonia
//	 	for epoch := range epochs {
//	-		for _, samples := range batches(epoch) {
//	+		for _, samples := range sampler.Epoch(epoch) {
//	 			autograd.Rows(m.x, images, samples)
//	 			autograd.Rows(m.y, labels, samples)
//	 			vm.RunAll()
//	-			adam.Step(gorgonia.NodesToValueGrads(m.learnables()))
//	+			grads, err := dp.Sync()
//	+			adam.Step(grads)              // or both at once: dp.Step(adam)
//	 			vm.Reset()
//	 		}
//	+		err = autograd.Mean(comm, &loss)      // of all ranks, to be printed by rank 0
//	+		err = dp.Save(dir, adam, progress{Epoch: epoch + 1})
//	 	}
//
// Each of these calls returns an error, which the example ignores. Every rank makes the same
// calls in the same order. NewSampler, New, Save, SaveAsync, Load, Check, Mean, Sum, Any and
// Evaluation wait for all ranks, so never call them under "if comm.Rank() == 0".
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
// so P ranks compute what one rank computes with the whole batch, except for rounding, since sums
// are taken in another order. So keep the rate, the schedule and the solver.
//
// Some of Gorgonia's solvers divide gradients by a batch size (gorgonia.WithBatchSize). Keep the
// value that you use on one rank: with the graph's batch size, which is now B/P, steps would be P
// times larger. Those of package solver have no such setting.
//
// Shares of different sizes would weigh samples differently, so [Sampler] requires that the
// number of ranks divides the batch. If shares must differ, let the loss be the sum over the
// share, divided by the number of samples on all ranks (use [Sum]), and use [WithSum].
//
// All ranks get bitwise identical results from each reduction, and solvers are deterministic, so
// parameters that are equal at first stay equal bit for bit. [DataParallel.Check] verifies this,
// and [DataParallel.Hash] returns a hash by which to compare trainings.
//
// # What a model is
//
// A model is everything that results depend on besides the data of a run. [New] gives all ranks the
// model of rank 0, Check and Hash cover it, and checkpoints keep it:
//
//   - the parameters of New, which a solver changes;
//   - frozen variables, which nothing changes, if the program declares them: [WithFrozen];
//   - the running statistics of the batch norms in the graphs of the parameters;
//   - the seed and the step of random numbers: those of the dropouts in these graphs, or
//     [WithRandom].
//
// All other variables are data of each rank, such as images and labels. They are never sent,
// compared or saved.
//
// A batch norm normalises the share of its rank. Its running statistics become the mean over all
// ranks in each Sync: each is averaged over the shares, and differences between the means of shares
// do not count as variance. vm.SyncBatchNorm normalises the whole batch. Random numbers of
// Gorgonia's own operations, such as its Dropout, cannot be kept: Save names these operations
// ([WithNotice]).
//
// # Other numbers of ranks
//
// Another number of ranks gives other bits, since sums are taken in another order. vm.WithTree
// takes them in an order that depends on micro-batches alone.
//
// # Solvers
//
// The solvers of package solver work on tensors of the host and in machines of package vm, with
// bitwise identical results, and checkpoints contain their state. All solvers of Gorgonia v0.9.18
// work on the host, except AdamW, which does not change the parameters. Of them, checkpoints
// support only VanillaSolver.
//
// # Micro-batches, evaluation, decisions
//
// Sync makes one run of each rank a step. Steps of several runs, whose gradients are added up, and
// elastic trainings are for machines of package vm: vm.Accumulate, vm.WithTree, vm.WithElastic.
// [Evaluation] divides any number of samples among ranks so that each sample is seen once, and
// [Sum] adds the counts. [Any] lets ranks stop together: early, or when one of them is told to
// stop.
//
// # What is detected
//
// Sync returns an error for parameters without a gradient (unless [WithUnused] allows them), and
// for a graph with hooks that ran twice. Close and Save return an error in the middle of a step,
// and if a solver was given gradients but Sync was never called; rank 0 also prints the latter at
// Close. New refuses two nodes of one tensor, and goroutines that share tensors; it compares
// parameters and options among ranks, and NewSampler and Evaluation compare their numbers. A
// variable with a gradient that New was not given is reported ([WithNotice]). One mistake is not
// detected: a graph without hooks that runs several times before a Sync. Gorgonia then overwrites
// the gradients or, with BindDualValues, adds them.
//
// # Buckets
//
// Gradients travel in buckets: large buffers with the gradients of many parameters of one dtype.
// New fixes their layout: parameters in reverse order, because the backward pass reaches the last
// layers first. A bucket leaves when it is full and all buckets before it have left. So every rank
// sends the same buckets in the same order, each exactly once in a step, in whatever order its
// machine runs. Ranks agree on the layout before they send anything else; if layouts differ, the
// error names the difference.
//
// Several buckets are under way at once if the communicator gains from it (InFlight of
// [backend.Capabilities]), as one of several machines does: while one is exchanged between
// machines, the next is reduced inside them.
//
// The gradients that Sync returns are views of the buckets: nothing is copied back. Buckets are in
// memory from Alloc, so on one machine ranks read each other's gradients in place.
//
// # Devices
//
// Graphs train on devices by package vm, whose machines exchange gradients in the memory of the
// device (vm.WithDataParallel).
//
// Gorgonia's machines compute on the host, and parameters and gradients are tensors of the host. If
// ranks communicate on devices, each bucket is copied to the device, reduced there, and copied
// back, behind the backward pass where hooks are used. Every solver and machine works as without
// devices.
//
// # Fewer bytes
//
// Gradients can travel through a communicator that compresses them, in the same
// training loop ([WithCompression]):
//
//	inBF16 := autograd.WithCompression(half.Wrap(backend.BF16))
//	largest := autograd.WithCompression(sparse.Wrap(sparse.TopK(0.01)))
//	dp, err := autograd.New(comm, params, largest)
//
// Parameters are broadcast uncompressed. With [WithPartial] ranks exchange no gradients at all:
// each applies its own, and [DataParallel.Average] averages one bucket of parameters in each step.
//
// # Checkpoints
//
// [DataParallel.Save] and Load keep everything that training depends on: the model, the residuals
// of a compression, and the state of solvers that are [solver.Stateful]. Training resumes bitwise
// identically in a program with the same options, also on another number of ranks unless ranks have
// state of their own. Each checkpoint is a directory in the one that Save is given, and Load takes
// the newest that is whole; docs/checkpoints.md describes them. Call both between steps: after
// Sync, and before the next RunAll. Where ranks have parts of the parameters ([WithParts]), a
// checkpoint has whole parameters.
//
// [DataParallel.SaveAsync] writes behind the training. Tensors have the names of the graph's nodes:
// [SaveWeights] and [LoadWeights] write and read a model alone, and [WeightsOnly] makes Load take
// the model alone, for another solver. A program without other ranks passes [Solo] to [New].
package autograd

// Each file uses only files in its own line and in those below, as a test checks.
//
//	exchange, check, hook, elastic          what machines and programs call
//	checkpoint
//	parallel                                DataParallel
//	tape, trainer                           who computes gradients: Gorgonia's machines, vm's
//	state, weights, options                 what a rank has of a training; of a model alone
//	sampler, tables, names, reducer, mirrors
//	inventory, parts, tree, solo
//	record, layout, param                   of checkpoints; of buckets
//	ranks                                   what they agree on, and how errors name them
