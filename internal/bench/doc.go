// Package bench measures collectives, like nccl-tests.
//
// [Measure] runs one collective over a range of sizes on any communicator and
// returns one [Result] for each size. It is collective.
//
// # Method
//
// Calls follow each other back to back, as they do in training: there is no
// barrier between them, and a call's time runs from the end of the call before
// it to its own end. For each size:
//
//  1. Buffers are filled with small integers that differ between the ranks.
//  2. Five calls warm up. From the median of five more, rank 0 computes how many
//     calls fit [Config.Budget] (at least [MinIters], at most [MaxIters]), and
//     tells the others.
//  3. A fifth as many calls warm up further, then the timed calls run.
//  4. The result of the last timed call is compared with the expected one, bit for
//     bit; Wrong counts the elements of all ranks that differ.
//
// P50 and P99 are over the timed calls of rank 0, by the nearest-rank rule. The
// mean is the total time divided by the number of calls, on the slowest rank.
// Bandwidths are computed from the mean, so that a rank that runs ahead, such as
// the root of a broadcast, does not look fast. If mean and median are far apart, the
// machine was busy or there are more ranks than cores.
//
// # Devices
//
// Buffers are in the memory of the communicator's Device. If the host cannot access
// it, as on a GPU, data is copied there and back outside of the timed part. The times
// above are then the host's view: a call is started and joined before the next, so
// its time includes everything that the host does. Programs seldom join. So half of
// the time goes to batches of calls that are started without a wait in between:
//
//   - StreamMicros is the time of a call in such a batch, on the slowest rank, by the
//     host's clock. A batch has 20 to 400 calls and, within these bounds, takes 2 ms,
//     so that the wait at its end is negligible. Bandwidths are computed from it, as in
//     nccl-tests.
//   - HostMicros is the host's time to start a call. If it is as long as StreamMicros,
//     the host limits small calls.
//
// With [Config.Iters] both ways time that many calls.
//
// # Bytes
//
// Bytes are counted as in nccl-tests: the whole buffer of an all-reduce, reduce or
// broadcast, and the buffer of all chunks otherwise. A size that does not divide into
// whole elements for each rank is rounded down, but not to zero; Bytes is the actual
// size. Algorithm bandwidth is bytes divided by time; bus bandwidth is that times
// [backend.Kind.BusFactor].
//
// # Comparisons
//
// A [Comparison] compares ways to run the same call, such as two algorithms, where
// differences of a few percent matter: the ways take turns in short rounds, and their
// medians over the rounds are compared. euryale bench --tune measures tables this way.
package bench
