// Package fit is a training loop for machines of package vm: the part that all trainings share.
//
//	samples, classes, err := data.CSV("flowers.csv", "species")
//	train, held := data.Split(samples, 0.2, 1)
//	... // a graph with inputs x [16, 4] and y [16], scores, and a loss: the batch is this rank's
//	m, err := vm.New(g, comm.Device(), vm.WithSolver(solver, w...), vm.WithDataParallel(comm))
//	eval, err := vm.New(g, comm.Device(), vm.Eval(), vm.Keep(scores))
//	result, err := fit.Run(ctx, m, fit.Data{Set: train, Inputs: G.Nodes{x, y}, Loss: loss},
//		fit.Epochs(100), fit.Checkpoint("run1", 0), fit.Progress(os.Stdout), fit.EarlyStop(5),
//		fit.Validate(eval, fit.Data{Set: held, Inputs: G.Nodes{x, y}}, fit.Accuracy(scores, y)),
//		fit.Watch("accuracy"), fit.TensorBoard("curves/run1"))
//	all, err := fit.Predict(comm, eval, fit.Data{Set: rows, Inputs: G.Nodes{x}}, scores)
//
// What depends on the model stays elsewhere: precision, clipping, accumulation, trees and batch
// norms are options of the machine, which also has a Summary; averages of weights are a solver,
// [solver.EMA]. A training that needs another loop does not use this package.
//
// # Batches
//
// A step takes as many samples as all ranks have room for: the first axis of the inputs, times the
// runs of a step (vm.Accumulate, vm.WithTree), times the ranks. An [autograd.Sampler] shuffles
// them, so batches are the same for any number of ranks. Goroutines read and augment batches while
// the machine computes. The random numbers of an augmentation depend only on the seed, the epoch
// and the sample, so a training that resumes sees the batches that it would have seen.
//
// Graphs have static shapes. Without [Data.Weights] an epoch drops the samples that do not fill its
// last batch, different ones in each epoch. With it the last batch has fewer samples, and its
// gradient is exactly their mean, whatever share of them a rank has. The graph then says
//
//	loss = sum(weights * losses)                            of weights [b]: 0 where none is
//	loss = weights * nn.CrossEntropy(nn.NoLabel, scores, y)  of weights []: Pad writes NoLabel
//
// A missing sample must reach nothing else. Run and Evaluate follow the rows of the inputs through
// the graph, and refuse an incomplete batch where operations over several samples, such as batch
// norms in training or a mean without the weights, would count them. [Data.DropLast] drops it.
//
// # Decisions
//
// No rank decides alone. Losses and metrics are sums over all ranks, so all find the same best
// epoch and stop after the same one. After each step ranks tell each other whether one was told to
// stop, or cannot go on: a signal to one rank ends all after the same step, and an error of a file
// or hook on one rank is an error on all.
//
// # Resuming
//
// With [Checkpoint], Run resumes from the newest checkpoint, even in the middle of an epoch, with
// the bits of a training that never stopped. On SIGTERM, SIGINT, and when ctx ends, it saves and
// returns [ErrStopped]; another signal, a second later, ends the program.
//
// On the ranks of a machine with vm.WithElastic, which may be lost and replaced, Run trains on with
// the others: docs/elastic.md says how.
package fit
