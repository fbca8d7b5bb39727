// Package sparse sends the large elements of gradients and keeps the small ones
// for later: an all-reduce of a part of the elements, with error feedback.
//
//	comm, err := sparse.New(comm, sparse.TopK(0.01))
//
// AllReduce by Sum and Avg of f32 and f64 is sparse if its State names the operand, as in
// buckets of package autograd. Everything else passes as it is: other kinds, reductions and
// dtypes, calls that must be Exact, empty operands, and every call of a group of one rank.
//
// # What it computes
//
// Let g be the operand of a rank, and a its residual, which begins as zeros. In f32:
//
//	v := a + g
//	s[i] := v[i] if it is selected, else 0
//	a = v - s
//	y := the sum of s over the ranks, in rank order; divided by P for an average
//
// A [Threshold] selects the elements of at least that magnitude, a [TopK] the ceil(density*n)
// largest. Each element is either sent or kept, so s + a is v, bit for bit except for the sign of a
// zero: nothing is lost, small gradients are only late. On all ranks y is
// bitwise identical, with zeros where no rank has sent anything.
//
// With [WithValues], s[i] is v[i] rounded to 16 bits, and the difference stays in a. That is exact
// for BF16, and for F16 as long as v[i] is below 2^29. F16 holds 65504 at most, so each call sends
// 65504 of a larger number. From 2^29 on, f32 is too coarse for the difference: s + a is v up to
// half an ulp of v. Above 2^40 the difference is v itself, and does not shrink. An operand of f64
// is rounded to f32 first.
//
// # State
//
// A State key stands for one operand through all of training. Each rank keeps its residual. An
// operand of another length with the same key is an error, and so is a changed layout of buckets.
// [Communicator.State] and SetState checkpoint all residuals; [Communicator.Reset] forgets them.
//
// # Messages
//
// Each rank sends a head, values and i32 indices to all ranks, by one all-gather of inner. The
// capacity of a message is fixed before the call. A top-k has room for k entries. For a
// threshold, the capacity is 1.25 times the largest count that any rank had two calls earlier
// with the same State; the heads carry the counts, so all ranks decide the same. Its first two
// calls know no counts yet: their messages take as many bytes as a dense all-reduce, n/P
// entries with f32 values. Selected elements that find no room, the last by index, stay in the
// residual until the next call.
//
// # Dense fallback
//
// From a density of about 1/P on, messages would cost more bytes than a dense all-reduce. Then s is
// reduced densely instead, and messages are heads alone. Bytes alone decide: no clock is read, so
// two runs give bitwise identical results wherever they run.
//
// Fewer bytes are not always faster. Where links are as fast as memory, as between processes of
// one host, selecting takes longer than it saves. [Counters] say how often calls were dense, and
// [Communicator.Explain] says why.
//
// # NaN and infinity
//
// Infinity counts as larger than every number, and NaN as larger than infinity. So they are
// selected first, sent, and seen by all ranks, as in a dense reduction; nothing of them stays in
// the residual. Those that find no room wait in the residual and come with later calls, even if
// the operands of those calls are finite: call Reset on all ranks after such a step.
//
// [WithStrict] makes them an error instead, which names State, rank and element. It is for
// training steps of several calls: [Communicator.Undo] takes back what the other calls of the
// step have done, as package autograd does.
//
// # Cost
//
// A rank receives (P-1)*k*8 bytes, 6 with 16-bit values, instead of 2(P-1)/P*4n. On a device, and
// for a threshold on the host, one pass reads operand and residual; a top-k on the host takes two,
// and reads its candidates again. One more pass writes the result. Memory: a residual of 4n bytes
// for each State, and P+1 messages; on a device also the candidates of a top-k, about twice as many
// as it sends; and a copy of s for each State of a graph's node ([Communicator.Sent]).
// docs/benchmarks.md has the measurements.
//
// # How it works
//
// Operands are in host memory or on the communicator's device, whose queues must then be
// [kernels.Sparse]. A State stays in one of the two. An operand has at most [kernels.MaxSelect]
// elements, 2^30. A call takes the same steps in both, in the order of its queue:
//
//	sparse.go    Communicator: what is sparse, and what passes
//	options.go   Selection and Option
//	plan.go      plan: messages or dense fallback, and the capacity of messages
//	call.go      call: select, exchange, add; and what the heads say when it has finished
//	message.go   layout: head, values, indices
//	residual.go  residual: what is kept between calls, checkpoints, Undo
//	select.go    selector: selecting and adding on the host
//	host.go      hostSteps: the selector in the order of a queue
//	memory.go    memory: scratch; heads: what the host is told
//
// Results are bitwise identical on host and device. Counts stay on the device, and the host learns
// them after the call. So a top-k blocks the host only when it is 64 calls ahead, and a threshold
// when it is two calls ahead with one State, which is two steps in training. Calls that differ
// between ranks, and the NaN of a strict communicator, are errors of Join, not of Start.
//
// The lock of [backend.Sequence], which orders calls, comes first. Communicator.mu comes next;
// it guards everything except the scratch that steps use on a queue.
//
// # Sources
//
// Thresholds with error feedback are Strom's (Interspeech 2015), top-k is Aji and
// Heafield's (EMNLP 2017). The system that this package follows is Apache SINGA's
// valSparsAllReduce and topKSparsAllReduce, with these differences. SINGA counted the entries of
// a compacted array by the zeros behind it, so messages had duplicates and an index -1 whenever
// zeros came first. It compared magnitudes as integers, so a top-k of numbers below 1 sent the
// first ones. Its buffers overflowed above a density of one half, NaN stayed in the residual
// unseen, and every call waited for the device.
package sparse
