package main

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/ops/nn"
)

// ours is the section of package ops/nn, all of whose rows are right.
const ours = "Operations of package ops/nn"

// ourRows are the replacements, on what Gorgonia's operations compute wrongly and beyond.
func ourRows() []row {
	return slices.Concat(ourSliceRows(), ourIndexRows(), ourSoftMaxRows(), ourLossRows(),
		ourNormRows(), ourPowerNormRows(), ourDropoutRows(), ourPoolRows(), ourProductRows(),
		ourAttentionRows(), newerRows())
}

// nnSlice is nn.Slice of one operand.
func nnSlice(axis, start, end, step int) node1 {
	return func(x *gorgonia.Node) (*gorgonia.Node, error) {
		return nn.Slice(axis, start, end, step, x)
	}
}

func ourSliceRows() []row {
	along := func(axis int) node2 {
		return func(a, b *gorgonia.Node) (*gorgonia.Node, error) { return nn.Concat(axis, a, b) }
	}
	split := row{call: "nn.Split(1, [1 1 1], x), (2, 3)", in: dims([]int{2, 3}),
		build: func(x gorgonia.Nodes) gorgonia.Nodes {
			parts, err := nn.Split(1, []int{1, 1, 1}, x[0])
			if err != nil {
				panic(refusal{err})
			}
			return parts
		}, want: func(x, _ []array) []array {
			return []array{x[0].cut(1, 0, 1, 1), x[0].cut(1, 1, 2, 1), x[0].cut(1, 2, 3, 1)}
		}}
	return []row{
		of1("nn.Slice(0, 0, 5, 2, x), (5, 3)", []int{5, 3}, nnSlice(0, 0, 5, 2),
			func(x array) array { return x.cut(0, 0, 5, 2) }),
		of1("nn.Slice(1, 1, 2, 1, x), (2, 3, 4)", []int{2, 3, 4}, nnSlice(1, 1, 2, 1),
			func(x array) array { return x.cut(1, 1, 2, 1) }),
		pair("nn.Slice(0, 0, 256, 1, x) and nn.Slice(0, 256, 512, 1, x)", []int{512},
			nnSlice(0, 0, 256, 1), nnSlice(0, 256, 512, 1),
			func(x array) array { return x.cut(0, 0, 256, 1) }, func(x array) array {
				return x.cut(0, 256, 512, 1)
			}),
		split,
		of2("nn.Concat(1, x, y), (2, 2, 3) and (2, 4, 3)", []int{2, 2, 3}, []int{2, 4, 3}, along(1),
			func(x, y array) array { return join(1, x, y) }),
		of2("nn.Concat(1, x, y), (1, 1) and (1, 1)", []int{1, 1}, []int{1, 1}, along(1),
			func(x, y array) array { return join(1, x, y) }),
	}
}

func ourSoftMaxRows() []row {
	soft := func(axis int) node1 {
		return func(x *gorgonia.Node) (*gorgonia.Node, error) { return nn.SoftMax(axis, x) }
	}
	logs := func(axis int) node1 {
		return func(x *gorgonia.Node) (*gorgonia.Node, error) { return nn.LogSoftMax(axis, x) }
	}
	softLoop := func(axis int) func(array) array {
		return func(x array) array {
			return softmax(x, axis)
		}
	}
	logLoop := func(axis int) func(array) array {
		return func(x array) array { return softmax(x, axis).apply(math.Log) }
	}
	return []row{
		of1("nn.SoftMax(1, x), (4, 1)", []int{4, 1}, soft(1), softLoop(1)),
		of1("nn.SoftMax(0, x), (2, 3, 4)", []int{2, 3, 4}, soft(0), softLoop(0)),
		of1("nn.LogSoftMax(1, x), (4, 1)", []int{4, 1}, logs(1), logLoop(1)),
		of1("nn.LogSoftMax(2, x), (2, 3, 4)", []int{2, 3, 4}, logs(2), logLoop(2)),
		pair("nn.SoftMax(1, x) and nn.LogSoftMax(1, x)", []int{3, 4}, soft(1), logs(1), softLoop(1),
			logLoop(1)),
		{call: "s = nn.SoftMax(1, x) and Log(s)", in: dims([]int{3, 4}),
			build: func(x gorgonia.Nodes) gorgonia.Nodes {
				s := must(nn.SoftMax(1, x[0]))
				return gorgonia.Nodes{s, must(gorgonia.Log(s))}
			},
			want: func(x, _ []array) []array {
				return []array{softLoop(1)(x[0]), logLoop(1)(x[0])}
			}},
	}
}

