// Package observe is a flight recorder: it keeps the last collectives of a rank,
// to be looked at when something has gone wrong or is slow.
//
// A [Recorder] is told of calls by [backend.WithHooks]:
//
//	recorder := observe.New(comm.Rank(), 1000)
//	comm = backend.WithHooks(comm, recorder)
//
// Of each call it keeps the header, the bytes, the queue, the time it was started, the
// time it was seen to have ended and its error, in a ring of fixed size.
// [Recorder.Events] returns them, [Recorder.WriteLast] writes them as text and
// [Recorder.WriteChrome] for chrome://tracing or Perfetto. The files of several ranks
// may be put together: the process is the rank, the thread the queue, the time that of
// the machine's clock.
//
// # Times
//
// Start is when the caller started the call, which on a queue may be long before
// it runs. End is when the call was first seen to be over: on return from Start
// where the queue runs on the caller, else on return from Join, or when the
// events are read. For a Work that nobody joins it is therefore late, never
// early.
//
// # Parts
//
// A hierarchical communicator consists of several, and tells of its phases: parts of calls. With
// [Recorder.TimeParts] they are recorded with the device's times, each on the thread of its
// queue: the timeline shows which of them overlap.
//
// # Cost
//
// Three locks, two readings of the clock and no allocation for a call on a queue that runs on
// the caller; two locks, one reading and 40 bytes on any other, and again one lock and one
// reading in Join. The clock is the processor's counter where Linux keeps time by it (ticks.go), at
// 10 ns a reading instead of 25 on an AMD EPYC. BenchmarkRecording measures it. Before a launch on
// an H200 it was 0.2 to 0.3 us, once caches were warm, with one lock less
// (2026-11-22-h200-host-time.txt, part 4).
package observe
