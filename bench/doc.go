// Package bench measures collectives: nccl-tests for this library.
//
// [Measure] runs one collective over a range of sizes on any communicator and
// gives one [Result] for each size. Every rank calls it, as it would call a
// collective.
//
// # Method
//
// Calls follow each other back to back, as they do in training: there is no
// barrier between them, and a call's time runs from the end of the call before
// it to its own end. For each size:
//
//  1. Buffers are filled with small integers that differ between the ranks.
//  2. Five calls warm up, and the median of five more tells how long a call
//     takes. From that rank 0 chooses how many to time, so that they fit
//     [Config.Budget] (but from [MinIters] to [MaxIters]), and tells the others.
//  3. A fifth as many calls warm up further, then the timed ones run.
//  4. The result of the last timed call is compared with what it must be, bit
//     for bit; Wrong counts the elements of all ranks that differ.
//
// P50 and P99 are over the timed calls of rank 0, by the nearest-rank rule. The
// mean is total time by number of calls on the slowest rank, and the bandwidths
// follow from it, so that a rank that runs ahead of the others cannot look
// fast: a broadcast's root, say, is done before its data has arrived. Where
// mean and median are far apart the machine was busy with something else, or
// ranks outnumber cores.
//
// # Devices
//
// Buffers are where the communicator's Device has its memory. Where the host
// cannot touch it, as on a GPU, data is copied there and back outside of the
// timed part, and what was said so far is the host's view: a call is started
// and joined before the next is started, so that its time holds everything that
// the host does. Programs seldom join. So half of the time goes to batches of
// calls that are started one behind the other, with one wait at the end:
//
//   - StreamMicros is a call's share of such a batch, on the slowest rank, by
//     the clock of the host. A batch has 20 to 400 calls and, within these
//     bounds, takes 2 ms, so that the wait does not count. Bandwidths follow
//     from it, as those of nccl-tests do.
//   - HostMicros is what of it the host needs to start a call. Where it is as
//     long as StreamMicros, the host is what limits small calls.
//
// With [Config.Iters] both ways time that many calls.
//
// # Bytes
//
// Bytes are those of nccl-tests: the whole buffer of an all-reduce, reduce or
// broadcast, the buffer that holds all chunks otherwise. A size that does not
// divide into whole elements for each rank is rounded down, but not to nothing;
// Bytes is what was really moved. Algorithm bandwidth is bytes by time; bus
// bandwidth is that times [backend.Kind.BusFactor].
//
// # Comparisons
//
// A [Comparison] compares ways to run the same call, such as two algorithms, where
// differences of a few percent matter: the ways take turns in short rounds, and their
// medians over the rounds are compared. euryale bench --tune measures tables this way.
package bench
