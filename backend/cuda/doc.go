// Package cuda runs Gorgonia graphs on the memory of a device.
//
// An [Engine] is a tensor.Engine: Gorgonia's own tape machine calls it for every
// operation on tensors that carry it. It is written over [backend.Device] and
// [backend.Arithmetic] alone, so that the engine that runs on a GPU runs in
// tests on any machine, on the guarded memory of package fakedevice, where a touch
// by the host is a fault.
//
//	e, err := cuda.NewEngine(device, nil)
//	x, err := e.ToDevice(images)                        // lives until e.Free(x, 0)
//	node := gorgonia.NewTensor(g, ..., gorgonia.WithValue(x))
//	...
//	grads, err := gorgonia.Grad(loss, params...)
//	machine, err := e.NewMachine(g)                     // checks the graph
//	err = machine.RunAll()
//	dw, err := e.ToHost(grads[0].Value().(tensor.Tensor))
//	machine.Reset()
//
// A machine made with gorgonia.WithEngine(e) works too: call e.Check before its
// first run, and e.Reset before each.
//
// # How long memory lives
//
// What operations compute is in an arena, which the next run recycles: the
// memory of a program is flat, and nothing is allocated after the first run.
// What must outlive the next run is copied out, with [Engine.ToDevice] or
// [Engine.ToHost]. Using a value of an earlier run is an error where it can be
// told, which is not always. Inputs and parameters come from ToDevice and live
// until Free; [Engine.Copy] gives them new content.
//
// Collectives that operations start ([Engine.Expect]) may fail after RunAll has
// returned. Whatever then copies a value to the host, ToHost first of all, waits for them
// and returns their error.
//
// # What is on the host
//
// Tensors of one element, because Gorgonia reads them itself, and so the result
// of a sum of everything, which waits for the queue. [Engine.Stats] counts every
// tensor that is copied between host and device; with inputs from ToDevice a run
// copies none.
//
// Tensors on the host that meet one on the device are copied to it, each time.
// Gorgonia makes some itself: the gradient of a sum is a tensor of equal values,
// made on the host. That one is filled in on the device, not copied, but the
// host's time for it grows with its size. A broadcast along an axis that is of
// length 1 in the result too goes through the host and back, because Gorgonia
// copies there itself.
//
// # What runs
//
// Element-wise arithmetic and functions but sin and cos, comparisons that give
// numbers (retSame), Sum, Mean, Max, Reshape, Transpose, broadcasts, and
// everything on scalars, of Float32, Float64, Int, Int32, Int64 and Byte, with
// their gradients. [Engine.Check] says what else is in a graph, and what to do.
// Matrix products are still to come.
//
// Gradients are read from the nodes that gorgonia.Grad returns. BindDualValues,
// WatchNaN and loggers look into memory from the host: do not use them.
package cuda
