package main

import (
	"fmt"
	"regexp"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/vm"
)

// byDo are the operations that plans run by their Do, on the host, with what to use instead on a
// device.
var byDo = map[string]string{
	"Dropout": "nn.Dropout", "dropoutDiffOp": "nn.Dropout",
	"Aᵀ": "nn.OuterProd", "T[0:5:2...]": "nn.Slice", "T[0:5:2...]+=...": "nn.Slice",
	"CTCLoss": "", "ctcLossDiff": "", "Sparsemax": "", "SparsemaxDiff": "", // rare
	// random numbers, uniform, normal and binomial: of the host's generators
	"0": "", "1": "", "2": "",
}

// The plan of every row of the table, with gradients, runs nothing else by its Do.
func TestPlansOfTheTable(t *testing.T) {
	found := map[string][]string{}
	for _, r := range rows() {
		for _, op := range hostOps(r) {
			found[op] = append(found[op], r.call)
		}
	}
	for op, calls := range found {
		_, known := byDo[op]
		require.Check(t, known, "%s runs on the host in %q", op, calls)
	}
	for op := range byDo {
		require.Check(t, found[op] != nil, "%s does not run on the host", op)
	}
}

var hostOp = regexp.MustCompile(`= host ([^({ ]*)`)

// hostOps returns the operations that the plan of a row's graph runs by their Do.
func hostOps(r row) (names []string) {
	g := gorgonia.NewGraph()
	x := inputs(g, r, dtypes[1])
	nodes, err := built(r, x)
	if err != nil {
		return nil
	}
	if loss, err := lossOf(r, nodes, dtypes[1]); err == nil && !r.flat {
		addGradient(r, loss, x)
	}
	m, err := vm.New(g, nil, vm.Notice(func(string) {}))
	if err != nil {
		return []string{fmt.Sprint("error: ", err)}
	}
	defer m.Close()
	for _, found := range hostOp.FindAllStringSubmatch(m.Plan().String(), -1) {
		names = append(names, found[1])
	}
	return names
}
