package repolint_test

import (
	"go/ast"
	"go/build"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// named are the tests of raced packages that make unraced runs, too.
var named = regexp.MustCompile(`Unraced$|Communicator`)

// TestWhatRaceLeavesOutIsRunUnraced: a test of a raced package that asks for -short, or for the
// race detector, itself or in what it calls, leaves a part out in make race. By its name make
// unraced runs it whole; elsewhere that part would run nowhere in CI.
func TestWhatRaceLeavesOutIsRunUnraced(t *testing.T) {
	atRoot(t)
	tests := thins(t)
	require.Check(t, len(tests) > 10, "%d tests leave parts out: are they still found?", len(tests))
	for _, test := range tests {
		if dir, name := path.Split(test); raced(dir) && !named.MatchString(name) {
			t.Errorf("%s%s leaves a part out in make race: let one ...Unraced run that", dir, name)
		}
	}
}

// raced reports whether make race runs the tests of a package.
func raced(dir string) bool {
	_, err := os.Stat(path.Join(dir, "race_test.go"))
	return err == nil
}

// inMakeRace reports whether make race builds a file, which is without tags.
func inMakeRace(t *testing.T, f source) bool {
	t.Helper()
	return require.Value(build.Default.MatchFile(path.Dir(f.name), path.Base(f.name)))(t)
}

// TestMakeRaceHasThePackagesThatStartGoroutines: it runs all of their tests, or those ...Raced.
// What only starts programs, and tools, are left out.
func TestMakeRaceHasThePackagesThatStartGoroutines(t *testing.T) {
	atRoot(t)
	starts, tests := map[string]bool{}, map[string]bool{}
	for _, f := range sources(t) {
		dir := path.Dir(f.name)
		if !inMakeRace(t, f) {
			continue
		}
		ast.Inspect(f.File, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				starts[dir] = starts[dir] || !f.test()
			case *ast.CallExpr: // of a WaitGroup
				s, ok := n.Fun.(*ast.SelectorExpr)
				starts[dir] = starts[dir] || !f.test() && ok && s.Sel.Name == "Go"
			case *ast.FuncDecl:
				tests[dir] = tests[dir] || f.test() && strings.HasSuffix(n.Name.Name, "Raced")
			}
			return true
		})
	}
	for dir := range starts {
		if top, _, _ := strings.Cut(dir, "/"); starts[dir] && !raced(dir) && !tests[dir] &&
			!slices.Contains([]string{"bench", "cmd", "examples"}, top) &&
			!strings.HasPrefix(dir, "internal/testing/") &&
			!strings.HasPrefix(dir, "internal/tools/") {
			t.Errorf("%s starts goroutines: give it a file race_test.go, or tests ...Raced", dir)
		}
	}
}

// thinning are the functions for tests that ask for the race detector.
var thinning = []string{"backend/backendtest/Run", "backend/backendtest/RunWrapper"}

// thins returns the tests, as dir/name, that ask by themselves, by functions beside them, or by
// thinning.
func thins(t *testing.T) (tests []string) {
	t.Helper()
	asks := map[string]bool{"testing/Short": true, "internal/testing/proctest/Race": true}
	uses := map[string][]string{}
	for _, f := range sources(t) {
		dir := path.Dir(f.name)
		if !inMakeRace(t, f) {
			continue
		}
		for _, d := range f.Decls {
			d, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			used, name := usedBy(d, f), path.Join(dir, d.Name.Name)
			switch {
			case !f.test() && dir != "backend/backendtest" &&
				slices.ContainsFunc(used, func(u string) bool { return asks[u] }):
				t.Errorf("%s: %s asks for -short or the race detector: tests do, whose names "+
					"say so", f.name, d.Name.Name)
			case f.test() && d.Recv == nil:
				uses[name] = append(uses[name], used...)
				if strings.HasPrefix(d.Name.Name, "Test") && d.Name.Name != "TestMain" {
					tests = append(tests, name)
				}
			}
		}
	}
	for _, name := range thinning {
		asks[name] = true
	}
	for before := 0; before < len(asks); {
		before = len(asks)
		for name, used := range uses {
			if slices.ContainsFunc(used, func(u string) bool { return asks[u] }) {
				asks[name] = true
			}
		}
	}
	return slices.DeleteFunc(tests, func(test string) bool { return !asks[test] })
}

// usedBy returns, as dir/name, what a function mentions of packages that its file imports, and the
// functions of its package that it calls.
func usedBy(d *ast.FuncDecl, f source) (names []string) {
	packages := map[string]string{}
	for _, spec := range f.Imports {
		imported, _ := strconv.Unquote(spec.Path.Value)
		name := path.Base(imported)
		if spec.Name != nil {
			name = spec.Name.Name
		}
		packages[name] = path.Clean(strings.TrimPrefix(strings.TrimPrefix(imported, module), "/"))
	}
	ast.Inspect(d, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && packages[x.Name] != "" {
				names = append(names, path.Join(packages[x.Name], n.Sel.Name))
			}
		case *ast.CallExpr:
			if called, ok := n.Fun.(*ast.Ident); ok {
				names = append(names, path.Join(path.Dir(f.name), called.Name))
			}
		}
		return true
	})
	return names
}