func ourIndexRows() []row {
	by := func(call string, shape []int, axis int, at ...int) row {
		return row{call: call, in: []input{{shape: shape}, {shape: []int{len(at)}, kind: integers,
			ints: at}},
			build: func(x gorgonia.Nodes) gorgonia.Nodes {
				return gorgonia.Nodes{must(nn.ByIndices(axis, x[0], x[1]))}
			},
			want: func(x, _ []array) []array { return []array{byIndices(x[0], x[1], axis)} }}
	}
	return []row{
		by("nn.ByIndices(0, x, indices), (5)", []int{5}, 0, 0, 2, 2, 4),
		by("nn.ByIndices(1, x, indices), (3, 5)", []int{3, 5}, 1, 0, 2, 2, 4),
		by("nn.ByIndices(1, x, indices), (2, 5, 3)", []int{2, 5, 3}, 1, 0, 2, 2, 4),
		{call: "nn.Embedding(x, indices), indices (2, 2)", in: []input{{shape: []int{5, 3}},
			{shape: []int{2, 2}, kind: integers, ints: []int{4, 0, 0, 1}}},
			build: func(x gorgonia.Nodes) gorgonia.Nodes {
				return gorgonia.Nodes{must(nn.Embedding(x[0], x[1]))}
			},
			want: func(x, _ []array) []array {
				return []array{byIndices(x[0], x[1].reshape(4), 0).reshape(2, 2, 3)}
			}},
	}
}

func ourLossRows() []row {
	labels := []int{2, 0, nn.NoLabel}
	return []row{{call: "nn.CrossEntropy(-100, x, labels), labels [2 0 -100]",
		in: []input{{shape: []int{3, 4}}, {shape: []int{3}, kind: integers, ints: labels}},
		build: func(x gorgonia.Nodes) gorgonia.Nodes {
			return gorgonia.Nodes{must(nn.CrossEntropy(nn.NoLabel, x[0], x[1]))}
		},
		want: func(x, _ []array) []array {
			p := softmax(x[0], 1)
			return []array{{nil, []float64{-(math.Log(p.at(0, 2)) + math.Log(p.at(1, 0))) / 2}}}
		}}}
}

func ourNormRows() []row {
	rows := func(n int) func(i []int) int { return func(i []int) int { return i[0]*n + i[1] } }
	gelu := func(x float64) float64 { return x * (1 + math.Erf(x/math.Sqrt2)) / 2 }
	tanh := func(x float64) float64 {
		return x * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x))) / 2
	}
	return append(elementwise([]row{
		of1("nn.GELU(x)", []int{3, 4}, nn.GELU, func(x array) array { return x.apply(gelu) }),
		of1("nn.GELUTanh(x)", []int{3, 4}, nn.GELUTanh, func(x array) array {
			return x.apply(tanh)
		}),
	}),
		row{call: "nn.LayerNorm(1e-5, x, y, z), (2, 3, 4)", in: dims([]int{2, 3, 4}, []int{4},
			[]int{4}),
			build: func(x gorgonia.Nodes) gorgonia.Nodes {
				return gorgonia.Nodes{must(nn.LayerNorm(epsilon, x[0], x[1], x[2]))}
			},
			want: func(x, _ []array) []array {
				return []array{affine(normalize(x[0], 6, rows(3)), x[1].reshape(1, 1, 4),
					x[2].reshape(1, 1, 4))}
			}})
}

// ourDropoutRows take the mask from the result, as those of Gorgonia's Dropout.
func ourDropoutRows() []row {
	masked := func(call string, ps ...float64) row {
		var random *nn.Random
		return row{call: call, in: dims([]int{20, 10}), distinct: true, again: func() {
			random.Next(0)
		},
			build: func(x gorgonia.Nodes) (y gorgonia.Nodes) {
				random = nn.NewRandom(1)
				for _, p := range ps {
					y = append(y, must(nn.Dropout(p, random, x[0])))
				}
				return y
			},
			want: func(x, got []array) (want []array) {
				for k, p := range ps {
					want = append(want, generate(x[0].shape, func(i []int) float64 {
						return x[0].at(i...) / (1 - p) * truth(got[k].at(i...) != 0)
					}))
				}
				return want
			}}
	}
	return []row{
		masked("nn.Dropout(0.2, random, x)", 0.2),
		masked("nn.Dropout(0.5, random, x), twice", 0.5, 0.5),
		masked("nn.Dropout(0.1, random, x) and nn.Dropout(0.9, random, x)", 0.1, 0.9),
	}
}

