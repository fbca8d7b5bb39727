package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	G "gorgonia.org/gorgonia"
)

// kindOf is the operation that a row's call names: rows of one kind share a line of the page.
func (r row) kindOf() string {
	if name := named.FindString(r.call); name != "" && !r.alone {
		return strings.TrimSuffix(name, "(")
	}
	return r.call
}

var named = regexp.MustCompile(`^(nn\.)?[A-Z]\w*\(`)

// alone gives each row a line of its own.
func alone(rows []row) []row {
	for i := range rows {
		rows[i].alone = true
	}
	return rows
}

// group is what a line of the page is about: places of rows of one kind.
type group struct {
	kind string
	rows []int
}

// groups puts the rows of a section together by their kind, in the order in which kinds appear.
func groups(rows []row) (all []group) {
	for i, r := range rows {
		at := slices.IndexFunc(all, func(g group) bool { return g.kind == r.kindOf() })
		if at < 0 {
			at = len(all)
			all = append(all, group{kind: r.kindOf()})
		}
		all[at].rows = append(all[at].rows, i)
	}
	return all
}

// twiceRead adds, for the first row of each kind, one whose operands are computed and read twice:
// by the operation, and by a product with 3 that is a result, too. A machine that writes a result
// over its operand has to see the second reader.
func twiceRead(rows []row) []row {
	for _, g := range groups(rows) {
		first := rows[g.rows[0]]
		if !first.random && !first.whole && first.in[0].kind != integers {
			rows = append(rows, first.readTwice())
		}
	}
	return rows
}

func (r row) readTwice() row {
	once := r
	r.call += ", x read twice"
	r.build = func(x G.Nodes) G.Nodes {
		computed := slices.Clone(x)
		for i, n := range x {
			if r.in[i].kind != integers {
				computed[i] = must(G.HadamardProd(n, constant(n, 1)))
			}
		}
		return append(once.build(computed), must(G.HadamardProd(computed[0], constant(x[0], 3))))
	}
	r.want = func(x, got []array) []array {
		triple := x[0].apply(func(v float64) float64 { return 3 * v })
		if len(got) > 0 {
			got = got[:len(got)-1]
		}
		return append(once.want(x, got), triple)
	}
	return r
}

// constant is a number of the dtype of n.
func constant(n N, x float64) N {
	if n.Dtype() == G.Float32 {
		return G.NewConstant(float32(x))
	}
	return G.NewConstant(x)
}

// of returns what the rows of a group say in a column: their text if it is one, else what each row
// says that is not right, with what its call has besides the name.
func (g group) of(rows []row, said []verdict, c column) string {
	var texts, bad []string
	for _, i := range g.rows {
		if text := said[i][c]; text != "" {
			texts = append(texts, text)
			if text != right {
				bad = append(bad, text)
			}
		}
	}
	switch {
	case len(texts) == 0:
		return "-"
	case len(bad) == 0:
		return right
	case len(texts) == len(bad) && len(g.rows) > 1 && alike(bad):
		return "in all: " + bad[0]
	case len(g.rows) == 1:
		return bad[0]
	case c == lisp && len(bad) > 2:
		return fmt.Sprintf("not right in %d of %d", len(bad), len(texts))
	}
	var list []string
	for _, i := range g.rows {
		if text := said[i][c]; text != right && text != "" {
			list = append(list, fmt.Sprintf("`%s` %s", strings.TrimPrefix(rows[i].call, g.kind),
				text))
		}
	}
	if len(texts) == len(bad) {
		return strings.Join(list, "<br>")
	}
	return "right, but " + strings.Join(list, "<br>")
}

// alike reports whether texts differ in numbers at most.
func alike(texts []string) bool {
	return !slices.ContainsFunc(texts, func(s string) bool { return what(s) != what(texts[0]) })
}

// what is a text without its numbers.
func what(text string) string {
	before, _, _ := strings.Cut(text, ":")
	return before
}
