package main

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"
)

// head is the text above the tables.
const head = `# Operations of Gorgonia

This page is the output of ` + "`go run ./internal/tools/optable`" + `; a test compares them. A line of a table is about one operation, and about several
graphs with it: other shapes, axes of length 1, four axes, and operands that are computed and read twice. Each graph of Gorgonia
v0.9.18 is built in float64 and float32.

- **value** compares the result of the tape machine with a plain loop, twice, as training does.
- **Grad** compares the gradient that ` + "`gorgonia.Grad`" + ` and the tape machine compute with central differences of the loop.
- **lisp** compares the gradient of the lisp machine.
- **vm** compares value and gradient of package vm, three times.
- **instead** says what to use.

A line lists what is not right by shape, after "right, but", except that **lisp** has numbers where there are many. "none" means that
there is no gradient, "-" that none is expected or that there is no value to differentiate. Results that differ only in
float32 say so. A graph is wrong, too, if a run writes over an operand. The operands are ` + "`x`, `y` and `z`" + `, of shape (3, 4) if nothing is said.

Package vm reads an operation as what its caller wrote. It is wrong only where the graph itself says something else, because Gorgonia has
merged two nodes, built another gradient or given a node another shape, and where it runs Gorgonia's own code, of Sparsemax, CTCLoss and
Dropout. vm.New reports the wrong nodes of a graph, and says where Gorgonia's machines alone are wrong. ` + "`nn.Defects`" + ` returns these nodes.
YOLOv3, which is for inference, is left out.

`

// ownTests is what command stocktests has found.
//
//go:embed stocktests.md
var ownTests string

// output is the page, with what every row says.
func output(said []verdict) string {
	var b strings.Builder
	good, here, said := 0, 0, slices.Clone(said)
	for i := range said {
		said[i] = said[i].short()
		if !said[i].wrong() {
			good++
		}
		if said[i][compiled] == right {
			here++
		}
	}
	total := len(said)
	for _, s := range sections() {
		fmt.Fprintf(&b, "\n## %s\n\n| operation | graphs | value | Grad | lisp | vm | instead "+
			"|\n|---|---|---|---|---|---|---|\n", s.title)
		for _, g := range groups(s.rows) {
			fmt.Fprintf(&b, "| `%s` | %d |", g.kind, len(g.rows))
			for c := range columns {
				fmt.Fprintf(&b, " %s |", g.of(s.rows, said, c))
			}
			fmt.Fprintf(&b, " %s |\n", g.replacement(s.rows, said))
		}
		said = said[len(s.rows):]
	}
	fmt.Fprintf(&b, "\n## Gorgonia's own tests\n\n`go run ./internal/tools/stocktests` runs "+
		"Gorgonia's tests with a hook. %s", ownTests)
	return fmt.Sprintf("%s%d of %d graphs are right in all columns, %d in package vm.\n%s", head,
		good, total, here, b.String())
}

// replacement names what to use instead of what is wrong in a group.
func (g group) replacement(rows []row, said []verdict) string {
	var use []string
	for _, i := range g.rows {
		if r := replacement(rows[i], said[i]); r != "" && !slices.Contains(use, r) {
			use = append(use, r)
		}
	}
	return strings.Join(use, "; ")
}

// short says once that there is no graph.
func (v verdict) short() verdict {
	if v[value] == errBuild.Error() {
		v[tape], v[lisp], v[compiled] = "", "", ""
	}
	return v
}

// replacement names what to use instead of what is wrong.
func replacement(r row, v verdict) string {
	switch {
	case !v.wrong():
		return ""
	case v[value] == right && (v[tape] == right || v[tape] == "") && v[compiled] == right:
		return "`gorgonia.Grad`"
	case v[compiled] == right && r.use == "":
		return "package vm"
	case v[compiled] == right:
		return r.use + ", package vm"
	}
	return r.use
}
