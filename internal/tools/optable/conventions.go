package main

import (
	_ "embed"
	"fmt"
	"strings"

	G "gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/testing/conventions"
	"github.com/euryale-ml/euryale/vm"
)

// conventionsHead is the text above the table of conventions, after the number of cases and the
// version of PyTorch.
//
//go:embed conventions.md
var conventionsHead string

// conventionsTail is what no case of the table shows.
//
//go:embed conventions_tail.md
var conventionsTail string

// document is the page: the tables of operations, with what every row says, and the one of
// conventions.
func document(said []verdict) (string, error) {
	section, err := conventionsSection()
	return output(said) + section, err
}

// conventionsSection is the section of the page.
func conventionsSection() (string, error) {
	cases, version, err := conventions.Cases()
	if err != nil {
		return "", err
	}
	lines, err := conventions.Lines(map[conventions.Runner]conventions.Maker{
		conventions.VM: func(g *G.ExprGraph) (G.VM, error) { return vm.New(g, nil) },
		conventions.Tape: func(g *G.ExprGraph) (G.VM, error) {
			return G.NewTapeMachine(g), nil
		},
	})
	if err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, conventionsHead, version, len(cases))
	for _, l := range lines {
		tape := said(l.Says[conventions.Tape])
		if strings.HasPrefix(l.Op, "MaxPool2D") {
			tape = "NaN is lost; a window without a number above the least one gives that, " +
				"and its backward pass ends the program"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", l.Op, said(l.Says[conventions.VM]), tape)
	}
	return b.String() + conventionsTail, nil
}

// said joins the conventions that are not PyTorch's.
func said(conventions []string) string {
	if len(conventions) == 0 {
		return "as PyTorch"
	}
	return strings.Join(conventions, "; ")
}
