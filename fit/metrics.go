package fit

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
)

// Metric is a number that tells how good a model is: a function of sums that all ranks add up. A
// metric of one's own is a value of this type. Nodes that it reads are kept by the machine, with
// vm.Keep.
type Metric struct {
	Name string
	Less bool // a smaller value is better
	// Sums returns how many sums there are for n samples. nil for none.
	Sums func(n int) int
	// Add adds what a run says of samples, given their numbers: the first rows of its nodes.
	Add func(sums []float64, samples []int) error
	// Value returns the metric from the sums of all ranks and the mean loss, NaN if there is none.
	Value func(sums []float64, loss float64) float64
}

// Accuracy is the share of samples whose highest score is that of their label.
//
//	scores [b, n], labels [b] of Int
func Accuracy(scores, labels *gorgonia.Node) Metric {
	m := TopK(1, scores, labels)
	m.Name = "accuracy"
	return m
}

// TopK is the share of samples whose label is among the k highest scores. Of equal scores the first
// ones are higher. Its name is "top5" for 5. Shapes are those of [Accuracy].
func TopK(k int, scores, labels *gorgonia.Node) Metric {
	return Metric{Name: fmt.Sprint("top", k), Sums: constant(2),
		Add: func(sums []float64, samples []int) error {
			return eachRow(scores, labels, len(samples), func(row []float64, label int) {
				sums[1]++
				if rank(row, label) < k {
					sums[0]++
				}
			})
		},
		Value: quotient}
}

// Confusion counts how often each class was taken for which, in matrix[label][guess], which it
// fills. Its value, named "recall", is the mean over the classes of the share of their samples that
// were recognised. Shapes are those of [Accuracy].
func Confusion(matrix [][]int, scores, labels *gorgonia.Node) Metric {
	n := len(matrix)
	return Metric{Name: "recall", Sums: constant(n * n),
		Add: func(sums []float64, samples []int) error {
			return eachRow(scores, labels, len(samples), func(row []float64, label int) {
				if guess := highest(row); label < n && guess < n {
					sums[label*n+guess]++
				}
			})
		},
		Value: func(sums []float64, _ float64) float64 {
			recall, classes := 0.0, 0.0
			for label, row := range matrix {
				all := 0.0
				for guess := range min(n, len(row)) {
					row[guess] = int(sums[label*n+guess])
					all += sums[label*n+guess]
				}
				if all > 0 {
					recall, classes = recall+sums[label*n+label]/all, classes+1
				}
			}
			return recall / classes
		}}
}

// AUC is the area under the ROC curve: how likely a sample of label 1 has a higher score than one
// of label 0; equal scores count a half. It is exact. There is none without samples of both labels.
//
//	scores [b] or [b, 1]; labels [b] of numbers, 1 or 0
//
// Cost: an all-gather of 16 bytes for each sample.
func AUC(scores, labels *gorgonia.Node) Metric {
	return Metric{Name: "auc", Sums: func(n int) int { return 2 * n },
		Add: func(sums []float64, samples []int) error {
			err := backend.Given("fit.AUC", "scores", scores, "labels", labels)
			if err != nil {
				return err
			}
			for i, sample := range samples {
				sums[2*sample], sums[2*sample+1] = number(scores, i), number(labels, i)
			}
			return nil
		},
		Value: func(sums []float64, _ float64) float64 { return area(sums) }}
}

// Perplexity is the exponential of the mean loss.
func Perplexity() Metric {
	return Metric{Name: "perplexity", Less: true,
		Value: func(_ []float64, loss float64) float64 { return math.Exp(loss) }}
}

func constant(n int) func(int) int { return func(int) int { return n } }

func quotient(sums []float64, _ float64) float64 { return sums[0] / sums[1] }

// area returns the AUC of pairs of a score and a label, by the ranks of Mann and Whitney.
func area(pairs []float64) float64 {
	order := make([]int, len(pairs)/2)
	for i := range order {
		if order[i] = i; math.IsNaN(pairs[2*i] + pairs[2*i+1]) {
			return math.NaN()
		}
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(pairs[2*a], pairs[2*b]) })
	var below, won, ones float64 // zeros with a lower score; pairs that a one has won
	for i := 0; i < len(order); {
		zerosHere, onesHere := 0.0, 0.0
		for score := pairs[2*order[i]]; i < len(order) && pairs[2*order[i]] == score; i++ {
			if pairs[2*order[i]+1] == 1 {
				onesHere++
			} else {
				zerosHere++
			}
		}
		won += onesHere * (below + zerosHere/2)
		below, ones = below+zerosHere, ones+onesHere
	}
	return won / (below * ones)
}

// eachRow calls f with the scores and the label of each of the first n samples.
func eachRow(scores, labels *gorgonia.Node, n int, f func(row []float64, label int)) error {
	if err := backend.Given("fit.Metric", "scores", scores, "labels", labels); err != nil {
		return err
	}
	if scores.Dims() != 2 || scores.Shape()[0] < n || scores.Value() == nil {
		return fmt.Errorf("%w: scores %v: they must be [b, n], and kept by the machine: vm.Keep",
			backend.ErrArgument, scores.Shape())
	}
	classes, values := scores.Shape()[1], numbers(scores)
	targets, ok := labels.Value().Data().([]int)
	if !ok || len(targets) < n {
		return fmt.Errorf("%w: labels %v of %v: they must be [b] of Int", backend.ErrArgument,
			labels.Shape(), labels.Dtype())
	}
	row := make([]float64, classes)
	for i := range n {
		for c := range row {
			row[c] = values(i*classes + c)
		}
		if targets[i] < 0 || targets[i] >= classes {
			return fmt.Errorf("%w: the label %d, of %d classes", backend.ErrArgument, targets[i],
				classes)
		}
		f(row, targets[i])
	}
	return nil
}

// rank returns how many scores are higher than one, or equal and before it.
func rank(row []float64, of int) (n int) {
	for c, x := range row {
		if x > row[of] || x == row[of] && c < of || row[of] != row[of] {
			n++
		}
	}
	return n
}

// highest returns the first highest score.
func highest(row []float64) (at int) {
	for c, x := range row {
		if x > row[at] {
			at = c
		}
	}
	return at
}

// number returns an element of a node's value, NaN if it has none.
func number(n *gorgonia.Node, i int) float64 { return numbers(n)(i) }

// numbers returns a function that returns the elements of a node's value.
func numbers(n *gorgonia.Node) func(i int) float64 {
	if n != nil && n.Value() != nil {
		switch x := n.Value().Data().(type) {
		case float32:
			return func(int) float64 { return float64(x) }
		case float64:
			return func(int) float64 { return x }
		case []float32:
			return func(i int) float64 { return float64(x[i]) }
		case []float64:
			return func(i int) float64 { return x[i] }
		case []int:
			return func(i int) float64 { return float64(x[i]) }
		}
	}
	return func(int) float64 { return math.NaN() }
}
