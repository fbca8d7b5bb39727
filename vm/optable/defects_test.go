package main

import (
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/ops/nn"
)

// unseen are wrong rows, without those that fail or are merged, of which nn.Defects cannot know.
var unseen = []string{"LogSumExp", "AveragePool1D", "Unconcat"}

// suspected are right rows whose operation is wrong beside others, or of other numbers.
var suspected = []string{"Slice(x, S(256, 258))", "Norm(x, 1, 3)"}

// nn.Defects reports a row's graph if and only if the table says that it is wrong.
func TestDefectsAreThoseOfTheTable(t *testing.T) {
	said, err := judged()
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range rows() {
		found := defects(r)
		wrong := strings.HasPrefix(said[i][value], "wrong") || strings.HasPrefix(said[i][tape], "wrong")
		merged := strings.HasPrefix(said[i][value], "merged")
		fine := said[i][value] == right && (said[i][tape] == right || said[i][tape] == "")
		switch {
		case fine && len(found) > 0 && !hasPrefix(r.call, suspected):
			t.Errorf("%s is right, but has the defect %v", r.call, found[0])
		case wrong && !merged && len(found) == 0 && !hasPrefix(r.call, unseen):
			t.Errorf("%s is wrong (%s, %s), but nn.Defects does not know it", r.call, said[i][value], said[i][tape])
		}
	}
}

func hasPrefix(s string, prefixes []string) bool {
	for _, p := range prefixes {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return false
}

// defects builds the row's graph, with gradients where there are some.
func defects(r row) []nn.Defect {
	g := gorgonia.NewGraph()
	x := inputs(g, r, dtypes[0])
	nodes, err := built(r, x)
	if err != nil {
		return nil
	}
	if loss, err := lossOf(r, nodes, dtypes[0]); err == nil && !r.flat {
		grad(r, loss, x)
	}
	return nn.Defects(g)
}

// grad adds the nodes of the gradients, if that works.
func grad(r row, loss *gorgonia.Node, x gorgonia.Nodes) {
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
	if found := nn.Defects(g); len(found) != 0 {
		t.Errorf("a graph without operations has defects: %v", found)
	}
	must(gorgonia.Slice(x, nil, gorgonia.S(256, 512)))
	found := nn.Defects(g)
	const want = "it is merged with slices of the same operand whose bounds differ by multiples of 256: use nn.Slice or nn.Split"
	if len(found) != 1 || !strings.HasSuffix(found[0].String(), want) || found[0].Instead != "nn.Slice or nn.Split" {
		t.Errorf("defects of a slice 256:512: %v, want one that ends in %q", found, want)
	}
}
