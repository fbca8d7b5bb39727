// Package program says how operations of graphs are computed, once for all machines.
//
// An operation writes its program against a [Builder], which has the primitives. Package vm has a
// Builder that makes values of a plan of them, which planning fuses with what is around them.
// [Compile] has one that makes loops on the host of them: the Do of an operation, for the machines
// of Gorgonia. So an operation has one meaning, and on the host the bits of a plan: only sums of
// float64 across rows are added in an order that depends on what else a loop computes.
//
//	func (s silu) program(b program.Builder, x ...program.Value) program.Value {
//		return b.Do(fuse.Mul, x[0], b.Do(fuse.Sigmoid, x[0]))
//	}
//
// The files: builder.go has the Builder, and expressions.go what several operations are made of.
// record.go notes what a program does, compile.go makes steps of it, loop.go those that compute
// element by element, and run.go runs them.
package program
