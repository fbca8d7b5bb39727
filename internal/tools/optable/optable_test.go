package main

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestMain lets the test binary be the child process of the command. Tests run in a temporary
// folder: Gorgonia writes err.dot where it finds a mistake in types.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "-from" {
		main()
		return
	}
	os.Exit(elsewhere(m))
}

// folder is where the test program was started: the package.
var folder string

func elsewhere(m *testing.M) int {
	dir, err := os.MkdirTemp("", "optable")
	if err == nil {
		defer func() { _ = os.RemoveAll(dir) }()
		folder, err = os.Getwd()
	}
	if err == nil {
		err = os.Chdir(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// judged is verdicts, once for all tests.
var judged = sync.OnceValues(verdicts)

// docs/ops.md is what the command prints.
func TestPageIsTheOutput(t *testing.T) {
	committed := require.Value(os.ReadFile(filepath.Join(folder, "../../..", page)))(t)
	said := require.Value(judged())(t)
	got := require.Value(document(said))(t)
	want := strings.Split(string(committed), "\n")
	for i, line := range strings.Split(got, "\n") {
		if i >= len(want) || line != want[i] {
			t.Fatalf("line %d of %s is out of date: run `go run ./internal/tools/optable -w` in "+
				"the root of the module and read what changed\ngot  %s\nwant %s",
				i+1, page, line, strings.Join(want[min(i, len(want)):min(i+1, len(want))], ""))
		}
	}
	if len(strings.Split(got, "\n")) != len(want) {
		t.Fatalf("%s has more lines than the output: run `go run ./internal/tools/optable -w` in "+
			"the root of the module", page)
	}
}

// wrongGraphs are kinds of rows that package vm computes wrongly, because the graph itself is wrong
// or the operation runs by its Do.
var wrongGraphs = []string{
	// gradients that Gorgonia builds wrongly, or not
	"Log2(", "InverseSqrt(", "OuterProd(", "At(x, 1, 2), (3, 4), x read twice",
	// shapes
	"Slice(x, S(0, 5, 2)", "Unconcat(x, 1, 3)", "KeepDims(x, true, Sum(x, 0)), (1, 4)",
	"KeepDims(x, false, Sum(x, 1)), (3, 1)",
	// other operations
	"SoftMax(x), (4, 1)", "LogSoftMax(x), (4, 1)", "LogSumExp(", "AveragePool1D(",
	"Sparsemax(", "CTCLoss(", "Dropout(", // by Do
	"BatchNorm(x), epsilon", "GroupNorm(x), epsilon", // merged
	"Grad of two losses, two paths", "Grad of two losses that share", "Grad of a gradient's square",
}

// Package vm is right wherever the graph is: in all rows but those in which Gorgonia has built or
// merged something else.
func TestPackageVMIsRight(t *testing.T) {
	said := require.Value(judged())(t)
	for i, r := range rows() {
		v := said[i].short()
		require.Check(t, v[compiled] == right || v[compiled] == "" || v[value] == "merged with "+
			"another node" || hasPrefix(r.call,
			wrongGraphs), "%s in package vm: %s", r.call, v[compiled])
	}
}

// Each kind of operation has at least five graphs, except pairs and whole graphs.
func TestKindsHaveSeveralShapes(t *testing.T) {
	few := []string{"CTCLoss"} // its loop enumerates all paths
	for _, s := range sections() {
		for _, g := range groups(s.rows) {
			require.Check(t, len(g.rows) >= 5 || s.rows[g.rows[0]].alone ||
				slices.Contains(few, g.kind), "%s has %d graphs", g.kind, len(g.rows))
		}
	}
}

// A row that is wrong is found, whatever is wrong with it.
func TestWrongRowsAreFound(t *testing.T) {
	sine := func(x *gorgonia.Node) (*gorgonia.Node, error) { return gorgonia.Sin(x) }
	sines := func(x array) array { return x.apply(math.Sin) }
	twice := pair("", []int{3}, sine, sine, sines, func(x array) array { return x.apply(math.Cos) })
	refused := of1("", []int{2, 3}, func(x *gorgonia.Node) (*gorgonia.Node, error) {
		return gorgonia.OuterProd(x, x)
	}, sines)
	panicked := of1("", []int{2}, func(*gorgonia.Node) (*gorgonia.Node, error) {
		panic("of the test")
	}, sines)
	for _, test := range []struct {
		name string
		r    row
		c    column
		want string
	}{
		{"right", of1("", []int{3}, sine, sines), value, right},
		{"right gradient", of1("", []int{3}, sine, sines), tape, right},
		{"right lisp gradient", of1("", []int{3}, sine, sines), lisp, right},
		{"value", of1("", []int{3}, sine, func(x array) array { return x.apply(math.Cos) }), value,
			"wrong: "},
		{"gradient", of1("", []int{3}, sine, func(x array) array { return x.apply(math.Cos) }),
			tape, "wrong: "},
		{"lisp gradient", of1("", []int{3}, sine, func(x array) array { return x.apply(math.Cos) }),
			lisp, "wrong: "},
		{"shape", of1("", []int{4}, sine, func(x array) array { return sines(x).reshape(2, 2) }),
			value, "wrong: shape [4], want [2 2]"},
		{"merged", twice, value, "merged with another node"},
		{"refused", refused, value, "does not build"},
		{"panicked", panicked, value, "panics when built: of the test"},
		{"none expected", of1("", []int{3}, sine, sines).nowhere(), tape, ""},
	} {
		if got := judge(test.r, test.c); got != test.want && !(strings.HasSuffix(test.want, ": ") &&
			strings.HasPrefix(got, test.want)) {
			t.Errorf("%s: the row says %q, want %q", test.name, got, test.want)
		}
	}
}

// The loops themselves, on numbers that can be checked by hand.
func TestLoops(t *testing.T) {
	count := func(shape ...int) array {
		next := 0.0
		return generate(shape, func([]int) float64 { next++; return next })
	}
	for _, test := range []struct {
		name  string
		got   array
		shape []int
		want  []float64
	}{
		{"matmul", matmul(count(2, 3), count(3, 2)), []int{2, 2}, []float64{22, 28, 49, 64}},
		{"reduce 0", count(2, 3).reduce(plus, 0), []int{3}, []float64{5, 7, 9}},
		{"reduce all", count(2, 3).reduce(plus), nil, []float64{21}},
		{"transpose", count(2, 3).transpose(1, 0), []int{3, 2}, []float64{1, 4, 2, 5, 3, 6}},
		{"cut", count(5).cut(0, 0, 5, 2), []int{3}, []float64{1, 3, 5}},
		{"join", join(1, count(2, 1), count(2, 2)), []int{2, 3}, []float64{1, 1, 2, 2, 3, 4}},
		{"max pool", square(2, 0, 2, 1).max(count(1, 1, 2, 4)), []int{1, 1, 1, 2}, []float64{6, 8}},
		{"mean pool", square(2, 0, 2, 1).mean(count(1, 1, 2, 4)), []int{1, 1, 1, 2},
			[]float64{3.5, 5.5}},
		{"convolve", square(2, 0, 1, 1).convolve(count(1, 1, 2, 3), count(1, 1, 2, 2)),
			[]int{1, 1, 1, 2}, []float64{37, 47}},
		{"sparsemax", sparsemax(array{[]int{1, 3}, []float64{1, 0.5, -1}}, 1), []int{1, 3},
			[]float64{0.75, 0.25, 0}},
		{"softmax", softmax(array{[]int{2}, []float64{0, math.Log(3)}}, 0), []int{2},
			[]float64{0.25, 0.75}},
	} {
		require.Check(t, slices.Equal(test.got.shape, test.shape) &&
			compare([]array{test.got}, []array{{test.shape, test.want}}, 1e-12) == nil, "%s: %v, "+
			"want %v %v", test.name, test.got, test.shape, test.want)
	}
}
