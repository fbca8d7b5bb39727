// Package host runs collectives among ranks of one machine on host memory.
//
// Ranks are processes or goroutines of one process; both run the same code over
// the same kind of shared-memory region.
//
// # The region
//
// Every group maps one region: a page for the group, a page of control lines
// for each rank, and two slots of data for each rank. It is an unnamed file
// (O_TMPFILE) of /dev/shm, of mode 0600, reserved in full when it is made: too
// little room is an error at Connect and never a SIGBUS later, and nothing can
// stay behind, however a process ends.
//
// # Steps
//
// A collective is a sequence of steps, the same number on every rank. In a step
// a rank writes its part into its own slot, posts the number of the step, waits
// until every other rank has posted it too, and reads what it needs from their
// slots. Slots alternate between steps. So a rank that writes step k+2 knows
// that everyone has posted k+1 and is done reading k: there is no second
// barrier, and no reader is ever overtaken.
//
// The control line a rank posts carries a digest of the call's header, which is beside
// it; ranks compare digests in the first step, before any data is used, and read headers
// where those differ. That is the whole check, and it costs
// one comparison of 8 bytes in a cache line that is read anyway.
//
// # Algorithms
//
// Small all-reduces are one-shot: one step, every rank adds everyone's data. A
// few bytes are in the line that is posted, up to a kilobyte in the lines behind it.
// Larger ones are two-shot: reduce-scatter and all-gather in blocks, where the
// all-gather of a block travels in the same step as the reduce-scatter of the
// next. Memory from Alloc is mapped by every rank, so that large all-reduces on
// it skip the slots. All of them add in rank order and give bitwise identical results.
//
// # Ends
//
// The first error of a group is in its page of the region (package group), where all
// ranks look while they wait. Close unmaps the region, which only calls touch, and
// replaces memory from Alloc by zero pages, since the caller may still use it.
//
// # Waiting
//
// A rank that waits spins for a while and then sleeps on a futex until the last
// rank it waits for wakes it. With more ranks than cores it lets others run
// between looks. A rank that has found nothing, on a core with more of the
// group's ranks than it need have, moves to another one (core.go).
package host
