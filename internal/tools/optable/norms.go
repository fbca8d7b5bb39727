package main

import (
	"fmt"
	"math"
	"slices"

	G "gorgonia.org/gorgonia"
)

const epsilon = 1e-5

// normalize subtracts the mean and divides by the standard deviation of the elements that group
// puts together, of n groups.
func normalize(x array, n int, group func(i []int) int) array {
	return normalizeWith(x, epsilon, n, group)
}

func normalizeWith(x array, epsilon float64, n int, group func(i []int) int) array {
	count, mean, variance := make([]float64, n), make([]float64, n), make([]float64, n)
	generate(x.shape, func(i []int) float64 {
		count[group(i)]++
		mean[group(i)] += x.at(i...)
		return 0
	})
	for g := range mean {
		mean[g] /= count[g]
	}
	generate(x.shape, func(i []int) float64 {
		g := group(i)
		variance[g] += (x.at(i...) - mean[g]) * (x.at(i...) - mean[g]) / count[g]
		return 0
	})
	return generate(x.shape, func(i []int) float64 {
		g := group(i)
		return (x.at(i...) - mean[g]) / math.Sqrt(variance[g]+epsilon)
	})
}

// affine is x*gain + bias.
func affine(x, gain, bias array) array {
	return zip(zip(x, gain, func(a, b float64) float64 { return a * b }), bias, plus)
}

func normRows() []row {
	batch := func(x G.Nodes) G.Nodes {
		y, _, _, _, err := G.BatchNorm(x[0], x[1], x[2], 0.1, epsilon)
		return G.Nodes{must(y, err)}
	}
	channels := func(x []array, _ []array) []array {
		return []array{affine(normalize(x[0], x[0].shape[1], func(i []int) int { return i[1] }),
			x[1], x[2])}
	}
	var rows []row
	for _, r := range []struct{ x, gain []int }{
		{[]int{6, 4}, []int{6, 4}}, {[]int{6, 4}, []int{1, 4}}, {[]int{3, 2, 2, 2},
			[]int{1, 2, 1, 1}},
		{[]int{4, 1}, []int{1, 1}}, {[]int{2, 3, 1, 5}, []int{1, 3, 1, 1}}, {[]int{5, 2, 1, 1},
			[]int{1, 2, 1, 1}},
	} {
		rows = append(rows, row{call: fmt.Sprintf("BatchNorm(x, y, z, 0.1, 1e-5), %s, y %s",
			shown(r.x), shown(r.gain)),
			in: dims(r.x, r.gain, r.gain), build: batch, want: channels})
	}
	return slices.Concat(rows, groupNormRows(), dropoutRows())
}

// groupNormRows have groups of few and, from 264 elements on, of many elements.
func groupNormRows() (rows []row) {
	for _, r := range []struct {
		x      []int
		groups int
	}{
		{[]int{2, 4, 2, 2}, 2}, {[]int{1, 2, 3, 3}, 1}, {[]int{2, 3, 1, 2}, 3}, {[]int{1, 4, 1, 1},
			2}, {[]int{2, 6, 2, 1}, 3},
		{[]int{1, 1, 1, 263}, 1}, {[]int{1, 1, 12, 22}, 1}, {[]int{1, 2, 17, 16}, 2},
		{[]int{1, 4, 16, 16}, 2},
	} {
		rows = append(rows, groupNormOf(r.x, r.groups))
	}
	return rows
}

func groupNormOf(x []int, groups int) row {
	channels := x[1]
	gain := []int{1, channels, 1, 1}
	group := func(i []int) int { return i[0]*groups + i[1]/(channels/groups) }
	return row{call: fmt.Sprintf("GroupNorm(x, y, z, %d, %d, 1e-5), %s", groups, channels,
		shown(x)),
		in: dims(x, gain, gain),
		want: func(x []array, _ []array) []array {
			return []array{affine(normalize(x[0], groups*x[0].shape[0], group), x[1], x[2])}
		},
		build: func(x G.Nodes) G.Nodes {
			return G.Nodes{must(G.GroupNorm(x[0], x[1], x[2], groups, channels, epsilon))}
		}}
}

// dropoutRows take the mask from the result.
func dropoutRows() []row {
	var rows []row
	for _, p := range []float64{0.2, 0.5, 0.1, 0.7, 0.8} {
		rows = append(rows, row{call: fmt.Sprintf("Dropout(x, %v)", p), in: dims([]int{20, 10}),
			random: true, use: "`nn.Dropout`",
			build: func(x G.Nodes) G.Nodes { return G.Nodes{must(G.Dropout(x[0], p))} },
			want: func(x, got []array) []array {
				kept := 0
				y := generate(x[0].shape, func(i []int) float64 {
					if got[0].at(i...) == 0 {
						return 0
					}
					kept++
					return x[0].at(i...) / (1 - p)
				})
				// 7 standard deviations
				if share := float64(kept) / 200; math.Abs(share-(1-p)) > 0.25 {
					return nil
				}
				return []array{y}
			}})
	}
	return append(rows, randomRows()...)
}

// randomRows only check bounds: two draws differ.
func randomRows() (rows []row) {
	random := func(call string, shape []int, build func(x N) N,
		ok func(v float64) bool) {
		r := of1(call+shown(shape), []int{1}, nil, nil).nowhere()
		r.random = true
		r.build = func(x G.Nodes) G.Nodes { return G.Nodes{build(x[0])} }
		r.want = func(_, got []array) []array {
			if slices.ContainsFunc(got[0].data, func(v float64) bool { return !ok(v) }) {
				return nil
			}
			return []array{{shape, got[0].data}}
		}
		rows = append(rows, r)
	}
	for _, shape := range [][]int{{20, 10}, {5}, {1, 4}, {4, 1}, {2, 3, 4, 2}} {
		random("UniformRandomNode(g, dt, 2, 3, ...), ", shape,
			func(x N) N {
				return G.UniformRandomNode(x.Graph(), x.Dtype(), 2, 3, shape...)
			}, func(v float64) bool { return v >= 2 && v <= 3 })
		random("GaussianRandomNode(g, dt, 2, 3, ...), ", shape,
			func(x N) N {
				return G.GaussianRandomNode(x.Graph(), x.Dtype(), 2, 3, shape...)
			}, func(v float64) bool { return math.Abs(v-2) < 30 })
		random("BinomialRandomNode(g, dt, 1, 0.5, ...), ", shape,
			func(x N) N {
				return G.BinomialRandomNode(x.Graph(), x.Dtype(), 1, 0.5, shape...)
			}, func(v float64) bool { return v == 0 || v == 1 })
	}
	return rows
}
