// Package sparse sends the large elements of gradients and keeps the small ones
// for later: an all-reduce of a part of the elements, with error feedback.
//
//	comm, err := sparse.New(comm, sparse.TopK(0.01))
//
// AllReduce by Sum and Avg of f32 and f64 is sparse if its State names the operand, as the
// buckets of package autograd do. Everything else
// passes as it is: other kinds, reductions and dtypes, calls that must be Exact,
// empty operands, and every call of a group of one rank, where nothing travels.
//
// # What it computes
//
// For the operand g of a rank, and the residual a of its State, which begins as
// zeros, in f32:
//
//	v := a + g
//	s[i] := v[i] if it is selected, else 0
//	a = v - s
//	y := the sum of s over the ranks, in rank order; divided by P for an average
//
// Selected are the elements with a magnitude of at least a [Threshold], or the
// ceil(density*n) largest, [TopK]. Each element is either sent or kept, so that
// s + a is v, bit for bit (but for the sign of a zero): nothing is lost, small
// gradients are only late. All ranks get the same y, bit for bit, with zeros
// where no rank has sent anything.
//
// With [WithValues], s[i] is v[i] rounded to 16 bits, and the rest stays in a: always
// exactly for BF16, and for F16 where v[i] is below 2^29. F16 holds 65504 at most, which is
// what is sent of larger numbers, call after call. From 2^29 on, f32 is too coarse for the
// rest, so that s + a is v up to half an ulp of v in each such call; above 2^40 the rest is v
// itself, and does not shrink. An operand of f64 is rounded to f32 first.
//
// # State
//
// A State key stands for one operand through all of training; its residual is kept on each
// rank. An operand of another length with the same key is an error: so is a
// changed layout of buckets. [Communicator.State] and SetState checkpoint all
// residuals, [Communicator.Reset] forgets them.
//
// # Messages
//
// Each rank sends a head, values and i32 indices to all, by one all-gather of
// inner, whatever that is. How many entries a message holds is fixed before the
// call: k of a top-k; for a threshold, what the last call but one with the same State needed at
// most and a quarter more. The first two calls of a threshold know no counts yet:
// their messages have as many entries as a dense all-reduce of the operand would take bytes
// for, n/P with f32 values. Selected elements for which there is no room, the last by index, stay in
// the residual until the next call: so where a threshold selects more than about 1/P of the
// elements, its first two calls send the first of them only. The heads say what each rank has selected, so that
// all ranks take the same decision; the last call may be under way then.
//
// # Dense fallback
//
// Where messages would cost more bytes than a dense all-reduce, from a density of about
// 1/P on, s is reduced densely instead, beside heads. Bytes alone decide: no clock is read,
// so that two runs take the same way wherever they run.
//
// Fewer bytes are not always sooner. Where links are as fast as memory, selecting may take
// longer than what it saves: between processes of one host, or of a threshold between two
// H200, which took 1.3 times as long as a dense call with 0.49 of the bytes. Measure with
// euryale bench --compress topk=0.01. [Counters] say how often calls were dense, and
// [Communicator.Explain] why.
//
// # NaN and infinity
//
// They count as larger than every number, NaN as the largest, so they are selected first, sent
// and seen by all ranks, as in a dense reduction, and nothing of those sent stays in the
// residual. But no more are sent than there is room for, k of a top-k: the others wait in the
// residual and come with later calls, even if the operands of those are finite: so Reset on
// all ranks after such a step. [WithStrict] makes them an error instead that names State, rank and
// element; a training step of several calls is left out by [Communicator.Undo], as package
// autograd does.
//
// # Cost
//
// A rank receives (P-1)*k*8 bytes (6 with 16-bit values) instead of 2(P-1)/P*4n.
// On the host: one pass over operand and residual for a threshold, two and a look
// at some of them for a top-k, and one over the result. On a device: one pass over
// operand and residual, also for a top-k, whose cut is found among candidates that a
// sample of them gives; and one over the result. For 2^25 elements of f32 on an H200, a
// threshold of 1 % takes 138 us, with 72 % of the bandwidth of a copy, and a top-k 201 us at
// 1 % and 249 us at 5 %; to add up the messages of four ranks takes 62 and 88 us
// (bench/results/2026-11-21-h200-sparse-kernels.txt). Whole calls of a top-k among two took
// 0.63 and 0.86 of the time of NCCL's dense one, of 469 us (bench/results/2026-11-21-h200x2-sparse-calls.txt). Memory: a residual of 4n bytes
// for each State, and P+1 messages; on a device also the candidates of a top-k, about
// twice as many as it sends.
//
// # How it works
//
// Operands are of the host or of the communicator's device, if its kernels are
// [kernels.Sparse], always the same with one State; there are [kernels.MaxSelect] elements,
// 2^30, at most. The steps of a call are the same on both, and run in the order of its queue:
//
//	sparse.go    Communicator: what is sparse, and what passes
//	plan.go      plan: messages or dense fallback, and room for how many entries
//	call.go      call: select, exchange, add; and what the heads say when it is over
//	message.go   layout: head, values, indices
//	residual.go  residual: what is kept between calls, checkpoints, Undo
//	select.go    selector: selecting and adding on the host
//	host.go      hostSteps: the selector in the order of a queue
//	memory.go    memory: scratch; heads: what the host is told
//
// Results have the same bits on the host and on a device. Counts stay on the device, and the
// host is told behind the call. A top-k stops the host where it is 64 calls ahead; a threshold
// where it is two calls ahead with a State, which in training are two steps: the counts of a
// call say how much room the second one after it must have. What ranks disagree on, and a NaN
// of a strict communicator, are errors of Join, not of Start.
//
// One lock, Communicator.mu, guards everything but the scratch that steps use on a queue; the
// lock of [backend.Sequence], which orders calls, comes before it.
//
// # Sources
//
// Thresholds with error feedback are Strom's (Interspeech 2015), top-k is Aji and
// Heafield's (EMNLP 2017). Apache SINGA's valSparsAllReduce and topKSparsAllReduce are the
// system that this one follows, and where it differs: SINGA counted the entries of
// a compacted array by the zeros left behind it, so that messages had duplicates
// and an index -1 whenever zeros came first; it compared magnitudes as integers,
// so that a top-k of numbers below 1 sent the first ones; it rounded 5 % of 1000
// as it came; its buffers overflowed above a density of one half; NaN stayed in
// the residual unseen; and it waited for the device in every call.
package sparse
