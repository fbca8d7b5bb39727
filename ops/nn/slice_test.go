package nn

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops"
)

func slicer(axis, start, end, step int) builder {
	return one(func(x *gorgonia.Node) (*gorgonia.Node, error) {
		return Slice(axis, start, end, step, x)
	})
}

func concatenated(axis int) builder {
	return func(x gorgonia.Nodes) (*gorgonia.Node, error) { return Concat(axis, x...) }
}

func TestSlice(t *testing.T) {
	for _, test := range []struct {
		in                     operand
		axis, start, end, step int
		want                   operand
	}{
		{count(2, 3), 0, 1, 2, 1, of([]int{1, 3}, 4, 5, 6)},
		{count(2, 3), 1, 1, 3, 1, of([]int{2, 2}, 2, 3, 5, 6)},
		{count(2, 3), -1, 0, 3, 2, of([]int{2, 2}, 1, 3, 4, 6)},
		{count(5), 0, 0, 5, 2, of([]int{3}, 1, 3, 5)},
		{count(5), 0, 4, 5, 1, of([]int{1}, 5)},
		{count(2, 3, 2), 1, 1, 2, 1, of([]int{2, 1, 2}, 3, 4, 9, 10)},
		{count(600), 0, 298, 300, 1, of([]int{2}, 299, 300)},
	} {
		build := slicer(test.axis, test.start, test.end, test.step)
		checkForward(t, []operand{test.in}, build, test.want, 0)
		if len(test.in.data) < 100 {
			checkGradient(t, []operand{test.in}, build)
		}
	}
}

// The operand may be transposed, or a slice of columns.
func TestOperandsInAnyOrder(t *testing.T) {
	transposed := func(x gorgonia.Nodes) (*gorgonia.Node, error) {
		y, err := gorgonia.Transpose(x[0])
		if err != nil {
			return nil, err
		}
		return Slice(0, 1, 3, 1, y)
	}
	checkForward(t, []operand{count(2, 3)}, transposed, of([]int{2, 2}, 2, 5, 3, 6), 0)
	checkGradient(t, []operand{count(2, 3)}, transposed)

	whole := tensor.New(tensor.WithShape(2, 4),
		tensor.WithBacking([]float64{1, 2, 3, 4, 5, 6, 7, 8}))
	columns := require.Value(whole.Slice(nil, gorgonia.S(1, 3)))(t)
	g := gorgonia.NewGraph()
	y := require.Value(Slice(1, 1, 2, 1, gorgonia.NewTensor(g, tensor.Float64, 2,
		gorgonia.WithShape(2, 2), gorgonia.WithName("x"))))(t)
	v := require.Value(y.Op().Do(columns))(t)
	if got := numbers(t, v); got[0] != 3 || got[1] != 7 {
		t.Errorf("the second column of a slice is %v, want [3 7]", got)
	}
}

func TestSplitIsUndoneByConcat(t *testing.T) {
	for axis := range 3 {
		lengths := [][]int{{1, 1}, {2, 1}, {1, 3}}[axis]
		checkForward(t, []operand{count(2, 3, 4)},
			one(func(x *gorgonia.Node) (*gorgonia.Node, error) {
				parts, err := Split(axis, lengths, x)
				if err != nil {
					return nil, err
				}
				return Concat(axis, parts...)
			}), count(2, 3, 4), 0)
	}
}

func TestConcat(t *testing.T) {
	checkForward(t, []operand{count(2, 1), count(2, 2)}, concatenated(1),
		of([]int{2, 3}, 1, 1, 2, 2, 3, 4), 0)
	checkForward(t, []operand{count(1), count(2), count(1)}, concatenated(0),
		of([]int{4}, 1, 1, 2, 1), 0)
	checkForward(t, []operand{count(1, 1), count(1, 1)}, concatenated(1), of([]int{1, 2}, 1, 1), 0)
	checkGradient(t, []operand{count(2, 1, 2), count(2, 3, 2)}, concatenated(1))
	checkGradient(t, []operand{count(1, 2), count(1, 2)}, concatenated(0))
	checkGradient(t, []operand{count(2, 1), count(2, 1)}, concatenated(-1))
}

// The gradient of a slice is an operation with a gradient, so gradients have gradients.
func TestUnslice(t *testing.T) {
	unslicer := one(func(x *gorgonia.Node) (*gorgonia.Node, error) {
		return apply(unsliceSpec{1, 1, 2, 6}, x)
	})
	checkForward(t, []operand{count(2, 2)}, unslicer, of([]int{2, 6}, 0, 1, 0, 2, 0, 0, 0, 3, 0, 4,
		0, 0), 0)
	checkGradient(t, []operand{count(2, 2)}, unslicer)
}

func TestSlicesAreNotMerged(t *testing.T) {
	checkDistinct(t, []operand{count(768)}, slicer(0, 0, 256, 1), slicer(0, 256, 512, 1),
		slicer(0, 512, 768, 1), slicer(0, 0, 256, 2), slicer(0, 0, 255, 2))
	checkDistinct(t, []operand{count(4, 4)}, slicer(0, 0, 2, 1), slicer(1, 0, 2, 1))
	checkDistinct(t, []operand{count(2, 2), normal(1, 2, 2)}, concatenated(0), concatenated(1),
		func(x gorgonia.Nodes) (*gorgonia.Node, error) { return Concat(0, x[1], x[0]) })
}

func TestSliceErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	x := count(2, 3).node(g, "x", tensor.Float64)
	_, err := Slice(2, 0, 1, 1, x)
	checkRefused(t, err, ops.ErrShape, "nn: Slice: bad shape: axis 2 is out of range: x has "+
		"shape (2, 3)")
	_, err = Slice(1, 1, 4, 1, x)
	checkRefused(t, err, ops.ErrShape, "elements 1 to 4 of axis 1, whose length is 3")
	_, err = Slice(1, 2, 2, 1, x)
	checkRefused(t, err, ops.ErrShape, "elements 2 to 2 of axis 1")
	_, err = Slice(1, 0, 2, 0, x)
	checkRefused(t, err, backend.ErrArgument, "the step is 0: use at least 1")
	_, err = Slice(0, 0, 1, 1, nil)
	checkRefused(t, err, backend.ErrArgument, "x is nil")
	_, err = Split(1, []int{1, 1}, x)
	checkRefused(t, err, ops.ErrShape, "lengths [1 1] add up to 2, but axis 1 of shape (2, 3) "+
		"has length 3")
	_, err = Concat(0, x, count(2, 2).node(g, "y", tensor.Float64))
	checkRefused(t, err, ops.ErrShape, "operand 1 has shape (2, 2), which does not fit (2, 3) "+
		"along axis 0")
	_, err = Concat(0)
	checkRefused(t, err, backend.ErrArgument, "there is nothing to join")
	_, err = Concat(0, x, count(2, 3).node(g, "z", tensor.Float32))
	checkRefused(t, err, ops.ErrDType, "operand 1 is float32, another one is float64")
	_, err = Slice(0, 0, 1, 1, gorgonia.NewVector(g, tensor.Uint8, gorgonia.WithShape(2)))
	checkRefused(t, err, ops.ErrDType,
		"operand 0 is uint8: it can be Float32, Float64, Int, Int64 or Int32")
	_, err = SoftMax(0, indices([]int{2}, 0, 1).node(g, "i", tensor.Int))
	checkRefused(t, err, ops.ErrDType,
		"operand 0 is int: this operation is for Float32 and Float64")
	_, err = Concat(0, x, indices([]int{1, 3}, 0, 1, 2).node(g, "j", tensor.Int))
	checkRefused(t, err, ops.ErrDType, "operand 1 is int, another one is float64")
}

// Slices, parts and joins of integers keep every bit, and the tape machine runs them.
func TestIntegersAreMoved(t *testing.T) {
	const far = 1<<62 + 1      // which no float has
	const signals = 0x7fa00001 // a signalling NaN of float32, whose bits arithmetic would change
	for _, test := range []struct {
		backing, want any
	}{
		{[]int{1, 2, far, -4, 5, -far}, []int{far, 2, -far, 5}},
		{[]int64{1, 2, far, -4, 5, -far}, []int64{far, 2, -far, 5}},
		{[]int32{1, signals, -1 << 31, -4, 5, 1<<31 - 1}, []int32{-1 << 31, signals, 1<<31 - 1, 5}},
	} {
		g := gorgonia.NewGraph()
		value := tensor.New(tensor.WithShape(2, 3), tensor.WithBacking(test.backing))
		x := gorgonia.NodeFromAny(g, value, gorgonia.WithName("x"))
		parts := require.Value(Split(1, []int{1, 1, 1}, x))(t)
		y := require.Value(Concat(1, parts[2], parts[1]))(t)
		if y.Op().(*Op).DiffWRT(2)[0] {
			t.Errorf("a join of %v has a gradient", x.Dtype())
		}
		var v gorgonia.Value
		gorgonia.Read(y, &v)
		m := gorgonia.NewTapeMachine(g)
		for range 3 {
			require.NoError(t, m.RunAll())
			if !reflect.DeepEqual(v.Data(), test.want) ||
				!slices.Equal(v.Shape(), tensor.Shape{2, 2}) {
				t.Errorf("columns 2 and 1 of %v are %v of shape %v, want %v",
					x.Dtype(), v.Data(), v.Shape(), test.want)
			}
			m.Reset()
		}
		_ = m.Close()
	}
}

// A value that does not fit the node is an error that names both shapes.
func TestValuesThatDoNotFit(t *testing.T) {
	_, _, y := graph(t, tensor.Float64, []operand{count(2, 3)}, slicer(0, 0, 1, 1))
	op := y.Op()
	_, err := op.Do(tensor.New(tensor.WithShape(2, 4), tensor.Of(tensor.Float64)))
	checkRefused(t, err, ops.ErrShape, "the value has shape (2, 4), the graph was built for (2, 3)")
	_, err = op.Do(tensor.New(tensor.WithShape(2, 3), tensor.Of(tensor.Float32)))
	checkRefused(t, err, ops.ErrDType, "the value is float32, the graph was built for float64")
}

// A part of Split without elements is an error that names the part and says what to do.
func TestSplitNamesThePartWithoutElements(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(2, 4), gorgonia.WithName("x"))
	for _, lengths := range [][]int{{4, 0}, {0, 4}, {5, -1}} {
		_, err := Split(1, lengths, x)
		require.Fails(t, fmt.Sprintf("Split into %v", lengths), err, ops.ErrShape,
			"use at least 1, and leave empty parts out")
	}
}
