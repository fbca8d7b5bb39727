// Package half halves the bytes of gradients on the wire: sums and averages of f32 and f64 travel
// as 16-bit floats.
//
//	comm, err := half.New(comm, backend.BF16)
//
// Operands of AllReduce and ReduceScatter by Sum and Avg, of f32 and f64, are cast to 16 bits,
// reduced by the inner communicator, and cast back. If inner rounds in transport, as package gpu
// does among GPUs with NVLink, one kernel does all of this for an AllReduce of f32. Everything else
// passes as it is, bit for bit: other kinds (a broadcast of parameters), other reductions, other
// dtypes, calls that must be Exact, and every call of a group of one rank, where nothing travels.
//
// half.go has the Communicator and decides what travels as 16 bits; call.go has the steps of a
// call. The lock Communicator.mu guards the scratch memory and the counters; the lock of
// [backend.Sequence], which orders calls, comes before it.
//
// # What comes out
//
// An average travels, and a sum is P times that: an average of numbers that fit 16 bits fits 16
// bits, however many ranks there are. Four ranks that each have 40000 get 160000, even with F16,
// whose largest number is 65504. Ranks are still added up in f32. If the sum of all ranks exceeds
// the largest f32, about 3.4e38, the result is infinite. This applies to averages and to f64
// operands, too. Only BF16 has numbers that large: with P ranks, keep them below 3.4e38/P.
//
// With u = 2^-11 for F16 and 2^-8 for BF16, each operand is rounded once (u), and
// so is the average by a communicator that accumulates in 32 bits, as package host
// and Euryale's GPU kernels do; others say how they round. The error is then at most 2u
// times the sum of the operands' magnitudes, and sums of small integers are exact if P
// is a power of two. All ranks get bitwise identical results, as from inner.
//
//   - F16: numbers from 65520 on become infinite, and so does the result, on every
//     rank. Below 2^-14 precision fades; below 2^-25 nothing is left. Scale the
//     loss if gradients are that small.
//   - BF16: the range of f32, with 8 bits of precision. Numbers from (2-2^-8)*2^127 on, about
//     3.396e38, become infinite, in f32 as in f64.
//   - NaN stays NaN, and infinities stay infinities.
//
// # Cost
//
// Half the bytes, or a quarter for f64. If inner rounds in transport, casts cost nothing: the
// kernel does them between the operand, the links and the result, and needs no memory.
// docs/benchmarks.md has the measurements.
//
// Otherwise one cast runs before the reduction and one after, on the queue of the call. The second
// one also scales a sum (CastScale). Scratch memory is as large as the largest operand in 16 bits.
// Nothing blocks the host.
//
// A machine of package vm computes gradients in BF16 itself (autograd.Buckets.Halve): its calls
// pass as they are, and Counters counts them.
//
// A call is not cut into parts whose casts could run beside collectives: that loses more than it
// gains (128 MiB on two H200: 366 us whole, 421 in two parts). Among processes of one host, 16 bits
// are slower than 32: there a call only moves memory, and casts occupy the processors.
//
// # Origin
//
// The idea comes from Apache SINGA's synchHalf and fusedSynchHalf. There the sum was divided after
// the reduction, so it could overflow; the 16-bit buffers of one call could be overwritten by the
// next, as nothing ordered the two; and the buffers had a fixed size that nothing checked.
package half
