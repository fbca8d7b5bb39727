// Package program says how operations of graphs are computed, once for all machines.
//
// An operation writes its program against a [Builder], which has the primitives and adds their
// values to a program of package ir. Package read does so in the program of a whole graph, where
// planning fuses them with what is around them. [New] plans the program of one operation: its Do,
// for the machines of Gorgonia. So an operation has one meaning, and one way to be compiled.
//
//	func (s silu) program(b *program.Builder, x ...program.Value) program.Value {
//		return b.Do(fuse.Mul, x[0], b.Do(fuse.Sigmoid, x[0]))
//	}
//
// The files: builder.go has the Builder, layers.go its primitives that are kernels, expressions.go
// what several operations are made of, and run.go plans and runs the program of one operation.
package program
