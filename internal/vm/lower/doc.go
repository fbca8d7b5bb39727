// Package lower rewrites programs so that good plans can be made of them. It is pure: each pass
// takes a program and returns one of the same results, by the equation in its doc comment. A pass
// that changes digits says so. It knows operations alone: neither plans nor what runs them.
//
// [Program] is what all programs go through:
//
//   - simplify.go: equal values become one, as do views of views and reductions of reductions
//   - join.go: parts side by side are concatenated, not added to zeros
//   - images.go: matrix multiplications of patches become convolutions
//   - precision.go: matrix multiplications read operands of TF32 or BF16
//   - stack.go: products of one value by several matrices that stay are one
//   - channels.go: convolutions are of tensors with their channels last
//   - prune.go: values that nobody wants are dropped
//
// The others depend on how a program runs. In their order:
//
//   - lookups.go: ranks exchange rows of tables, not gradients of their size
//   - tiles.go: a loss is computed in tiles of rows
//   - precision.go: ranks exchange gradients in BF16
//   - train.go, accumulate.go: what runs and ranks make of gradients, their norm, the rule of a
//     solver ([Update]), and what is assigned
//   - hoist.go: what no run changes is computed once
//   - reshape.go: values get the shape in which they are read
//   - rematerialize.go: loops compute values that cost more to store and load
//
// In rewrite.go is what they write programs with.
package lower
