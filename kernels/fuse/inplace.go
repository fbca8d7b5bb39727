package fuse

// InPlace reports whether an output may be the memory of an input: the same memory from the first
// element to the last, or none of it. Inputs that are the same memory must all allow it, and no two
// outputs are.
//
// It is so because of the passes in which a loop reads and writes, on every device:
//
//   - A loop without rows has one pass. All inputs of an element are read before the first output
//     of that element is written, and each element is read and written by one thread.
//   - A loop that folds rows has a pass over a row for each fold that needs the one before, and a
//     last one. In the last one all that outputs of an element are computed from, also those that
//     are folded across rows, is read, again if need be, before the first of them is written. What
//     a row has one element of is read before the first pass and written after the last.
//   - Outputs that are folded are written while other elements, or rows, are still to be read.
//
// So an output that is not folded may be an input's memory if both have the same element of it at
// each index: the same strides along every axis of more than one element, and elements of the same
// size.
func (p *Program) InPlace(output, input int) bool {
	out, in := &p.Outputs[output], &p.Inputs[input]
	if out.Folded || out.DType.Size() != in.DType.Size() {
		return false
	}
	for k, extent := range p.Shape {
		if extent > 1 && out.Strides[k] != in.Strides[k] {
			return false
		}
	}
	return true
}
