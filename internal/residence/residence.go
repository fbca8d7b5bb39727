// Package residence says where the memory of a tensor is.
package residence

import "gorgonia.org/tensor"

// OnHost reports whether a tensor of n elements is in host memory even if its Engine is that of a
// device. One element is, with axes or without, because Gorgonia reads such tensors itself.
func OnHost(n int) bool { return n == 1 }

// Engine returns the Engine of a tensor in the memory of a device: the one that v carries, if it is
// an E. It is the zero E for everything that is in host memory.
func Engine[E any](v any) (e E) {
	if t, ok := v.(*tensor.Dense); ok && !OnHost(t.Shape().TotalSize()) {
		e, _ = t.Engine().(E)
	}
	return e
}
