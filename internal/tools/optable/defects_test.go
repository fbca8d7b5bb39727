package main

import (
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
)

// unseen are wrong rows, without those that fail, of which nn.Defects cannot know: functions that
// leave no trace, nodes that are merged, and numbers.
var unseen = []string{"AveragePool1D", "KeepDims", "Unconcat", "Im2Col(x), dilation 1 and 2",
	"CTCLoss(LogSoftMax(x), ...) with",
	"Sparsemax(x, 0) and", "Dropout(x, 0.5), twice", "Dropout(x, 0.1) and",
	"Slice(x, nil, S(1, 3)) and",
	"Exp(x), x = 3e+38"}

// suspected are right rows whose operation is wrong beside others, or of other numbers.
var suspected = []string{"Slice(x, S(256, 258))", "Norm(x, 1, 3)", "Norm(x, 3, 3)"}

// nn.Defects reports a row's graph if and only if the table says that it is wrong, and says that
// package vm is right if and only if it is.
func TestDefectsAreThoseOfTheTable(t *testing.T) {
	said := require.Value(judged())(t)
	for i, r := range rows() {
		found := defects(r)
		bad := func(s string) bool {
			return strings.Contains(s, "wrong") || strings.HasPrefix(s, "merged")
		}
		wrong := bad(said[i][value]) || bad(said[i][tape])
		fine := said[i][value] == right && (said[i][tape] == right || said[i][tape] == "")
		switch {
		case hasPrefix(r.call, unseen):
		case fine && len(found) > 0 && !hasPrefix(r.call, suspected):
			t.Errorf("%s is right, but has the defect %v", r.call, found[0])
		case wrong && len(found) == 0:
			t.Errorf("%s is wrong (%s, %s), but nn.Defects does not know it", r.call,
				said[i][value], said[i][tape])
		case said[i][compiled] == right && !fine && slices.ContainsFunc(found, everywhere) &&
			!partly(r):
			t.Errorf("%s is right in package vm, but its defects say otherwise: %v", r.call, found)
		case bad(said[i][compiled]) && !slices.ContainsFunc(found, everywhere):
			t.Errorf("%s is wrong in package vm (%s), but its defects say otherwise: %v", r.call,
				said[i][compiled], found)
		}
	}
}

func everywhere(d nn.Defect) bool { return !d.Tape }

// partly is for rows that have a defect which their columns do not show: a gradient that is
// missing, or an operation that fails on the tape.
func partly(r row) bool { return hasPrefix(r.call, []string{"At(", "OuterProd("}) }

func hasPrefix(s string, prefixes []string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return false
}

// defects builds the row's graph, without gradients and, where there are some, with them.
func defects(r row) (found []nn.Defect) {
	for _, gradients := range []bool{false, true} {
		g := gorgonia.NewGraph()
		x := inputs(g, r, dtypes[0])
		nodes, err := built(r, x)
		if err != nil {
			return nil
		}
		if gradients && !r.flat {
			if loss, err := lossOf(r, nodes, dtypes[0]); err == nil {
				addGradient(r, loss, x)
			}
		}
		if !gradients {
			for _, n := range nodes {
				gorgonia.Read(n, new(gorgonia.Value))
			}
		}
		found = append(found, nn.Defects(g)...)
	}
	return found
}

// addGradient adds the nodes of the gradients, if that works.
func addGradient(r row, loss *gorgonia.Node, x gorgonia.Nodes) {
	defer func() { _ = recover() }() // the table says which panic
	var by gorgonia.Nodes
	for i, n := range x {
		if r.in[i].kind != integers {
			by = append(by, n)
		}
	}
	_, _ = gorgonia.Grad(loss, by...)
}

func TestDefectsNameTheReplacement(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(4, 768), gorgonia.WithName("x"))
	require.Equal(t, "a graph without operations has defects", len(nn.Defects(g)), 0)
	must(gorgonia.Slice(x, nil, gorgonia.S(256, 512)))
	found := nn.Defects(g)
	const want = "it is merged with slices of the same operand whose bounds differ by multiples " +
		"of 256: use nn.Slice or nn.Split"
	require.Check(t, len(found) == 1 && strings.HasSuffix(found[0].String(), want) &&
		found[0].Instead == "nn.Slice or nn.Split", "defects of a slice 256:512: %v, want one "+
		"that ends in %q", found, want)
}