func ourPoolRows() []row {
	var rows []row
	for _, r := range []struct{ kernel, pad, stride int }{{2, 0, 2}, {3, 0, 1}, {3, 1, 2}} {
		rows = append(rows, of1(fmt.Sprintf("nn.AvgPool2D(x), kernel %d, stride %d, pad %d",
			r.kernel, r.stride, r.pad), []int{1, 2, 5, 5}, func(x *gorgonia.Node) (
			*gorgonia.Node, error) {
			return nn.AvgPool2D([2]int{r.kernel, r.kernel}, [2]int{r.pad, r.pad},
				[2]int{r.stride, r.stride}, x)
		}, square(r.kernel, r.pad, r.stride, 1).mean))
	}
	for _, r := range []struct{ kernel, pad, stride, dilation int }{{2, 0, 2, 1}, {3, 1, 1, 1},
		{2, 1, 1, 2}} {
		w := square(r.kernel, r.pad, r.stride, r.dilation)
		rows = append(rows, of1(fmt.Sprintf("nn.MaxPool2D(x), kernel %d, stride %d, pad %d, "+
			"dilation %d", r.kernel, r.stride, r.pad, r.dilation), []int{1, 2, 5, 5},
			func(x *gorgonia.Node) (*gorgonia.Node, error) {
				return nn.MaxPool2D(w.kernel, [2]int{r.pad, r.pad}, w.stride, x,
					nn.PoolOptions{Dilation: w.dilation})
			}, w.max))
		rows = append(rows, of2(fmt.Sprintf("nn.Conv2D(x, y), kernel %d, stride %d, pad %d, "+
			"dilation %d", r.kernel, r.stride, r.pad, r.dilation), []int{2, 3, 5, 6},
			[]int{4, 3, r.kernel, r.kernel}, func(x, y *gorgonia.Node) (*gorgonia.Node, error) {
				return nn.Conv2D(nn.ConvOptions{Pad: []int{r.pad, r.pad}, Stride: w.stride[:],
					Dilation: w.dilation[:]}, x, y, nil)
			}, w.convolve))
	}
	return append(rows, of1("nn.GlobalAvgPool2D(x)", []int{2, 3, 4, 4}, nn.GlobalAvgPool2D,
		square(4, 0, 1, 1).mean))
}

func ourProductRows() []row {
	outer := func(x, y array) array {
		return generate([]int{x.shape[0], y.shape[0]}, func(i []int) float64 {
			return x.at(i[0]) * y.at(i[1])
		})
	}
	rows := []row{of2("nn.OuterProd(x, y)", []int{3}, []int{4}, nn.OuterProd, outer)}
	for _, r := range []struct {
		a, b           []int
		transA, transB bool
	}{
		{[]int{2, 3, 4}, []int{2, 4, 5}, false, false}, {[]int{2, 2, 4, 3}, []int{2, 2, 4, 5}, true,
			false},
		{[]int{2, 3, 4}, []int{2, 5, 4}, false, true}, {[]int{4, 3}, []int{5, 4}, true, true},
	} {
		call := fmt.Sprintf("nn.BatchedMatMul(%v, %v, x, y), %d axes", r.transA, r.transB, len(r.a))
		rows = append(rows, of2(call, r.a, r.b, func(a, b *gorgonia.Node) (*gorgonia.Node, error) {
			return nn.BatchedMatMul(r.transA, r.transB, a, b)
		}, func(x, y array) array { return matmul(x.swapped(r.transA), y.swapped(r.transB)) }))
	}
	return rows
}

func ourAttentionRows() []row {
	attended := func(q, k, v array, causal bool) array {
		scores := matmul(q, k.swapped(true))
		hidden := func(i []int) bool { return causal && i[3] > i[2]+k.shape[2]-q.shape[2] }
		weights := softmax(generate(scores.shape, func(i []int) float64 {
			if hidden(i) {
				return math.Inf(-1)
			}
			return scores.at(i...) / math.Sqrt(float64(q.shape[3]))
		}), 3)
		return matmul(weights, v)
	}
	var rows []row
	for _, causal := range []bool{false, true} {
		rows = append(
			rows, row{call: fmt.Sprintf("nn.Attention(x, y, z), (2, 2, 3, 4) and (2, 2, 5, 4), "+
				"causal %v", causal),
				in: dims([]int{2, 2, 3, 4}, []int{2, 2, 5, 4}, []int{2, 2, 5, 4}),
				build: func(x gorgonia.Nodes) gorgonia.Nodes {
					return gorgonia.Nodes{must(
						nn.Attention(x[0], x[1], x[2], nn.AttentionOptions{Causal: causal}))}
				},
				want: func(x, _ []array) []array {
					return []array{attended(x[0], x[1], x[2], causal)}
				}})
	}
	return rows
}
