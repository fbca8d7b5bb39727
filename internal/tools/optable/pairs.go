package main

import (
	"fmt"
	"math"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// pair is a row with two operations on one operand. They are different, so their nodes must be.
func pair(call string, shape []int, f, g node1, loopF, loopG func(x array) array) row {
	return row{call: call, in: dims(shape),
		build: func(x G.Nodes) G.Nodes {
			return G.Nodes{must(f(x[0])), must(g(x[0]))}
		},
		want: func(x, _ []array) []array { return []array{loopF(x[0]), loopG(x[0])} }}
}

func pairRows() []row {
	cut := func(axis, start, end int) func(array) array {
		return func(x array) array { return x.cut(axis, start, end, 1) }
	}
	soft := func(x N) (N, error) { return G.SoftMax(x) }
	logSoft := func(x N) (N, error) { return G.LogSoftMax(x) }
	rows := softmax1
	logs := func(x array) array { return softmax1(x).apply(math.Log) }
	return append([]row{
		pair("Slice(x, S(0, 256)) and S(256, 512)", []int{512}, slicer(G.S(0, 256)),
			slicer(G.S(256, 512)), cut(0, 0, 256), cut(0, 256, 512)).instead("`nn.Split`"),
		pair("Slice(x, nil, S(1, 3)) and S(257, 259)", []int{2, 260}, slicer(all, G.S(1, 3)),
			slicer(all, G.S(257, 259)), cut(1, 1, 3), cut(1, 257, 259)).instead(
			"`nn.Slice`"),
		pair("Slice(x, S(0, 4)) and S(0, 4, 2)", []int{4}, slicer(G.S(0, 4)),
			slicer(G.S(0, 4, 2)), cut(0, 0, 4), func(x array) array {
				return x.cut(0, 0, 4, 2)
			}),
		pair("SoftMax(x) and LogSoftMax(x)", []int{3, 4}, soft, logSoft, rows, logs).instead(
			"`nn.SoftMax`, `nn.LogSoftMax`"),
		pair("LogSoftMax(x) and SoftMax(x)", []int{3, 4}, logSoft, soft, logs, rows).instead(
			"`nn.SoftMax`, `nn.LogSoftMax`"),
		{call: "s = SoftMax(x) and Log(s)", in: dims([]int{3, 4}), use: "`nn.SoftMax`",
			build: func(x G.Nodes) G.Nodes {
				s := must(G.SoftMax(x[0]))
				return G.Nodes{s, must(G.Log(s))}
			},
			want: func(x, _ []array) []array { return []array{rows(x[0]), logs(x[0])} }},
		pair("SoftMax(x, 0) and SoftMax(x, 1)", []int{3, 4}, axial1(G.SoftMax, 0),
			axial1(G.SoftMax, 1),
			func(x array) array { return softmax(x, 0) }, rows),
		pair("Sparsemax(x, 0) and Sparsemax(x, 1)", []int{3, 3}, axial1(G.Sparsemax, 0),
			axial1(G.Sparsemax, 1),
			func(x array) array { return sparsemax(x, 0) }, func(x array) array {
				return sparsemax(x, 1)
			}).
			instead("`Sparsemax` between two `Transpose`"),
		pair("Sum(x, 0) and Sum(x, 1)", []int{3, 3}, axial1(G.Sum, 0),
			axial1(G.Sum, 1),
			func(x array) array { return x.reduce(plus, 0) }, func(x array) array {
				return x.reduce(plus, 1)
			}),
		pair("Max(x, 0) and Max(x, 1)", []int{3, 3}, axial1(G.Max, 0),
			axial1(G.Max, 1),
			func(x array) array { return x.reduce(math.Max, 0) }, func(x array) array {
				return x.reduce(math.Max, 1)
			}),
		pair("Norm(x, 1, 2) and Norm(x, 1, 4)", []int{3, 3}, func(x N) (N, error) {
			return G.Norm(x, 1, 2)
		},
			func(x N) (N, error) {
				return G.Norm(x, 1, 4)
			}, powerNorm(2), powerNorm(4)).with(positive),
		pair("At(x, 0, 1) and At(x, 1, 0)", []int{3, 3}, func(x N) (N, error) {
			return G.At(x, 0, 1)
		},
			func(x N) (N, error) { return G.At(x, 1, 0) },
			func(x array) array { return array{nil, []float64{x.at(0, 1)}} }, func(x array) array {
				return array{nil, []float64{x.at(1, 0)}}
			}).nowhere().instead("`Slice`"),
	}, append(comparisonPairs(), append(imagePairs(), statefulPairs()...)...)...)
}

func softmax1(x array) array { return softmax(x, 1) }

func axial1(f func(N, ...int) (N, error), axis int) node1 {
	return func(x N) (N, error) { return f(x, axis) }
}

func powerNorm(p float64) func(x array) array {
	return func(x array) array {
		return x.apply(func(v float64) float64 { return math.Pow(v, p) }).reduce(plus, 1).apply(
			func(v float64) float64 { return math.Pow(v, 1/p) })
	}
}

func comparisonPairs() []row {
	leaky := func(alpha float64) (node1, func(array) array) {
		return func(x N) (N, error) { return G.LeakyRelu(x, alpha) },
			func(x array) array {
				return x.apply(func(v float64) float64 { return max(v, 0) + alpha*min(v, 0) })
			}
	}
	small, smallLoop := leaky(0.1)
	close, closeLoop := leaky(0.1000001)
	greater := func(x []array, _ []array) []array {
		y := zip(x[0], x[1], func(a, b float64) float64 { return truth(a > b) })
		return []array{y, y}
	}
	return []row{
		pair("LeakyRelu(x, 0.1) and LeakyRelu(x, 0.1000001)", []int{3, 4}, small, close, smallLoop,
			closeLoop),
		{call: "Gt(x, y, false) and Gt(x, y, true), used as numbers",
			in: dims([]int{3, 4}, []int{3, 4}), flat: true, want: greater,
			build: func(x G.Nodes) G.Nodes {
				bools, numbers := must(G.Gt(x[0], x[1], false)),
					must(G.Gt(x[0], x[1], true))
				one := G.NewConstant(1.0)
				if x[0].Dtype() == tensor.Float32 {
					one = G.NewConstant(float32(1))
				}
				return G.Nodes{bools, must(G.HadamardProd(numbers, one))}
			}},
	}
}

func imagePairs() []row {
	pool := func(f func(x N, kernel tensor.Shape, pad, stride []int) (N,
		error), pad ...int) node1 {
		return func(x N) (N, error) { return f(x, tensor.Shape{2, 2}, pad, []int{2, 2}) }
	}
	return []row{
		pair("Im2Col(x), dilation 1 and 2", []int{1, 1, 5, 5}, im2col(2, 0, 2, 1),
			im2col(2, 0, 2, 2), square(2, 0, 2, 1).columns, square(2, 0, 2, 2).columns),
		pair("MaxPool2D(x), AveragePool2D(x)", []int{1, 1, 4, 4}, pool(G.MaxPool2D, 0, 0),
			pool(G.AveragePool2D, 0, 0), square(2, 0, 2, 1).max, square(2, 0, 2, 1).mean).
			instead("`nn.AvgPool2D`"),
	}
}

// statefulPairs are operations with numbers that are printed with few digits, or not at all.
func statefulPairs() []row {
	batch := func(eps float64) node1 {
		return func(x N) (N, error) {
			one := node(x.Graph(), generate([]int{1, 4}, func([]int) float64 { return 1 }),
				x.Dtype(), fmt.Sprint("one ", eps))
			zero := node(x.Graph(), generate([]int{1, 4}, func([]int) float64 { return 0 }),
				x.Dtype(), fmt.Sprint("zero ", eps))
			y, _, _, _, err := G.BatchNorm(x, one, zero, 0.1, eps)
			return y, err
		}
	}
	group := func(eps float64) node1 {
		return func(x N) (N, error) {
			one := node(x.Graph(), generate([]int{1, 4, 1, 1}, func([]int) float64 { return 1 }),
				x.Dtype(), fmt.Sprint("one ", eps))
			zero := node(x.Graph(), generate([]int{1, 4, 1, 1}, func([]int) float64 { return 0 }),
				x.Dtype(), fmt.Sprint("zero ", eps))
			return G.GroupNorm(x, one, zero, 2, 4, eps)
		}
	}
	normal := func(eps float64, groups int, at func(i []int) int) func(x array) array {
		return func(x array) array { return normalizeWith(x, eps, groups, at) }
	}
	channel := func(i []int) int { return i[1] }
	half := func(i []int) int { return i[0]*2 + i[1]/2 }
	drop := func(x G.Nodes) G.Nodes {
		return G.Nodes{must(G.Dropout(x[0], 0.1)), must(G.Dropout(x[0], 0.9))}
	}
	twice := func(x G.Nodes) G.Nodes {
		return G.Nodes{must(G.Dropout(x[0], 0.5)), must(G.Dropout(x[0], 0.5))}
	}
	return []row{
		pair("BatchNorm(x), epsilon 1e-5 and 0.04", []int{6, 4}, batch(1e-5), batch(0.04),
			normal(1e-5, 4, channel), normal(0.04, 4, channel)),
		pair("GroupNorm(x), epsilon 1e-5 and 0.5", []int{2, 4, 2, 2}, group(1e-5), group(0.5),
			normal(1e-5, 4, half), normal(0.5, 4, half)),
		{call: "Dropout(x, 0.5), twice", in: dims([]int{20, 10}), random: true, distinct: true,
			flat: true, use: "`nn.Dropout`", build: twice,
			want: func(_, got []array) []array { return got }},
		{call: "Dropout(x, 0.1) and Dropout(x, 0.9)", in: dims([]int{20, 10}), random: true,
			flat: true, use: "`nn.Dropout`", build: drop, want: func(x, got []array) []array {
				want := make([]array, 2)
				for k, p := range []float64{0.1, 0.9} {
					want[k] = generate(x[0].shape, func(i []int) float64 {
						return x[0].at(i...) / (1 - p) * truth(got[k].at(i...) != 0)
					})
				}
				return want
			}},
	}
}
