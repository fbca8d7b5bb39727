package main

import (
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

func shapeRows() []row {
	return append(append(sliceRows(), joinRows()...), append(indexRows(), layoutRows()...)...)
}

// all is T[:].
var all tensor.Slice

func slicer(slices ...tensor.Slice) node1 {
	return func(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Slice(x, slices...) }
}

func sliceRows() []row {
	S := gorgonia.S
	return []row{
		of1("Slice(x, S(1, 3)), (5, 4)", []int{5, 4}, slicer(S(1, 3)), func(x array) array { return x.cut(0, 1, 3, 1) }),
		of1("Slice(x, S(1)), (5, 4)", []int{5, 4}, slicer(S(1)), func(x array) array { return x.cut(0, 1, 2, 1).reshape(4) }),
		of1("Slice(x, nil, S(2, 5)), (3, 6)", []int{3, 6}, slicer(all, S(2, 5)), func(x array) array { return x.cut(1, 2, 5, 1) }),
		of1("Slice(x, nil, S(2)), (3, 6)", []int{3, 6}, slicer(all, S(2)), func(x array) array { return x.cut(1, 2, 3, 1).reshape(3) }),
		of1("Slice(x, S(1, 3), S(2, 4)), (5, 6)", []int{5, 6}, slicer(S(1, 3), S(2, 4)), func(x array) array { return x.cut(0, 1, 3, 1).cut(1, 2, 4, 1) }),
		of1("Slice(x, S(1), S(2, 4)), (5, 6)", []int{5, 6}, slicer(S(1), S(2, 4)), func(x array) array { return x.cut(0, 1, 2, 1).cut(1, 2, 4, 1).reshape(2) }),
		of1("Slice(x, S(1), S(2)), (5, 6)", []int{5, 6}, slicer(S(1), S(2)), func(x array) array { return array{nil, []float64{x.at(1, 2)}} }),
		of1("Slice(x, nil, S(2, 5)), (2, 6, 3)", []int{2, 6, 3}, slicer(all, S(2, 5)), func(x array) array { return x.cut(1, 2, 5, 1) }),
		of1("Slice(x, nil, nil, S(2, 5)), (2, 3, 6)", []int{2, 3, 6}, slicer(all, all, S(2, 5)), func(x array) array { return x.cut(2, 2, 5, 1) }),
		of1("Slice(x, nil, S(1)), (2, 3, 4)", []int{2, 3, 4}, slicer(all, S(1)), func(x array) array { return x.cut(1, 1, 2, 1).reshape(2, 4) }),
		of1("Slice(x, S(1, 4)), (6)", []int{6}, slicer(S(1, 4)), func(x array) array { return x.cut(0, 1, 4, 1) }),
		of1("Slice(x, S(2)), (6)", []int{6}, slicer(S(2)), func(x array) array { return array{nil, []float64{x.at(2)}} }),
		of1("Slice(x, S(0, 6, 2)), (6)", []int{6}, slicer(S(0, 6, 2)), func(x array) array { return x.cut(0, 0, 6, 2) }),
		of1("Slice(x, S(0, 6, 2)), (6, 3)", []int{6, 3}, slicer(S(0, 6, 2)), func(x array) array { return x.cut(0, 0, 6, 2) }),
		of1("Slice(x, S(0, 5, 2)), (5, 3)", []int{5, 3}, slicer(S(0, 5, 2)), func(x array) array { return x.cut(0, 0, 5, 2) }).instead("`nn.Slice`"),
		of1("Slice(x, nil, S(0, 6, 2)), (3, 6)", []int{3, 6}, slicer(all, S(0, 6, 2)), func(x array) array { return x.cut(1, 0, 6, 2) }),
		of1("Slice(x, S(256, 258)), (260, 2)", []int{260, 2}, slicer(S(256, 258)), func(x array) array { return x.cut(0, 256, 258, 1) }),
		of1("Slice(x, S(0, 1)), (1, 4)", []int{1, 4}, slicer(S(0, 1)), func(x array) array { return x.reshape(4) }),
		of1("At(x, 1, 2)", []int{3, 4}, func(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.At(x, 1, 2) },
			func(x array) array { return array{nil, []float64{x.at(1, 2)}} }).instead("`Slice`"),
	}
}

func joinRows() []row {
	along := func(axis int) node2 {
		return func(a, b *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Concat(axis, a, b) }
	}
	joined := func(axis int) func(x, y array) array {
		return func(x, y array) array { return join(axis, x, y) }
	}
	cut := func(call string, shape []int, axis, n int) row {
		return row{call: call, in: dims(shape), build: func(x gorgonia.Nodes) gorgonia.Nodes {
			parts, err := gorgonia.Unconcat(x[0], axis, n)
			if err != nil {
				panic(refusal{err})
			}
			return parts
		}, want: func(x, _ []array) (parts []array) {
			length := shape[axis] / n
			for i := range n {
				parts = append(parts, x[0].cut(axis, i*length, (i+1)*length, 1))
			}
			return parts
		}}
	}
	return []row{
		of2("Concat(0, x, y), (2, 4) and (3, 4)", []int{2, 4}, []int{3, 4}, along(0), joined(0)),
		of2("Concat(1, x, y), (3, 2) and (3, 4)", []int{3, 2}, []int{3, 4}, along(1), joined(1)),
		of2("Concat(0, x, y), (2) and (3)", []int{2}, []int{3}, along(0), joined(0)),
		of2("Concat(0, x, y), (1, 4) and (1, 4)", []int{1, 4}, []int{1, 4}, along(0), joined(0)),
		of2("Concat(1, x, y), (3, 1) and (3, 1)", []int{3, 1}, []int{3, 1}, along(1), joined(1)),
		of2("Concat(1, x, y), (1, 1) and (1, 1)", []int{1, 1}, []int{1, 1}, along(1), joined(1)),
		of2("Concat(1, x, y), (2, 2, 3) and (2, 4, 3)", []int{2, 2, 3}, []int{2, 4, 3}, along(1), joined(1)),
		of2("Concat(2, x, y), (2, 3, 2) and (2, 3, 4)", []int{2, 3, 2}, []int{2, 3, 4}, along(2), joined(2)),
		cut("Unconcat(x, 0, 2), (4, 3)", []int{4, 3}, 0, 2),
		cut("Unconcat(x, 1, 2), (3, 4)", []int{3, 4}, 1, 2),
		cut("Unconcat(x, 1, 3), (2, 3)", []int{2, 3}, 1, 3).instead("`nn.Split`"),
	}
}

// byIndices is x[..., indices[k], ...] along an axis.
func byIndices(x, indices array, axis int) array {
	parts := make([]array, len(indices.data))
	for k, i := range indices.data {
		parts[k] = x.cut(axis, int(i), int(i)+1, 1)
	}
	return join(axis, parts...)
}

func indexRows() []row {
	var rows []row
	for _, r := range []struct {
		call  string
		shape []int
		axis  int
	}{
		{"ByIndices(x, indices, 0), (5, 3)", []int{5, 3}, 0}, {"ByIndices(x, indices, 1), (3, 5)", []int{3, 5}, 1},
		{"ByIndices(x, indices, 0), (5)", []int{5}, 0}, {"ByIndices(x, indices, 1), (2, 5, 3)", []int{2, 5, 3}, 1},
	} {
		rows = append(rows, row{call: r.call, use: "`nn.ByIndices`", in: []input{{shape: r.shape}, {[]int{4}, integers, []int{0, 2, 2, 4}}},
			build: func(x gorgonia.Nodes) gorgonia.Nodes {
				return gorgonia.Nodes{must(gorgonia.ByIndices(x[0], x[1], r.axis))}
			},
			want: func(x, _ []array) []array { return []array{byIndices(x[0], x[1], r.axis)} }})
	}
	return rows
}

func layoutRows() []row {
	shaped := func(to ...int) node1 {
		return func(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Reshape(x, tensor.Shape(to)) }
	}
	axes := func(pattern ...int) node1 {
		return func(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Transpose(x, pattern...) }
	}
	keep := func(left bool, axis int) node1 {
		return func(x *gorgonia.Node) (*gorgonia.Node, error) {
			return gorgonia.KeepDims(x, left, func(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Sum(x, axis) })
		}
	}
	diagonal := func(x array) array {
		n := len(x.data)
		return generate([]int{n, n}, func(i []int) float64 { return x.data[i[0]] * truth(i[0] == i[1]) })
	}
	return []row{
		of1("Reshape(x, (2, 6))", []int{3, 4}, shaped(2, 6), func(x array) array { return x.reshape(2, 6) }),
		of1("Reshape(x, (2, -1))", []int{3, 4}, shaped(2, -1), func(x array) array { return x.reshape(2, 6) }),
		of1("Reshape(x, (1, 4)), (4)", []int{4}, shaped(1, 4), func(x array) array { return x.reshape(1, 4) }),
		of1("Ravel(x)", []int{3, 4}, gorgonia.Ravel, func(x array) array { return x.reshape(12) }),
		of1("Transpose(x), (3, 4)", []int{3, 4}, axes(), func(x array) array { return x.transpose(1, 0) }),
		of1("Transpose(x), (2, 3, 4)", []int{2, 3, 4}, axes(), func(x array) array { return x.transpose(2, 1, 0) }),
		of1("Transpose(x, 1, 2, 0), (2, 3, 4)", []int{2, 3, 4}, axes(1, 2, 0), func(x array) array { return x.transpose(1, 2, 0) }),
		of1("Transpose(x, 0, 2, 1, 3), (2, 3, 4, 2)", []int{2, 3, 4, 2}, axes(0, 2, 1, 3), func(x array) array { return x.transpose(0, 2, 1, 3) }),
		of1("Reshape(Transpose(x, 0, 2, 1), (8, 3))", []int{2, 3, 4}, func(x *gorgonia.Node) (*gorgonia.Node, error) {
			return gorgonia.Reshape(must(gorgonia.Transpose(x, 0, 2, 1)), tensor.Shape{8, 3})
		}, func(x array) array { return x.transpose(0, 2, 1).reshape(8, 3) }),
		of1("Slice(Transpose(x), S(1, 3))", []int{3, 4}, func(x *gorgonia.Node) (*gorgonia.Node, error) {
			return gorgonia.Slice(must(gorgonia.Transpose(x)), gorgonia.S(1, 3))
		}, func(x array) array { return x.transpose(1, 0).cut(0, 1, 3, 1) }),
		of1("KeepDims(x, true, Sum(x, 0))", []int{3, 4}, keep(true, 0), func(x array) array { return x.reduce(plus, 0).reshape(1, 4) }),
		of1("KeepDims(x, false, Sum(x, 1))", []int{3, 4}, keep(false, 1), func(x array) array { return x.reduce(plus, 1).reshape(3, 1) }),
		of1("DiagFlat(x)", []int{3}, gorgonia.DiagFlat, diagonal),
		conversionRow(),
	}
}
