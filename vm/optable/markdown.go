package main

import (
	"fmt"
	"strings"
)

// head is the text above the tables.
const head = `# Operations of Gorgonia

This page is the output of ` + "`go run ./vm/optable`" + `; a test compares them. Each row runs one graph of Gorgonia v0.9.18 in float64 and
float32, twice in the tape machine, as training does. **value** compares its result with that of a plain loop. **Grad** compares the gradient that ` + "`gorgonia.Grad`" + ` and the
tape machine compute with central differences of the loop, and **lisp** that of the lisp machine. "none" means that there is no
gradient, "-" that none is expected or that the row has no value to differentiate. Results that differ only in float32 say so.

The operands are ` + "`x`, `y` and `z`" + `. Shapes are given where they are not obvious. ` + "`nn.Defects`" + ` reports the wrong nodes of a graph.
YOLOv3, which is for inference, is left out.

`

// output is the page, with what every row says.
func output(said []verdict) string {
	var b strings.Builder
	good := 0
	for _, s := range sections() {
		fmt.Fprintf(&b, "\n## %s\n\n| operation | value | Grad | lisp | instead |\n|---|---|---|---|---|\n", s.title)
		for _, r := range s.rows {
			v := said[0].short()
			said = said[1:]
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", r.call, v[value], dash(v[tape]), dash(v[lisp]), replacement(r, v))
			if !v.wrong() {
				good++
			}
		}
	}
	return fmt.Sprintf("%s%d of %d rows are right in all columns.\n%s", head, good, len(rows()), b.String())
}

// short says once that there is no graph.
func (v verdict) short() verdict {
	if v[value] == errBuild.Error() {
		v[tape], v[lisp] = "", ""
	}
	return v
}

// replacement names what to use instead of what is wrong.
func replacement(r row, v verdict) string {
	switch {
	case !v.wrong():
		return ""
	case v[value] == right && (v[tape] == right || v[tape] == ""):
		return "`gorgonia.Grad`"
	}
	return r.use
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
