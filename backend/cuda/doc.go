// Package cuda runs Gorgonia graphs on the memory of a device.
//
// An [Engine] is a tensor.Engine: Gorgonia's tape machine calls it for every operation on
// tensors that carry it. It uses only [backend.Device] and [backend.Arithmetic], so
// tests run the same engine on any machine, on the memory of package fakedevice, which
// faults when the host accesses it.
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
// Results of operations are in an arena, which the next run recycles: memory use is
// constant, and nothing is allocated after the first run. Copy what must outlive the
// next run with [Engine.ToDevice] or [Engine.ToHost]. Using a value of an earlier run is
// an error, which is detected in most cases. Inputs and parameters come from ToDevice and
// live until Free; [Engine.Copy] replaces their content.
//
// Collectives that operations start ([Engine.TrackWork]) may fail after RunAll has
// returned. Every copy to the host, such as ToHost, waits for them and returns their
// error.
//
// # What is on the host
//
// Tensors of one element are on the host, because Gorgonia reads them. So is the result of
// a full sum, which waits for the queue. [Engine.Stats] counts the tensors that are copied
// between host and device; with inputs from ToDevice a run copies none.
//
// A host tensor in an operation with a device tensor is copied to the device, each time.
// Gorgonia makes some host tensors itself: the gradient of a sum is a tensor of equal
// values. The engine fills such a tensor on the device instead of copying it, but the host's
// time for it grows with its size. A broadcast along an axis that has length 1 in the result,
// too, goes through the host, because Gorgonia copies there.
//
// # What runs
//
// Element-wise arithmetic and functions but sin and cos, comparisons that give
// numbers (retSame), Sum, Mean, Max, Reshape, Transpose, broadcasts, and
// everything on scalars, of Float32, Float64, Int, Int32, Int64 and Byte, with
// their gradients. [Engine.Check] reports other operations in a graph, and what to do
// instead. Matrix products are not offered to Gorgonia yet: Queue.NewProducts multiplies buffers.
//
// Read gradients from the nodes that gorgonia.Grad returns. Do not use BindDualValues,
// WatchNaN and loggers: they access memory from the host.
package cuda
