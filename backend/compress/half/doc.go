// Package half halves what gradients cost on the way: sums and averages of f32
// and f64 travel as 16-bit floats.
//
//	comm, err := half.New(comm, backend.BF16)
//
// AllReduce and ReduceScatter by Sum and Avg of f32 and f64 are cast to 16 bits,
// reduced by inner, and cast back. Where inner rounds in transport, as package gpu does
// among devices with NVLink, one kernel does all of that, for an AllReduce of f32 of its
// choice. Everything else passes as it is, bit for bit:
// other kinds (a broadcast of parameters), other reductions, other dtypes, calls
// that must be Exact, and every call of a group of
// one rank, where nothing travels.
//
// # What comes out
//
// What travels is an average, and a sum is P times that: an average of numbers
// that fit 16 bits fits 16 bits, however many ranks there are. Four ranks that each
// have 40000 get 160000, also by F16, whose largest number is 65504. Ranks are still added up
// in f32: where the sum of all ranks goes beyond the largest f32, about 3.4e38, the result is
// infinite, also that of an average, and also of f64. Only BF16 has numbers that large: with
// P ranks, keep them below 3.4e38/P.
//
// With u = 2^-11 for F16 and 2^-8 for BF16, each operand is rounded once (u), and
// so is the average by a communicator that accumulates in 32 bits, as packages
// host and the kernels of gpu do; others say how they round. The error is then at most 2u
// times the sum of the operands' magnitudes, and sums of small integers are exact if P
// is a power of two. All ranks get the same bits, as from inner.
//
//   - F16: numbers from 65520 on become infinite, and so does the result, on every
//     rank. Below 2^-14 precision fades; below 2^-25 nothing is left. Scale the
//     loss if gradients are that small.
//   - BF16: the range is that of f32, with 8 bits of precision. Numbers from
//     (2-2^-8)*2^127 on, about 3.396e38, become infinite, of f32 as of f64.
//   - NaN and infinities travel as what they are.
//
// # Cost
//
// Half the bytes (a quarter, of f64). In one kernel, casts cost nothing: they are done
// between the operand, the links and the result, and memory does not depend on the
// operand. 128 MiB of f32 take 0.49 of the time of NCCL's dense call on two H200, and
// 0.53 on four, where casts around NCCL take 0.75 and 0.70
// (bench/results/2026-11-21-h200x4-wire.txt).
//
// Else there is one cast before and one after, on the queue of the call, which scales a
// sum in the same pass (CastScale); memory for the largest
// operand in 16 bits. Who gathers an operand from many tensors casts it in the same pass,
// and gives it as it travels ([backend.Capabilities].StartRounded), as package autograd does with buckets of
// gradients: for each element of f32, 12 bytes of memory are then read and written beside
// the collective, where a copy, a cast and a cast back take 20. Nothing stops the host. Devices need nothing but
// [backend.Arithmetic]. To cut a long call, so that casts run beside collectives, loses
// more than it gains: on two H200, 128 MiB of f32 took 366 us whole, 421 and 426 in two
// and four parts.
//
// Among processes of one host, 16 bits are slower than all 32: there a call moves memory, and
// casts take the processors. Of 128 MiB among four on 2 cores, BF16 took 2.28 and F16 4.61
// times as long as a plain call (bench/results/2026-11-21-epyc2-compress-host.jsonl).
//
// # Origin
//
// The idea is that of Apache SINGA's synchHalf and fusedSynchHalf. There the sum
// was divided after the reduction, so that it could overflow; the 16-bit buffers
// of one call could be overwritten by the next, as nothing ordered the two; and
// the buffers had a fixed size that nothing checked.
package half
