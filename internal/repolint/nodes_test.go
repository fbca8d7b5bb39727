package repolint_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Messages name nodes by stock.Label: Gorgonia's own name of a variable without one is
// "%!s(<nil>)()". What this module calls a node is known by the names of its variables.
func TestMessagesNameNodesByTheirLabels(t *testing.T) {
	atRoot(t)
	nodes := []string{"n", "w", "x", "y", "node", "Node", "root", "loss", "cost"}
	formats := []string{"Errorf", "Sprintf", "Fprintf"}
	files, found := token.NewFileSet(), 0
	look := func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || !slices.Contains(formats, last(call.Fun)) {
			return true
		}
		for _, arg := range call.Args {
			found++
			name, ok := arg.(*ast.CallExpr)
			if !ok || len(name.Args) > 0 || last(name.Fun) != "Name" {
				continue
			}
			if s, ok := name.Fun.(*ast.SelectorExpr); ok && slices.Contains(nodes, last(s.X)) {
				t.Errorf("%v: name the node by stock.Label", files.Position(arg.Pos()))
			}
		}
		return true
	}
	for _, dir := range []string{"autograd", "layers", "ops", "vm"} {
		require.NoError(t, filepath.WalkDir(dir, func(file string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(file, ".go") ||
				strings.HasSuffix(file, "_test.go") {
				return err
			}
			parsed, err := parser.ParseFile(files, file, nil, 0)
			if err == nil {
				ast.Inspect(parsed, look)
			}
			return err
		}))
	}
	require.Check(t, found != 0, "there are no messages")
}

// last returns the last identifier of a selection, "" for other expressions.
func last(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}
