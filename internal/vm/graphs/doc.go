// Package graphs draws random graphs for tests of package vm.
//
// A [Graph] is a list of values, each an operation of the table in operations.go on earlier
// values or on new variables. To add an operation, add a line there. [Draw] draws a graph from
// a source of numbers, and [Graph.Build] adds it to a graph of Gorgonia, in another order each
// time: any in which operands come first. Planning follows the order of a program, so the order
// is half of what is random.
//
// Shapes are small and few, so that values meet: an element-wise value is often read by a
// product, a Concat, a convolution or a reduction, and again by element-wise values that need a
// reduction. Axes of length 1, batches of one sample, and indices and labels are among them.
// Variables are small integers, with which most arithmetic is exact.
//
// [Shrink] makes a graph that fails smaller.
package graphs
