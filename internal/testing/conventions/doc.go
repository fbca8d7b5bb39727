// Package conventions holds what PyTorch makes of numbers that are not finite, ties and kinks, and
// what the engines of this module make of them: the table of docs/ops.md and the tests of package
// vm are computed from it.
//
// pytorch.json is the output of pytorch.py. It has operands of NaN, infinities, the largest and the
// least numbers, zeros of both signs and ordinary numbers for each operation, with results and
// gradients.
package conventions
