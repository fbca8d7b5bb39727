// Package plan turns a program into the steps of a machine. It is pure: it knows the program
// and nothing else, and the same program gives the same plan on every rank.
//
//   - simplify.go: equal values become one, and so do views of views, and reductions of reductions
//   - images.go: products of patches become convolutions
//   - join.go: parts side by side are concatenated, not added to zeros
//   - lower.go: layers become reductions and element-wise values
//   - precision.go: products read operands of TF32 or BF16
//   - prune.go: values that nobody wants go
//   - again.go: later loops compute anew what costs less than to store and to load it
//   - group.go, rows.go: element-wise values and reductions become loops; a reduction along the
//     last axis and what reads it are one loop, which keeps each row
//   - order.go: groups stay in an order in which each comes behind those that it needs
//   - hoist.go: each gradient is computed before the steps that go on backwards
//   - layout.go: views become strides; operands that must lie in order are copied
//   - epilogue.go: element-wise loops over the result of a product may run in it, block by block
//   - memory.go: values whose lives do not overlap share memory of one arena
//   - verify.go, verifyupdates.go, meaning.go: every plan is proven to compute its program,
//     whatever the passes above have made of it
//   - print.go: the plan as text
package plan
