package main

import (
	"fmt"
	"slices"
	"strings"
)

// reason says why a test differs.
type reason struct {
	test, operation string
	node            string // how the operation prints, as far as it is the same in all runs
	why             string
}

const drawn = "it draws random numbers, which differ from run to run"

// reasons are all differences that are known.
var reasons = []reason{
	{"Example_iop", "I", "I",
		"the operation of the example writes into its operands; package vm gives each Do copies"},
	{"TestBatchNormAll", "batchnormdiff", "batchnormdiff",
		"in evaluation, Gorgonia takes the variance of the last batch for the gradient, package " +
			"vm the running variance"},
	{"TestByIndicesOpFull", "ByIndicesOp", "",
		"an index is out of range: an error in package vm, another row in Gorgonia"},
	{"TestDropout_integration", "Dropout", "Dropout", drawn},
	{"TestGraph_Clone", "UniformRandomNode", "0(0, 1)", drawn},
	{"TestGt", "UniformRandomNode", "0(0, 1)", drawn},
	{"TestMaxPool2D_asymmetricPadding", "MaxPool", "MaxPool",
		"Gorgonia begins with the padding of the other side"},
	{"TestRandomNodeBackprop", "GaussianRandomNode", "1(0, 1)", drawn},
}

// table is what docs/ops.md says, and what no reason explains.
func table(results []result) (text string, unexplained []string) {
	tests, differ, runs := map[string]bool{}, map[string]bool{}, 0
	for _, r := range results {
		tests[r.Test] = true
		switch r.Outcome {
		case "agree", "both fail", "tape fails", "lisp fails":
			runs++
			continue
		}
		differ[r.Test] = true
		known := func(why reason) bool {
			return why.test == r.Test && strings.HasPrefix(r.Node, why.node)
		}
		if !slices.ContainsFunc(reasons, known) {
			unexplained = append(unexplained,
				fmt.Sprintf("%s, %s machine: %s %s: %s", r.Test, r.Machine, r.Outcome, r.Node,
					r.Text))
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d tests and examples of Gorgonia v0.9.18 run graphs, in the tape machine "+
		"or in the lisp machine.\nPackage vm computes the same values and gradients, node by "+
		"node, in %d of them. The others differ in:\n\n", len(tests), len(tests)-len(differ))
	fmt.Fprintf(&b, "| test | operation | reason |\n|---|---|---|\n")
	for _, why := range reasons {
		if differ[why.test] {
			fmt.Fprintf(&b, "| `%s` | `%s` | %s |\n", why.test, why.operation, why.why)
		}
	}
	return b.String(), unexplained
}
