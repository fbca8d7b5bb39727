// Package nn has operations for Gorgonia graphs that Gorgonia lacks, computes wrongly, or merges
// with others: they take nodes and return nodes, and gorgonia.Grad differentiates through them.
//
//	shape, name := gorgonia.WithShape(8, 768), gorgonia.WithName("x")
//	x := gorgonia.NewMatrix(g, gorgonia.Float32, shape, name)
//	parts, err := nn.Split(1, []int{256, 256, 256}, x) // three of [8, 256]
//
// docs/ops.md says which operations of Gorgonia are wrong, and how, and [Defects] lists the wrong
// nodes of a graph. Use instead:
//
//	gorgonia                                here
//	Slice, At, Unconcat                     [Slice], [Split]
//	Concat, in the lisp machine             [Concat]
//	ByIndices                               [ByIndices], [Embedding]
//	SoftMax, LogSoftMax                     [SoftMax], [LogSoftMax]
//	Log(SoftMax(x)) of labels               [CrossEntropy]
//	Norm of odd p                           [Norm]
//	Dropout                                 [Dropout], [Random]
//	AveragePool1D, AveragePool2D            [AvgPool2D]
//	MaxPool2D of NaN or uneven padding      [MaxPool2D]
//	Conv1d, Conv2d, without groups          [Conv1D], [Conv2D]
//	GlobalAveragePool2D                     [GlobalAvgPool2D]
//	OuterProd                               [OuterProd]
//	BatchedMatMul, one product at a time    [BatchedMatMul]
//	SoftMax between two products            [Attention]
//	Grad, of several losses or of gradients [Grad]
//	Max along a middle axis                 [ReduceMax], [ReduceMin]
//	LogSumExp                               [LogSumExp]
//	ConvType                                [Cast]
//	nothing                                 [LayerNorm], [RMSNorm], [GELU], [GELUTanh], [SwiGLU],
//	                                        [Rotary], [Where], [MaskedFill], [And], [Or], [Xor],
//	                                        [Not], [ArgMax], [ArgMin], [TopK], [GatherElements],
//	                                        [ScatterAdd], [ReduceProd], [CumSum], [Conv3D],
//	                                        [ConvTranspose2D], [LSTM], [GRU]
//
// # What is the same for all
//
// Operations work on Float32 and Float64 of up to 8 axes, in the tape machine and in the lisp
// machine, in host memory. Results have the dtype of the operands, except positions, which are Int,
// and results of [Cast]. Conditions and logic take any dtype: every value other than 0 is true.
// Operations compute in their dtype and add up in float64, except matrix multiplications,
// convolutions, attention and [CumSum]. Results are new tensors in row-major order, and operands
// are never written to; operands may be transposed or sliced. Shapes are checked when the graph is
// built: constructors return errors that wrap [ops.ErrShape], [ops.ErrDType] or
// [backend.ErrArgument]. An operation that fails at run time, for example because a label is out of
// range, gives an [Error], which [ops.Cause] extracts from the error of a Gorgonia machine.
//
// Two nodes are merged only if operation, all parameters, shapes and operands are equal. Gorgonia's
// machines and package vm both compute an operation by the program of its [Op]. The first run of an
// operation compiles it, which takes about 50 microseconds.
//
// Gradients can be differentiated again where the operation is linear in each operand (Slice,
// Split, Concat, ByIndices, CumSum, Rotary, AvgPool2D, convolutions and matrix multiplications);
// other gradients of gradients give [ops.ErrGradient].
package nn
