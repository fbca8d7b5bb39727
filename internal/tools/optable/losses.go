package main

import (
	"fmt"
	"math"
	"slices"

	G "gorgonia.org/gorgonia"
)

func lossRows() []row {
	var rows []row
	for _, r := range []struct {
		says  string
		shape []int
		axes  []int // as given; the last one without
		axis  int
	}{
		{"x), (5)", []int{5}, nil, 0}, {"x), (3, 4)", []int{3, 4}, nil, 1}, {"x, 0), (3, 4)",
			[]int{3, 4}, []int{0}, 0}, {"x, 1), (3, 4)", []int{3, 4}, []int{1}, 1},
		{"x), (2, 3, 4)", []int{2, 3, 4}, nil, 2}, {"x, 0), (2, 3, 4)", []int{2, 3, 4}, []int{0},
			0}, {"x, 1), (2, 3, 4)", []int{2, 3, 4}, []int{1}, 1},
		{"x), (2, 2, 3, 4)", []int{2, 2, 3, 4}, nil, 3}, {"x, 1), (2, 2, 3, 4)", []int{2, 2, 3, 4},
			[]int{1}, 1},
		{"x), (1, 4)", []int{1, 4}, nil, 1}, {"x), (4, 1)", []int{4, 1}, nil, 1}, {"x, 0), (4, 1)",
			[]int{4, 1}, []int{0}, 0},
	} {
		rows = append(rows,
			of1("SoftMax("+r.says, r.shape, func(x N) (N, error) {
				return G.SoftMax(x, r.axes...)
			},
				func(x array) array { return softmax(x, r.axis) }).instead("`nn.SoftMax`"),
			of1("LogSoftMax("+r.says, r.shape, func(x N) (N, error) {
				return G.LogSoftMax(x, r.axes...)
			},
				func(x array) array { return softmax(x, r.axis).apply(math.Log) }).
				instead("`nn.LogSoftMax`"))
	}
	// SoftMax, LogSoftMax
	slices.SortStableFunc(rows, func(a, b row) int { return int(b.call[0]) - int(a.call[0]) })
	return append(slices.Concat(rows, sparsemaxRows(), crossEntropyRows(), logRows()),
		ctcRow("CTCLoss(LogSoftMax(x), ..., ReductionMean)", true, G.ReductionMean).instead(
			"`ReductionSum`"),
		ctcRow("CTCLoss(LogSoftMax(x), ..., ReductionSum)", true, G.ReductionSum),
		ctcRow("CTCLoss(LogSoftMax(x), ..., ReductionSum), in an expression", false,
			G.ReductionSum).instead("`CTCLoss` as the whole loss"),
		ctcRow("CTCLoss(LogSoftMax(x), ...) with ReductionSum and ReductionMean", false,
			G.ReductionSum, G.ReductionMean).nowhere(),
	)
}

func sparsemaxRows() (rows []row) {
	for _, r := range []struct {
		shape []int
		axes  []int // as given; the last one without
		axis  int
	}{{[]int{3, 4}, nil, 1}, {[]int{3, 4}, []int{0}, 0}, {[]int{3, 4}, []int{1}, 1}, {[]int{1, 4},
		nil, 1}, {[]int{5, 2}, nil, 1}, {[]int{4, 1}, []int{0}, 0}} {
		call := "Sparsemax(x), "
		if r.axes != nil {
			call = fmt.Sprintf("Sparsemax(x, %d), ", r.axis)
		}
		rows = append(rows, of1(call+shown(r.shape), r.shape, func(x N) (N, error) {
			return G.Sparsemax(x, r.axes...)
		}, func(x array) array { return sparsemax(x, r.axis) }).instead(
			"`Sparsemax` between two `Transpose`"))
	}
	return rows
}

func crossEntropyRows() []row {
	loss := func(p, t float64) float64 { return -t*math.Log(p) - (1-t)*math.Log(1-p) }
	return append(elementwise([]row{
		of2("BinaryXent(x, y)", []int{3, 4}, []int{3, 4}, G.BinaryXent,
			func(p, t array) array { return zip(p, t, loss) }).with(interval),
	}), of2("BinaryXent(Sigmoid(x), y)", []int{3, 4}, []int{3, 4}, func(x, t N) (N, error) {
		return G.BinaryXent(must(G.Sigmoid(x)), t)
	}, func(x, t array) array { return zip(x.apply(sigmoid), t, loss) }).with(interval))
}

// logRows take the logarithm of a softmax along the last axis.
func logRows() (rows []row) {
	for _, shape := range [][]int{{3, 4}, {5}, {1, 4}, {2, 3, 4}, {2, 3, 4, 2}} {
		rows = append(rows, of1("Log(SoftMax(x)), "+shown(shape), shape, func(x N) (N, error) {
			return G.Log(must(G.SoftMax(x)))
		}, func(x array) array { return softmax(x, len(shape)-1).apply(math.Log) }))
	}
	return rows
}

// sparsemax is the point of the simplex nearest to x, along an axis of a matrix.
func sparsemax(x array, axis int) array {
	return generate(x.shape, func(i []int) float64 {
		var z []float64
		for k := range x.shape[axis] {
			at := slices.Clone(i)
			at[axis] = k
			z = append(z, x.at(at...))
		}
		slices.SortFunc(z, func(a, b float64) int { return int(math.Copysign(1, b-a)) })
		sum, threshold := 0.0, 0.0
		for k, v := range z {
			if sum += v; 1+float64(k+1)*v > sum {
				threshold = (sum - 1) / float64(k+1)
			}
		}
		return max(x.at(i...)-threshold, 0)
	})
}

// ctcRow is the loss of log-probabilities of 4 steps, 2 sequences and 3 labels, of which 0 is the
// blank.
func ctcRow(call string, whole bool, reductions ...G.Reduction) row {
	targets := []int{1, 2, 2, 1}
	return row{call: call, whole: whole,
		in: []input{{shape: []int{4, 2, 3}}, {shape: []int{2, 2}, kind: integers, ints: targets},
			{shape: []int{2}, kind: integers, ints: []int{4, 4}}, {shape: []int{2}, kind: integers,
				ints: []int{2, 2}}},
		build: func(x G.Nodes) (losses G.Nodes) {
			logs := must(G.LogSoftMax(x[0]))
			for _, reduction := range reductions {
				losses = append(losses, must(G.CTCLoss(logs, x[1], x[2], x[3], reduction)))
			}
			return losses
		},
		want: func(x, _ []array) (losses []array) {
			p := softmax(x[0], 2)
			total := ctc(p, 0, targets[:2]) + ctc(p, 1, targets[2:])
			for _, reduction := range reductions {
				share := 1.0
				if reduction == G.ReductionMean {
					share = 2 * 2 // the target's length, and the mean over the sequences
				}
				losses = append(losses, array{nil, []float64{total / share}})
			}
			return losses
		}}
}

// ctc is minus the logarithm of the probability of all paths that spell the target.
func ctc(p array, sequence int, target []int) float64 {
	steps, labels, total := p.shape[0], p.shape[2], 0.0
	paths := 1
	for range steps {
		paths *= labels
	}
	for path := range paths {
		probability, rest, last := 1.0, path, 0
		var spelled []int
		for t := range steps {
			label := rest % labels
			rest /= labels
			probability *= p.at(t, sequence, label)
			if label != 0 && label != last {
				spelled = append(spelled, label)
			}
			last = label
		}
		if slices.Equal(spelled, target) {
			total += probability
		}
	}
	return -math.Log(total)
}
