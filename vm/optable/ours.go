package main

import (
	"math"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/ops/nn"
)

// ours is the section of package ops/nn, all of whose rows are right.
const ours = "Operations of package ops/nn"

// ourRows are the replacements, on what Gorgonia's operations compute wrongly and beyond.
func ourRows() []row {
	return append(ourSliceRows(), ourSoftMaxRows()...)
}

// nnSlice is nn.Slice of one operand.
func nnSlice(axis, start, end, step int) node1 {
	return func(x *gorgonia.Node) (*gorgonia.Node, error) { return nn.Slice(axis, start, end, step, x) }
}

func ourSliceRows() []row {
	along := func(axis int) node2 {
		return func(a, b *gorgonia.Node) (*gorgonia.Node, error) { return nn.Concat(axis, a, b) }
	}
	split := row{call: "nn.Split(1, [1 1 1], x), (2, 3)", in: dims([]int{2, 3}), build: func(x gorgonia.Nodes) gorgonia.Nodes {
		parts, err := nn.Split(1, []int{1, 1, 1}, x[0])
		if err != nil {
			panic(refusal{err})
		}
		return parts
	}, want: func(x, _ []array) []array {
		return []array{x[0].cut(1, 0, 1, 1), x[0].cut(1, 1, 2, 1), x[0].cut(1, 2, 3, 1)}
	}}
	return []row{
		of1("nn.Slice(0, 0, 5, 2, x), (5, 3)", []int{5, 3}, nnSlice(0, 0, 5, 2), func(x array) array { return x.cut(0, 0, 5, 2) }),
		of1("nn.Slice(1, 1, 2, 1, x), (2, 3, 4)", []int{2, 3, 4}, nnSlice(1, 1, 2, 1), func(x array) array { return x.cut(1, 1, 2, 1) }),
		pair("nn.Slice(0, 0, 256, 1, x) and nn.Slice(0, 256, 512, 1, x)", []int{512}, nnSlice(0, 0, 256, 1), nnSlice(0, 256, 512, 1),
			func(x array) array { return x.cut(0, 0, 256, 1) }, func(x array) array { return x.cut(0, 256, 512, 1) }),
		split,
		of2("nn.Concat(1, x, y), (2, 2, 3) and (2, 4, 3)", []int{2, 2, 3}, []int{2, 4, 3}, along(1), func(x, y array) array { return join(1, x, y) }),
		of2("nn.Concat(1, x, y), (1, 1) and (1, 1)", []int{1, 1}, []int{1, 1}, along(1), func(x, y array) array { return join(1, x, y) }),
	}
}

func ourSoftMaxRows() []row {
	soft := func(axis int) node1 {
		return func(x *gorgonia.Node) (*gorgonia.Node, error) { return nn.SoftMax(axis, x) }
	}
	logs := func(axis int) node1 {
		return func(x *gorgonia.Node) (*gorgonia.Node, error) { return nn.LogSoftMax(axis, x) }
	}
	softLoop := func(axis int) func(array) array { return func(x array) array { return softmax(x, axis) } }
	logLoop := func(axis int) func(array) array {
		return func(x array) array { return softmax(x, axis).apply(math.Log) }
	}
	return []row{
		of1("nn.SoftMax(1, x), (4, 1)", []int{4, 1}, soft(1), softLoop(1)),
		of1("nn.SoftMax(0, x), (2, 3, 4)", []int{2, 3, 4}, soft(0), softLoop(0)),
		of1("nn.LogSoftMax(1, x), (4, 1)", []int{4, 1}, logs(1), logLoop(1)),
		of1("nn.LogSoftMax(2, x), (2, 3, 4)", []int{2, 3, 4}, logs(2), logLoop(2)),
		pair("nn.SoftMax(1, x) and nn.LogSoftMax(1, x)", []int{3, 4}, soft(1), logs(1), softLoop(1), logLoop(1)),
		{call: "s = nn.SoftMax(1, x) and Log(s)", in: dims([]int{3, 4}),
			build: func(x gorgonia.Nodes) gorgonia.Nodes {
				s := must(nn.SoftMax(1, x[0]))
				return gorgonia.Nodes{s, must(gorgonia.Log(s))}
			},
			want: func(x, _ []array) []array { return []array{softLoop(1)(x[0]), logLoop(1)(x[0])} }},
	}
}
