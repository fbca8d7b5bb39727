// Package observe is a flight recorder: it keeps the last collectives of a rank,
// to be looked at when something has gone wrong or is slow.
//
// [backend.WithHooks] tells a [Recorder] of calls:
//
//	recorder := observe.New(comm.Rank(), 1000)
//	comm = backend.WithHooks(comm, recorder)
//
// For each call it keeps the header, the bytes, the queue, the time it was started, the
// time it was seen to have ended and its error, in a ring of fixed size.
// [Recorder.Events] returns the calls, [Recorder.WriteLast] writes them as text and
// [Recorder.WriteChrome] writes them for chrome://tracing or Perfetto. You can merge the
// files of several ranks: the process is the rank, the thread is the queue, and times are
// on the machine's clock.
//
// # Times
//
// Start is when the caller started the call, which on a queue may be long before
// it runs. End is when the call was first seen to be over: on return from Start
// if the queue runs on the caller, otherwise on return from Join or when the
// events are read. So for a Work that nobody joins, End is late, never early.
//
// # Parts
//
// A hierarchical communicator consists of several, and reports its phases, which are parts of
// calls. With [Recorder.TimeParts] they are recorded with the device's times, each on the thread
// of its queue: the timeline shows which of them overlap.
//
// # Cost
//
// A call on a queue that runs on the caller takes three locks, two readings of the clock and no
// allocation. On any other queue it takes two locks, one reading and 40 bytes, and again one lock
// and one reading in Join. The clock is the processor's counter where Linux keeps time by it
// (ticks.go), at 10 ns a reading instead of 25 on an AMD EPYC. BenchmarkRecording measures the
// cost. Before a launch on an H200 it was 0.2 to 0.3 us with warm caches and one lock less
// (2026-11-22-h200-host-time.txt, part 4).
package observe
