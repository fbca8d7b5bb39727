// Package plan turns a program, which package lower has rewritten, into the steps of a machine. It
// is pure: it depends only on the program, and the same program gives the same plan on every rank.
//
//   - group.go, rows.go: element-wise values and reductions become loops; a reduction along the
//     last axis and its readers are one loop, which keeps each row
//   - order.go: groups keep an order in which each follows those that it needs
//   - hoist.go: each gradient is computed before the steps that continue the backward pass
//   - layout.go: views become strides; operands that must lie in order are copied
//   - epilogue.go: element-wise loops over the result of a product may run in it, block by block
//   - memory.go: values whose lives do not overlap share memory of one arena
//   - plan.go: every plan is proven to compute its program, whatever the passes above have done, by
//     package proof
//   - print.go: the plan as text
package plan
