package main

import (
	"fmt"
	"math"

	"gorgonia.org/gorgonia"
)

const epsilon = 1e-5

// normalize subtracts the mean and divides by the standard deviation of the elements that group
// puts together, of n groups.
func normalize(x array, n int, group func(i []int) int) array {
	return normalizeWith(x, epsilon, n, group)
}

func normalizeWith(x array, epsilon float64, n int, group func(i []int) int) array {
	count, mean, variance := make([]float64, n), make([]float64, n), make([]float64, n)
	generate(x.shape, func(i []int) float64 { count[group(i)]++; mean[group(i)] += x.at(i...); return 0 })
	for g := range mean {
		mean[g] /= count[g]
	}
	generate(x.shape, func(i []int) float64 {
		g := group(i)
		variance[g] += (x.at(i...) - mean[g]) * (x.at(i...) - mean[g]) / count[g]
		return 0
	})
	return generate(x.shape, func(i []int) float64 { g := group(i); return (x.at(i...) - mean[g]) / math.Sqrt(variance[g]+epsilon) })
}

// affine is x*gain + bias.
func affine(x, gain, bias array) array {
	return zip(zip(x, gain, func(a, b float64) float64 { return a * b }), bias, plus)
}

func normRows() []row {
	batch := func(x gorgonia.Nodes) gorgonia.Nodes {
		y, _, _, _, err := gorgonia.BatchNorm(x[0], x[1], x[2], 0.1, epsilon)
		return gorgonia.Nodes{must(y, err)}
	}
	channels := func(x []array, _ []array) []array {
		return []array{affine(normalize(x[0], x[0].shape[1], func(i []int) int { return i[1] }), x[1], x[2])}
	}
	groups := func(x []array, _ []array) []array {
		return []array{affine(normalize(x[0], 4, func(i []int) int { return i[0]*2 + i[1]/2 }), x[1], x[2])}
	}
	return append([]row{
		{call: "BatchNorm(x, y, z, 0.1, 1e-5), (6, 4)", in: dims([]int{6, 4}, []int{6, 4}, []int{6, 4}), build: batch, want: channels},
		{call: "BatchNorm(x, y, z, 0.1, 1e-5), (6, 4), y (1, 4)", in: dims([]int{6, 4}, []int{1, 4}, []int{1, 4}), build: batch, want: channels},
		{call: "BatchNorm(x, y, z, 0.1, 1e-5), (3, 2, 2, 2), y (1, 2, 1, 1)", in: dims([]int{3, 2, 2, 2}, []int{1, 2, 1, 1}, []int{1, 2, 1, 1}), build: batch, want: channels},
		{call: "GroupNorm(x, y, z, 2, 4, 1e-5), (2, 4, 2, 2)", in: dims([]int{2, 4, 2, 2}, []int{1, 4, 1, 1}, []int{1, 4, 1, 1}), want: groups,
			build: func(x gorgonia.Nodes) gorgonia.Nodes {
				return gorgonia.Nodes{must(gorgonia.GroupNorm(x[0], x[1], x[2], 2, 4, epsilon))}
			}},
	}, dropoutRows()...)
}

// dropoutRows take the mask from the result.
func dropoutRows() []row {
	var rows []row
	for _, p := range []float64{0.2, 0.5} {
		rows = append(rows, row{call: fmt.Sprintf("Dropout(x, %v)", p), in: dims([]int{20, 10}), random: true, use: "`nn.Dropout`",
			build: func(x gorgonia.Nodes) gorgonia.Nodes { return gorgonia.Nodes{must(gorgonia.Dropout(x[0], p))} },
			want: func(x, got []array) []array {
				kept := 0
				y := generate(x[0].shape, func(i []int) float64 {
					if got[0].at(i...) == 0 {
						return 0
					}
					kept++
					return x[0].at(i...) / (1 - p)
				})
				if share := float64(kept) / 200; math.Abs(share-(1-p)) > 0.25 { // 7 standard deviations
					return nil
				}
				return []array{y}
			}})
	}
	return append(rows, randomRows()...)
}

// randomRows only check bounds: two draws differ.
func randomRows() []row {
	random := func(call string, build func(x *gorgonia.Node) *gorgonia.Node, ok func(v float64) bool) row {
		r := of1(call, []int{1}, nil, nil).nowhere()
		r.random = true
		r.build = func(x gorgonia.Nodes) gorgonia.Nodes { return gorgonia.Nodes{build(x[0])} }
		r.want = func(_, got []array) []array {
			for _, v := range got[0].data {
				if !ok(v) {
					return nil
				}
			}
			return []array{{[]int{20, 10}, got[0].data}}
		}
		return r
	}
	return []row{
		random("UniformRandomNode(g, dt, 2, 3, 20, 10)", func(x *gorgonia.Node) *gorgonia.Node {
			return gorgonia.UniformRandomNode(x.Graph(), x.Dtype(), 2, 3, 20, 10)
		}, func(v float64) bool { return v >= 2 && v <= 3 }),
		random("GaussianRandomNode(g, dt, 2, 3, 20, 10)", func(x *gorgonia.Node) *gorgonia.Node {
			return gorgonia.GaussianRandomNode(x.Graph(), x.Dtype(), 2, 3, 20, 10)
		}, func(v float64) bool { return math.Abs(v-2) < 30 }),
		random("BinomialRandomNode(g, dt, 1, 0.5, 20, 10)", func(x *gorgonia.Node) *gorgonia.Node {
			return gorgonia.BinomialRandomNode(x.Graph(), x.Dtype(), 1, 0.5, 20, 10)
		}, func(v float64) bool { return v == 0 || v == 1 }),
	}
}
