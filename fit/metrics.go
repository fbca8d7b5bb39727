package fit

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
)

// Metric is a number that tells how good a model is: a function of sums that all ranks add up. You
// can define your own. The machine must keep the nodes that a metric reads (vm.Keep).
type Metric struct {
	Name string
	Less bool            // a smaller value is better
	Sums func(n int) int // how many sums there are for n samples; nil: 0
	// Add adds a run's results for samples, given their numbers: the first rows of the nodes.
	Add func(sums []float64, samples []int) error
	// Value returns the metric, given the sums of all ranks and the mean loss; NaN means none.
	Value func(sums []float64, loss float64) float64

	check func(g *gorgonia.ExprGraph) error // finds what is wrong before a machine of g runs
	reads *gorgonia.Node                    // labels, nil for none
}

// Accuracy is the share of samples whose label has the highest score.
//
//	scores [b, n], labels [b] of Int
func Accuracy(scores, labels *gorgonia.Node) Metric {
	m := TopK(1, scores, labels)
	m.Name = "accuracy"
	return m
}

// TopK is the share of samples whose label is among the k highest scores. For a k of 5 its name is
// "top5". Of equal scores the first one counts as the highest. Shapes are as for [Accuracy], and
// there must be k scores.
func TopK(k int, scores, labels *gorgonia.Node) Metric {
	check := func(g *gorgonia.ExprGraph) error {
		err := classify(g, scores, labels)
		if err == nil && (k < 1 || k > scores.Shape()[1]) {
			err = refused("TopK of %d: there are %d scores, so use 1 to %[2]d", k,
				scores.Shape()[1])
		}
		return err
	}
	return Metric{Name: fmt.Sprint("top", k), check: check, reads: labels,
		Sums: func(int) int { return 2 },
		Add: func(sums []float64, samples []int) error {
			return eachRow(scores, labels, samples, func(row []float64, label int) {
				sums[1]++
				if place(row, label) < k {
					sums[0]++
				}
			})
		},
		Value: func(sums []float64, _ float64) float64 { return sums[0] / sums[1] }}
}

// Confusion fills the square matrix[label][guess] with how often each class was taken for which.
// Its value, named "recall", is the share of samples recognised in a class, as a mean over all
// classes that occur. Shapes are as for [Accuracy].
func Confusion(matrix [][]int, scores, labels *gorgonia.Node) Metric {
	n := len(matrix)
	check := func(g *gorgonia.ExprGraph) error {
		err, other := classify(g, scores, labels), func(row []int) bool { return len(row) != n }
		if err == nil && (n != scores.Shape()[1] || slices.ContainsFunc(matrix, other)) {
			err = refused("a confusion matrix for %d classes has as many rows, of as many numbers "+
				"each", scores.Shape()[1])
		}
		return err
	}
	return Metric{Name: "recall", check: check, reads: labels, Sums: func(int) int { return n * n },
		Add: func(sums []float64, samples []int) error {
			return eachRow(scores, labels, samples, func(row []float64, label int) {
				for guess := range row {
					if place(row, guess) == 0 {
						sums[label*n+guess]++
					}
				}
			})
		},
		Value: func(sums []float64, _ float64) float64 {
			recall, there := 0.0, 0.0
			for label, row := range matrix {
				all := 0.0
				for guess := range row {
					row[guess] = int(sums[label*n+guess])
					all += sums[label*n+guess]
				}
				if all > 0 {
					recall, there = recall+sums[label*n+label]/all, there+1
				}
			}
			return recall / there
		}}
}

// AUC is the area under the ROC curve: how likely it is that a sample of label 1 has a higher score
// than one of label 0; equal scores count a half. It is exact, and there is none unless both labels
// occur.
//
//	scores [b] or [b, 1], labels [b] of numbers, 1 or 0
//
// Cost: an all-gather of 16 bytes for each sample.
func AUC(scores, labels *gorgonia.Node) Metric {
	check := func(g *gorgonia.ExprGraph) error {
		err := within(g, scores, labels)
		if err != nil {
			return err
		}
		if n, of := scores.Shape().TotalSize(), labels.Shape().TotalSize(); n != of {
			err = refused("AUC of %d scores and %d labels: give the score of label 1 alone", n, of)
		}
		return err
	}
	return Metric{Name: "auc", check: check, reads: labels, Sums: func(n int) int { return 2 * n },
		Add: func(sums []float64, samples []int) error {
			x, y := numbers(scores), numbers(labels)
			if len(x) < len(samples) || len(y) < len(samples) {
				return unkept()
			}
			for i, sample := range samples {
				if y[i] != 0 && y[i] != 1 {
					return refused("AUC of sample %d, whose label %v is not 0 or 1", sample, y[i])
				}
				sums[2*sample], sums[2*sample+1] = x[i], y[i]
			}
			return nil
		},
		Value: func(sums []float64, _ float64) float64 {
			return area(slices.Collect(slices.Chunk(sums, 2)))
		}}
}

