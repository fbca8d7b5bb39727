// Package solver has the solvers that update parameters by their gradients: [SGD], [Momentum],
// [Nesterov], [RMSProp], [Adam] and [AdamW].
//
// A solver is a struct of settings. In a machine of package vm it takes a step in each run:
//
//	adam := &solver.Adam{Rate: 0.001}
//	machine, err := vm.New(graph, device, vm.WithSolver(adam, learnables...))
//
// Elsewhere its Step is given parameters with their gradients: those of a DataParallel of package
// autograd, whose gradients are means over all ranks, or nodes of a graph on one rank:
//
//	grads, err := dp.Sync()
//	err = adam.Step(grads)
//
//	err = adam.Step(gorgonia.NodesToValueGrads(learnables))
//
// Both ways give bitwise identical results: an update is a program of package kernels/fuse for one
// element ([Update]), which Step runs on the host, and a machine in its plan, on the host or on a
// GPU.
//
// # What solvers are made of
//
// [Groups] gives groups of parameters their own solvers, or one solver with different settings.
// [EMA] keeps an exponential moving average of each parameter beside a solver. [Custom] is your own
// solver, written as the update of one element. A [Schedule] gives the rate of each step, for
// SetRate, and [ClipNorm] bounds the norm of the gradients before Step; in machines vm.ClipNorm
// does.
//
// # State
//
// A solver keeps vectors for each parameter, such as the moments of Adam, and most count their
// steps. All solvers are [Stateful]: checkpoints of package autograd hold this state, and
// [VectorNames] says which parameter a vector of it is of. Settings are the program's, not the
// checkpoint's, and may change between steps.
//
// A caller that computes steps itself, as machines do, asks [Fuse] for what they compute.
package solver
