package main

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"
)

// head is the text above the tables.
//
//go:embed head.md
var head string

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
		"Gorgonia's tests with a hook.\n%s", ownTests)
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
