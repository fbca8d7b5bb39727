// Package fakedevice is a device for machines without one: memory that the host
// cannot touch, and queues that compute on it.
//
// A buffer of a [Device] has an address, as one of a GPU has, in a part of the
// address space that is never mapped. So a Go program that reads or writes it by
// mistake, where it should have started a kernel, faults at once. Kernels take
// the address, look up the host memory that stands behind it, and compute there
// with the kernels of the host. They refuse buffers that are not wholly inside
// one allocation, and buffers that were freed: addresses are not used twice. Memory
// that a queue gives out (Alloc and Free, as a GPU's queue has them) holds garbage,
// and is used again.
//
// This is how continuous integration runs, on any machine, the code that is
// meant for GPUs: machines of package vm, and, with [Over], collectives on device
// memory.
//
//	d, err := fakedevice.New(host.Device{})       // what stands behind it
//	m, err := vm.New(graph, d)
//	comm := fakedevice.Over(hostComm, d)
//
// A [Host] has several devices: GPUs that reach each other's memory, with streams and events
// by number, pinned memory and imports, as package gpu uses them. [Host].Fail makes any of
// that fail, or block, when a test wants it, and [Host].Exchange stands for the kernels by which
// ranks exchange data. NCCL itself is a fake of that package's tests.
//
//	m, err := fakedevice.NewHost(host.Device{})
//	m.Fail = func(ordinal int, doing string, nbytes int) error { ... }
//	d, err := m.GPU(0, fakedevice.Properties{Product: "NVIDIA H200", Capability: 90})
//
// A fault ends the process with the runtime's "unexpected fault address" and the stack of the
// culprit. [Device.Close] reports what was not freed.
package fakedevice
