package repolint_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// What the proof of plans asks packages lower and plan, which make them: how values lie, how it
// prints them, which runs there are, whether these keep gradients, and whether a shard is empty.
var askedByTheProof = []string{"Dense", "Span", "Text", "Has", "Every", "Kinds", "Of",
	"Keeps", "Empty"}

// TestTheProofSharesNothingWithThePlanner: package proof uses types and constants of packages lower
// and plan, and calls nothing of them that decides anything. So no mistake of planning proves a
// wrong plan.
func TestTheProofSharesNothingWithThePlanner(t *testing.T) {
	functions, methods := planFunctions(t)
	for _, file := range parsed(t, "internal/vm/proof") {
		packages := []string{}
		for _, i := range file.Imports {
			name := strings.Trim(i.Path.Value, `"`)
			packages = append(packages, name[strings.LastIndex(name, "/")+1:])
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			s, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			x, named := s.X.(*ast.Ident)
			of := named && x.Obj == nil && slices.Contains(packages, x.Name)
			planner := of && slices.Contains([]string{"lower", "plan"}, x.Name)
			if planner && slices.Contains(functions, s.Sel.Name) ||
				!of && slices.Contains(methods, s.Sel.Name) &&
					!slices.Contains(askedByTheProof, s.Sel.Name) {
				t.Errorf("%s uses %s of package plan or lower", file.Name.Name, s.Sel.Name)
			}
			return true
		})
	}
}

// planFunctions returns the names of exported functions of packages lower and plan, and of methods.
func planFunctions(t *testing.T) (functions, methods []string) {
	for _, file := range append(parsed(t, "internal/vm/lower"), parsed(t, "internal/vm/plan")...) {
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			switch {
			case !ok || !f.Name.IsExported():
			case f.Recv == nil:
				functions = append(functions, f.Name.Name)
			default:
				methods = append(methods, f.Name.Name)
			}
		}
	}
	require.That(t, slices.Contains(functions, "Train") && slices.Contains(methods, "New") &&
		slices.Contains(functions, "Standard"), "found the functions %v and the methods %v",
		functions, methods)
	return functions, methods
}

// parsed returns the files of a package, without tests.
func parsed(t *testing.T, dir string) (files []*ast.File) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join("../..", dir, "*.go"))
	require.That(t, err == nil && len(names) != 0, "%v %v", names, err)
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file := require.Value(parser.ParseFile(token.NewFileSet(), name, nil, 0))(t)
		files = append(files, file)
	}
	return files
}
