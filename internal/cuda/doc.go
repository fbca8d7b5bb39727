// Package cuda is a GPU as a device: memory, queues, events, graphs, and what the driver and
// NVIDIA's libraries compute there.
//
//	d, err := cuda.Open(0)                 // a [backend.Device]
//	b, err := d.Alloc(1 << 20)             // zeroed; cached when it is freed
//	q, err := d.NewQueue()                 // a stream
//
// A device is bound to the thread that uses it ([Device.Bind]). Memory from a device's Alloc may be
// used on all of its queues; that from a queue's Alloc on this queue alone, where memory of the
// size that was freed costs nothing. Graphs of Gorgonia run on a device by vm.New, which takes
// tensors of the host.
//
// Without build tag gpu the package has no device, and [Available] says so.
package cuda
