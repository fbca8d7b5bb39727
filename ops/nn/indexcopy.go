package nn

import (
	"fmt"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/program"
	"github.com/euryale-ml/euryale/internal/residence"
	"github.com/euryale-ml/euryale/ops"
)

// IndexCopy returns x with rows in place of the elements of an axis that indices name. It is
// PyTorch's index_copy.
//
//	in   x        [d..., n, e...]
//	     indices  [k]             Int, 0 to n-1
//	     rows     [d..., k, e...]
//	out  y        [d..., n, e...]   y[d, indices[k], e] = rows[d, k, e], and elsewhere x
//
// A negative axis counts from the last. Of equal indices the last one counts. x may also be a
// variable of 16-bit floats, as [Cast] takes, such as a cache in a machine of vm: rows of Float32
// or Float64 are rounded to y, which is like x.
//
// Gradient: dx is dy with zeros at the indices, and drows are the elements of dy there, so
// gradients are right if no two indices are equal. Indices have none, nor has 16-bit x.
// Cost: a copy of x; with vm.WithState of x, only the rows.
// Errors: [ops.ErrShape] if x has no such axis or the shapes do not fit; [ops.ErrDType] if indices
// are not Int; when the graph runs, [backend.ErrArgument] if an index is out of range.
func IndexCopy(axis int, x, indices, rows *gorgonia.Node) (*gorgonia.Node, error) {
	axis, err := resolve(axis, x)
	if err != nil {
		return nil, fmt.Errorf("nn: IndexCopy: %w", err)
	}
	half := residence.Half(x.Dtype())
	return build("IndexCopy", "x indices rows", indexCopySpec{axis, false, half}, x, indices, rows)
}

// indexCopySpec is [IndexCopy], with an axis that is not negative. If Zero is set, it is of x and
// indices, and rows are zeros.
type indexCopySpec struct {
	Axis int
	Zero bool
	Half bool // x is of 16 bits
}

// String returns "IndexCopy{axis 0}".
func (s indexCopySpec) String() string {
	if s.Zero {
		return fmt.Sprintf("IndexFill{axis %d, 0}", s.Axis)
	}
	return fmt.Sprintf("IndexCopy{axis %d}", s.Axis)
}

func (s indexCopySpec) indices() int { return 1 }

func (s indexCopySpec) dtype(in []tensor.Dtype) (tensor.Dtype, error) {
	if s.Half {
		_, err := floats.alike(in[2:], -1)
		return in[0], err
	}
	return floats.alike(in, s.indices())
}

func (s indexCopySpec) check(indices []int, in []tensor.Shape) error {
	return inRange(indices, in[0][s.Axis])
}

func (s indexCopySpec) shape(in []tensor.Shape) (tensor.Shape, error) {
	rows := in[0].Clone()
	if len(in[1]) == 1 {
		rows[s.Axis] = in[1][0]
	}
	if len(in[1]) != 1 || !s.Zero && !rows.Eq(in[2]) {
		return nil, fmt.Errorf("%w: x has shape %v, and indices %v: want a vector, and rows of "+
			"shape %v, not %v", ops.ErrShape, in[0], in[1], rows, in[2:])
	}
	return in[0].Clone(), nil
}

func (s indexCopySpec) program(b *program.Builder, x ...program.Value) program.Value {
	if !s.Zero {
		return b.Put(x[0], x[1], b.Cast(b.Of(x[0]).DType, x[2]), s.Axis)
	}
	shape := append([]int{}, b.Of(x[0]).Shape...)
	ones := make([]int, len(shape))
	for i := range ones {
		ones[i] = 1
	}
	shape[s.Axis] = b.Of(x[1]).Shape[0]
	zeros := b.Broadcast(b.Reshape(b.Number(0, x[0]), ones...), shape...)
	return b.Put(x[0], x[1], zeros, s.Axis)
}

func (s indexCopySpec) gradients([]tensor.Shape) []gradient {
	if s.Half {
		return []gradient{{}, {}, {}}
	}
	all := []gradient{{indexCopySpec{s.Axis, true, false}, []int{dy, 1}}, {}}
	if !s.Zero {
		all = append(all, gradient{byIndicesSpec{s.Axis}, []int{dy, 1}})
	}
	return all
}
