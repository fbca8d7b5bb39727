package residence

import (
	"fmt"
	"strconv"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestRowMajor(t *testing.T) {
	matrix := tensor.New(tensor.WithShape(2, 3), tensor.WithBacking([]float32{1, 2, 3, 4, 5, 6}))
	slice := func(t tensor.Tensor, s ...tensor.Slice) *tensor.Dense {
		view, err := t.Slice(s...)
		if err != nil {
			panic(err)
		}
		return view.(*tensor.Dense)
	}
	transposed := matrix.Clone().(*tensor.Dense)
	require.NoError(t, transposed.T())
	for what, test := range map[string]struct {
		t    *tensor.Dense
		want bool
	}{
		"matrix":              {matrix, true},
		"row":                 {slice(matrix, tensor.S(1)), true},
		"column":              {slice(matrix, nil, tensor.S(1)), false},
		"transposed":          {transposed, false},
		"row of a transposed": {slice(transposed, tensor.S(1)), false},
		"element":             {slice(matrix, tensor.S(1), tensor.S(1)), true},
		"matrix of axes of length": {tensor.New(tensor.WithShape(1, 3, 1),
			tensor.Of(tensor.Float64)), true},
	} {
		require.Equal(t,
			fmt.Sprintf("%s with the strides %v is in row-major order", what, test.t.Strides()),
			RowMajor(test.t), test.want)
	}
}

func TestDType(t *testing.T) {
	for dt, want := range map[tensor.Dtype]backend.DType{tensor.Float32: backend.F32,
		tensor.Int64: backend.I64, tensor.Byte: backend.U8, tensor.Bool: 0, tensor.Complex64: 0} {
		d, ok := DType(dt)
		require.Check(t, d == want && ok == (want != 0), "%v is %v, %v", dt, d, ok)
	}
	d, ok := DType(tensor.Int)
	require.Check(t, ok && d.Size() == strconv.IntSize/8, "int is %v", d)
}
