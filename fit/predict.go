package fit

import (
	"math"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm"
)

// Predict runs a machine once on all samples, each rank on a part of them, and returns what a node,
// such as the scores [b, n], has for each: the row of sample i, on all ranks. The machine must keep
// the node; the data need neither labels nor a loss. It is collective.
//
//	known, err := fit.ReadMapping("run1") // of the training
//	rows, classes, err := data.CSV("new.csv", "", known)
//	all, err := fit.Predict(comm, eval, fit.Data{Set: rows, Inputs: G.Nodes{x}}, scores)
//
// Cost: an all-gather of 8 bytes for each element of all rows.
//
// Errors: those of [Evaluate], and ErrArgument for a node without a row for each sample.
func Predict(comm backend.Communicator, m *vm.Machine, d Data, of *gorgonia.Node) ([][]float64,
	error) {
	if err := backend.Given("fit.Predict", "comm", comm, "m", m, "of", of); err != nil {
		return nil, err
	}
	var rows [][]float64
	local, wrong := d.check(m.Summary()) // which Evaluate reports on all ranks
	size := of.Shape().TotalSize() / max(local, 1)
	_, err := Evaluate(comm, m, d, Metric{Name: "prediction",
		check: func(g *gorgonia.ExprGraph) error {
			if wrong == nil && (of.Graph() != g || of.Dims() == 0 || of.Shape()[0] != local) {
				return refused("%s, of the shape %v, has no row for each of %d samples in the "+
					"machine's graph", of.Name(), of.Shape(), local)
			}
			return nil
		},
		Sums: func(n int) int { return n * size },
		Add: func(sums []float64, samples []int) error {
			x := numbers(of)
			if len(x) < len(samples)*size {
				return refused("the machine does not keep %s: use vm.Keep", of.Name())
			}
			for i, sample := range samples {
				copy(sums[sample*size:], x[i*size:(i+1)*size])
			}
			return nil
		},
		Value: func(sums []float64, _ float64) float64 {
			rows = slices.Collect(slices.Chunk(sums, size))
			return math.NaN()
		}})
	return rows, err
}
