// Package fit is a training loop for machines of package vm: the part of a program that is the same
// in every training.
//
//	comm, err := euryale.Init(ctx)
//	samples, classes, err := data.CSV("iris.csv", "species")
//	train, held := data.Split(samples, 0.2, 1)
//	... // a graph with inputs x [16, 4] and y [16], scores, and a loss: its batch is of this rank
//	m, err := vm.New(g, comm.Device(), vm.WithSolver(solver, w...), vm.WithDataParallel(comm))
//	eval, err := vm.New(g, comm.Device(), vm.Eval(), vm.Keep(scores))
//	result, err := fit.Run(ctx, m, fit.Data{Set: train, Inputs: G.Nodes{x, y}, Loss: loss},
//		fit.Epochs(100), fit.Checkpoint("run1", 0), fit.Progress(os.Stdout),
//		fit.Validate(eval, fit.Data{Set: held, Inputs: G.Nodes{x, y}}, fit.Accuracy(scores, y)),
//		fit.Watch("accuracy"), fit.EarlyStop(5))
//
// What depends on the model stays where it is: precision, clipping, accumulation, trees and batch
// norms are options of the machine, rates a [autograd.Schedule], weights of checkpoints are loaded
// by autograd.LoadWeights. A training that needs another loop is written without this package.
//
// # Batches
//
// A step of training has the samples that all ranks together have room for: the first axis of the
// inputs, times the runs of a step (vm.Accumulate, vm.WithTree), times the ranks. An
// [autograd.Sampler] shuffles them, so the batches, as ordered lists of samples, are the same for
// any number of ranks. Goroutines read and augment batches while the machine computes. Random
// numbers of an augmentation follow from the seed, the epoch and the sample alone. A training that
// resumes therefore sees the batches that it would have seen.
//
// Graphs have static shapes. Without [Data.Weights] an epoch drops the samples that do not fill its
// last batch, other ones in each epoch. With it the last batch has fewer samples, and its gradient
// is exactly their mean, however many each rank has: the graph multiplies the loss of each sample
// by its weight, and adds up the products.
//
//	weights [b]         loss = sum(weights * losses): the weight is 0 where a sample is missing
//	weights []          loss = weights * nn.CrossEntropy(nn.NoLabel, scores, y), and [Data.Pad]
//	                    writes NoLabel where a sample is missing
//
// # Decisions
//
// No rank decides alone. Losses and metrics are sums over all ranks, so all find the same best
// epoch and stop after the same one. Before each step ranks agree whether one of them was told to
// stop, or has failed: by a file that cannot be read, or a hook. So a signal to one rank ends all,
// after the same step, and every rank returns the error of the one that failed.
//
// # Resuming
//
// With [Checkpoint], Run goes on with the newest checkpoint that is there. It continues with the
// same bits as a training that never stopped, in the middle of an epoch, too. On SIGTERM, SIGINT,
// or when ctx ends, it saves and returns an error that is [ErrStopped]; a second signal ends the
// program at once.
//
// # Files
//
// run.go is Run and its options, loop.go the loop, loader.go prefetches, evaluate.go evaluates,
// metrics.go are the metrics, report.go what is printed and written. Package fit/data reads files,
// package fit/curves draws.
package fit
