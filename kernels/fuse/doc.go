// Package fuse runs a chain of element-wise operations as one loop over memory.
//
// A [Program] is a loop over an n-dimensional shape. For each element it loads its
// operands (with broadcasts), computes a list of instructions, and stores the results;
// outputs may be folded (sum, mean, maximum, ...) along some of the axes:
//
//	var p fuse.Program // dx = dy * (1 - tanh(x + b)^2), db = sum of dx over rows
//	p.Shape = []int{rows, columns}
//	p.Reduced = []bool{true, false}
//	x, b := p.Load(backend.F32, columns, 1), p.Load(backend.F32, 0, 1)
//	dy := p.Load(backend.F32, columns, 1)
//	t := p.Do(fuse.Tanh, p.Do(fuse.Add, x, b))
//	dx := p.Do(fuse.Mul, dy, p.Do(fuse.Sub, p.Const(backend.F32, 1), p.Do(fuse.Square, t)))
//	p.Store(dx, backend.F32, columns, 1)
//	p.Fold(backend.Sum, dx, backend.F32, 0, 1)
//	loop, err := fuse.Host(&p, nil)
//	err = loop.Run([]backend.Buffer{dxs, dbs}, []backend.Buffer{xs, bs, dys}, backend.Buffer{})
//
// [Host] runs a program on host memory. [PTX] writes a CUDA kernel for it, which a queue of
// internal/cuda loads and launches: a [Queue] makes any program a [Loop] in its order, and a
// [Joiner] several at once.
//
// # Meaning
//
// Values are F32, F64, I32 or I64. F16 and BF16 are loaded as F32 and U8 as I32, exactly. They are
// stored rounded once to nearest even, and U8 as the low eight bits. Every operation is rounded to
// its type; a product followed by a sum is never fused. Comparisons give 1 or 0 in the operands'
// type, and integers wrap. Functions that are [Op.Rounded], such as [Exp] and [Pow], are right up
// to four units in the last place; all others have bitwise identical results on every device,
// except those of a NaN.
//
// [Cast] converts the operand to Type. Floats become integers by truncation towards zero; what is
// out of range becomes the nearest integer of the type, NaN 0. Numbers become floats by rounding to
// nearest even; integers wrap.
//
// [Uniform] is the same for the same operands on every device and rank: Philox4x32-10, of operands
// key, step, sample, element, all I64. Key is the low and the high word of its operand. The counter
// is the low word of element/4, the low word of sample, and the low and the high word of step; word
// element%4 of the result counts, of which F32 takes the upper 24 bits and F64 all 32.
//
// # Folds
//
// The order of a fold on the host depends on the program alone; on a device, also on whether all
// operands are aligned to [Alignment]. There are no atomics, so a program run twice on the same
// memory gives bitwise identical results. The host folds floats in float64, and rounds once at the
// end. It cuts the loop into parts and those into blocks by the program alone. A run along the
// innermost axis, up to the end of its block, is added up as 16 interleaved sums, to which every
// 16th element is added, and which are combined in pairs that are 8, 4, 2 and 1 apart. The sums of
// runs are added in row-major order within a part, and those of parts in their order. Along other
// axes, elements are added in row-major order within a part. So neither the processor nor the
// number of workers changes a bit of a sum. A device folds in a fixed tree, in the type of the
// value: see [PTX]. Avg divides the sum by the number of elements.
//
// # Rows
//
// [SumRow], [MaxRow] and [MinRow] fold a value along the last axis of the loop, and other values
// may be computed from the result: a softmax, a layer norm or its gradient is one loop, which reads
// each row from memory once. A value that is the same for all elements of a row may be stored once
// for each row, by a stride of 0 along the last axis. Outputs of such a program may be folded
// across rows of at most [MaxFoldedRow] elements, along all other axes: the gradients of a layer
// norm, its gain and its bias are one loop.
//
//	x := p.Load(backend.F32, columns, 1)
//	e := p.Do(fuse.Exp, p.Do(fuse.Sub, x, p.Do(fuse.MaxRow, x)))
//	p.Store(p.Do(fuse.Div, e, p.Do(fuse.SumRow, e)), backend.F32, columns, 1)
//
// The orders are as in other folds: the host adds a row as one run, floats in float64, rounded
// once; a device's is a fixed tree in the type of the value, see [PTX]. The host computes whole
// rows at a time.
//
// # Files
//
// program.go is the Program, build.go makes one, check.go refuses bad ones, text.go prints
// them. layout.go merges axes, rows.go says what is alike along rows. host.go is the evaluator: it
// runs one instruction over a block of about 1,024 elements at a time, so that blocks stay in the
// cache, by vector instructions where the processor has them. hostparts.go cuts loops into parts,
// for the workers of a pool, and into blocks; hostvalues.go says what is computed once for a block
// or a row, and where; hostcompute.go, hostfold.go, hostmove.go and hoststore.go are the steps.
// ptx*.go writes kernels.
package fuse
