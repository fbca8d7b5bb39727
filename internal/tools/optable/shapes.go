package main

import (
	"fmt"
	"math"
	"slices"
	"strings"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

func shapeRows() []row {
	return append(append(sliceRows(), joinRows()...), append(indexRows(), layoutRows()...)...)
}

// all is T[:].
var all tensor.Slice

func slicer(slices ...tensor.Slice) node1 {
	return func(x N) (N, error) { return G.Slice(x, slices...) }
}

func sliceRows() []row {
	S := G.S
	return append([]row{
		of1("Slice(x, S(1, 3)), (5, 4)", []int{5, 4}, slicer(S(1, 3)), func(x array) array {
			return x.cut(0, 1, 3, 1)
		}),
		of1("Slice(x, S(1)), (5, 4)", []int{5, 4}, slicer(S(1)), func(x array) array {
			return x.cut(0, 1, 2, 1).reshape(4)
		}),
		of1("Slice(x, nil, S(2, 5)), (3, 6)", []int{3, 6}, slicer(all, S(2, 5)),
			func(x array) array { return x.cut(1, 2, 5, 1) }),
		of1("Slice(x, nil, S(2)), (3, 6)", []int{3, 6}, slicer(all, S(2)), func(x array) array {
			return x.cut(1, 2, 3, 1).reshape(3)
		}),
		of1("Slice(x, S(1, 3), S(2, 4)), (5, 6)", []int{5, 6}, slicer(S(1, 3), S(2, 4)),
			func(x array) array { return x.cut(0, 1, 3, 1).cut(1, 2, 4, 1) }),
		of1("Slice(x, S(1), S(2, 4)), (5, 6)", []int{5, 6}, slicer(S(1), S(2, 4)),
			func(x array) array { return x.cut(0, 1, 2, 1).cut(1, 2, 4, 1).reshape(2) }),
		of1("Slice(x, S(1), S(2)), (5, 6)", []int{5, 6}, slicer(S(1), S(2)), func(x array) array {
			return array{nil, []float64{x.at(1, 2)}}
		}),
		of1("Slice(x, nil, S(2, 5)), (2, 6, 3)", []int{2, 6, 3}, slicer(all, S(2, 5)),
			func(x array) array { return x.cut(1, 2, 5, 1) }),
		of1("Slice(x, nil, nil, S(2, 5)), (2, 3, 6)", []int{2, 3, 6}, slicer(all, all, S(2, 5)),
			func(x array) array { return x.cut(2, 2, 5, 1) }),
		of1("Slice(x, nil, S(1)), (2, 3, 4)", []int{2, 3, 4}, slicer(all, S(1)),
			func(x array) array { return x.cut(1, 1, 2, 1).reshape(2, 4) }),
		of1("Slice(x, S(1, 4)), (6)", []int{6}, slicer(S(1, 4)), func(x array) array {
			return x.cut(0, 1, 4, 1)
		}),
		of1("Slice(x, S(2)), (6)", []int{6}, slicer(S(2)), func(x array) array {
			return array{nil, []float64{x.at(2)}}
		}),
		of1("Slice(x, S(0, 6, 2)), (6)", []int{6}, slicer(S(0, 6, 2)), func(x array) array {
			return x.cut(0, 0, 6, 2)
		}),
		of1("Slice(x, S(0, 6, 2)), (6, 3)", []int{6, 3}, slicer(S(0, 6, 2)), func(x array) array {
			return x.cut(0, 0, 6, 2)
		}),
		of1("Slice(x, S(0, 5, 2)), (5, 3)", []int{5, 3}, slicer(S(0, 5, 2)), func(x array) array {
			return x.cut(0, 0, 5, 2)
		}).instead("`nn.Slice`"),
		of1("Slice(x, nil, S(0, 6, 2)), (3, 6)", []int{3, 6}, slicer(all, S(0, 6, 2)),
			func(x array) array { return x.cut(1, 0, 6, 2) }),
		of1("Slice(x, S(256, 258)), (260, 2)", []int{260, 2}, slicer(S(256, 258)),
			func(x array) array { return x.cut(0, 256, 258, 1) }),
		of1("Slice(x, S(0, 1)), (1, 4)", []int{1, 4}, slicer(S(0, 1)), func(x array) array {
			return x.reshape(4)
		}),
		of1("Slice(x, nil, nil, S(1, 3)), (2, 3, 4, 2)", []int{2, 3, 4, 2},
			slicer(all, all, S(1, 3)), func(x array) array { return x.cut(2, 1, 3, 1) }),
		of1("Slice(x, nil, S(0)), (4, 1)", []int{4, 1}, slicer(all, S(0)), func(x array) array {
			return x.reshape(4)
		}),
	}, atRows()...)
}

func atRows() (rows []row) {
	for _, at := range [][2][]int{{{3, 4}, {1, 2}}, {{5}, {3}}, {{1, 4}, {0, 2}},
		{{2, 3, 4}, {1, 0, 3}}, {{2, 3, 4, 2}, {1, 2, 0, 1}}} {
		shape, index := at[0], at[1]
		call := fmt.Sprintf("At(x, %s), %s", strings.Trim(shown(index), "()"), shown(shape))
		rows = append(rows, of1(call, shape, func(x N) (N, error) {
			return G.At(x, index...)
		},
			func(x array) array { return array{nil, []float64{x.at(index...)}} }).
			instead("`Slice`"))
	}
	return rows
}

func joinRows() []row {
	along := func(axis int) node2 { return func(a, b N) (N, error) { return G.Concat(axis, a, b) } }
	joined := func(axis int) func(x, y array) array {
		return func(x, y array) array { return join(axis, x, y) }
	}
	cut := func(call string, shape []int, axis, n int) row {
		return row{call: call, in: dims(shape), build: func(x G.Nodes) G.Nodes {
			parts, err := G.Unconcat(x[0], axis, n)
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
		of2("Concat(1, x, y), (2, 2, 3) and (2, 4, 3)", []int{2, 2, 3}, []int{2, 4, 3}, along(1),
			joined(1)),
		of2("Concat(2, x, y), (2, 3, 2) and (2, 3, 4)", []int{2, 3, 2}, []int{2, 3, 4}, along(2),
			joined(2)),
		of2("Concat(1, x, y), (2, 1, 3, 2) and (2, 2, 3, 2)", []int{2, 1, 3, 2}, []int{2, 2, 3, 2},
			along(1), joined(1)),
		of2("Concat(3, x, y), (2, 3, 2, 1) and (2, 3, 2, 4)", []int{2, 3, 2, 1}, []int{2, 3, 2, 4},
			along(3), joined(3)),
		cut("Unconcat(x, 0, 2), (4, 3)", []int{4, 3}, 0, 2),
		cut("Unconcat(x, 1, 2), (3, 4)", []int{3, 4}, 1, 2),
		cut("Unconcat(x, 1, 3), (2, 3)", []int{2, 3}, 1, 3).instead("`nn.Split`"),
		cut("Unconcat(x, 0, 3), (6)", []int{6}, 0, 3),
		cut("Unconcat(x, 2, 2), (2, 3, 4)", []int{2, 3, 4}, 2, 2),
		cut("Unconcat(x, 1, 2), (2, 4, 3, 2)", []int{2, 4, 3, 2}, 1, 2),
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
		{"ByIndices(x, indices, 0), (5, 3)", []int{5, 3}, 0}, {"ByIndices(x, indices, 1), (3, 5)",
			[]int{3, 5}, 1},
		{"ByIndices(x, indices, 0), (5)", []int{5}, 0}, {"ByIndices(x, indices, 1), (2, 5, 3)",
			[]int{2, 5, 3}, 1},
		{"ByIndices(x, indices, 0), (5, 1)", []int{5, 1}, 0},
		{"ByIndices(x, indices, 0), (5, 2, 2, 3)", []int{5, 2, 2, 3}, 0},
	} {
		rows = append(rows, row{call: r.call, use: "`nn.ByIndices`", in: []input{{shape: r.shape},
			{shape: []int{4}, kind: integers, ints: []int{0, 2, 2, 4}}},
			build: func(x G.Nodes) G.Nodes {
				return G.Nodes{must(G.ByIndices(x[0], x[1], r.axis))}
			},
			want: func(x, _ []array) []array { return []array{byIndices(x[0], x[1], r.axis)} }})
	}
	return rows
}

func layoutRows() []row {
	shaped := func(to ...int) node1 {
		return func(x N) (N, error) { return G.Reshape(x, tensor.Shape(to)) }
	}
	axes := func(pattern ...int) node1 {
		return func(x N) (N, error) { return G.Transpose(x, pattern...) }
	}
	rows := []row{
		of1("Reshape(x, (2, 6))", []int{3, 4}, shaped(2, 6), func(x array) array {
			return x.reshape(2, 6)
		}),
		of1("Reshape(x, (2, -1))", []int{3, 4}, shaped(2, -1), func(x array) array {
			return x.reshape(2, 6)
		}),
		of1("Reshape(x, (1, 4)), (4)", []int{4}, shaped(1, 4), func(x array) array {
			return x.reshape(1, 4)
		}),
		of1("Ravel(x)", []int{3, 4}, G.Ravel, func(x array) array { return x.reshape(12) }),
		of1("Transpose(x), (3, 4)", []int{3, 4}, axes(), func(x array) array {
			return x.transpose(1, 0)
		}),
		of1("Transpose(x), (2, 3, 4)", []int{2, 3, 4}, axes(), func(x array) array {
			return x.transpose(2, 1, 0)
		}),
		of1("Transpose(x, 1, 2, 0), (2, 3, 4)", []int{2, 3, 4}, axes(1, 2, 0), func(x array) array {
			return x.transpose(1, 2, 0)
		}),
		of1("Transpose(x, 0, 2, 1, 3), (2, 3, 4, 2)", []int{2, 3, 4, 2}, axes(0, 2, 1, 3),
			func(x array) array { return x.transpose(0, 2, 1, 3) }),
		of1("Reshape(Transpose(x, 0, 2, 1), (8, 3))", []int{2, 3, 4}, func(x N) (N, error) {
			return G.Reshape(must(G.Transpose(x, 0, 2, 1)), tensor.Shape{8, 3})
		}, func(x array) array { return x.transpose(0, 2, 1).reshape(8, 3) }),
		of1("Slice(Transpose(x), S(1, 3))", []int{3, 4}, func(x N) (N, error) {
			return G.Slice(must(G.Transpose(x)), G.S(1, 3))
		}, func(x array) array { return x.transpose(1, 0).cut(0, 1, 3, 1) }),
		of1("Reshape(x, (4, 1, 3, 2)), (2, 3, 4)", []int{2, 3, 4}, shaped(4, 1, 3, 2),
			func(x array) array { return x.reshape(4, 1, 3, 2) }),
		of1("Reshape(x, (6)), (2, 1, 3, 1)", []int{2, 1, 3, 1}, shaped(6), func(x array) array {
			return x.reshape(6)
		}),
		of1("Ravel(x), (4, 1)", []int{4, 1}, G.Ravel, func(x array) array { return x.reshape(4) }),
		of1("Ravel(x), (1, 4)", []int{1, 4}, G.Ravel, func(x array) array { return x.reshape(4) }),
		of1("Ravel(x), (2, 3, 4)", []int{2, 3, 4}, G.Ravel, func(x array) array {
			return x.reshape(24)
		}),
		of1("Ravel(x), (2, 3, 4, 2)", []int{2, 3, 4, 2}, G.Ravel, func(x array) array {
			return x.reshape(48)
		}),
		of1("Transpose(x), (1, 4)", []int{1, 4}, axes(), func(x array) array {
			return x.transpose(1, 0)
		}),
		of1("Transpose(x, 3, 1, 0, 2), (2, 1, 4, 2)", []int{2, 1, 4, 2}, axes(3, 1, 0, 2),
			func(x array) array { return x.transpose(3, 1, 0, 2) }),
	}
	return slices.Concat(rows, overwritingRows(), keepRows(), diagonalRows(), conversionRows())
}

// overwritingRows compute with a reshaped operand, which shares the memory of x.
func overwritingRows() []row {
	double := func(f node1) node1 {
		return func(x N) (N, error) { return G.HadamardProd(must(f(x)), constant(x, 2)) }
	}
	reshaped := func(x N) (N, error) { return G.Reshape(x, tensor.Shape{2, 6}) }
	twice := func(v float64) float64 { return 2 * v }
	return []row{
		of1("Ravel(x), times 2", []int{3, 4}, double(G.Ravel), func(x array) array {
			return x.reshape(12).apply(twice)
		}),
		of1("Reshape(x, (2, 6)), times 2", []int{3, 4}, double(reshaped), func(x array) array {
			return x.reshape(2, 6).apply(twice)
		}),
	}
}

func keepRows() (rows []row) {
	for _, r := range []struct {
		shape []int
		axis  int
	}{
		{[]int{3, 4}, 0}, {[]int{3, 4}, 1}, {[]int{1, 4}, 0}, {[]int{3, 1}, 1}, {[]int{2, 3, 4}, 2},
		{[]int{1, 3, 4}, 0},
		{[]int{2, 3, 4, 2}, 3}, {[]int{2, 3, 4, 1}, 3},
	} {
		left := r.axis == 0 // else last
		kept := slices.Clone(r.shape)
		kept[r.axis] = 1
		rows = append(rows, of1(fmt.Sprintf("KeepDims(x, %v, Sum(x, %d)), %s", left, r.axis,
			shown(r.shape)), r.shape,
			func(x N) (N, error) {
				return G.KeepDims(x, left, func(x N) (N, error) { return G.Sum(x, r.axis) })
			}, func(x array) array { return x.reduce(plus, r.axis).reshape(kept...) }))
	}
	return rows
}

func diagonalRows() (rows []row) {
	for _, n := range []int{3, 1, 2, 5, 8} {
		rows = append(rows, of1(fmt.Sprintf("DiagFlat(x), (%d)", n), []int{n}, G.DiagFlat,
			func(x array) array {
				return generate([]int{n, n}, func(i []int) float64 {
					return x.data[i[0]] * truth(i[0] == i[1])
				})
			}))
	}
	return rows
}

// conversionRows forget what is behind the point.
func conversionRows() []row {
	return elementwise(
		[]row{of1("ConvType(x, from, Int)", []int{3, 4}, func(x N) (N, error) {
			return G.ConvType(x, x.Dtype(), tensor.Int)
		}, func(x array) array { return x.apply(math.Trunc) }).nowhere()})
}
