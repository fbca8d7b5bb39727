// Package cuda is a GPU as a device: memory, queues, events, graphs, and tensors that lie there.
//
// An [Engine] keeps tensors in the memory of a device: package ops runs collectives on them by Do, and
// autograd.DataParallel and its solvers train parameters that are there, both without copies to the host. It
// uses only [backend.Device] and [backend.Arithmetic], so tests run the same engine on any machine, on the
// memory of package fakedevice, which faults when the host accesses it.
//
//	e, err := cuda.NewEngine(device, nil)
//	w, err := e.ToDevice(weights)          // lives until e.Free(w, 0)
//	...
//	onHost, err := e.ToHost(w)
//
// An engine computes nothing. Graphs run on devices by vm.New, which takes tensors of the host: Gorgonia's own
// machines fail on tensors of an engine, most often with an error that says so.
//
// # How long memory lives
//
// Tensors from [Engine.ToDevice] live until [Engine.Free]; [Engine.Copy] replaces their content. Results of
// operations, and copies that they need, are in an arena, which [Engine.Reset] recycles: a program that calls
// it in every step takes no memory after the first one. Copy what must outlive it with ToDevice or ToHost.
//
// Collectives that operations start ([Engine.TrackWork]) may fail after Do has returned. Every copy to the
// host, such as ToHost, waits for them and returns their error.
//
// # What is on the host
//
// Tensors of one element are on the host, because Gorgonia reads them. A tensor of the host where one of the
// device is needed is copied, each time: [Engine.Stats] counts that.
package cuda
