// Package ir is the language between the three rooms of package vm: what reading makes of a
// graph, what planning rewrites, and what is executed.
//
// A [Program] is a list of values. Each is the result of one typed operation ([Op]) on earlier
// values. Operations are small comparable structs that hold everything the result depends on
// besides the operands, so two values are equal if operation, operands, shape and dtype are:
// no hashes are involved. Operations that only rename elements (Reshape, Permute, Slice,
// Broadcast) are views: they have strides of their own and no memory.
//
// The package knows neither Gorgonia nor devices.
package ir