// Perplexity is the exponential of the mean loss.
func Perplexity() Metric {
	return Metric{Name: "perplexity", Less: true,
		Value: func(_ []float64, loss float64) float64 { return math.Exp(loss) }}
}

// area returns the AUC of pairs of a score and a label, by the ranks of Mann and Whitney.
func area(pairs [][]float64) float64 {
	slices.SortFunc(pairs, func(a, b []float64) int { return cmp.Compare(a[0], b[0]) })
	var won, zeros, ones float64 // pairs that a one has won, and labels so far
	for len(pairs) > 0 {
		equal := slices.IndexFunc(pairs, func(p []float64) bool { return p[0] != pairs[0][0] })
		if equal < 0 {
			equal = len(pairs)
		}
		if equal == 0 { // NaN is not itself
			return math.NaN()
		}
		here := 0.0
		for _, p := range pairs[:equal] {
			here += p[1]
		}
		won += here * (zeros + (float64(equal)-here)/2)
		zeros, ones, pairs = zeros+float64(equal)-here, ones+here, pairs[equal:]
	}
	return won / (zeros * ones)
}

// eachRow calls f with the scores and the label of each of the samples, in the first rows.
func eachRow(scores, labels *gorgonia.Node, samples []int,
	f func(row []float64, label int)) error {
	x, y := numbers(scores), numbers(labels)
	if len(x) == 0 || min(len(y), len(x)/scores.Shape()[1]) < len(samples) {
		return unkept()
	}
	classes := scores.Shape()[1]
	for i, sample := range samples {
		if label := int(y[i]); float64(label) != y[i] || label < 0 || label >= classes {
			return refused("sample %d has label %v of %d classes", sample, y[i], classes)
		}
		f(x[i*classes:(i+1)*classes], int(y[i]))
	}
	return nil
}

// within returns an error unless scores and labels are nodes of a graph.
func within(g *gorgonia.ExprGraph, scores, labels *gorgonia.Node) error {
	err := backend.Given("", "scores", scores, "labels", labels)
	for _, n := range []*gorgonia.Node{scores, labels} {
		if err == nil && n.Graph() != g {
			err = refused("%s is of another graph than the machine's", n.Name())
		}
	}
	return err
}

// classify returns an error unless there is a row of scores, [b, n], for each label, [b].
func classify(g *gorgonia.ExprGraph, scores, labels *gorgonia.Node) error {
	err := within(g, scores, labels)
	if err == nil && (scores.Dims() != 2 || labels.Shape().TotalSize() != scores.Shape()[0]) {
		err = refused("scores are %v and labels %v: want [b, n] and [b]", scores.Shape(),
			labels.Shape())
	}
	return err
}

// unkept is the error for nodes that do not have a row for each sample.
func unkept() error {
	return refused("scores and labels of a metric must have a row for each sample of a batch, " +
		"and the machine must keep them (vm.Keep)")
}

// place returns how many scores are higher than one, or equal and before it. NaN is never high.
func place(row []float64, of int) (n int) {
	for c, x := range row {
		if x > row[of] || x == row[of] && c < of || math.IsNaN(row[of]) {
			n++
		}
	}
	return n
}

// numbers returns the elements of a node's value, or nothing.
func numbers(n *gorgonia.Node) []float64 {
	if n == nil || n.Value() == nil {
		return nil
	}
	switch x := n.Value().Data().(type) {
	case float32:
		return []float64{float64(x)}
	case float64:
		return []float64{x}
	case []float32:
		return widened(x)
	case []float64:
		return x
	case []int:
		return widened(x)
	}
	return nil
}

// lossOf returns the value of the loss, NaN if it has none.
func lossOf(d Data) float64 {
	if x := numbers(d.Loss); len(x) == 1 {
		return x[0]
	}
	return math.NaN()
}

func widened[T float32 | int](from []T) []float64 {
	to := make([]float64, len(from))
	for i, x := range from {
		to[i] = float64(x)
	}
	return to
}
